"""What the progress bar shows: the stage, how much of it is done, and the text beside the bar."""

from dataclasses import dataclass
from typing import Any

from conveyor.cli import formatting as text
from conveyor.cli.snapshot import IngestSnapshot, Snapshot
from conveyor.states import RunState
from conveyor.telemetry.redact import printable


@dataclass(frozen=True)
class View:
    """One line of progress."""

    stage: str
    completed: int
    # None while unknown.
    total: int | None
    done: str
    problems: str = ""
    rate: str = ""
    tail: str = ""
    # No later view will differ from this one.
    last: bool = False
    # A message to print once, at once.
    alert: str = ""

    def line(self) -> str:
        """The view as one line of text."""
        share = f"{self.completed / self.total:.0%}" if self.stage and self.total else ""
        parts = [self.stage, share, self.done, self.problems, "" if self.last else self.rate, self.tail]
        return ", ".join(part for part in parts if part)


def view_job(now: Snapshot) -> View:
    """View a job: the progress of its ingest while that runs, then the progress of its tasks."""
    if now.run > 1 and not now.ended:
        return _of_rerun(now)
    if now.state is RunState.INGESTING and now.ingest is not None:
        return _of_ingest(now, now.ingest)
    unchanged = f", {text.count(now.unchanged)} unchanged" if now.unchanged else ""
    done = f"{text.count(now.done)} of {text.count(now.total)} done{unchanged}{_transfers(now)}"
    return View("", now.done, now.total or None, done, _problems(now), _rate(now), _tail(now), now.ended, _alert(now))


def view_bytes(stage: str, done: int, total: int | None) -> View:
    """View a transfer of bytes."""
    size = text.size(done) if total is None else f"{text.size(done)} of {text.size(total)}"
    return View(stage, done, total, size)


def view_export(export: dict[str, Any]) -> View:
    """View an export that a server makes."""
    progress = export["progress"]
    done = f"{text.count(progress['tasks'])} of {text.count(progress['total'])} tasks, {text.size(progress['bytes'])}"
    return View("exporting", progress["tasks"], progress["total"] or None, done)


def _of_rerun(now: Snapshot) -> View:
    """The progress of a rerun; the failures are those of the job so far."""
    done = f"{text.count(now.run_done)} of {text.count(now.run_total)} done"
    return View("rerun", now.run_done, now.run_total or None, done, _problems(now), _rate(now), _tail(now))


def _of_ingest(now: Snapshot, ingest: IngestSnapshot) -> View:
    done = f"{text.count(ingest.tasks)} tasks, {text.count(now.done)} done"
    if ingest.bytes_total is None and ingest.bytes_read:
        done = f"{text.size(ingest.bytes_read)}, {done}"
    rate, tail = _rate(now), now.note or ""
    return View("ingesting", ingest.bytes_read, ingest.bytes_total, done, _problems(now), rate, tail, alert=_alert(now))


def _transfers(now: Snapshot) -> str:
    if now.transfers is None or now.ended:
        return ""
    done, total, _ = now.transfers
    of = "" if total is None else f" of {text.size(total)}"
    return f", now {text.size(done)}{of}"


def _problems(now: Snapshot) -> str:
    invalid = f"{text.count(now.invalid)} invalid" if now.invalid else ""
    failed = f"{text.count(now.failed)} failed" if now.failed else ""
    return ", ".join(part for part in (failed, invalid) if part)


def _rate(now: Snapshot) -> str:
    """Of files, the bytes a second say more than the tasks, and a narrow terminal has no room for both."""
    if now.transfers is not None and not now.ended:
        return f"{text.size(int(now.transfers[2]))}/s"
    return "" if now.rate is None else text.rate(now.rate)


def _alert(now: Snapshot) -> str:
    if now.outage is None:
        return ""
    target, error, patience = now.outage
    because = f" ({error})" if error else ""
    return f"{printable(target)} is down{because}. Its tasks wait for it, at most {text.duration(patience)}, then fail."


def _tail(now: Snapshot) -> str:
    if now.note:
        return now.note
    if now.ended:
        return now.state.value
    if now.outage is not None:
        # Why and for how long is said once, above the bar, which has no room for it.
        return f"waiting for {printable(now.outage[0])}"
    if now.reason:
        return now.reason
    return f"eta {text.duration(now.eta)}" if now.eta is not None else ""
