"""Which tasks of a run are attempted now, as its workers share it."""

from typing import Any, cast

from conveyor.coordination.in_progress import KEEP_SECONDS, read_in_progress, share_in_progress
from conveyor.engines.sqlite.coordinator import SqliteCoordinator
from conveyor.model import RunId
from tests.support.clocks import ManualClock

RUN = RunId("run_1")


async def test_workers_share_theirs_beside_each_other() -> None:
    clock = ManualClock()
    coordinator = SqliteCoordinator(cast(Any, None), clock)
    assert await read_in_progress(coordinator, RUN, clock.now()) == {}
    await share_in_progress(coordinator, RUN, "one", [3, 5], clock.now())
    await share_in_progress(coordinator, RUN, "two", [4], clock.now())
    assert await read_in_progress(coordinator, RUN, clock.now()) == {3: "one", 5: "one", 4: "two"}
    await share_in_progress(coordinator, RUN, "one", [7], clock.now())
    await share_in_progress(coordinator, RUN, "two", [], clock.now())
    assert await read_in_progress(coordinator, RUN, clock.now()) == {7: "one"}


async def test_a_worker_that_died_attempts_nothing() -> None:
    clock = ManualClock()
    coordinator = SqliteCoordinator(cast(Any, None), clock)
    await share_in_progress(coordinator, RUN, "one", [3], clock.now())
    clock.advance(KEEP_SECONDS - 1)
    await share_in_progress(coordinator, RUN, "two", [4], clock.now())
    assert await read_in_progress(coordinator, RUN, clock.now()) == {3: "one", 4: "two"}
    clock.advance(2)
    assert await read_in_progress(coordinator, RUN, clock.now()) == {4: "two"}


async def test_the_form_of_another_version_is_passed_over() -> None:
    clock = ManualClock()
    coordinator = SqliteCoordinator(cast(Any, None), clock)
    await coordinator.cache(f"in_progress:{RUN}", b'["new"]', 10)
    assert await read_in_progress(coordinator, RUN, clock.now()) == {}
    await share_in_progress(coordinator, RUN, "one", [3], clock.now())
    assert await read_in_progress(coordinator, RUN, clock.now()) == {3: "one"}
