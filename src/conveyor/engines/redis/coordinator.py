"""Leases, semaphores, rate limits, counters and a cache on Redis.

The server may lose all of it at any moment, and may have executed a call that it never answered. So fences come from
the server's clock. A semaphore is a lease per holder: after leases expire, or the server loses them, it may be
overbooked by their permits until each holder asks again. Additions are numbered, so that a repeated call adds nothing.

Everything that has a name has a hash tag of its own, so that a cluster spreads names over its nodes; the keys of one
script share a tag. Leases are the exception: they share a few partitions, so that those of a prefix are found.
"""

import asyncio
import math
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from conveyor.clock import Clock
from conveyor.engines.coordinator import Lease, PermitRequest
from conveyor.engines.ready import Look, LookRequest, ReadyMark
from conveyor.engines.redis.ready_index import RedisReadyIndex
from conveyor.engines.redis.redis_server import Argument, Server, load_script
from conveyor.faults import crashpoint
from conveyor.model import RunId, TenantId

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
# Part of the layout: another number loses all leases.
_LEASE_PARTITIONS = 16


class RedisCoordinator:
    """Coordinator."""

    def __init__(self, server: Server, prefix: str, clock: Clock, time: Clock | None) -> None:
        self._server = server
        self._prefix = prefix
        self._time = time
        self._caller = clock.new_id("caller")
        self._ready = RedisReadyIndex(server, prefix, time)
        self._last_number = 0
        # By key: the numbers of its unanswered calls, lowest first.
        self._unanswered: dict[str, dict[int, None]] = {}

    async def lease(self, name: str, holder: str, ttl: float) -> Lease | None:
        crashpoint("lease.grant.before")
        fence = await self._server.run(_LEASE, self._lease_keys(name), [self._now(), name, holder, _micros(ttl)])
        crashpoint("lease.grant.after")
        return Lease(name, holder, int(fence)) if fence else None

    async def renew(self, lease: Lease, ttl: float) -> bool:
        arguments = [self._now(), lease.name, lease.holder, lease.fence, _micros(ttl)]
        return bool(await self._server.run(_RENEW, self._lease_keys(lease.name), arguments))

    async def release(self, lease: Lease) -> None:
        arguments = [self._now(), lease.name, lease.holder, lease.fence]
        await self._server.run(_RELEASE, self._lease_keys(lease.name), arguments)

    async def forget_leases(self, prefix: str) -> None:
        now = self._now()
        partitions = (_partition_keys(self._prefix, number) for number in range(_LEASE_PARTITIONS))
        await asyncio.gather(*(self._server.run(_FORGET, keys, [now, prefix]) for keys in partitions))

    async def acquire(self, semaphore: str, holder: str, want: int, limit: int, ttl: float) -> int:
        arguments = [self._now(), holder, want, limit, _micros(ttl)]
        return int(await self._server.run(_HOLD, [self._key("semaphore", semaphore)], arguments))

    async def acquire_many(self, requests: Sequence[PermitRequest], holder: str, ttl: float) -> list[int]:
        # Calls that are made together share a round trip, and each goes to the server that has its key.
        calls = [self.acquire(each.semaphore, holder, each.want, each.limit, ttl) for each in requests]
        return list(await asyncio.gather(*calls))

    async def permits_in_use(self, semaphore: str) -> int:
        return int(await self._server.run(_HELD, [self._key("semaphore", semaphore)], [self._now()]))

    async def permits_in_use_of(self, semaphores: Sequence[str]) -> list[int]:
        return list(await asyncio.gather(*map(self.permits_in_use, semaphores)))

    async def reserve(self, bucket: str, count: int, rate: float, burst: int, within: float = math.inf) -> float:
        key = self._key("bucket", bucket)
        with self._numbered(key) as number:
            keys = [self._answers(key), key]
            bound = "inf" if within == math.inf else _micros(within)
            arguments = [self._now(), *number, count, repr(_MICROS / rate), burst, bound]
            wait = float(await self._server.run(_RESERVE, keys, arguments)) / _MICROS
        # Below 0: not reserved. The returned wait is then above `within`, whatever the rounding.
        return min(wait, within) if wait >= 0 else max(-wait, math.nextafter(within, math.inf))

    async def add_counters(
        self, name: str, amounts: Mapping[str, int], ttl: float, once: str | None = None
    ) -> dict[str, int]:
        key = self._key("tally", name)
        with self._numbered(key) as number:
            keys = [self._answers(key), key, f"{key}:once"]
            # An empty string would mean no name.
            arguments = [self._now(), *number, _micros(ttl), "" if once is None else f":{once}"]
            for counter, amount in amounts.items():
                arguments += [counter, amount]
            answer: list[Any] = await self._server.run(_TALLY, keys, arguments)
        return {counter.decode(): int(value) for counter, value in zip(answer[::2], answer[1::2], strict=True)}

    async def add_counters_of(self, additions: Mapping[str, Mapping[str, int]], ttl: float) -> None:
        await asyncio.gather(*(self.add_counters(name, amounts, ttl) for name, amounts in additions.items()))

    async def swap(self, key: str, old: bytes | None, new: bytes, ttl: float) -> bool:
        value = self._key("cache", key)
        with self._numbered(value) as number:
            arguments = [self._now(), *number, int(old is not None), old or b"", new, _micros(ttl)]
            return bool(int(await self._server.run(_SWAP, [self._answers(value), value], arguments)))

    async def cache(self, key: str, value: bytes, ttl: float) -> None:
        await self._server.run(_CACHE, [self._key("cache", key)], [self._now(), value, _micros(ttl)])

    async def cached(self, key: str) -> bytes | None:
        value: bytes | None = await self._server.run(_CACHED, [self._key("cache", key)], [self._now()])
        return value

    async def mark_runs(self, marks: Sequence[ReadyMark], *, is_built: bool = False) -> None:
        await self._ready.mark_runs(marks, is_built=is_built)

    async def hasten_tenant(self, tenant: TenantId) -> None:
        await self._ready.hasten_tenant(tenant)

    async def look_for_runs(self, request: LookRequest) -> Look:
        return await self._ready.look_for_runs(request)

    async def known_runs(self, run_ids: Collection[RunId]) -> frozenset[RunId]:
        return await self._ready.known_runs(run_ids)

    def _key(self, kind: str, name: str) -> str:
        return f"{{{self._prefix}:{kind}:{name}}}"

    def _lease_keys(self, name: str) -> list[str]:
        return _partition_keys(self._prefix, zlib.crc32(name.encode()) % _LEASE_PARTITIONS)

    def _answers(self, key: str) -> str:
        return f"{key}:answers:{self._caller}"

    def _now(self) -> Argument:
        return "" if self._time is None else _micros(self._time.now())

    @contextmanager
    def _numbered(self, key: str) -> Iterator[Sequence[Argument]]:
        """The number of a call that must execute once, and the number below which all calls on this key are
        answered."""
        self._last_number += 1
        number = self._last_number
        numbers = self._unanswered.setdefault(key, {})
        numbers[number] = None
        try:
            yield number, next(iter(numbers))
        finally:
            del numbers[number]
            if not numbers:
                del self._unanswered[key]


def _partition_keys(prefix: str, number: int) -> list[str]:
    """The keys of a partition of the leases: by name, their names, when they end."""
    tag = f"{{{prefix}:leases:{number}}}"
    return [f"{tag}:by-name", f"{tag}:names", f"{tag}:ends"]


def _micros(seconds: float) -> int:
    return round(seconds * _MICROS)
