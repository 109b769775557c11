"""The Coordinator on Redis or Valkey: shared state that may be lost. Every method is one Lua script of this folder and
one round trip, and uses the server's clock."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from conveyor.clock import Clock
from conveyor.engines.redis.address import read_address
from conveyor.engines.redis.coordinator import RedisCoordinator
from conveyor.engines.redis.doctor import eviction_problem, run_checks
from conveyor.engines.redis.redis_server import Server, open_server
from conveyor.errors import InvalidSetting


class RedisEngine:
    """The Coordinator, on servers that may become unreachable at any time."""

    def __init__(self, server: Server, coordinator: RedisCoordinator, clock: Clock) -> None:
        self._server = server
        self._clock = clock
        self.coordinator = coordinator

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, clock: Clock, time: Clock | None = None) -> AsyncIterator[Self]:
        """Connect to redis://…, redis+cluster://… or redis+sentinel://…, each with rediss for TLS (address.py). Refuses
        a server that evicts any key when its memory is full: leases would be lost one by one. `time` is for tests,
        which cannot move the server's clock."""
        address = read_address(url)
        async with open_server(address, clock) as server:
            evicts = await eviction_problem(server)
            if evicts is not None:
                raise InvalidSetting(f"{address.shown}: {evicts}")
            yield cls(server, RedisCoordinator(server, address.prefix, clock, time), clock)

    async def checks(self) -> list[tuple[str, str | None]]:
        """The name of each check, and what to fix, or None."""
        return await run_checks(self._server, self.coordinator, self._clock)
