"""Leased buckets over every coordinator: processes share the work, and take over that of one that died."""

from typing import Any

from conveyor.coordination.buckets import COUNT, LeasedBuckets
from conveyor.engines.coordinator import Coordinator
from conveyor.errors import EngineFailed
from tests.support.clocks import ManualClock

KEYS = [f"run_{number}" for number in range(500)]


def owned(process: LeasedBuckets) -> set[str]:
    return {key for key in KEYS if process.owns(key)}


async def settle(clock: ManualClock, *processes: LeasedBuckets) -> None:
    """A few turns of each."""
    for _ in range(4):
        for process in processes:
            await process.tick()
        clock.advance(3.0)


def assert_split(*processes: LeasedBuckets) -> None:
    """Each key is one process's, none has more than its share, and one of them leads."""
    shares = [owned(process) for process in processes]
    assert set().union(*shares) == set(KEYS)
    assert sum(map(len, shares)) == len(KEYS)
    assert max(len(process._leases) for process in processes) <= -(-COUNT // len(processes))
    assert [process.processes for process in processes] == [len(processes)] * len(processes)
    assert sum(process.leads for process in processes) == 1


async def test_one_alone_has_all_at_once(coordinator: Coordinator, clock: ManualClock) -> None:
    alone = LeasedBuckets(coordinator, clock)
    assert owned(alone) == set()
    await alone.tick()
    assert_split(alone)


async def test_processes_that_come_get_their_share(coordinator: Coordinator, clock: ManualClock) -> None:
    processes = [LeasedBuckets(coordinator, clock) for _ in range(5)]
    for count in range(1, 6):
        await settle(clock, *processes[:count])
        assert_split(*processes[:count])


async def test_what_a_dead_process_had_goes_to_the_others(coordinator: Coordinator, clock: ManualClock) -> None:
    one, two, three = (LeasedBuckets(coordinator, clock) for _ in range(3))
    await settle(clock, one, two, three)
    await settle(clock, one, two)
    assert_split(one, two)


async def test_a_process_that_stops_gives_back_at_once(coordinator: Coordinator, clock: ManualClock) -> None:
    one, two = LeasedBuckets(coordinator, clock), LeasedBuckets(coordinator, clock)
    await settle(clock, one, two)
    await one.close()
    assert owned(one) == set()
    await two.tick()
    assert_split(two)


async def test_a_process_that_lost_its_leases_knows_at_its_next_turn(
    coordinator: Coordinator, clock: ManualClock
) -> None:
    slow, other = LeasedBuckets(coordinator, clock), LeasedBuckets(coordinator, clock)
    await settle(clock, slow)
    clock.advance(60.0)
    await settle(clock, other)
    assert owned(other) == set(KEYS)
    await slow.tick()
    assert not owned(slow)
    await settle(clock, slow, other)
    assert_split(slow, other)


class Away:
    """A coordinator that can go away."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.is_away = False

    def __getattr__(self, name: str) -> Any:
        if self.is_away:
            raise EngineFailed("it is away")
        return getattr(self._coordinator, name)


async def test_without_the_coordinator_each_works_on_all(coordinator: Coordinator, clock: ManualClock) -> None:
    away: Any = Away(coordinator)
    one, two = LeasedBuckets(away, clock), LeasedBuckets(away, clock)
    await settle(clock, one, two)
    away.is_away = True
    await settle(clock, one, two)
    assert owned(one) == owned(two) == set(KEYS)
    assert one.leads and two.leads
    await one.close()
    away.is_away = False
    clock.advance(60.0)
    one = LeasedBuckets(away, clock)
    await settle(clock, one, two)
    assert_split(one, two)
