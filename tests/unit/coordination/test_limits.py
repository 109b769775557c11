"""Limits per target, as workers ask for them through one coordinator."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from conveyor.coordination.limits import AHEAD, WAITER_SECONDS, TargetLimits
from conveyor.engines.sqlite import SqliteEngine
from conveyor.model import Job, Options
from tests.support.clocks import ManualClock
from tests.support.make_jobs import OTHER, make_job
from tests.support.places import quick_place


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def coordinator(clock: ManualClock) -> AsyncIterator[Any]:
    with quick_place() as place:
        async with SqliteEngine.open(place, clock) as engine:
            yield engine.coordinator


async def test_passes_come_at_the_rate_over_all_workers(coordinator: Any, clock: ManualClock) -> None:
    job = make_job(clock, rate_per_host=10.0)
    workers = [TargetLimits(coordinator, job, f"w{number}") for number in range(2)]
    waits = [await workers[number % 2].reserve("host", 1) for number in range(5)]
    assert waits == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    assert await workers[0].reserve("another host", 1) == 0
    other = TargetLimits(coordinator, make_job(clock, rate_per_host=2.0, tenant=OTHER), "w1")
    assert await other.reserve("host", 1) == 0, "the limit is of one job"


async def test_passes_are_not_reserved_far_ahead(coordinator: Any, clock: ManualClock) -> None:
    limits = TargetLimits(coordinator, make_job(clock, rate_per_host=2.0), "w1")
    assert [await limits.reserve("host", 1) for _ in range(4)] == pytest.approx([0, AHEAD, 2 * AHEAD, 2 * AHEAD])
    clock.advance(2 * AHEAD)
    assert await limits.reserve("host", 1) == pytest.approx(0)


async def test_several_passes_are_used_one_after_the_other(coordinator: Any, clock: ManualClock) -> None:
    limits = TargetLimits(coordinator, make_job(clock, rate_per_host=100.0), "w1")
    assert await limits.reserve("host", 20) == 0
    assert await limits.reserve("host", 20) == pytest.approx(0.2)
    assert await limits.reserve("host", 1) == pytest.approx(0.4)


async def test_another_rate_has_passes_of_its_own(coordinator: Any, clock: ManualClock) -> None:
    job = make_job(clock, rate_per_host=0.1)
    limits = TargetLimits(coordinator, job, "w1")
    assert await limits.reserve("host", 1) == 0
    assert await limits.reserve("host", 1) == pytest.approx(10)
    assert not limits.follow(job)
    assert limits.follow(_with(job, rate_per_host=5.0))
    assert await limits.reserve("host", 1) == 0
    assert limits.follow(_with(job, concurrency_per_host=2))
    assert (limits.rate, limits.slots) == (None, 2)


async def test_slots_are_shared_by_workers_and_given_back(coordinator: Any, clock: ManualClock) -> None:
    job = make_job(clock, concurrency_per_host=3)
    one, two = (TargetLimits(coordinator, job, name) for name in ("w1", "w2"))
    assert [await one.hold("host", 2), await two.hold("host", 2)] == [2, 1]
    assert await one.hold("host", 1) == 1
    assert await two.hold("host", 3) == 2
    assert await one.hold("host", 0) == 0
    assert await two.hold("host", 3) == 3
    assert await one.hold("another host", 3) == 3


async def test_slots_of_a_worker_that_died_expire(coordinator: Any, clock: ManualClock) -> None:
    job = make_job(clock, concurrency_per_host=2)
    dead, alive, patient = (
        TargetLimits(coordinator, job, name, seconds) for name, seconds in (("w1", 5.0), ("w2", 5.0), ("w3", 200.0))
    )
    assert await dead.hold("host", 2) == 2
    assert await alive.hold("host", 1) == 0
    clock.advance(60)
    assert await patient.hold("host", 2) == 2
    clock.advance(199)
    assert await alive.hold("host", 1) == 0, "those of a worker with longer leases live as long"
    clock.advance(1)
    assert await alive.hold("host", 1) == 1


async def test_slots_without_a_limit_any_more(coordinator: Any, clock: ManualClock) -> None:
    job = make_job(clock, concurrency_per_host=2)
    limits = TargetLimits(coordinator, job, "w1")
    assert await limits.hold("host", 2) == 2
    limits.follow(_with(job))
    assert [await limits.hold("host", 2), await limits.hold("host", 0)] == [2, 0]


async def test_who_waits_is_known_for_a_while(coordinator: Any, clock: ManualClock) -> None:
    job = make_job(clock, concurrency_per_host=2)
    one, two = (TargetLimits(coordinator, job, name) for name in ("w1", "w2"))
    assert await one.waiters("host") == 0
    await two.join_waiters("host")
    await two.join_waiters("host")
    assert await one.waiters("host") == 1
    assert await one.hold("host", 2) == 2, "who waits has no slot"
    clock.advance(WAITER_SECONDS)
    assert await one.waiters("host") == 0


def _with(job: Job, **options: Any) -> Job:
    return msgspec.structs.replace(job, options=Options(**options))
