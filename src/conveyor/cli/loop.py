"""The event loop of a command, and what Ctrl-C and SIGTERM do to it."""

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
    """The user stopped the command; everything durable is closed."""


# M_ARENA_MAX of glibc's mallopt.
_ARENAS = -8


def share_one_heap() -> None:
    """Before there are threads: with glibc each would get a heap of its own and keep there what it has freed. Here they
    mostly take turns, and one heap that all of them use stays smaller."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_ARENAS, 1)


def keep_for_good() -> None:
    """Once everything is loaded and has started: the collector need not look again and again at what stays for as long
    as the process does. It would take some fifty milliseconds each time, in which nothing else happens."""
    gc.freeze()


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end, on uvloop where there is one."""
    share_one_heap()
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
        # A thread may still wait for standard input, and closing would wait for the thread: see `leave`.
        raise
    except BaseException:
        runner.close()
        raise
    runner.close()
    return result


def leave(exit_code: int) -> NoReturn:
    """End the process without waiting for threads. Only when all that must be closed is closed."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            stream.flush()
    os._exit(exit_code)


class Stop:
    """Set by the first SIGINT or SIGTERM; the second SIGINT leaves at once."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self.event = asyncio.Event()
        self.exit_code = 0
        self._on_first = on_first

    def listen(self) -> None:
        """From inside the running loop."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._receive, EXIT_INTERRUPTED)
        loop.add_signal_handler(signal.SIGTERM, self._receive, EXIT_TERMINATED)

    def _receive(self, exit_code: int) -> None:
        if not self.event.is_set():
            self.exit_code = exit_code
            self._on_first()
            self.event.set()
        elif exit_code == EXIT_INTERRUPTED:
            # Durable at every step: leaving here is what kill -9 would do. But a live bar hides the cursor.
            if sys.__stderr__ is not None and sys.__stderr__.isatty():
                sys.__stderr__.write(_SHOW_CURSOR)
            leave(exit_code)
