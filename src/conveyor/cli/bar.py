"""Progress on standard error: a live bar on a terminal, a line every few seconds elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from conveyor.cli.bar_view import View
from conveyor.clock import Clock, SystemClock

Show = Callable[[View], None]

_LINE_SECONDS = 5.0
# Width of the bar itself; the text beside it needs the rest of a narrow terminal.
_WIDTH, _NARROW_WIDTH = 16, 8
_NARROW = 100


@contextmanager
def progress_bar(title: str, clock: Clock | None = None) -> Iterator[Show]:
    """Yield the function that shows a view. All stages share one bar."""
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
        BarColumn(_NARROW_WIDTH if console.width < _NARROW else _WIDTH),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[done]}"),
        TextColumn("[red]{task.fields[problems]}"),
        TextColumn("[cyan]{task.fields[rate]}"),
        TextColumn("{task.fields[tail]}", markup=False),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(title, total=None, done="", problems="", rate="", tail="")

        alerts: set[str] = set()

        def show(view: View) -> None:
            if view.alert and view.alert not in alerts:
                alerts.add(view.alert)
                progress.console.print(f"{title}: {view.alert}", markup=False, highlight=False)
            progress.update(
                bar,
                description=f"{title}: {view.stage}" if view.stage else title,
                completed=view.completed,
                done=view.done,
                problems=view.problems,
                rate=view.rate,
                tail=view.tail,
            )
            # `update` cannot reset a total to None.
            progress.tasks[0].total = view.total

        yield show


def _plain(title: str, console: Console, clock: Clock) -> Show:
    due = clock.monotonic() + _LINE_SECONDS
    finished = False
    alerts: set[str] = set()

    def show(view: View) -> None:
        nonlocal due, finished
        if view.alert and view.alert not in alerts:
            alerts.add(view.alert)
            print(f"{title}: {view.alert}", file=console.file, flush=True)
        just_finished = view.last and not finished
        if not just_finished and clock.monotonic() < due:
            return
        due, finished = clock.monotonic() + _LINE_SECONDS, view.last
        print(f"{title}: {view.line()}", file=console.file, flush=True)

    return show
