"""The event loop of a command, and what Ctrl-C and SIGTERM do to it."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from conveyor.cli import EXIT_INTERRUPTED, EXIT_TERMINATED

T = TypeVar("T")


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end, on uvloop where there is one."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    try:
        import uvloop

        factory = uvloop.new_event_loop
    except ImportError:
        pass
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


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
            # Durable at every step: leaving here is what kill -9 would do.
            os._exit(exit_code)
