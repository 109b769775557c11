"""Progress for people: one line that is written over on a terminal, a card in a notebook, else a line now and then.
Needs nothing that is not there: a notebook has its own display."""

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
from conveyor.client.upload_file import Moved

_FIRST_LINE = 5.0
_LONGEST = 60.0


class Shown(Protocol):
    """What progress is shown of: words, and for notebooks what they look like there."""

    def summary(self) -> str: ...

    def _repr_html_(self) -> str: ...


class Words:
    """Something that is only words."""

    def __init__(self, words: str) -> None:
        self._words = words

    def summary(self) -> str:
        return self._words

    def _repr_html_(self) -> str:
        return f'<div style="font-family:system-ui,sans-serif;font-size:13px">{text.escaped(self._words)}</div>'

    def __repr__(self) -> str:
        return self._words


Show = Callable[[Shown], None]


@contextmanager
def showing(title: str) -> Iterator[Show]:
    """Hands out what shows the progress of one thing. What was shown last stays."""
    display, out = _notebook(), sys.stderr
    name = text.printable(title)
    if display is not None:
        paced = _Paced(_card(display), first=0.0, every=0.25)
    elif out.isatty():
        paced = _Paced(lambda what: _overwrite(out, f"{name}: {what.summary()}"), first=0.0, every=0.1)
    else:
        paced = _Paced(lambda what: print(f"{name}: {what.summary()}", file=out, flush=True), 5.0, 5.0, longest=60.0)
    try:
        yield paced.show
    finally:
        paced.end()
        if display is None and out.isatty() and paced.written:
            print(file=out, flush=True)


class _Paced:
    """Writes now and then, at distances that may grow, and what was last."""

    def __init__(self, write: Show, first: float, every: float, longest: float | None = None) -> None:
        self._write = write
        self._every = every
        self._longest = longest or every
        self._due = time.monotonic() + first
        self._held: Shown | None = None
        self.written = False

    def show(self, what: Shown) -> None:
        self._held = what
        if time.monotonic() >= self._due:
            self.end()
            self._due = time.monotonic() + self._every
            self._every = min(self._longest, self._every * 1.5)

    def end(self) -> None:
        """Write what was held back."""
        if self._held is not None:
            self._write(self._held)
            self._held, self.written = None, True


def _overwrite(out: TextIO, line: str) -> None:
    width = max(20, shutil.get_terminal_size().columns - 1)
    out.write(f"\r{line[:width]}\x1b[K")
    out.flush()


def _card(display: Any) -> Show:
    handle: Any = None

    def show(what: Shown) -> None:
        nonlocal handle
        if handle is None:
            handle = display(what, display_id=True)
        else:
            handle.update(what)

    return show


def _notebook() -> Any:
    """The display of the notebook that this runs in; None elsewhere."""
    found = sys.modules.get("IPython")
    shell = found.get_ipython() if found is not None else None
    # A terminal's IPython has no kernel, and shows no HTML.
    return importlib.import_module("IPython.display").display if hasattr(shell, "kernel") else None


@contextmanager
def watching(progress: bool | Callable[[Any], None], job: JobView) -> Iterator[Callable[[Json], None]]:
    """Hands out what takes a job as it is now: keeps it, and shows it if that is wanted."""

    def keep(data: Json) -> None:
        job.data = data

    if progress is False:
        yield keep
        return
    with showing(job.name or job.id) if progress is True else _calling(progress) as show:

        def seen(data: Json) -> None:
            job.data = data
            show(job)

        yield seen


@contextmanager
def moving(progress: bool | Moved, title: str, doing: str) -> Iterator[Moved | None]:
    """Hands out what takes the bytes so far, and shows them if that is wanted."""
    if isinstance(progress, bool):
        if not progress:
            yield None
            return
        with showing(title) as show:
            yield lambda done, total: show(Words(_bytes(doing, done, total)))
        return
    yield progress


def _bytes(doing: str, done: int, total: int | None) -> str:
    return f"{doing}, {text.size(done)}" + ("" if total is None else f" of {text.size(total)}")


@contextmanager
def _calling(function: Callable[[Any], None]) -> Iterator[Show]:
    yield function
