"""Scheduler: fires schedules that are due. The steps of a fire, in order:

1. claim: write the time of the fire to the schedule's document, on its version, with a lease.
2. stage: copy the list that the schedule reads, if it has one.
3. submit: create the job, with an id and an idempotency key that are derived from schedule and time. Repeated by any
   number of schedulers, this creates one job.
4. advance: record the fire, and make the document due at the next one.

After a crash the time of the fire is still in the document, and the next scheduler makes the same fire once the lease
has expired.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec
import structlog

from conveyor.accept.cron import missed_fires, next_fires
from conveyor.accept.schedules import (
    SCHEDULE,
    SHOWN_FIRES,
    Fire,
    Missed,
    Schedule,
    Schedules,
    schedule_of,
    set_right,
    template_of,
    upload_of,
    with_schedule,
)
from conveyor.accept.sources import Sources
from conveyor.accept.submit import Submit
from conveyor.clock import ClockSteps
from conveyor.coordination.isolation import Isolation
from conveyor.egress.outbound import Outbound
from conveyor.engines.records import Document
from conveyor.errors import ConveyorError, IdempotencyInFlight, QuotaExceeded, SourceUnavailable, UnknownHandler
from conveyor.faults import crashpoint
from conveyor.jobs.fire_ids import fire_job_id
from conveyor.jobs.idempotency import IdempotentRequest
from conveyor.model import Job, JobId, JobKind, TenantId
from conveyor.states import ENDED
from conveyor.system import System

log = structlog.get_logger()

LEASE_SECONDS = 60.0
ROUTE = "schedule"

_EVERY = 1.0
_ROWS = 100
_AT_ONCE = 64
# Of one tenant.
_SHARE = 8
_PUT_OFF = 5.0
# Missed fires that one fire counts at most.
_MAX_COUNTED = 1000
# How often a fire is started, and how often an unavailable list is read.
_TRIES = 20
_READS = 5
_LONGEST_PAUSE = 60.0
_CLOSE_SECONDS = 5.0
# How long nothing fires after the clock jumped forward, or the machine was suspended.
_SETTLE_SECONDS = 300.0
# How often the time is extended for which the job to compare with is kept, in seconds.
_SHORTEST_KEEP = 5.0
_LONGEST_KEEP = 7 * 86_400.0
_DAY = 86_400.0
# HTTP statuses of server errors start here.
_SERVER_ERROR = 500


class FirePlan(NamedTuple):
    """The time to fire now (None: none), and how many missed fires it makes up for."""

    at: float | None
    coalesced: int = 0


class Later(Exception):
    """The fire cannot be made now; it is retried."""


class LeaseLost(Exception):
    """Another scheduler makes this fire, or the schedule was removed."""


class Scheduler:
    """A role. Several can run concurrently."""

    def __init__(self, system: System, outbound: Outbound, name: str = "scheduler") -> None:
        self.name = name
        self.wake: Callable[[], None] = lambda: None
        self.stopping = False
        self._settings = system.settings
        self._records = system.records
        self._clock = system.clock
        self._outbound = outbound
        self._submit = Submit(system)
        self._schedules = Schedules(system)
        self._sources = Sources(system, outbound)
        self._running: dict[asyncio.Task[None], tuple[TenantId, str]] = {}
        self._isolation = Isolation(name, system.clock)
        self._steps = ClockSteps(system.clock)
        # Until then a step forward may be corrected.
        self._settled_at = 0.0

    async def tick(self) -> float:
        """Start the fires that are due."""
        if not self._is_settled():
            return _EVERY
        now = self._clock.now()
        rows = await self._records.documents.due_documents(SCHEDULE, now, _ROWS)
        in_progress = set(self._running.values())
        shares = Counter(tenant for tenant, _ in in_progress)
        waiting: list[Document] = []
        for row in rows:
            if (row.tenant, row.id) in in_progress:
                continue
            if len(self._running) >= _AT_ONCE or shares[row.tenant] >= _SHARE:
                waiting.append(row)
                continue
            shares[row.tenant] += 1
            work = self._isolation.due_row(self._records, row, partial(self.attend, row))
            task = asyncio.create_task(work, name=f"fire {row.id}")
            self._running[task] = (row.tenant, row.id)
            task.add_done_callback(self._ended)
        if len(rows) == _ROWS and len(self._running) < _AT_ONCE:
            # Schedules of one tenant fill the page: postpone them, so that the next page has others.
            for row in waiting:
                await self._records.documents.replace_document(msgspec.structs.replace(row, due_at=now + _PUT_OFF))
        return _EVERY

    async def close(self) -> None:
        """Fires in progress have a few seconds to finish; another scheduler takes over the rest."""
        if self._running:
            _, late = await asyncio.wait(set(self._running), timeout=_CLOSE_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._outbound.close()

    def _is_settled(self) -> bool:
        """False for a while after the clock jumped forward: a job that is made too early is not taken back."""
        step, monotonic = self._steps.look(), self._clock.monotonic()
        if step > 0:
            self._settled_at = monotonic + _SETTLE_SECONDS
            log.warning("clock jumped forward: schedules wait a while", jump=round(step), seconds=_SETTLE_SECONDS)
        elif step < 0:
            self._settled_at = monotonic
        return monotonic >= self._settled_at

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("schedule failed with an internal error; it is retried", exc_info=error)
        # There may be more missed fires.
        self.wake()

    async def attend(self, row: Document) -> None:
        """Handle a schedule that is due: fire it, keep its upload, or both."""
        schedule = set_right(schedule_of(row), self._clock.now())
        if schedule.keep_at is not None and schedule.keep_at <= self._clock.now():
            template = template_of(bytes(schedule.job))
            row = msgspec.structs.replace(row, upload_id=upload_of(template))
            schedule = msgspec.structs.replace(schedule, keep_at=await self._schedules.keep_upload(template))
        if schedule.keep_base_at is not None and schedule.keep_base_at <= self._clock.now():
            schedule = msgspec.structs.replace(schedule, keep_base_at=await self._keep_base(row.tenant, schedule))
        plan = self._plan(schedule)
        if plan.at is None:
            await self._records.documents.replace_document(
                with_schedule(row, self._advanced(schedule, self._clock.now()), self._clock.now())
            )
            return
        claimed = await self._claim(row, schedule, plan)
        if claimed is None:
            return
        try:
            fire = await self._fire_with_lease(claimed, plan)
        except LeaseLost:
            return
        except Later as later:
            log.warning("schedule cannot fire now", schedule=row.id, tries=schedule.tries + 1, why=str(later))
            await self._postpone(claimed)
            return
        await self._advance(claimed, fire)

    def _plan(self, schedule: Schedule) -> FirePlan:
        if schedule.firing is not None:
            return FirePlan(schedule.firing, schedule.coalesced)
        now = self._clock.now()
        first = schedule.next_fire
        if schedule.paused or first is None or first > now:
            return FirePlan(None)
        if schedule.made_until is not None and schedule.made_until <= now:
            first = max(first, schedule.made_until)
        limit = self._settings.schedule_catch_up if schedule.missed is Missed.ALL else _MAX_COUNTED
        fires = missed_fires(schedule.cron, schedule.timezone, first, now, limit)
        if not fires:
            return FirePlan(None)
        # No job of the same time before the clock was set back is in their way.
        fires = [at + schedule.repeats % 1000 / 1000 for at in fires]
        match schedule.missed:
            case Missed.ALL:
                return FirePlan(fires[0])
            case Missed.SKIP:
                return FirePlan(fires[-1] if now - fires[-1] <= self._settings.schedule_grace_seconds else None)
            case Missed.COALESCE:
                return FirePlan(fires[-1], len(fires) - 1)

    async def _claim(self, row: Document, schedule: Schedule, plan: FirePlan) -> Document | None:
        """Record the fire and its scheduler, with a lease; None if another scheduler was first."""
        leased = msgspec.structs.replace(
            schedule,
            firing=plan.at,
            coalesced=plan.coalesced,
            holder=self._clock.new_id("hold"),
            tries=schedule.tries + 1,
        )
        crashpoint("schedule.claim.before")
        claimed = await self._records.documents.replace_document(
            with_schedule(row, leased, self._clock.now(), self._clock.now() + LEASE_SECONDS)
        )
        crashpoint("schedule.claim.after")
        return claimed

    async def _fire_with_lease(self, row: Document, plan: FirePlan) -> Fire:
        """Make the fire while the lease is renewed. Raises LeaseLost and Later."""
        firing = asyncio.ensure_future(self._fire(row, plan))
        renewing = asyncio.ensure_future(self._renew_lease(row))
        try:
            await asyncio.wait({firing, renewing}, return_when=asyncio.FIRST_COMPLETED)
            if not firing.done():
                raise LeaseLost
            return firing.result()
        finally:
            for task in (firing, renewing):
                task.cancel()
            await asyncio.gather(firing, renewing, return_exceptions=True)

    async def _renew_lease(self, row: Document) -> None:
        """Renew the lease until another scheduler has it."""
        holder = schedule_of(row).holder
        while True:
            await self._clock.sleep(LEASE_SECONDS / 3)
            current = await self._records.documents.document(SCHEDULE, row.tenant, row.id)
            if current is None or schedule_of(current).holder != holder:
                return
            # If a client changes the schedule at the same time, the next renewal is early enough.
            until = self._clock.now() + LEASE_SECONDS
            await self._records.documents.replace_document(msgspec.structs.replace(current, due_at=until))

    async def _fire(self, row: Document, plan: FirePlan) -> Fire:
        """Create the job, or find that it exists. An error that a retry would not fix is the result of the fire."""
        assert plan.at is not None
        job_id = fire_job_id(row.tenant, row.id, plan.at)
        tries = schedule_of(row).tries
        error: str | None = None
        try:
            if tries <= _TRIES:
                await self._make_job(row, job_id, plan.at)
            else:
                error = f"The fire was started {_TRIES} times and never finished."
        except IdempotencyInFlight:
            # Another scheduler creates it now, or died a moment ago.
            raise Later("another scheduler is creating this job") from None
        except SourceUnavailable as unavailable:
            if tries < _READS:
                raise Later(str(unavailable)) from None
            error = str(unavailable)
        except ConveyorError as failed:
            # Workers with the handler may be starting.
            is_passing = failed.status >= _SERVER_ERROR or isinstance(failed, QuotaExceeded | UnknownHandler)
            if is_passing and tries < _TRIES:
                raise Later(failed.message) from None
            error = failed.message
        if error is not None and await self._records.jobs.job(row.tenant, job_id) is not None:
            # An earlier attempt created it without receiving the answer.
            error = None
        if error is not None:
            log.warning("schedule fired without a job", schedule=row.id, error=error)
            await self._sources.discard(row.tenant, job_id)
        return Fire(plan.at, self._clock.now(), None if error else job_id, error, plan.coalesced)

    async def _base(self, tenant: TenantId, schedule: Schedule) -> Job | None:
        """The job to compare with: that of the last fire that has finished."""
        for fire in reversed(schedule.fires):
            job = None if fire.job_id is None else await self._records.jobs.job(tenant, fire.job_id)
            if job is not None and job.state in ENDED:
                return job
        return None

    async def _keep_base(self, tenant: TenantId, schedule: Schedule) -> float | None:
        """Keep the job to compare with for longer, until the job of the next fire has finished and takes its place.
        Returns when to do that again: several times before a job that finishes just now would expire."""
        if not schedule.changed_only:
            return None
        days = template_of(bytes(schedule.job)).spec.retention_days
        pause = min(max(days * _DAY / 4, _SHORTEST_KEEP), _LONGEST_KEEP)
        base = await self._base(tenant, schedule)
        if base is not None:
            crashpoint("schedule.keep.before")
            await self._records.jobs.keep_job(tenant, base.job_id, self._clock.now() + 3 * pause)
            crashpoint("schedule.keep.after")
        return self._clock.now() + pause

    async def _make_job(self, row: Document, job_id: JobId, at: float) -> None:
        if await self._records.jobs.job(row.tenant, job_id) is not None:
            return
        schedule = schedule_of(row)
        template = template_of(bytes(schedule.job))
        spec = template.spec
        if spec.name is None:
            spec = msgspec.structs.replace(spec, name=schedule.name)
        if schedule.changed_only and spec.kind is JobKind.FETCH:
            base = await self._base(row.tenant, schedule)
            spec = msgspec.structs.replace(spec, changed_from=None if base is None else base.job_id)
        source = None
        if template.source is not None:
            source = await self._sources.stage(row.tenant, job_id, template.source)
        # As in the version before for the times of cron, which are whole seconds.
        name = f"{row.id}:{int(at)}" if at == int(at) else f"{row.id}:{at:.3f}"
        crashpoint("schedule.submit.before")
        try:
            accepted = await self._submit.submit_as(
                job_id, row.tenant, spec, source, IdempotentRequest(ROUTE, name, name)
            )
        except ConveyorError as refused:
            # After a server error the job may exist all the same.
            if source is not None and refused.status < _SERVER_ERROR:
                await self._sources.drop(source)
            raise
        crashpoint("schedule.submit.after")
        if accepted.replayed and source is not None:
            await self._sources.drop(source)

    async def _postpone(self, row: Document) -> None:
        pause = min(2.0 ** schedule_of(row).tries, _LONGEST_PAUSE)
        await self._records.documents.replace_document(msgspec.structs.replace(row, due_at=self._clock.now() + pause))

    async def _advance(self, row: Document, fire: Fire) -> None:
        """Record the fire, on top of concurrent changes; nothing if another scheduler has done so."""
        holder = schedule_of(row).holder
        current: Document | None = row
        while current is not None and schedule_of(current).holder == holder:
            schedule, now = schedule_of(current), self._clock.now()
            done = msgspec.structs.replace(
                schedule if schedule.is_manual else set_right(self._advanced(schedule, fire.at), now),
                firing=None,
                is_manual=False,
                holder=None,
                tries=0,
                coalesced=0,
                fires=[*schedule.fires, fire][-SHOWN_FIRES:],
                fired=schedule.fired + 1,
                # From now on there may be a job to keep.
                keep_base_at=now if schedule.changed_only else None,
            )
            crashpoint("schedule.advance.before")
            if await self._records.documents.replace_document(with_schedule(current, done, now)) is not None:
                crashpoint("schedule.advance.after")
                log.info(
                    "schedule fired", tenant=row.tenant, schedule=row.id, job=fire.job_id, coalesced=fire.coalesced
                )
                return
            current = await self._records.documents.document(SCHEDULE, row.tenant, row.id)

    def _advanced(self, schedule: Schedule, at: float) -> Schedule:
        """The schedule with its next fire after this time, unless it is later already."""
        if schedule.next_fire is not None and schedule.next_fire > at:
            return schedule
        following = next(iter(next_fires(schedule.cron, schedule.timezone, at, 1)), None)
        return msgspec.structs.replace(schedule, next_fire=following)
