"""Early fetchers: child processes that were started before the rest of the program is imported, and wait for their
settings. A command that is to fetch at once starts them first: they import what they need meanwhile, on another core.

It imports nothing of Conveyor, so that it takes no time itself. What speaks to the processes is in
executors/fetch/launch.py.
"""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

# Some hundred outcomes without bodies: what lies in the socket is fetched again after a crash.
_SOCKET_BYTES = 256 * 1024


class StartedFetcher(NamedTuple):
    """A process (executors/fetch/child.py) that waits for its settings, and our end of its socket. It ends when that is
    closed."""

    ours: socket.socket
    process: subprocess.Popen[bytes]


def start_fetcher() -> StartedFetcher:
    """Start a fetcher. Raises OSError if the machine is out of processes or descriptors."""
    ours, theirs = socket.socketpair()
    try:
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        process = _start(theirs.fileno())
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return StartedFetcher(ours, process)


def _start(fd: int) -> subprocess.Popen[bytes]:
    # Its parent decides when it stops: these signals stay blocked until it ignores them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        # Not through the event loop: uvloop forks, and the copy of a process whose threads are inside SQLite can wait
        # for their locks for ever. Popen runs none of our code in the copy.
        return subprocess.Popen(  # noqa: S603  (our own module)
            [sys.executable, "-m", "conveyor.process.executors.fetch.child", str(fd)],
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class EarlyFetchers:
    """Fetchers that nobody has taken yet."""

    def __init__(self) -> None:
        self._waiting: list[StartedFetcher] = []

    def start(self) -> None:
        """Start one more. Raises OSError, as `start_fetcher` does."""
        self._waiting.append(start_fetcher())

    def take(self) -> StartedFetcher:
        """One of them, or a new one."""
        return self._waiting.pop() if self._waiting else start_fetcher()

    def close(self) -> None:
        """End those that nobody has taken."""
        while self._waiting:
            ours, process = self._waiting.pop()
            ours.close()
            process.kill()
            process.wait()


@contextmanager
def early_fetchers(count: int) -> Iterator[EarlyFetchers]:
    """Start fetchers, as many as the machine allows: what is missing is started, or fails, later."""
    early = EarlyFetchers()
    try:
        with suppress(OSError):
            for _ in range(count):
                early.start()
        yield early
    finally:
        early.close()
