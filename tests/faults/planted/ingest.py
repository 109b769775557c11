"""Planted bugs of ingest, deadlines, housekeeping roles and downloads."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from conveyor import lifecycle
from conveyor.isolation import Isolation
from conveyor.model import Counts, FailureThreshold
from tests.faults.planted import Planted
from tests.flow import test_isolation


def divide_by_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    def breach(threshold: FailureThreshold | None, counts: Counts) -> str | None:
        if threshold is None or threshold.ratio is None or counts.ended < threshold.after:
            return None
        return "failure threshold" if counts.failed / counts.ended > threshold.ratio else None

    monkeypatch.setattr(lifecycle, "_breach", breach)


def stop_at_the_first_bad_item(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def item(self: Isolation, name: str) -> Iterator[None]:
        yield

    monkeypatch.setattr(Isolation, "item", item)


PLANTED = [
    Planted("ratio_of_no_task", divide_by_no_task, test_isolation.test_a_ratio_after_no_task_stops_nobody),
    Planted(
        "one_bad_run_stops_the_sweeper",
        stop_at_the_first_bad_item,
        test_isolation.test_the_sweeper_goes_on_after_a_run_that_makes_it_fail,
        (ZeroDivisionError,),
    ),
]
