"""The Coordinator of the embedded system. Leases are stored, because a fence must grow across restarts. The rest is in
memory, because one process owns the database."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from math import inf

import msgspec

from conveyor.clock import CLOCK_SLACK, Clock
from conveyor.engines.coordinator import Lease, PermitRequest
from conveyor.engines.ready import Look, LookRequest, ReadyMark
from conveyor.engines.sqlite.database import SqliteDatabase, named_queries
from conveyor.engines.sqlite.expiring import Expiring
from conveyor.engines.sqlite.ready_index import MemoryReadyIndex
from conveyor.faults import crashpoint
from conveyor.model import RunId, TenantId

SQL = named_queries("coordinator.sql")

# Sorts after every name that continues a prefix.
_LAST = "\U0010ffff"


class _Tally(msgspec.Struct):
    """The counters of one name, and the expiry of each addition that is applied once."""

    counters: dict[str, int]
    once: dict[str, float]


class SqliteCoordinator:
    """Leases in SQLite; semaphores, buckets, counters, cache and ready index in memory."""

    def __init__(self, database: SqliteDatabase, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._holders: dict[str, dict[str, tuple[int, float]]] = {}
        # GCRA's theoretical arrival time of each bucket: when its next pass is due.
        self._buckets: Expiring[float] = Expiring()
        self._tallies: Expiring[_Tally] = Expiring()
        self._cache: Expiring[bytes] = Expiring()
        self._ready = MemoryReadyIndex(clock)

    async def lease(self, name: str, holder: str, ttl: float) -> Lease | None:
        now = self._clock.now()
        values = {"name": name, "holder": holder, "now": now, "until": now + ttl, "slack": CLOCK_SLACK}
        crashpoint("lease.grant.before")
        row = await self._database.write(lambda db: db.execute(SQL["grant"], values).fetchone())
        crashpoint("lease.grant.after")
        return Lease(name, holder, int(row[0])) if row else None

    async def renew(self, lease: Lease, ttl: float) -> bool:
        now = self._clock.now()
        values = {**_fields(lease), "now": now, "until": now + ttl}

        return await self._database.change(SQL["renew"], values) > 0

    async def release(self, lease: Lease) -> None:
        await self._database.change(SQL["release"], _fields(lease))

    async def forget_leases(self, prefix: str) -> None:
        await self._database.change(SQL["forget"], {"prefix": prefix, "after": prefix + _LAST})

    async def release_all(self) -> None:
        """Release the leases of the last owner of the database, when a new owner opens it."""
        await self._database.change(SQL["release_all"], {})

    async def acquire(self, semaphore: str, holder: str, want: int, limit: int, ttl: float) -> int:
        now = self._clock.monotonic()
        holders = self._live(semaphore, now)
        others = sum(count for name, (count, _) in holders.items() if name != holder)
        granted = max(0, min(want, limit - others))
        holders.pop(holder, None)
        if granted:
            holders[holder] = (granted, now + ttl)
        if holders:
            self._holders[semaphore] = holders
        else:
            self._holders.pop(semaphore, None)
        return granted

    async def acquire_many(self, requests: Sequence[PermitRequest], holder: str, ttl: float) -> list[int]:
        return [await self.acquire(each.semaphore, holder, each.want, each.limit, ttl) for each in requests]

    async def permits_in_use(self, semaphore: str) -> int:
        return sum(count for count, _ in self._live(semaphore, self._clock.monotonic()).values())

    async def permits_in_use_of(self, semaphores: Sequence[str]) -> list[int]:
        return [await self.permits_in_use(each) for each in semaphores]

    async def reserve(self, bucket: str, count: int, rate: float, burst: int, within: float = inf) -> float:
        now = self._clock.monotonic()
        step = 1 / rate
        due = self._buckets.get(bucket, now) or now
        wait = max(0.0, due - now - (burst - count) * step)
        if wait > within:
            return wait
        following = due + count * step
        # A bucket whose pass is due equals a new one.
        self._buckets.put(bucket, following, following, now)
        return wait

    async def add_counters(
        self, name: str, amounts: Mapping[str, int], ttl: float, once: str | None = None
    ) -> dict[str, int]:
        return dict(self._add(name, amounts, ttl, once).counters)

    async def add_counters_of(self, additions: Mapping[str, Mapping[str, int]], ttl: float) -> None:
        for name, amounts in additions.items():
            self._add(name, amounts, ttl, None)

    def _add(self, name: str, amounts: Mapping[str, int], ttl: float, once: str | None) -> _Tally:
        now = self._clock.monotonic()
        tally = self._tallies.get(name, now) or _Tally({}, {})
        lapsed = list(itertools.takewhile(lambda added: added[1] <= now, tally.once.items()))
        for each, _ in lapsed:
            del tally.once[each]
        if amounts and (once is None or tally.once.get(once, now) <= now):
            for counter, amount in amounts.items():
                tally.counters[counter] = tally.counters.get(counter, 0) + amount
            if once is not None:
                tally.once[once] = now + ttl
            self._tallies.put(name, tally, now + ttl, now)
        return tally

    async def swap(self, key: str, old: bytes | None, new: bytes, ttl: float) -> bool:
        if await self.cached(key) != old:
            return False
        await self.cache(key, new, ttl)
        return True

    async def cache(self, key: str, value: bytes, ttl: float) -> None:
        now = self._clock.monotonic()
        self._cache.put(key, value, now + ttl, now)

    async def cached(self, key: str) -> bytes | None:
        return self._cache.get(key, self._clock.monotonic())

    async def mark_runs(self, marks: Sequence[ReadyMark], *, is_built: bool = False) -> None:
        await self._ready.mark_runs(marks, is_built=is_built)

    async def hasten_tenant(self, tenant: TenantId) -> None:
        await self._ready.hasten_tenant(tenant)

    async def look_for_runs(self, request: LookRequest) -> Look:
        return await self._ready.look_for_runs(request)

    async def known_runs(self, run_ids: Collection[RunId]) -> frozenset[RunId]:
        return await self._ready.known_runs(run_ids)

    def _live(self, semaphore: str, now: float) -> dict[str, tuple[int, float]]:
        holders = self._holders.get(semaphore, {})
        return {name: entry for name, entry in holders.items() if entry[1] > now}


def _fields(lease: Lease) -> dict[str, str | int]:
    return {"name": lease.name, "holder": lease.holder, "fence": lease.fence}
