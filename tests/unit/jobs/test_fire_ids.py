"""The ids of the jobs of a schedule."""

from conveyor.clock import sortable_id
from conveyor.jobs.fire_ids import fire_job_id, is_fire_of
from conveyor.model import JobId, TenantId

ACME = TenantId("acme")


def test_the_id_of_a_job_tells_its_schedule() -> None:
    for at in (1_762_000_020.0, 1_762_000_020.7071):
        job_id = fire_job_id(ACME, "schedule_one", at)
        assert is_fire_of(ACME, "schedule_one", job_id)
        assert not is_fire_of(ACME, "schedule_two", job_id)
        assert not is_fire_of(TenantId("other"), "schedule_one", job_id)
    assert not is_fire_of(ACME, "schedule_one", JobId(sortable_id("job", 1_762_000_020.0, 7)))
