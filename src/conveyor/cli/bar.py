"""A job's progress on standard error: a live bar on a terminal, a line every few seconds elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from conveyor.cli import text
from conveyor.cli.snapshot import Snapshot
from conveyor.clock import Clock, SystemClock

Show = Callable[[Snapshot], None]

_LINE_SECONDS = 5.0


@contextmanager
def progress_bar(title: str, clock: Clock | None = None) -> Iterator[Show]:
    """Hands out the function that shows a snapshot."""
    console = Console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        with _live(title, console) as show:
            yield show
    else:
        yield _plain(title, console, clock or SystemClock())


@contextmanager
def _live(title: str, console: Console) -> Iterator[Show]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[done]}"),
        TextColumn("[red]{task.fields[failed]}"),
        TextColumn("[cyan]{task.fields[rate]}"),
        TextColumn("{task.fields[eta]}"),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(title, total=None, done="", failed="", rate="", eta="")

        def show(now: Snapshot) -> None:
            progress.update(
                bar,
                total=now.total or None,
                completed=now.done,
                done=f"{text.count(now.done)}/{text.count(now.total)}",
                failed=f"{text.count(now.failed)} failed" if now.failed else "",
                rate=text.rate(now.rate) if now.rate is not None else "",
                eta=_tail(now),
            )

        yield show


def _tail(now: Snapshot) -> str:
    if now.note:
        return now.note
    if now.ended:
        return now.state.value
    if now.reason:
        return now.reason
    return f"eta {text.duration(now.eta)}" if now.eta is not None else ""


def _plain(title: str, console: Console, clock: Clock) -> Show:
    due = clock.monotonic() + _LINE_SECONDS
    ended = False

    def show(now: Snapshot) -> None:
        nonlocal due, ended
        just_ended = now.ended and not ended
        if not just_ended and clock.monotonic() < due:
            return
        due, ended = clock.monotonic() + _LINE_SECONDS, now.ended
        print(f"{title}: {line(now)}", file=console.file, flush=True)

    return show


def line(now: Snapshot) -> str:
    """A snapshot in words."""
    parts = [f"{text.count(now.done)} of {text.count(now.total)} done"]
    if now.failed:
        parts.append(f"{text.count(now.failed)} failed")
    if now.rate is not None and not now.ended:
        parts.append(text.rate(now.rate))
    tail = _tail(now)
    return ", ".join([*parts, tail] if tail else parts)
