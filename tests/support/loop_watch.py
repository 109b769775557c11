"""A watch on the event loop: how long its longest step took, and what it was.

While a step runs nobody else does: no heartbeat, no answer, no other run. A step that is over the bound is looked at
from another thread, so that a failure names the line. Steps in which only the test itself is at work do not count, and
of others not the time for which the machine had no processor for them, where the system tells it (Linux does).
"""

import asyncio
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import conveyor

_HOME = str(Path(conveyor.__file__).parent) + "/"
_Handle: Any = asyncio.Handle
# Functions of a process that has not begun to serve anybody, and a command, which has a loop of its own.
_STARTING = {"<module>", "open_system", "open_database", "create_app", "run_here"}


class Step(NamedTuple):
    """A step of the loop: how long it took, and what it was seen to be at."""

    seconds: float
    where: str


class LoopWatch:
    """Watches all loops of the thread that it is entered in."""

    def __init__(self, bound: float) -> None:
        self.bound = bound
        self.longest = Step(0.0, "nothing")
        self.blocked: list[Step] = []
        self._thread = threading.get_ident()
        self._statistics = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        # When it was last asked for, and how long the thread had waited for a processor by then.
        self._waited = (0.0, self._waits())
        self._began: float | None = None
        self._seen: tuple[float, str | None] | None = None
        self._over = threading.Event()

    def __enter__(self) -> "LoopWatch":
        self._run = _Handle._run
        run, perf = self._run, time.perf_counter

        def watched(handle: Any) -> None:
            began = self._began = perf()
            run(handle)
            took = perf() - began
            self._began = None
            if took > self.longest.seconds:
                self._ended(began, took - self._waited_since(began), handle)

        _Handle._run = watched
        self._watcher = threading.Thread(target=self._look, daemon=True, name="loop watch")
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        _Handle._run = self._run
        self._over.set()
        self._watcher.join()

    def _waits(self) -> float:
        """Seconds for which the thread could have run and had no processor."""
        try:
            return int(self._statistics.read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0

    def _waited_since(self, began: float) -> float:
        """Since about then: it was asked for a moment before or after."""
        at, waited = self._waited
        return max(0.0, self._waits() - waited) if abs(at - began) < self.bound / 2 else 0.0

    def _ended(self, began: float, took: float, handle: Any) -> None:
        if took <= self.longest.seconds:
            return
        seen = self._seen
        where = seen[1] if seen is not None and seen[0] == began else _of_conveyor(handle)
        if where is None:
            return
        self.longest = Step(took, where)
        if took > self.bound:
            self.blocked.append(self.longest)

    def _look(self) -> None:
        """From its own thread: what a step is at that has gone on for most of what it may."""
        while not self._over.wait(self.bound / 8):
            began, now = self._began, time.perf_counter()
            if began is None or now - began < self.bound / 4:
                self._waited = (now, self._waits())
            if began is None or now - began < self.bound / 2:
                continue
            if self._seen is not None and self._seen[0] == began:
                continue
            frame = sys._current_frames().get(self._thread)
            self._seen = (began, None if frame is None else _place(frame))


def _place(frame: FrameType) -> str | None:
    """The innermost lines of Conveyor that are at work; None if there are none, or if it only starts."""
    ours = [each for each in traceback.extract_stack(frame) if each.filename.startswith(_HOME)]
    if any(each.name in _STARTING for each in ours):
        return None
    lines = [f"{each.filename.removeprefix(_HOME)}:{each.lineno} {each.name}" for each in ours[-4:]]
    return " < ".join(reversed(lines)) or None


def _of_conveyor(handle: Any) -> str | None:
    """The task that a step belongs to, if it is one of Conveyor's."""
    task = getattr(handle._callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return None
    code = getattr(task.get_coro(), "cr_code", None)
    return repr(task) if code is not None and code.co_filename.startswith(_HOME) else None
