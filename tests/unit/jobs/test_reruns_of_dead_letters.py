"""A rerun that selects only some tasks leaves the dead letters of the others where they are."""

import pytest

from conveyor.jobs.dead_lettered_tasks import _takes_all
from conveyor.model import Lineage, RunId
from conveyor.states import TaskStatus


def lineage(**selection: object) -> Lineage:
    return Lineage(parent=RunId("run_1"), **selection)  # type: ignore[arg-type]  # Each case has another field.


@pytest.mark.parametrize(
    "selection",
    [
        {"host": "a.example"},
        {"tag": "x"},
        {"error_code": "http_503"},
        {"http_status": 503},
        {"indexes": [1]},
        {"damaged": True},
        {"extract_only": True},
        {"statuses": [TaskStatus.CANCELLED]},
    ],
)
def test_one_that_selects_some(selection: dict[str, object]) -> None:
    assert not _takes_all(lineage(**selection))


@pytest.mark.parametrize("selection", [{}, {"statuses": [TaskStatus.FAILED]}])
def test_one_that_selects_all(selection: dict[str, object]) -> None:
    assert _takes_all(lineage(**selection))
