"""Fails open: a Coordinator for readers that answer without it. What it only shows or caches is missing while it is
away or slow, and nothing waits for it: after a failure it is left alone for a moment. Calls that decide something
(leases, permits, limits, swaps, the ready index) are passed on, and raise.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TypeVar

import structlog

from conveyor.clock import Clock
from conveyor.engines.coordinator import Coordinator, Lease, PermitRequest
from conveyor.engines.ready import Look, LookRequest, ReadyMark
from conveyor.errors import Unavailable
from conveyor.model import RunId, TenantId

log = structlog.get_logger()

T = TypeVar("T")

# How long a reader waits for the coordinator, and for how long it is not asked after it failed, in seconds.
_PATIENCE = 1.0
_REST = 2.0


class FailOpen:
    """Coordinator."""

    def __init__(self, coordinator: Coordinator, clock: Clock, patience: float = _PATIENCE) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._patience = patience
        self._rests_until = -math.inf

    async def cached(self, key: str) -> bytes | None:
        return await self._open(lambda: self._coordinator.cached(key), None)

    async def cache(self, key: str, value: bytes, ttl: float) -> None:
        await self._open(lambda: self._coordinator.cache(key, value, ttl), None)

    async def permits_in_use(self, semaphore: str) -> int:
        return await self._open(lambda: self._coordinator.permits_in_use(semaphore), 0)

    async def permits_in_use_of(self, semaphores: Sequence[str]) -> list[int]:
        return await self._open(lambda: self._coordinator.permits_in_use_of(semaphores), [0] * len(semaphores))

    async def add_counters(
        self, name: str, amounts: Mapping[str, int], ttl: float, once: str | None = None
    ) -> dict[str, int]:
        if amounts:
            return await self._coordinator.add_counters(name, amounts, ttl, once)
        return await self._open(lambda: self._coordinator.add_counters(name, {}, ttl), {})

    async def add_counters_of(self, additions: Mapping[str, Mapping[str, int]], ttl: float) -> None:
        await self._coordinator.add_counters_of(additions, ttl)

    async def lease(self, name: str, holder: str, ttl: float) -> Lease | None:
        return await self._coordinator.lease(name, holder, ttl)

    async def renew(self, lease: Lease, ttl: float) -> bool:
        return await self._coordinator.renew(lease, ttl)

    async def release(self, lease: Lease) -> None:
        await self._coordinator.release(lease)

    async def forget_leases(self, prefix: str) -> None:
        await self._coordinator.forget_leases(prefix)

    async def acquire(self, semaphore: str, holder: str, want: int, limit: int, ttl: float) -> int:
        return await self._coordinator.acquire(semaphore, holder, want, limit, ttl)

    async def acquire_many(self, requests: Sequence[PermitRequest], holder: str, ttl: float) -> list[int]:
        return await self._coordinator.acquire_many(requests, holder, ttl)

    async def reserve(self, bucket: str, count: int, rate: float, burst: int, within: float = math.inf) -> float:
        return await self._coordinator.reserve(bucket, count, rate, burst, within)

    async def swap(self, key: str, old: bytes | None, new: bytes, ttl: float) -> bool:
        return await self._coordinator.swap(key, old, new, ttl)

    async def mark_runs(self, marks: Sequence[ReadyMark], *, is_built: bool = False) -> None:
        await self._coordinator.mark_runs(marks, is_built=is_built)

    async def hasten_tenant(self, tenant: TenantId) -> None:
        await self._coordinator.hasten_tenant(tenant)

    async def look_for_runs(self, request: LookRequest) -> Look:
        return await self._coordinator.look_for_runs(request)

    async def known_runs(self, run_ids: Collection[RunId]) -> frozenset[RunId]:
        return await self._coordinator.known_runs(run_ids)

    async def _open(self, call: Callable[[], Awaitable[T]], default: T) -> T:
        if self._clock.monotonic() < self._rests_until:
            return default
        try:
            async with asyncio.timeout(self._patience):
                return await call()
        except (Unavailable, TimeoutError) as error:
            self._rests_until = self._clock.monotonic() + _REST
            log.warning("the coordinator is away; answering without it", error=str(error) or "no answer in time")
            return default
