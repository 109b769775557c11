"""The paces of several workers, through one coordinator."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from conveyor.coordination.pace import START, HostPace
from conveyor.coordination.paces import Paces, list_paces
from conveyor.engines.sqlite import SqliteEngine
from tests.support.clocks import ManualClock
from tests.support.make_jobs import ACME, OTHER
from tests.support.places import quick_place
from tests.unit.coordination.test_pace import Lane


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def coordinator(clock: ManualClock) -> AsyncIterator[Any]:
    with quick_place() as place:
        async with SqliteEngine.open(place, clock) as engine:
            yield engine.coordinator


def use(pace: HostPace, limit: float, now: float, lane: Lane) -> None:
    """Let a host have as many requests as this, one of which was refused."""
    pace.limit = limit
    pace.start(lane, int(limit))
    pace.refuse(now)
    pace.is_new = False


async def test_a_worker_begins_with_its_part_of_what_others_found(coordinator: Any, clock: ManualClock) -> None:
    first, second, third = (Paces(coordinator, clock, f"w{number}") for number in range(3))
    use(first.of(ACME, "a.example"), 40.0, clock.monotonic(), Lane())
    await first.share([ACME])
    await second.share([ACME])
    assert second.of(ACME, "a.example").limit == pytest.approx(15)
    assert second.of(OTHER, "a.example").limit == START, "tenants have paces of their own"
    assert second.of(ACME, "b.example").limit == START
    shown = (await list_paces(coordinator, ACME))["a.example"]
    assert (shown.limit, shown.is_settled) == (30, True)
    clock.advance(600)
    await third.share([ACME])
    assert third.of(ACME, "a.example").limit == pytest.approx(15), "nobody is there any more: with half of it"
    assert await list_paces(coordinator, OTHER) == {}


async def test_a_pause_holds_for_all_workers(coordinator: Any, clock: ManualClock) -> None:
    first, second = (Paces(coordinator, clock, f"w{number}") for number in range(2))
    lane, here = Lane(), second.of(ACME, "a.example")
    here.lanes.wait(lane, is_waiting=True)
    first.of(ACME, "a.example").refuse(clock.monotonic(), 30.0)
    await first.share([ACME])
    await second.share([ACME])
    assert here.room(lane, clock.monotonic() + 29) == 0
    assert here.room(lane, clock.monotonic() + 31) > 0
    assert lane.lowered == 1, "the lane sets its timer"


async def test_a_pause_by_a_clock_that_was_ahead_does_not_count(coordinator: Any, clock: ManualClock) -> None:
    ahead = ManualClock()
    ahead.advance(clock.now() + 100_000 - ahead.now())
    first, second = Paces(coordinator, ahead, "ahead"), Paces(coordinator, clock, "here")
    first.of(ACME, "a.example").refuse(ahead.monotonic(), 30.0)
    await first.share([ACME])
    assert (await list_paces(coordinator, ACME))["a.example"].paused_until > clock.now() + 90_000
    here, lane = second.of(ACME, "a.example"), Lane()
    use(here, 8.0, clock.monotonic(), lane)
    await second.share([ACME])
    here.finish(lane, here.lanes.in_flight, clock.monotonic())
    assert here.room(lane, clock.monotonic()) > 0
    assert (await list_paces(coordinator, ACME))["a.example"].paused_until == 0.0, "it is not passed on"


async def test_hosts_that_nobody_uses_are_dropped(coordinator: Any, clock: ManualClock) -> None:
    paces, lane = Paces(coordinator, clock, "w"), Lane()
    used = paces.of(ACME, "used.example")
    used.start(lane, 1)
    idle = paces.of(ACME, "idle.example")
    clock.advance(1000)
    await paces.share([])
    assert len(paces) == 1
    assert idle.is_dropped
    assert not used.is_dropped
    for number in range(5000):
        paces.of(ACME, f"{number}.example")
    assert len(paces) <= 4001
    assert paces.of(ACME, "used.example") is used
