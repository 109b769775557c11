"""What `conveyor schedules show` says of a fire."""

from typing import Any

import pytest

from conveyor.cli.schedule_commands import _outcome

COUNTS = {"succeeded": 9, "unchanged": 0, "failed": 0, "cancelled": 0}


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (None, ""),
        ({"state": "completed", "total": 9, "counts": COUNTS, "invalid_lines": 0}, "  completed, 9 succeeded"),
        (
            {"state": "running", "total": 10, "counts": COUNTS, "invalid_lines": 1},
            "  running, 9 succeeded, 1 not finished, 1 invalid line skipped",
        ),
        # Of a server that does not count them there.
        ({"state": "completed", "total": 9, "counts": COUNTS}, "  completed, 9 succeeded"),
    ],
)
def test_a_fire_says_what_its_job_has_come_to(outcome: dict[str, Any] | None, said: str) -> None:
    assert _outcome({"outcome": outcome}) == said
