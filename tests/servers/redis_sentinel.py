"""A Valkey server with a replica on loopback, and three Sentinels that watch them."""

import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from conveyor.clock import SystemClock
from conveyor.engines.redis import RedisEngine
from tests.servers.redis import RedisServer, with_prefix
from tests.support.clocks import ManualClock

SERVICE = "main"
_PATIENCE = 90.0


class SentinelServer(RedisServer):
    """Watches a master."""

    def __init__(self, master: int) -> None:
        self._master = master
        super().__init__("--sentinel")

    def _arguments(self, folder: Path) -> list[str]:
        config = folder / "sentinel.conf"
        if not config.exists():
            config.write_text(
                f"sentinel monitor {SERVICE} 127.0.0.1 {self._master} 2\n"
                f"sentinel down-after-milliseconds {SERVICE} 500\n"
                f"sentinel failover-timeout {SERVICE} 3000\n"
            )
        return [str(config)]


class Watched:
    """`servers[0]` is the master at first."""

    def __init__(self) -> None:
        master = RedisServer()
        replica = RedisServer("--replicaof", f"127.0.0.1 {master.port}", "--repl-diskless-sync-delay", "0")
        self.servers = [master, replica]
        self.sentinels = [SentinelServer(master.port) for _ in range(3)]
        self.wait_until_well()

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{SERVICE}/0"

    def pair(self) -> tuple[RedisServer, RedisServer]:
        """The master and the replica, whichever is which now."""
        one, two = self.servers
        return (one, two) if self._master(self.sentinels[0]) == one.port else (two, one)

    def mend(self) -> None:
        """Begin anew, with one master. The Sentinels would come to it in 10 s."""
        for server in self.servers:
            if not server.is_running:
                server.start()
        master, replica = self.pair()
        replica.ask("REPLICAOF", "127.0.0.1", master.port)
        self.wait_until_well()

    def wait_until_well(self) -> None:
        """Until the Sentinels know each other and both servers, and the replica has what the master has."""
        self._wait(lambda: all(self._knows_all(sentinel) for sentinel in self.sentinels))
        self._wait(lambda: "master_link_status:up" in self.pair()[1].say("INFO", "replication").decode())

    def wait_for_promotion(self, server: RedisServer) -> None:
        """Until the Sentinels name this one the master."""
        self._wait(lambda: all(self._master(sentinel) == server.port for sentinel in self.sentinels))

    def close(self) -> None:
        for each in (*self.sentinels, *self.servers):
            each.close()

    def _wait(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not is_so():
            assert time.monotonic() < deadline, "the Sentinels did not come to it"
            time.sleep(0.02)

    def _master(self, sentinel: RedisServer) -> int:
        return int(sentinel.say("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE).split(b"\r\n")[4])

    def _knows_all(self, sentinel: RedisServer) -> bool:
        words = sentinel.say("SENTINEL", "MASTER", SERVICE).decode().split("\r\n")
        told = dict(zip(words[2::4], words[4::4], strict=False))
        return (told.get("flags"), told.get("num-slaves"), told.get("num-other-sentinels")) == ("master", "1", "2")


_watched: dict[int, Watched] = {}


def watched() -> Watched:
    """The servers that the tests of this process share."""
    pid = os.getpid()
    if pid not in _watched:
        _watched[pid] = Watched()
    return _watched[pid]


@asynccontextmanager
async def open_engine(place: Path, clock: ManualClock) -> AsyncIterator[RedisEngine]:
    async with RedisEngine.open(with_prefix(watched().url, place), SystemClock(), clock) as engine:
        yield engine
