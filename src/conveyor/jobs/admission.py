"""Admission: whether there is room for more, asked before anything is accepted. What is under way is known from the
active jobs, looked at once in a while by whoever asks and shared through the coordinator; what was admitted since is
added up there too. A refusal has a code, a reason, and says when to come again.

Losing the coordinator lets in what was admitted in the last seconds once more, and no more than that.
"""

import asyncio
import math

import msgspec

from conveyor.engines.records import Records
from conveyor.errors import NoWorkers, Overloaded, QuotaExceeded
from conveyor.model import WORKERS, Job, TenantId
from conveyor.states import RunState
from conveyor.system import System
from conveyor.telemetry import metrics

_KEY = "admission:load"
_TURN = "admission:turn"
_KEEP_SECONDS = 600.0
# How old what is known may be; more where looking takes long, so that it is a small part of what a process does.
_FRESH = 5.0
_SHARE = 20
# Runs that are looked at side by side.
_AT_ONCE = 32
# Seconds after which a refused request should come again: at least, and at most as many more.
_AGAIN = 5.0
# An upload that nobody has made a job of counts for the hour in which it was promised and the next.
_HOUR = 3600.0

ALL = ""
_PARTS = ("jobs", "tasks", "bytes")


class Load(msgspec.Struct, frozen=True):
    """What is under way, as `tenant/part` → number; the tenant of all together is empty."""

    at: float
    # Seconds that finding it out took.
    took: float
    amounts: dict[str, int]


_loads = msgspec.json.Decoder(Load)


class Admission:
    """Asked by everything that accepts work."""

    def __init__(self, system: System) -> None:
        self._system = system
        settings = system.settings
        self._limits = {
            "jobs": (settings.tenant_jobs, settings.max_jobs),
            "tasks": (settings.tenant_queued_tasks, settings.max_queued_tasks),
            "bytes": (settings.tenant_staged_bytes, settings.max_staged_bytes),
        }

    async def admit(self, tenant: TenantId, *, jobs: int = 0, tasks: int = 0, staged: int = 0) -> None:
        """Take so much more of a tenant's, or raise NoWorkers, QuotaExceeded or Overloaded."""
        await self._check_workers()
        load = await self._load()
        wanted = {part: amount for part, amount in zip(_PARTS, (jobs, tasks, staged), strict=True) if amount}
        await self._add(f"admitted:{load.at}", tenant, wanted, load.amounts)

    async def admit_upload(self, tenant: TenantId, size: int) -> None:
        """Promise a place for a list, or raise as `admit` does."""
        await self._check_workers()
        load = await self._load()
        hour = int(self._system.clock.now() / _HOUR)
        before = await self._system.coordinator.tally(f"promised:{hour - 1}", {}, 2 * _HOUR)
        known = {name: load.amounts.get(name, 0) + before.get(name, 0) for name in (_name(tenant), _name(ALL))}
        await self._add(f"promised:{hour}", tenant, {"bytes": size}, known)

    async def _add(self, tally: str, tenant: TenantId, wanted: dict[str, int], known: dict[str, int]) -> None:
        """Added first and then looked at, so that of many at once only as many come in as there is room for."""
        amounts = {_name(who, part): amount for part, amount in wanted.items() for who in (tenant, ALL)}
        if not amounts:
            return
        added = await self._system.coordinator.tally(tally, amounts, 2 * _HOUR)
        for part in wanted:
            own, most = self._limits[part]
            for who, limit in ((tenant, own), (ALL, most)):
                name = _name(who, part)
                if known.get(name, 0) + added.get(name, 0) > limit:
                    await self._system.coordinator.tally(
                        tally, {each: -amount for each, amount in amounts.items()}, 2 * _HOUR
                    )
                    raise self._refusal(who, part, limit)

    def _refusal(self, who: str, part: str, limit: int) -> QuotaExceeded | Overloaded:
        again = self._again()
        metrics.REFUSALS.add(1, (Overloaded if who == ALL else QuotaExceeded).code, part)
        if who == ALL:
            return Overloaded(
                f"There is no room for more {part} now: {limit} are the most. Send this again in {again} seconds.",
                reason=part,
                limit=limit,
                retry_after=again,
            )
        return QuotaExceeded(
            f"The tenant may have {limit} {part} under way. Send this again when some have ended.",
            reason=part,
            limit=limit,
            retry_after=again,
        )

    def _again(self) -> int:
        return math.ceil(_AGAIN * (1 + self._system.clock.jitter()))

    async def _check_workers(self) -> None:
        least = self._system.settings.min_workers
        if least == 0:
            return
        alive = await self._system.coordinator.held(WORKERS)
        if alive < least:
            metrics.REFUSALS.add(1, NoWorkers.code, "workers")
            raise NoWorkers(
                f"{alive} workers are alive; {least} must be for work to be accepted.",
                reason="workers",
                limit=least,
                retry_after=self._again(),
            )

    async def _load(self) -> Load:
        """What was known a moment ago; if that is too old, one of those who ask looks again."""
        coordinator, clock = self._system.coordinator, self._system.clock
        raw = await coordinator.cached(_KEY)
        kept = _decoded(raw)
        if kept is not None:
            fresh = max(_FRESH, kept.took * _SHARE)
            if clock.now() < kept.at + fresh or not await coordinator.swap(_TURN, None, b"x", fresh):
                return kept
        began = clock.monotonic()
        at = clock.now()
        amounts = await self._look()
        load = Load(at, clock.monotonic() - began, amounts)
        if await coordinator.swap(_KEY, raw, msgspec.json.encode(load), _KEEP_SECONDS):
            return load
        # Of those who looked at the same time, all count with one: what they admit is added up under its time.
        return _decoded(await coordinator.cached(_KEY)) or load

    async def _look(self) -> dict[str, int]:
        active = await self._system.records.jobs.active_jobs()
        amounts: dict[str, int] = {}
        for job in active:
            staged = job.source.size if job.source is not None and job.state is RunState.INGESTING else 0
            _add_up(amounts, job.tenant, {"jobs": 1, "tasks": job.run.total, "bytes": staged})
        ingesting = [job for job in active if not job.run.last_batch]
        for start in range(0, len(ingesting), _AT_ONCE):
            some = ingesting[start : start + _AT_ONCE]
            for job, tasks in zip(
                some, await asyncio.gather(*(_ingested(self._system.records, job) for job in some)), strict=True
            ):
                _add_up(amounts, job.tenant, {"tasks": tasks})
        if self._is_near(amounts):
            await self._subtract_ended(active, amounts)
        return amounts

    def _is_near(self, amounts: dict[str, int]) -> bool:
        """Whether it matters how many of the tasks have ended: counting that is a read for each run."""
        own, most = self._limits["tasks"]
        tasks = {name: amount for name, amount in amounts.items() if name.endswith("/tasks")}
        return any(amount > (most if name == _name(ALL, "tasks") else own) / 2 for name, amount in tasks.items())

    async def _subtract_ended(self, active: list[Job], amounts: dict[str, int]) -> None:
        for start in range(0, len(active), _AT_ONCE):
            some = active[start : start + _AT_ONCE]
            counts = await asyncio.gather(*(self._system.tasks.counts(job.key) for job in some))
            for job, count in zip(some, counts, strict=True):
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
        # Another version's.
        return None
