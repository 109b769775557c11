"""What a line of progress says, stage by stage, and when it is written where there is no terminal."""

from typing import Any

import pytest

from conveyor.cli.bar import progress_bar
from conveyor.cli.bar_view import view_bytes, view_job
from conveyor.cli.snapshot import Snapshot
from tests.support.clocks import ManualClock

INGEST = {"tasks": 500, "invalid": 2, "bytes_read": 1024, "bytes_total": 4096, "ranges": 2, "ranges_done": 1}


def job(state: str, **more: Any) -> Snapshot:
    counts = {"pending": 0, "running": 0, "succeeded": 7, "failed": 3, "cancelled": 0}
    run = {"total": 500, "counts": counts}
    return Snapshot.of({"id": "job_1", "state": state, "run": run, "rate": 5.0, "ingest": INGEST, **more})


@pytest.mark.parametrize(
    ("view", "line"),
    [
        (view_bytes("uploading", 1024, 2048), "uploading, 50%, 1.0 KiB of 2.0 KiB"),
        (view_bytes("reading", 1024, None), "reading, 1.0 KiB"),
        (view_job(job("ingesting")), "ingesting, 25%, 500 tasks, 10 done, 3 failed, 2 invalid, 5.0/s"),
        (
            view_job(job("ingesting", ingest={**INGEST, "bytes_total": None})),
            "ingesting, 1.0 KiB, 500 tasks, 10 done, 3 failed, 2 invalid, 5.0/s",
        ),
        (view_job(job("running", eta=98.0)), "10 of 500 done, 3 failed, 2 invalid, 5.0/s, eta 1 min 38 s"),
        (
            view_job(
                job(
                    "running",
                    ingest=None,
                    reason="waiting: breaker open for http://shop.example until 2026-11-19T20:49:54.510Z",
                    waiting={"target": "http://shop.example", "error": "connect_failed"},
                )
            ),
            "10 of 500 done, 3 failed, 5.0/s, waiting for http://shop.example",
        ),
        (view_job(job("completed", ingest=None)), "10 of 500 done, 3 failed, completed"),
        (
            view_job(
                job("completed", ingest=None, counts={"succeeded": 7, "failed": 0, "cancelled": 0, "unchanged": 5})
            ),
            "7 of 500 done, 5 unchanged, completed",
        ),
    ],
)
def test_lines(view: Any, line: str) -> None:
    assert view.line() == line


@pytest.mark.parametrize(
    ("now", "why", "exit_code"),
    [
        (
            job("failed", reason="ingest failed: The list is not valid gzip.", reason_code="list_unreadable"),
            "The list is not valid gzip.",
            2,
        ),
        (
            job("failed", reason="The list has no tasks.", reason_code="no_tasks", ingest={**INGEST, "tasks": 0}),
            "The list has no tasks.",
            2,
        ),
        (job("failed", reason="10 tasks failed", reason_code="failure_threshold"), None, 3),
        (job("completed"), None, 3),
        (job("running"), None, 3),
    ],
)
def test_whether_a_job_failed_for_its_list(now: Snapshot, why: str | None, exit_code: int) -> None:
    assert (now.bad_list, now.exit_code) == (why, exit_code)


def test_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    clock = ManualClock()
    with progress_bar("mine", clock) as show:
        show(view_bytes("uploading", 1, 4))
        clock.advance(5.0)
        show(view_bytes("uploading", 2, 4))
        show(view_bytes("uploading", 3, 4))
        show(view_job(job("completed")))
        show(view_job(job("completed")))
    assert [line.split(",")[0] for line in capsys.readouterr().err.splitlines()] == [
        "mine: uploading",
        "mine: 10 of 500 done",
    ]
