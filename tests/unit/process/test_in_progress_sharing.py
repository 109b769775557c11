"""What a worker shares of its slow attempts, and what that costs."""

from typing import Any, cast

from conveyor.coordination.in_progress import read_in_progress
from conveyor.engines.sqlite.coordinator import SqliteCoordinator
from conveyor.model import RunId
from conveyor.process.in_progress_sharing import InProgressSharing
from tests.support.clocks import ManualClock


class FakeLane:
    def __init__(self) -> None:
        self.indexes: list[int] = []

    def in_progress(self) -> list[int]:
        return self.indexes


class Counting(SqliteCoordinator):
    calls = 0

    async def swap(self, *arguments: Any) -> bool:
        self.calls += 1
        return await super().swap(*arguments)


async def test_attempts_that_two_looks_find_are_shared() -> None:
    clock = ManualClock()
    coordinator = Counting(cast(Any, None), clock)
    lanes = {RunId(f"run_{number}"): FakeLane() for number in range(40)}
    sharing = InProgressSharing(coordinator, clock, "one", cast(Any, lanes))
    run, lane = RunId("run_3"), lanes[RunId("run_3")]

    async def look(*indexes: int) -> list[int]:
        lane.indexes = list(indexes)
        clock.advance(await sharing.share())
        return sorted(await read_in_progress(coordinator, run, clock.now()))

    assert await look(1, 2) == [], "they may be quick"
    assert await look(2, 3) == [2]
    assert await look(2, 3) == [2, 3]
    before = coordinator.calls
    assert await look(2, 3) == [2, 3]
    assert coordinator.calls == before, "nothing has changed"
    for _ in range(20):
        assert await look(2, 3) == [2, 3], "it stays fresh"
    assert coordinator.calls - before < 10
    assert await look() == []
    before = coordinator.calls
    assert await look() == []
    assert coordinator.calls == before
    # Of many runs, some are shared.
    for each in lanes.values():
        each.indexes = [1]
    await sharing.share()
    await sharing.share()
    assert coordinator.calls - before == 16
