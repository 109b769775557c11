"""The fleet deals its slots as one worker does: each tenant has its share, however many runs it has, whoever dies."""

import pytest

from conveyor.model import Job, TenantId
from tests.support.fleet_simulation import LEASE, SimulatedFleet, jain_index
from tests.support.make_jobs import make_job

PLENTY = 10_000_000


def jobs_of(fleet: SimulatedFleet, tenant: str, count: int, concurrency: int) -> list[Job]:
    return [make_job(fleet.clock, tenant=TenantId(tenant), concurrency=concurrency) for _ in range(count)]


async def shares(fleet: SimulatedFleet, seconds: float) -> dict[str, float]:
    before = fleet.runs.done.copy()
    await fleet.run(seconds)
    done = fleet.runs.done - before
    return {tenant: count / done.total() for tenant, count in sorted(done.items())}


@pytest.mark.parametrize("workers", [1, 20])
async def test_tenants_with_1_10_and_1000_runs_have_equal_shares(workers: int) -> None:
    fleet = SimulatedFleet(workers, slots=30)
    await fleet.add(jobs_of(fleet, "one", 1, 10_000), PLENTY)
    await fleet.add(jobs_of(fleet, "ten", 10, 1000), PLENTY)
    await fleet.add(jobs_of(fleet, "thousand", 1000, 64), PLENTY)
    await fleet.run(20)
    found = await shares(fleet, 10)
    assert jain_index(found.values()) > 0.95, found
    assert min(found.values()) > 0.25, found


async def test_no_run_waits_long_behind_those_of_others() -> None:
    fleet = SimulatedFleet(10, slots=30)
    await fleet.add(jobs_of(fleet, "thousand", 1000, 64), PLENTY)
    await fleet.run(20)
    late = jobs_of(fleet, "late", 1, 64)
    began = fleet.clock.monotonic()
    await fleet.add(late, PLENTY)
    await fleet.run(2)
    assert fleet.runs.started[late[0].run.run_id] - began <= 1.0


async def test_a_run_is_served_by_as_many_workers_as_it_needs() -> None:
    fleet = SimulatedFleet(20, slots=100)
    small, large = jobs_of(fleet, "small", 1, 64), jobs_of(fleet, "large", 1, 1000)
    await fleet.add([*small, *large], PLENTY)
    await fleet.run(60)
    seats = fleet.seats()
    assert seats[small[0].run.run_id] <= 2
    assert 10 <= seats[large[0].run.run_id] <= 13
    before = fleet.runs.done.copy()
    await fleet.run(1)
    assert fleet.runs.done - before == {"small": 4 * 64, "large": 4 * 1000}


async def test_runs_of_dead_workers_are_served_within_the_lease() -> None:
    fleet = SimulatedFleet(20, slots=30)
    jobs = jobs_of(fleet, "acme", 100, 6)
    await fleet.add(jobs, PLENTY)
    await fleet.run(10)
    assert len(fleet.seats()) == 100
    dead = fleet.workers[:10]
    del fleet.workers[:10]
    assert any(worker.held for worker in dead)
    await fleet.run(LEASE + 5)
    assert len(fleet.seats()) == 100, "the seats and the slots of the dead have expired"
    before = fleet.runs.done.total()
    await fleet.run(10)
    assert fleet.runs.done.total() - before > 0.9 * 10 * 4 * 300, "all slots that are left are used"


async def test_a_quiet_fleet_rests() -> None:
    """Runs with nothing to do: each is looked at once a minute, by one worker."""
    fleet = SimulatedFleet(5, slots=30)
    await fleet.add(jobs_of(fleet, "acme", 300, 64), 0)
    await fleet.run(180)
    assert len(fleet.seats()) <= 20
    before = fleet.runs.reads
    await fleet.run(60)
    assert fleet.runs.reads - before <= 330
