"""A job as people see it: in words, as a card, and its progress on a terminal and elsewhere."""

import json
import os
from contextlib import redirect_stderr
from html.parser import HTMLParser
from typing import Any

import pytest

from conveyor.client import progress_display as progress
from conveyor.client.job_view import JobView


def view(state: str = "running", **more: Any) -> JobView:
    counts = {"pending": 300, "running": 5, "succeeded": 1200, "failed": 30, "cancelled": 0}
    run = {"id": "run_1", "number": 1, "state": state, "total": 1530, "counts": counts}
    data = {"id": "job_1", "name": None, "kind": "fetch", "state": state, "reason": None, "run": run, **more}
    return JobView(data)


def test_in_words() -> None:
    now = view(rate=210.4, eta=75.0, waiting=None, top_errors=[{"code": "http_500", "count": 30}])
    assert now.summary() == "running, 1,230 of 1,530 done, 30 failed, 210/s, eta 1 min 15 s"
    assert repr(now) == f"<JobView job_1: {now.summary()}>"
    assert now.errors == {"http_500": 30}
    assert (now.total, now.done, now.succeeded, now.failed, now.invalid) == (1530, 1230, 1200, 30, 0)
    assert not now.ended
    assert not now.ok


def test_a_job_that_was_just_accepted_says_less() -> None:
    now = view("ingesting")
    assert (now.rate, now.eta, now.errors, now.reason, now.reason_code) == (None, None, {}, None, None)
    assert now.summary().startswith("ingesting, ")


def test_while_its_list_is_read() -> None:
    ingest = {"tasks": 5000, "invalid": 2, "bytes_read": 1, "bytes_total": 2, "ranges": 1, "ranges_done": 0}
    now = view("ingesting", ingest=ingest, invalid_lines=2)
    assert now.summary() == "ingesting, 5,000 tasks read, 1,230 done, 30 failed, 2 invalid lines"


def test_what_it_waits_for() -> None:
    waiting = {"code": "breaker_open", "detail": "waiting: example.com is down", "until": None}
    assert view(waiting=waiting).summary().endswith("waiting: example.com is down")


@pytest.mark.parametrize(("state", "ended"), [("completed", True), ("failed", True), ("cancelled", True)])
def test_an_end(state: str, ended: bool) -> None:
    now = view(state, reason="too many failures", reason_code="failure_threshold", rate=0.0, eta=None)
    assert now.ended is ended
    assert not now.ok
    assert now.reason_code == "failure_threshold"
    assert now.summary() == f"{state}, 1,230 of 1,530 done, 30 failed, too many failures"


class Tags(HTMLParser):
    """What a browser would make of it."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize(
    "state", ["ingesting", "running", "paused", "completed", "failed", "cancelled", "of a newer server"]
)
def test_a_card(state: str) -> None:
    parsed = Tags()
    parsed.feed(view(state, name="pages", top_errors=[{"code": "http_500", "count": 30}])._repr_html_())
    assert parsed.open == []
    assert "pages" in parsed.text
    assert "http_500" in parsed.text
    assert "1,230 of 1,530 done" in parsed.text


def test_a_card_holds_nothing_of_strangers_but_words() -> None:
    evil = "<img src=x onerror=alert(1)>\"'\x1b[31m"
    parsed = Tags()
    parsed.feed(view(name=evil, reason=evil, top_errors=[{"code": evil, "count": 1}])._repr_html_())
    assert parsed.tags == {"div", "b", "span", "code"}
    assert parsed.attributes <= {"style", "role", "aria-valuemin", "aria-valuemax", "aria-valuenow"}
    assert "\x1b" not in parsed.text
    assert "\x1b" not in repr(view(name=evil, reason=evil))


def test_a_job_without_tasks_yet() -> None:
    counts = {"pending": 0, "running": 0, "succeeded": 0, "failed": 0, "cancelled": 0}
    now = view(run={"id": "run_1", "number": 1, "state": "ingesting", "total": 0, "counts": counts})
    assert 'aria-valuenow="0"' in now._repr_html_()


def test_on_a_terminal_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one, of 60 columns."""
    monkeypatch.setenv("COLUMNS", "60")
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as terminal, redirect_stderr(terminal):
        with progress.display_progress("a list with a name that is longer than the terminal is wide") as show:
            show(view())
        with progress.display_progress("pages") as show:
            show(view())
            show(view("completed"))
        shown = ""
        # In pieces, as they come through the terminal.
        while shown.count("\n") < 2:
            shown += os.read(ours, 10_000).decode()
    os.close(ours)
    first, second, rest = shown.split("\n")
    assert rest == ""
    assert [line.count("\r") for line in (first, second)] == [2, 3], "the last one ends the line"
    assert all(len(part.removesuffix("\x1b[K")) < 60 for part in shown.split("\r"))
    assert "pages: completed, 1,230 of 1,530 done" in second


def test_elsewhere_it_is_a_line_at_the_end_of_something_short(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.display_progress("pages\x07") as show:
        for _ in range(100):
            show(view())
        show(view("completed"))
    assert capsys.readouterr().err == "pages?: completed, 1,230 of 1,530 done, 30 failed\n"


def test_nothing_was_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.display_progress("pages"):
        pass
    assert capsys.readouterr() == ("", "")


def test_lines_come_less_and_less_often(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.display_progress("pages") as show:
        for second in range(600):
            now = float(second)
            show(view())
    assert 8 <= len(capsys.readouterr().err.splitlines()) <= 20


def test_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.display_bytes(True, "out.zip", "downloading") as moved:
        assert moved is not None
        moved(1024, 4096)
        moved(4096, None)
    assert capsys.readouterr().err == "out.zip: downloading, 4.0 KiB\n"
    with progress.display_bytes(False, "out.zip", "downloading") as moved:
        assert moved is None


def test_data_is_all_of_it() -> None:
    assert json.dumps(view(colour="red").data)
