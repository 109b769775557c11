"""Launch a fetcher: a child process on the other end of a socket pair, which gets its settings first.

`Fetchers` takes the launcher as a parameter, so that a test can replace the process with anything that speaks
the frames of frames.py.
"""

import asyncio
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from conveyor.process.early_fetchers import StartedFetcher, start_fetcher
from conveyor.process.executors.fetch.frames import FrameReader, FrameWriter, JoinedFrames, write_frame
from conveyor.settings import Settings


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


async def launch_fetcher(
    settings: Settings, crash_at: str | None = None, start: Callable[[], StartedFetcher] = start_fetcher
) -> Launched:
    """Start the child process (child.py), or take one that `start` has started. It ends when its socket closes. It dies
    at `crash_at` (faults.py), and not where the worker is to die. Raises OSError if the machine is out of processes or
    descriptors."""
    ours, started = start()
    process = Subprocess(started)
    try:
        reader, writer = await asyncio.open_connection(sock=ours)
    except BaseException:
        ours.close()
        process.kill()
        await process.wait()
        raise
    write_frame(writer, _plain(msgspec.structs.replace(settings, crash_at=crash_at)))
    return Launched(reader, JoinedFrames(writer), process)


def _plain(settings: Settings) -> dict[str, Any]:
    values = {field: getattr(settings, field) for field in settings.__struct_fields__}
    return {
        field: str(value) if isinstance(value, Path) else value for field, value in values.items() if value is not None
    }
