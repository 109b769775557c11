"""The ids of jobs that a schedule makes: they follow from the schedule and the time of the fire, so that every attempt
to make the job makes the same one, and so that a job's id tells which schedule made it."""

from hashlib import sha256

from conveyor.clock import sortable_id, time_of_id
from conveyor.model import JobId, TenantId

# The characters after `job_` that hold the time; the rest is entropy.
_TIME_CHARS = 10


def fire_job_id(tenant: TenantId, schedule_id: str, at: float) -> JobId:
    """The id of the job of a fire, the same for every attempt to make it."""
    digest = sha256(f"{tenant}:{schedule_id}:{int(at)}".encode()).digest()
    return JobId(sortable_id("job", at, int.from_bytes(digest[:10])))


def is_fire_of(tenant: TenantId, schedule_id: str, job_id: JobId) -> bool:
    """Whether a fire of the schedule made the job."""
    text = job_id.removeprefix("job_")
    fire = fire_job_id(tenant, schedule_id, time_of_id(text)).removeprefix("job_")
    return fire[_TIME_CHARS:] == text[_TIME_CHARS:]
