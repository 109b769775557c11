"""Admission: whether there is capacity for more work, checked before anything is accepted. The load is computed from
the active jobs every few seconds, by one of the processes that ask, and shared through the coordinator, which also adds
up what was admitted since. A refusal has a code, a reason and a `retry_after`.

If the coordinator loses its state, the work of the last seconds may be admitted a second time, and no more. While it is
away, each process admits by what it counts itself.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable

import msgspec
import structlog

from conveyor.clock import seconds_since
from conveyor.coordination.own_counts import AdmissionCounts, CountsAway, OwnCounts, SharedCounts
from conveyor.engines.records import Records
from conveyor.errors import NoWorkers, Overloaded, QuotaExceeded
from conveyor.model import WORKERS, Job, TenantId
from conveyor.states import RunState
from conveyor.system import System
from conveyor.telemetry import metrics

log = structlog.get_logger()

_KEY = "admission:load"
_TURN = "admission:turn"
_KEEP_SECONDS = 600.0
# The maximum age of the load in seconds. It grows with the time that computing it takes, to keep that a small share.
_FRESH = 5.0
_SHARE = 20
# Runs that are read concurrently.
_AT_ONCE = 32
# Seconds after which a refused request should be repeated: at least these, at most twice as many.
_AGAIN = 5.0
# How long the coordinator is not asked after it failed, in seconds.
_REST = 2.0
# An upload without a job counts for the hour in which it was created and for the next.
_HOUR = 3600.0

ALL = ""
_PARTS = ("jobs", "tasks", "bytes")


class Load(msgspec.Struct, frozen=True):
    """The amounts in progress, as `tenant/part` → number; the tenant of the sum is empty."""

    at: float
    # Seconds that it took to compute.
    took: float
    amounts: dict[str, int]


_loads = msgspec.json.Decoder(Load)


class Admission:
    """Admits work, or refuses it."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._shared = SharedCounts(system.coordinator)
        self._own = OwnCounts(system.clock)
        self._rests_until = -math.inf
        settings = system.settings
        self._limits = {
            "jobs": (settings.tenant_jobs, settings.max_jobs),
            "tasks": (settings.tenant_queued_tasks, settings.max_queued_tasks),
            "bytes": (settings.tenant_staged_bytes, settings.max_staged_bytes),
        }

    async def admit(self, tenant: TenantId, *, jobs: int = 0, tasks: int = 0, staged: int = 0) -> None:
        """Admit this much more work of a tenant, or raise NoWorkers, QuotaExceeded or Overloaded."""
        wanted = {part: amount for part, amount in zip(_PARTS, (jobs, tasks, staged), strict=True) if amount}

        async def admit_by(counts: AdmissionCounts) -> None:
            load = await self._load(counts)
            await self._add(counts, f"admitted:{load.at}", tenant, wanted, load.amounts)

        await self._admit(admit_by)

    async def admit_upload(self, tenant: TenantId, size: int) -> None:
        """Admit an upload, or raise as `admit` does."""

        async def admit_by(counts: AdmissionCounts) -> None:
            load = await self._load(counts)
            hour = int(self._system.clock.now() / _HOUR)
            before = await counts.add_counters(f"promised:{hour - 1}", {}, 2 * _HOUR)
            known = {name: load.amounts.get(name, 0) + before.get(name, 0) for name in (_name(tenant), _name(ALL))}
            await self._add(counts, f"promised:{hour}", tenant, {"bytes": size}, known)

        await self._admit(admit_by)

    async def _admit(self, admit_by: Callable[[AdmissionCounts], Awaitable[None]]) -> None:
        """Admit by the counts of all processes, or by those of this one while the coordinator is away."""
        clock = self._system.clock
        if clock.monotonic() >= self._rests_until:
            try:
                await self._check_workers(self._shared)
                await admit_by(self._shared)
                return
            except CountsAway as error:
                self._rests_until = clock.monotonic() + _REST
                log.warning("the coordinator is away; admitting work without it", error=str(error))
        await admit_by(self._own)

    async def _add(
        self,
        counts: AdmissionCounts,
        tally: str,
        tenant: TenantId,
        wanted: dict[str, int],
        known: dict[str, int],
    ) -> None:
        """Add first and check afterwards, so that concurrent requests together stay within the limit."""
        amounts = {_name(who, part): amount for part, amount in wanted.items() for who in (tenant, ALL)}
        if not amounts:
            return
        added = await counts.add_counters(tally, amounts, 2 * _HOUR)
        for part in wanted:
            tenant_limit, total_limit = self._limits[part]
            for who, limit in ((tenant, tenant_limit), (ALL, total_limit)):
                name = _name(who, part)
                if known.get(name, 0) + added.get(name, 0) > limit:
                    await counts.add_counters(tally, {name: -amount for name, amount in amounts.items()}, 2 * _HOUR)
                    raise self._refusal(who, part, limit)

    def _refusal(self, who: str, part: str, limit: int) -> QuotaExceeded | Overloaded:
        retry_after = self._retry_after()
        metrics.REFUSALS.add(1, (Overloaded if who == ALL else QuotaExceeded).code, part)
        if who == ALL:
            return Overloaded(
                f"No capacity for more {part} now: the maximum is {limit}. Retry in {retry_after} seconds.",
                reason=part,
                limit=limit,
                retry_after=retry_after,
            )
        return QuotaExceeded(
            f"The tenant may have at most {limit} {part} in progress. Retry when some have finished.",
            reason=part,
            limit=limit,
            retry_after=retry_after,
        )

    def _retry_after(self) -> int:
        return math.ceil(_AGAIN * (1 + self._system.clock.jitter()))

    async def _check_workers(self, counts: AdmissionCounts) -> None:
        min_workers = self._system.settings.min_workers
        if min_workers == 0:
            return
        alive = await counts.permits_in_use(WORKERS)
        if alive < min_workers:
            metrics.REFUSALS.add(1, NoWorkers.code, "workers")
            raise NoWorkers(
                f"{alive} workers are alive. At least {min_workers} are needed to accept work.",
                reason="workers",
                limit=min_workers,
                retry_after=self._retry_after(),
            )

    async def _load(self, counts: AdmissionCounts) -> Load:
        """The shared load; if it is too old, one of the processes that ask computes it again."""
        clock = self._system.clock
        raw = await counts.cached(_KEY)
        shared = _decoded(raw)
        if shared is not None:
            fresh = max(_FRESH, shared.took * _SHARE)
            if seconds_since(shared.at, clock.now()) < fresh or not await counts.swap(_TURN, None, b"x", fresh):
                return shared
        began = clock.monotonic()
        at = clock.now()
        amounts = await self._compute()
        load = Load(at, clock.monotonic() - began, amounts)
        if await counts.swap(_KEY, raw, msgspec.json.encode(load), _KEEP_SECONDS):
            return load
        # Processes that computed it concurrently all use one: what they admit is added up under its time.
        return _decoded(await counts.cached(_KEY)) or load

    async def _compute(self) -> dict[str, int]:
        active = await self._system.records.jobs.active_jobs()
        amounts: dict[str, int] = {}
        for job in active:
            staged = job.source.size if job.source is not None and job.state is RunState.INGESTING else 0
            _add_up(amounts, job.tenant, {"jobs": 1, "tasks": job.run.total, "bytes": staged})
        ingesting = [job for job in active if not job.run.last_batch]
        for start in range(0, len(ingesting), _AT_ONCE):
            batch = ingesting[start : start + _AT_ONCE]
            for job, tasks in zip(
                batch, await asyncio.gather(*(_ingested(self._system.records, job) for job in batch)), strict=True
            ):
                _add_up(amounts, job.tenant, {"tasks": tasks})
        if self._is_near(amounts):
            await self._subtract_finished(active, amounts)
        return amounts

    def _is_near(self, amounts: dict[str, int]) -> bool:
        """Whether the number of finished tasks matters: it costs a read for each run."""
        tenant_limit, total_limit = self._limits["tasks"]
        tasks = {name: amount for name, amount in amounts.items() if name.endswith("/tasks")}
        return any(
            amount > (total_limit if name == _name(ALL, "tasks") else tenant_limit) / 2
            for name, amount in tasks.items()
        )

    async def _subtract_finished(self, active: list[Job], amounts: dict[str, int]) -> None:
        for start in range(0, len(active), _AT_ONCE):
            batch = active[start : start + _AT_ONCE]
            counts = await asyncio.gather(*(self._system.tasks.counts(job.key) for job in batch))
            for job, count in zip(batch, counts, strict=True):
                _add_up(amounts, job.tenant, {"tasks": -count.ended})


async def _ingested(records: Records, job: Job) -> int:
    return (await records.ingests.ingested(job.run.run_id)).tasks


def _name(who: str, part: str = "bytes") -> str:
    return f"{who}/{part}"


def _add_up(amounts: dict[str, int], tenant: TenantId, more: dict[str, int]) -> None:
    for part, amount in more.items():
        for who in (tenant, ALL):
            name = _name(who, part)
            amounts[name] = amounts.get(name, 0) + amount


def _decoded(raw: bytes | None) -> Load | None:
    try:
        return _loads.decode(raw) if raw else None
    except msgspec.MsgspecError:
        # Written by another version.
        return None
