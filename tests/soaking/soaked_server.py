"""A `conveyor up` on one of the stacks, with a clock that can be stepped, a small disk, and engines to take away."""

import mmap
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from conveyor.clock import SystemClock
from conveyor.settings import Settings
from conveyor.system import migrate
from tests.servers import dynamodb, postgres, redis, s3, sqs
from tests.servers.aws import aws, server_pid
from tests.support.processes import children_of
from tests.support.up_process import COMMAND, ROOT, Relay, Up, environment

DISK_BYTES = 512 * 1024 * 1024
_VERIFY_SECONDS = 300.0

# Before anything reads the clock.
_STEPPED = """
import mmap, os, struct, time
from conveyor import clock
with open(os.environ["SOAK_CLOCK"], "rb") as file:
    shared = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
class Stepped:
    monotonic = staticmethod(time.monotonic)
    @staticmethod
    def time():
        return time.time() + struct.unpack("d", shared[:8])[0]
clock.time = Stepped
"""

# Leases and claims that expire while the net watches.
_SETTINGS = {
    "CONVEYOR_LEASE_SECONDS": "6",
    "CONVEYOR_IDEMPOTENCY_LEASE_SECONDS": "5",
    "CONVEYOR_MONITOR_SECONDS": "5",
    "CONVEYOR_FETCHERS": "1",
    "CONVEYOR_HANDLER_PROCESSES": "1",
    "CONVEYOR_LOG_LEVEL": "warning",
    "CONVEYOR_LOG_FORMAT": "json",
}


class StepClock:
    """What is added to the wall clock of the server."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(struct.pack("d", 0.0))
        self.path = path
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), 8)

    @property
    def offset(self) -> float:
        return float(struct.unpack("d", self._shared[:8])[0])

    def step(self, seconds: float) -> None:
        self._shared[:8] = struct.pack("d", self.offset + seconds)


class SoakedServer(Up):
    """The server, and the engines that it is on."""

    program = _STEPPED + COMMAND

    def __init__(self, stack: str, place: Path, **settings: str) -> None:
        self.clock = StepClock(place / "clock")
        self.stack = stack
        # Where the AWS engines are: it can be cut.
        self.door = Relay() if stack == "aws" else None
        if self.door is not None:
            host, _, port = aws().removeprefix("http://").partition(":")
            self.door.target = (host, int(port))
        self.urls = _urls(stack, place / "data", None if self.door is None else self.door.url)
        named = {f"CONVEYOR_{name.upper()}": str(url) for name, url in self.urls.items()}
        # Shared engines want a key that all processes have.
        named |= {"CONVEYOR_SIGNING_KEY": "s" * 32} if named else {}
        own = {**_SETTINGS, **named, "SOAK_CLOCK": str(self.clock.path), **settings}
        super().__init__(place, "--app", "tests.everyday.app", **own)
        self.log = place / "log"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def children(self) -> list[int]:
        return children_of(self.pid)

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def verify(self) -> str | None:
        """What `conveyor verify` finds; None if nothing. The server is stopped."""
        with subprocess.Popen(
            [sys.executable, "-c", "import sys; from conveyor.cli import main; main(sys.argv[1:])", "verify"],
            cwd=ROOT,
            env=environment(CONVEYOR_DATA=str(self.data), **self._settings),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            said, _ = process.communicate(timeout=_VERIFY_SECONDS)
        return None if process.returncode == 0 else said[-2000:]


def _urls(stack: str, place: Path, endpoint: str | None) -> dict[str, Any]:
    if stack == "embedded":
        return {}
    coordinator = f"{redis.redis().url}?prefix=soak"
    if stack == "postgres":
        database = postgres.url_of(place)
        blobs = f"file://{place / 'blobs'}"
        return {"records": database, "tasks": database, "queue": database, "coordinator": coordinator, "blobs": blobs}
    tables = dynamodb.url_for(place, endpoint)
    queue, blobs = sqs.url_of(place, endpoint, wait=1), s3.url_of(place, endpoint)
    return {"records": tables, "tasks": tables, "queue": queue, "coordinator": coordinator, "blobs": blobs}


class SmallDisk:
    """A disk of its own for the data, if this process may mount one; else `is_mounted` is False."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._ballast = place / "ballast"
        self.is_mounted = False

    def mount(self) -> None:
        self._place.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "conveyor-soak", str(self._place)]
        if os.geteuid() == 0:
            self.is_mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0

    def fill(self) -> None:
        """Take what is left, but for a page."""
        with self._ballast.open("ab", buffering=0) as file:
            piece = b"\0" * (1 << 20)
            while len(piece) >= 4096:
                try:
                    file.write(piece)
                except OSError:
                    piece = piece[: len(piece) // 2]

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def unmount(self) -> None:
        command = ["umount", str(self._place)]
        for _ in range(50):
            if not self.is_mounted:
                return
            self.is_mounted = subprocess.run(command, capture_output=True, check=False).returncode != 0
            time.sleep(0.1 if self.is_mounted else 0)


@asynccontextmanager
async def soaked_server(stack: str, place: Path) -> AsyncIterator[tuple[SoakedServer, SmallDisk]]:
    """Started, on a small disk."""
    disk = SmallDisk(place / "data")
    # Bodies are there, unless they are in S3.
    if stack != "aws":
        disk.mount()
    server = SoakedServer(stack, place)
    try:
        if server.urls:
            await migrate(Settings.load({}, data=server.data, **server.urls), SystemClock())
        server.start()
        yield server, disk
    finally:
        with suppress(ProcessLookupError, AssertionError):
            server.thaw()
        server.close()
        if server.door is not None:
            server.door.close()
        disk.unmount()


def emulator_pid() -> int:
    return server_pid()
