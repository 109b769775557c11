"""Turnover: whether the small runs of a full worker make room soon."""

from typing import Any

from conveyor.process.turnover import Turnover
from tests.support.clocks import ManualClock

SLOTS = 8


class StubLane:
    """A lane with tasks that wait or run."""

    def __init__(self, demand: int, *, was_fed: bool = True, has_whole_run: bool = True) -> None:
        self.demand = demand
        self.was_fed = was_fed
        self.has_whole_run = has_whole_run


def lanes(*some: StubLane) -> Any:
    return some


def looked(outcomes_a_second: int, seconds: float = 4.0) -> Turnover:
    """A worker that has been full for a while."""
    clock = ManualClock()
    turnover = Turnover(clock)
    for step in range(int(seconds * 4) + 1):
        turnover.note_look(outcomes_a_second * step // 4, is_full=True)
        clock.advance(0.25)
    return turnover


def test_runs_that_end_soon_make_room() -> None:
    small = lanes(*[StubLane(10)] * 5)
    assert looked(200).is_quick(small, 0, SLOTS)
    assert not looked(50).is_quick(small, 0, SLOTS), "they take a second"
    assert not looked(0).is_quick(small, 0, SLOTS), "nothing ends"


def test_slots_without_work_are_for_the_next_runs() -> None:
    assert not looked(200).is_quick(lanes(StubLane(SLOTS - 1)), 0, SLOTS)
    # New ones have a task at least.
    assert looked(200).is_quick(lanes(StubLane(SLOTS - 1)), 1, SLOTS)
    assert looked(200).is_quick(lanes(StubLane(SLOTS - 1), StubLane(0, was_fed=False)), 0, SLOTS)


def test_a_run_with_more_in_its_queue_makes_no_room() -> None:
    assert not looked(10_000).is_quick(lanes(StubLane(300, has_whole_run=False)), 0, SLOTS)


def test_a_worker_that_became_full_waits_for_a_moment() -> None:
    """Its processes may have to start, and it knows no rate."""
    small = lanes(*[StubLane(10)] * 5)
    assert looked(0, 2.5).is_quick(small, 0, SLOTS)
    assert not looked(0, 3.5).is_quick(small, 0, SLOTS)
    assert looked(1, 0.5).is_quick(small, 0, SLOTS)
    assert not looked(1, 1.5).is_quick(small, 0, SLOTS), "it knows that they take long"


def test_only_the_last_second_counts() -> None:
    clock = ManualClock()
    turnover = Turnover(clock)
    for step in range(40):
        # Quick for six seconds, then slow.
        turnover.note_look(min(step, 24) * 100, is_full=True)
        clock.advance(0.25)
    assert not turnover.is_quick(lanes(*[StubLane(10)] * 5), 0, SLOTS)
