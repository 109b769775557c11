"""An engine whose sends are marked keeps the capabilities that it has."""

import inspect

import pytest

from conveyor.coordination.ready_marks import ReadyMarks, marking_queue
from conveyor.engines import queue
from conveyor.engines.sqlite.coordinator import SqliteCoordinator
from conveyor.engines.sqs.queue import SqsQueue
from conveyor.model import RunId
from conveyor.telemetry.seams import PROTOCOLS
from tests.support.clocks import ManualClock


class _Queue(SqsQueue):
    """One that is asked for nothing."""

    def __init__(self) -> None:
        pass


@pytest.mark.parametrize("protocol", PROTOCOLS["queue"])
def test_methods_are_found_without_getattr(protocol: type) -> None:
    """Since Python 3.12 isinstance looks for them there alone."""
    clock = ManualClock()
    coordinator = SqliteCoordinator(None, clock)  # type: ignore[arg-type]  # nothing is stored
    marking = marking_queue(_Queue(), ReadyMarks(coordinator, clock))
    names = [name for name, _ in inspect.getmembers(protocol, inspect.isfunction) if not name.startswith("_")]
    assert names
    assert all((name in vars(marking)) == hasattr(SqsQueue, name) for name in names)


def test_arrivals_are_kept_behind_it() -> None:
    assert issubclass(_Queue, queue.KeepsArrivals)


async def test_workers_look_at_what_is_due_or_changed_and_not_at_what_is_finished() -> None:
    clock = ManualClock()
    marks = ReadyMarks(SqliteCoordinator(None, clock), clock)  # type: ignore[arg-type]  # nothing is stored
    heard: list[RunId] = []
    marks.listeners.append(heard.extend)
    marks.note_finished(RunId("finished"))
    marks.note_change(RunId("changed"))
    marks.note_due(RunId("later"), 5.0)
    marks.note_due(RunId("due"), 0.0)
    while marks._flushing is not None:
        await marks._flushing
    assert heard == ["changed", "due"]
