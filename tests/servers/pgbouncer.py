"""PgBouncer as Debian packages it, in front of the Postgres of this test process: one for each pool mode.

It listens on 127.0.0.1 only, on a free port, and dies with the test process. Its pool is small, so that clients take
turns on few server sessions.
"""

import atexit
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.servers import postgres
from tests.servers.launch import launched

if TYPE_CHECKING:
    from conveyor.clock import Clock
    from conveyor.engines.postgres import PostgresEngine

# Server sessions in transaction mode.
FEW = 4
_START_SECONDS = 30.0
# It refuses to run as root, and takes no user that has no name.
_USER = "nobody"

_CONFIGURATION = """
[databases]
* = host=127.0.0.1 port={server} user=postgres

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = {sessions}
max_client_conn = 500
max_db_connections = 100
server_login_retry = 0
ignore_startup_parameters =
logfile = {folder}/log
"""


class PgBouncer:
    """A pooler of its own, in front of one server."""

    def __init__(self, server: postgres.Server, mode: str, sessions: int) -> None:
        program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        assert program is not None, "Postgres is tested behind PgBouncer: `make packages` installs it."
        self._folder = tempfile.TemporaryDirectory(prefix="conveyor-pgbouncer-")
        folder = Path(self._folder.name)
        folder.chmod(0o777)
        for _ in range(5):
            self.port = _free_port()
            written = _CONFIGURATION.format(
                server=server.port, port=self.port, mode=mode, sessions=sessions, folder=folder
            )
            (folder / "pgbouncer.ini").write_text(written)
            as_user = ["-u", _USER] if os.geteuid() == 0 else []
            self._process = subprocess.Popen(
                launched(program, *as_user, str(folder / "pgbouncer.ini")),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            if self._answers():
                break
        else:
            log = folder / "log"
            raise AssertionError(f"pgbouncer did not start:\n{log.read_text() if log.exists() else ''}")
        atexit.register(self.close)

    @property
    def url(self) -> str:
        return f"postgres://postgres@127.0.0.1:{self.port}/postgres"

    def close(self) -> None:
        atexit.unregister(self.close)
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def _answers(self) -> bool:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                time.sleep(0.01)
            else:
                return True
        self._process.kill()
        self._process.wait()
        return False


@contextmanager
def own_pooler(mode: str) -> Iterator[PgBouncer]:
    """For a test that looks at server sessions, or spoils them: they end with it."""
    bouncer = PgBouncer(postgres.server(), mode, FEW)
    try:
        yield bouncer
    finally:
        bouncer.close()


_poolers: dict[tuple[int, str], PgBouncer] = {}


def pooler(mode: str) -> PgBouncer:
    """The pooler of this test process with this mode."""
    known = (os.getpid(), mode)
    if known not in _poolers:
        # In session mode each client needs a server session for as long as it is connected.
        _poolers[known] = PgBouncer(postgres.server(), mode, FEW if mode == "transaction" else 50)
    return _poolers[known]


def url_of(place: Path, parameters: str = "", through: PgBouncer | None = None) -> str:
    """A schema of its own for a directory: the one that it has without the pooler. In transaction mode by default."""
    schema = postgres.url_of(place).rpartition("?")[2]
    return f"{(through or pooler('transaction')).url}?{schema}{parameters}"


@asynccontextmanager
async def open_engine(place: Path, clock: "Clock") -> "AsyncIterator[PostgresEngine]":
    """The engine on the schema of a directory, in transaction mode. It is not told that there is a pooler."""
    from conveyor.engines.postgres import PostgresEngine, migrate

    url = url_of(place)
    await migrate(url)
    async with PostgresEngine.open(url, clock, postgres.OWN_FROM) as engine:
        yield engine


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
