"""Leases, semaphores, rate limits, counters and a cache on Redis.

The server may lose all of it at any moment, and may have executed a call that it never answered. So fences come from
the server's clock. A semaphore is a lease per holder: after leases expire, or the server loses them, it may be
overbooked by their permits until each holder asks again. Additions are numbered, so that a repeated call adds nothing.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from conveyor.clock import Clock
from conveyor.engines.coordinator import Lease
from conveyor.engines.redis.redis_server import Argument, Server, load_script
from conveyor.faults import crashpoint

_LEASE = load_script("lease")
_RENEW = load_script("renew")
_RELEASE = load_script("release")
_FORGET = load_script("forget")
_HOLD = load_script("hold")
_HELD = load_script("held")
_RESERVE = load_script("answers", "reserve")
_TALLY = load_script("answers", "tally")
_SWAP = load_script("answers", "swap")
_CACHE = load_script("cache")
_CACHED = load_script("cached")

_MICROS = 1_000_000


class RedisCoordinator:
    """Coordinator. The prefix of keys is in braces, so that a cluster keeps all of them in one slot."""

    def __init__(self, server: Server, prefix: str, clock: Clock, time: Clock | None) -> None:
        self._server = server
        self._prefix = f"{{{prefix}}}:"
        self._time = time
        self._leases = self._key("leases", "by-name")
        self._lease_names = self._key("leases", "names")
        self._lease_ends = self._key("leases", "ends")
        self._answers = self._key("answers", clock.new_id("caller"))
        self._last_number = 0
        # Numbers of unanswered calls, lowest first.
        self._unanswered: dict[int, None] = {}

    async def lease(self, name: str, holder: str, ttl: float) -> Lease | None:
        keys = [self._leases, self._lease_names, self._lease_ends]
        crashpoint("lease.grant.before")
        fence = await self._server.run(_LEASE, keys, [self._now(), name, holder, _micros(ttl)])
        crashpoint("lease.grant.after")
        return Lease(name, holder, int(fence)) if fence else None

    async def renew(self, lease: Lease, ttl: float) -> bool:
        keys = [self._leases, self._lease_ends]
        arguments = [self._now(), lease.name, lease.holder, lease.fence, _micros(ttl)]
        return bool(await self._server.run(_RENEW, keys, arguments))

    async def release(self, lease: Lease) -> None:
        keys = [self._leases, self._lease_ends]
        await self._server.run(_RELEASE, keys, [self._now(), lease.name, lease.holder, lease.fence])

    async def forget_leases(self, prefix: str) -> None:
        keys = [self._leases, self._lease_names, self._lease_ends]
        await self._server.run(_FORGET, keys, [self._now(), prefix])

    async def acquire(self, semaphore: str, holder: str, want: int, limit: int, ttl: float) -> int:
        arguments = [self._now(), holder, want, limit, _micros(ttl)]
        return int(await self._server.run(_HOLD, [self._key("semaphore", semaphore)], arguments))

    async def permits_in_use(self, semaphore: str) -> int:
        return int(await self._server.run(_HELD, [self._key("semaphore", semaphore)], [self._now()]))

    async def reserve(self, bucket: str, count: int, rate: float, burst: int, within: float = math.inf) -> float:
        with self._numbered() as number:
            keys = [self._answers, self._key("bucket", bucket)]
            bound = "inf" if within == math.inf else _micros(within)
            arguments = [self._now(), *number, count, repr(_MICROS / rate), burst, bound]
            wait = float(await self._server.run(_RESERVE, keys, arguments)) / _MICROS
        # Below 0: not reserved. The returned wait is then above `within`, whatever the rounding.
        return min(wait, within) if wait >= 0 else max(-wait, math.nextafter(within, math.inf))

    async def add_counters(
        self, name: str, amounts: Mapping[str, int], ttl: float, once: str | None = None
    ) -> dict[str, int]:
        with self._numbered() as number:
            keys = [self._answers, self._key("tally", name), self._key("tally-once", name)]
            # An empty string would mean no name.
            arguments = [self._now(), *number, _micros(ttl), "" if once is None else f":{once}"]
            for counter, amount in amounts.items():
                arguments += [counter, amount]
            answer: list[Any] = await self._server.run(_TALLY, keys, arguments)
        return {counter.decode(): int(value) for counter, value in zip(answer[::2], answer[1::2], strict=True)}

    async def swap(self, key: str, old: bytes | None, new: bytes, ttl: float) -> bool:
        with self._numbered() as number:
            keys = [self._answers, self._key("cache", key)]
            arguments = [self._now(), *number, int(old is not None), old or b"", new, _micros(ttl)]
            return bool(int(await self._server.run(_SWAP, keys, arguments)))

    async def cache(self, key: str, value: bytes, ttl: float) -> None:
        await self._server.run(_CACHE, [self._key("cache", key)], [self._now(), value, _micros(ttl)])

    async def cached(self, key: str) -> bytes | None:
        value: bytes | None = await self._server.run(_CACHED, [self._key("cache", key)], [self._now()])
        return value

    def _key(self, kind: str, name: str) -> str:
        return f"{self._prefix}{kind}:{name}"

    def _now(self) -> Argument:
        return "" if self._time is None else _micros(self._time.now())

    @contextmanager
    def _numbered(self) -> Iterator[Sequence[Argument]]:
        """The number of a call that must execute once, and the number below which all calls are answered."""
        self._last_number += 1
        number = self._last_number
        self._unanswered[number] = None
        try:
            yield number, next(iter(self._unanswered))
        finally:
            del self._unanswered[number]


def _micros(seconds: float) -> int:
    return round(seconds * _MICROS)
