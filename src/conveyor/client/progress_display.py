"""Show progress: an updating line on a terminal, a card in a notebook, and a line every few seconds elsewhere. Needs no
further libraries: a notebook has its own display."""

import importlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

from conveyor.client import wording as text
from conveyor.client.job_view import JobView
from conveyor.client.transport import Json
from conveyor.client.upload_file import BytesProgress

_LINE_SECONDS = 5.0
_MAX_LINE_SECONDS = 60.0


class Displayable(Protocol):
    """Something whose progress can be shown, as text or in a notebook."""

    def summary(self) -> str: ...

    def _repr_html_(self) -> str: ...


class TextDisplay:
    """Progress that is only text."""

    def __init__(self, line: str) -> None:
        self._line = line

    def summary(self) -> str:
        return self._line

    def _repr_html_(self) -> str:
        return f'<div style="font-family:system-ui,sans-serif;font-size:13px">{text.escaped(self._line)}</div>'

    def __repr__(self) -> str:
        return self._line


Show = Callable[[Displayable], None]


@contextmanager
def display_progress(title: str) -> Iterator[Show]:
    """Yield the function that shows progress. The last state stays visible."""
    display, out = _notebook(), sys.stderr
    name = text.printable(title)
    if display is not None:
        throttle = _Throttle(_card(display), first=0.0, every=0.25)
    elif out.isatty():
        throttle = _Throttle(lambda item: _overwrite(out, f"{name}: {item.summary()}"), first=0.0, every=0.1)
    else:
        throttle = _Throttle(
            lambda item: print(f"{name}: {item.summary()}", file=out, flush=True),
            first=_LINE_SECONDS,
            every=_LINE_SECONDS,
            longest=_MAX_LINE_SECONDS,
        )
    try:
        yield throttle.show
    finally:
        throttle.flush()
        if display is None and out.isatty() and throttle.has_written:
            print(file=out, flush=True)


class _Throttle:
    """Writes the latest item at intervals, which may grow, and the last item at the end."""

    def __init__(self, write: Show, first: float, every: float, longest: float | None = None) -> None:
        self._write = write
        self._every = every
        self._longest = longest or every
        self._due = time.monotonic() + first
        self._pending: Displayable | None = None
        self.has_written = False

    def show(self, item: Displayable) -> None:
        self._pending = item
        if time.monotonic() >= self._due:
            self.flush()
            self._due = time.monotonic() + self._every
            self._every = min(self._longest, self._every * 1.5)

    def flush(self) -> None:
        """Write the pending item."""
        if self._pending is not None:
            self._write(self._pending)
            self._pending, self.has_written = None, True


def _overwrite(out: TextIO, line: str) -> None:
    width = max(20, shutil.get_terminal_size().columns - 1)
    out.write(f"\r{line[:width]}\x1b[K")
    out.flush()


def _card(display: Any) -> Show:
    handle: Any = None

    def show(item: Displayable) -> None:
        nonlocal handle
        if handle is None:
            handle = display(item, display_id=True)
        else:
            handle.update(item)

    return show


def _notebook() -> Any:
    """The display function of the notebook; None outside of notebooks."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    # IPython on a terminal has no kernel and shows no HTML.
    return importlib.import_module("IPython.display").display if hasattr(shell, "kernel") else None


@contextmanager
def display_job(progress: bool | Callable[[Any], None], job: JobView) -> Iterator[Callable[[Json], None]]:
    """Yield the function that takes the JSON of the job: it updates the job, and shows it if `progress`."""

    def update(data: Json) -> None:
        job.data = data

    if progress is False:
        yield update
        return
    with display_progress(job.name or job.id) if progress is True else _calling(progress) as show:

        def update_and_show(data: Json) -> None:
            job.data = data
            show(job)

        yield update_and_show


@contextmanager
def display_bytes(progress: bool | BytesProgress, title: str, verb: str) -> Iterator[BytesProgress | None]:
    """Yield the function that takes the bytes so far, and shows them if `progress`."""
    if isinstance(progress, bool):
        if not progress:
            yield None
            return
        with display_progress(title) as show:
            yield lambda done, total: show(TextDisplay(_bytes(verb, done, total)))
        return
    yield progress


def _bytes(verb: str, done: int, total: int | None) -> str:
    return f"{verb}, {text.size(done)}" + ("" if total is None else f" of {text.size(total)}")


@contextmanager
def _calling(function: Callable[[Any], None]) -> Iterator[Show]:
    yield function
