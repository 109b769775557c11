"""The Coordinator on Redis: shared state that may be lost. Every method is one Lua script of this folder and one round
trip, and uses the server's clock."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from conveyor.clock import Clock
from conveyor.engines.redis.address import read_address
from conveyor.engines.redis.coordinator import RedisCoordinator
from conveyor.engines.redis.redis_server import Server, open_server
from conveyor.errors import ConveyorError, InvalidSetting

_OLDEST = (6, 2)
# Seconds of clock skew that `checks` tolerates. Nothing depends on it.
_MAX_SKEW = 5.0


class RedisEngine:
    """The Coordinator, on a server that may become unreachable at any time."""

    def __init__(self, server: Server, coordinator: RedisCoordinator, clock: Clock) -> None:
        self._server = server
        self._clock = clock
        self.coordinator = coordinator

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, clock: Clock, time: Clock | None = None) -> AsyncIterator[Self]:
        """Connect to redis://[user:password@]host[:port][/db][?prefix=NAME], or rediss:// for TLS. Refuses a server
        that evicts keys when its memory is full: leases would be lost one by one. `time` is for tests, which cannot
        move the server's clock."""
        address = read_address(url)
        async with open_server(address, clock) as server:
            evicts = await _eviction(server)
            if evicts is not None:
                raise InvalidSetting(f"{address.shown}: {evicts}")
            yield cls(server, RedisCoordinator(server, address.prefix, clock, time), clock)

    async def checks(self) -> list[tuple[str, str | None]]:
        """The name of each check, and what to fix, or None."""
        checks: list[tuple[str, str | None]] = []
        for name, check in (
            ("reachable", self._reachable),
            ("version", self._version),
            ("eviction", self._evicts),
            ("write and conditional write", self._writes),
            ("clock", self._skew),
        ):
            try:
                checks.append((f"redis: {name}", await check()))
            except ConveyorError as error:
                checks.append((f"redis: {name}", error.message))
        return checks

    async def _reachable(self) -> str | None:
        await self._server.command("PING")
        return None

    async def _version(self) -> str | None:
        version = await self._server.info("server", "redis_version") or "0"
        if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
            return f"This is Redis {version}; use 6.2 or newer."
        return None

    async def _evicts(self) -> str | None:
        return await _eviction(self._server)

    async def _writes(self) -> str | None:
        key, coordinator = self._clock.new_id("check"), self.coordinator
        await coordinator.cache(key, b"old", 10.0)
        swapped = await coordinator.swap(key, b"old", b"new", 10.0)
        refused = not await coordinator.swap(key, b"old", b"never", 10.0)
        if not swapped or not refused or await coordinator.cached(key) != b"new":
            return "A written value was not read back. Is this address one server, or several behind a balancer?"
        return None

    async def _skew(self) -> str | None:
        seconds, micros = await self._server.command("TIME")
        skew = int(seconds) + int(micros) / 1e6 - self._clock.now()
        if abs(skew) > _MAX_SKEW:
            return f"Its clock differs from this machine's by {skew:.1f} s. Synchronize both with NTP."
        return None


async def _eviction(server: Server) -> str | None:
    policy = await server.info("memory", "maxmemory_policy")
    if policy == "noeviction":
        return None
    return (
        f"The server evicts keys when its memory is full (maxmemory-policy is {policy or 'unknown'}). "
        "Set maxmemory-policy to noeviction, or use a server that is not shared with a cache."
    )
