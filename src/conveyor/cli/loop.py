"""Run a command on an event loop, and stop it on Ctrl-C or SIGTERM."""

import asyncio
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

from conveyor.cli import EXIT_INTERRUPTED, EXIT_TERMINATED

T = TypeVar("T")

_SHOW_CURSOR = "\x1b[?25h\n"


class Stopped(Exception):
    """The user stopped the command, and all durable state is closed."""


# M_ARENA_MAX of glibc's mallopt.
_ARENAS = -8


def use_one_heap() -> None:
    """Make all threads share one heap. Call it before threads start: otherwise glibc gives each thread a heap, and each
    heap keeps the memory that its thread has freed. Our threads mostly take turns, so one heap stays smaller."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_ARENAS, 1)


def freeze_loaded_objects() -> None:
    """Exclude all present objects from garbage collection. Call it once everything is loaded and started: these objects
    live as long as the process, and each full collection over them would stop it for about fifty milliseconds."""
    gc.freeze()


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine, on uvloop if it is installed, and return its result."""
    use_one_heap()
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
        raise
    runner.close()
    return result


def leave(exit_code: int) -> NoReturn:
    """Exit without waiting for threads. Call it only after all durable state is closed."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            stream.flush()
    os._exit(exit_code)


class Stop:
    """The first SIGINT or SIGTERM sets `event`; a second SIGINT exits at once."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self.event = asyncio.Event()
        self.exit_code = 0
        self._on_first = on_first

    def listen(self) -> None:
        """Install the signal handlers. Call it from the running loop."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._receive, EXIT_INTERRUPTED)
        loop.add_signal_handler(signal.SIGTERM, self._receive, EXIT_TERMINATED)

    def _receive(self, exit_code: int) -> None:
        if not self.event.is_set():
            self.exit_code = exit_code
            self._on_first()
            self.event.set()
        elif exit_code == EXIT_INTERRUPTED:
            # Every step is durable, so an exit here is as safe as kill -9. But a live bar has hidden the cursor.
            if sys.__stderr__ is not None and sys.__stderr__.isatty():
                sys.__stderr__.write(_SHOW_CURSOR)
            leave(exit_code)
