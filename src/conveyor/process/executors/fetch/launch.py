"""Launch a fetcher: a child process on the other end of a socket pair, which gets its settings first.

`Fetchers` takes the launcher as a parameter, so that a test can replace the process with anything that speaks
the frames of frames.py.
"""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from conveyor.process.executors.fetch.frames import FrameReader, FrameWriter, JoinedFrames, write_frame
from conveyor.settings import Settings

# Some hundred outcomes without bodies: what lies in the socket is fetched again after a crash.
_SOCKET_BYTES = 256 * 1024


class LaunchedProcess(Protocol):
    """A launched process."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None:
        """Kill it at once. Does nothing if it has ended."""

    async def wait(self) -> None:
        """Wait until it has ended."""


class Launched(NamedTuple):
    """A process and both ends of its socket. Its first frame says that it is ready."""

    reader: FrameReader
    writer: FrameWriter
    process: LaunchedProcess


Launch = Callable[[Settings], Awaitable[Launched]]


class Subprocess:
    """A process of the operating system."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> None:
        await asyncio.to_thread(self._process.wait)


async def launch_fetcher(settings: Settings, crash_at: str | None = None) -> Launched:
    """Start the child process (child.py). It ends when its socket closes. It dies at `crash_at` (faults.py), and not
    where the worker is to die. Raises OSError if the machine is out of processes or descriptors."""
    ours, theirs = socket.socketpair()
    try:
        process = _start(ours, theirs)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    try:
        reader, writer = await asyncio.open_connection(sock=ours)
    except BaseException:
        ours.close()
        process.kill()
        await process.wait()
        raise
    write_frame(writer, _plain(msgspec.structs.replace(settings, crash_at=crash_at)))
    return Launched(reader, JoinedFrames(writer), process)


def _start(ours: socket.socket, theirs: socket.socket) -> Subprocess:
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
    fd = theirs.fileno()
    # Not through the event loop: uvloop forks, and the copy of a process whose threads are inside SQLite can wait for
    # their locks for ever. Popen runs none of our code in the copy.
    return Subprocess(
        subprocess.Popen(  # noqa: S603  (our own module)
            [sys.executable, "-m", "conveyor.process.executors.fetch.child", str(fd)],
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
        )
    )


def _plain(settings: Settings) -> dict[str, Any]:
    values = {field: getattr(settings, field) for field in settings.__struct_fields__}
    return {
        field: str(value) if isinstance(value, Path) else value for field, value in values.items() if value is not None
    }
