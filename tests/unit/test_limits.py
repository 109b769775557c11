"""Limits per target, as one worker and as several keep them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conveyor.coordination.limits import TargetLimits
from conveyor.engines.sqlite import SqliteEngine
from tests.clocks import ManualClock
from tests.jobs import OTHER, make_job
from tests.places import quick_place


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def coordinator(clock: ManualClock) -> AsyncIterator[Any]:
    with quick_place() as place:
        async with SqliteEngine.open(place, clock) as engine:
            yield engine.coordinator


class FarAway:
    """A coordinator that answers a turn later, as one over a network does."""

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator

    async def hold(self, *args: Any) -> int:
        await asyncio.sleep(0)
        granted: int = await self._coordinator.hold(*args)
        await asyncio.sleep(0)
        return granted


async def test_without_limits_everything_goes(coordinator: Any, clock: ManualClock) -> None:
    limits = TargetLimits(coordinator, make_job(clock), "w1")
    assert not limits.limited
    for _ in range(100):
        assert await limits.reserve("host") == 0
        assert await limits.enter("host") == 0


async def test_a_task_without_a_target_is_not_limited(coordinator: Any, clock: ManualClock) -> None:
    limits = TargetLimits(coordinator, make_job(clock, rate_per_host=1.0, concurrency_per_host=1), "w1")
    assert limits.limited
    for _ in range(3):
        assert await limits.reserve(None) == 0
        assert await limits.enter(None) == 0
    await limits.leave(None)


async def test_passes_come_at_the_rate_over_all_workers(coordinator: Any, clock: ManualClock) -> None:
    job = make_job(clock, rate_per_host=2.0)
    workers = [TargetLimits(coordinator, job, f"w{number}") for number in range(2)]
    waits = [await workers[number % 2].reserve("host") for number in range(5)]
    assert waits == pytest.approx([0, 0.5, 1.0, 1.5, 2.0])
    assert await workers[0].reserve("another host") == 0
    other = TargetLimits(coordinator, make_job(clock, rate_per_host=2.0, tenant=OTHER), "w1")
    assert await other.reserve("host") == 0, "the limit is of one job"


async def test_slots_are_shared_by_workers_and_given_back(coordinator: Any, clock: ManualClock) -> None:
    job = make_job(clock, concurrency_per_host=3)
    one, two = (TargetLimits(coordinator, job, name) for name in ("w1", "w2"))
    assert [await one.enter("host"), await one.enter("host"), await two.enter("host")] == [0, 0, 0]
    assert await one.enter("host") > 0
    assert await two.enter("host") > 0
    await one.leave("host")
    assert await two.enter("host") == 0
    assert await one.enter("host") > 0
    for limits in (one, two, two):
        await limits.leave("host")
    assert [await two.enter("host") for _ in range(3)] == [0, 0, 0]


async def test_slots_of_a_worker_that_died_lapse(coordinator: Any, clock: ManualClock) -> None:
    job = make_job(clock, concurrency_per_host=2)
    dead, alive = (TargetLimits(coordinator, job, name) for name in ("w1", "w2"))
    for _ in range(2):
        await dead.enter("host")
    assert await alive.enter("host") > 0
    clock.advance(60)
    assert await alive.enter("host") == 0


async def test_runners_at_once_stay_within_the_limit(coordinator: Any, clock: ManualClock) -> None:
    limits = TargetLimits(FarAway(coordinator), make_job(clock, concurrency_per_host=2), "w1")  # type: ignore[arg-type]
    waits = await asyncio.gather(*(limits.enter("host") for _ in range(10)))
    assert waits.count(0.0) == 2


async def test_slots_of_long_tasks_stay_held(coordinator: Any, clock: ManualClock) -> None:
    job = make_job(clock, concurrency_per_host=1)
    one, two = (TargetLimits(coordinator, job, name) for name in ("w1", "w2"))
    assert await one.enter("host") == 0
    for _ in range(30):
        clock.advance(10)
        await one.refresh()
        assert await two.enter("host") > 0
