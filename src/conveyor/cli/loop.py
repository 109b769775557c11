"""Run a command on an event loop, and stop it on Ctrl-C or SIGTERM."""

import asyncio
import ctypes
import gc
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar

from conveyor.cli import EXIT_INTERRUPTED, EXIT_TERMINATED

T = TypeVar("T")

_SHOW_CURSOR = "\x1b[?25h\n"


class Stopped(Exception):
    """The user stopped the command, and all durable state is closed."""


_MAX_OPEN_FILES = 65_536
# Objects between two collections of the youngest, and how many of those before one of older ones.
_GC_OBJECTS = (20_000, 10, 10)
# M_ARENA_MAX of glibc's mallopt.
_ARENAS = -8


def use_one_heap() -> None:
    """Make all threads share one heap. Call it before threads start: otherwise glibc gives each thread a heap, and each
    heap keeps the memory that its thread has freed. Our threads mostly take turns, so one heap stays smaller."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_ARENAS, 1)


def raise_open_files() -> None:
    """Raise the soft limit of open files to the hard one, within reason: each connection of a worker is one, and many
    systems start with 1024. Child processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def loading() -> Iterator[None]:
    """Import what a server needs, in two thirds of the time. Collections would go over objects that stay, again and
    again. And structlog imports rich, where it is installed, for tracebacks that no command uses."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        _import_structlog()
        yield
    finally:
        if was_enabled:
            gc.enable()


def _import_structlog() -> None:
    modules: dict[str, Any] = sys.modules
    rich = modules.get("rich")
    # An import of what is None fails.
    modules["rich"] = None
    try:
        import structlog  # noqa: F401
    finally:
        del modules["rich"]
        if rich is not None:
            modules["rich"] = rich


def freeze_loaded_objects() -> None:
    """Exclude all present objects from garbage collection. Call it once everything is loaded and started: these objects
    live as long as the process, and each full collection over them would stop it for about fifty milliseconds. Later
    collections come seldom: while thousands of small jobs run, nearly all objects are in use or freed without one, and
    going over them with every few hundred new ones took a sixth of the loop's time."""
    gc.freeze()
    gc.set_threshold(*_GC_OBJECTS)


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine, on uvloop if it is installed, and return its result."""
    use_one_heap()
    raise_open_files()
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    try:
        import uvloop

        factory = uvloop.new_event_loop
    except ImportError:
        pass
    runner = asyncio.Runner(loop_factory=factory)
    try:
        result = runner.run(main)
    except Stopped:
        # A thread may still read standard input, and `close` would wait for it. The caller exits with `leave`.
        raise
    except BaseException:
        runner.close()
        _stop_limit.cancel()
        raise
    runner.close()
    _stop_limit.cancel()
    return result


def leave(exit_code: int) -> NoReturn:
    """Exit without waiting for threads. Call it only after all durable state is closed."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            stream.flush()
    os._exit(exit_code)


class _StopLimit:
    """Ends a process that does not stop: a disk that hangs may hold up every thread that waits for it. In a thread of
    its own, because the loop may wait, too."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None

    def begin(self, seconds: float, exit_code: int) -> None:
        self._timer = threading.Timer(seconds, self._give_up, [seconds, exit_code])
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self, seconds: float, exit_code: int) -> None:
        from conveyor.cli.guard import complain

        complain(
            f"Not stopped after {seconds:g} s: a disk or an engine does not answer. "
            "Exiting; what was recorded stays, and the next start resumes."
        )
        # Every step is durable, so an exit here is as safe as kill -9.
        leave(exit_code)


_stop_limit = _StopLimit()


class Stop:
    """The first SIGINT or SIGTERM sets `event`; a second SIGINT exits at once. A process that has not stopped after
    `drain_seconds` exits."""

    def __init__(self, on_first: Callable[[], None], drain_seconds: float) -> None:
        self.event = asyncio.Event()
        self.exit_code = 0
        self._on_first = on_first
        self._drain_seconds = drain_seconds

    def listen(self) -> None:
        """Install the signal handlers. Call it from the running loop."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._receive, EXIT_INTERRUPTED)
        loop.add_signal_handler(signal.SIGTERM, self._receive, EXIT_TERMINATED)

    def _receive(self, exit_code: int) -> None:
        if not self.event.is_set():
            self.exit_code = exit_code
            _stop_limit.begin(self._drain_seconds, exit_code)
            self._on_first()
            self.event.set()
        elif exit_code == EXIT_INTERRUPTED:
            # Every step is durable, so an exit here is as safe as kill -9. But a live bar has hidden the cursor.
            if sys.__stderr__ is not None and sys.__stderr__.isatty():
                sys.__stderr__.write(_SHOW_CURSOR)
            leave(exit_code)
