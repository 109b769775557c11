"""Scheduler: fires schedules that are due. The steps of a fire, in order:

1. claim: which time is fired is written to the schedule's row, on its version, under a lease.
2. stage: a list that is read at each fire is copied for the job.
3. submit: under an id, and a request key, that follow from the schedule and the time. However often it is done, and by
   however many, it makes one job.
4. advance: the fire is written down, and the row is due at the next one.

A scheduler that dies anywhere leaves the time in the row. Whoever comes after its lease goes on with the same.
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
    fire_job_id,
    schedule_of,
    template_of,
    upload_of,
    with_schedule,
)
from conveyor.accept.sources import Sources, SourceUnavailable
from conveyor.accept.submit import Submit
from conveyor.coordination.isolation import Isolation
from conveyor.egress.outbound import Outbound
from conveyor.engines.records import Document
from conveyor.errors import ConveyorError, IdempotencyInFlight, QuotaExceeded
from conveyor.faults import crashpoint
from conveyor.jobs.idempotency import IdempotentRequest
from conveyor.model import JobId, TenantId
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
# Fires that are counted when one stands for them.
_MOST_COUNTED = 1000
# Times that a fire is begun, and that a list which can not be read now is asked for.
_TRIES = 20
_READS = 5
_LONGEST_PAUSE = 60.0
_CLOSE_SECONDS = 5.0
# The statuses of what fails on our side begin here.
_OURS = 500


class FirePlan(NamedTuple):
    """What is to be fired now, and how many fires it stands for beside its own; None: nothing."""

    at: float | None
    coalesced: int = 0


class Later(Exception):
    """The fire can not be made now; it is tried again."""


class LeaseLost(Exception):
    """Another makes this fire by now, or the schedule is gone."""


class Scheduler:
    """A role. Several may run side by side."""

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

    async def tick(self) -> float:
        """Begin what is due."""
        now = self._clock.now()
        rows = await self._records.documents.due_rows(SCHEDULE, now, _ROWS)
        under_way = set(self._running.values())
        shares = Counter(tenant for tenant, _ in under_way)
        waiting: list[Document] = []
        for row in rows:
            if (row.tenant, row.id) in under_way:
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
            # Those of one tenant are all that can be seen: what is behind them comes to light.
            for row in waiting:
                await self._records.documents.replace_row(msgspec.structs.replace(row, due_at=now + _PUT_OFF))
        return _EVERY

    async def close(self) -> None:
        """What is under way has a moment to end; the rest is taken up by another."""
        if self._running:
            _, late = await asyncio.wait(set(self._running), timeout=_CLOSE_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._outbound.close()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("schedule failed inside Conveyor; it is tried again", exc_info=error)
        # There may be more fires to make up for.
        self.wake()

    async def attend(self, row: Document) -> None:
        """See to a schedule that is due: fire it, keep its upload, or both."""
        schedule = schedule_of(row)
        if schedule.keep_at is not None and schedule.keep_at <= self._clock.now():
            template = template_of(bytes(schedule.job))
            row = msgspec.structs.replace(row, upload_id=upload_of(template))
            schedule = msgspec.structs.replace(schedule, keep_at=await self._schedules.keep_upload(template))
        plan = self._plan(schedule)
        if plan.at is None:
            await self._records.documents.replace_row(with_schedule(row, self._past(schedule, self._clock.now())))
            return
        claimed = await self._claim(row, schedule, plan)
        if claimed is None:
            return
        try:
            fire = await self._fire_held(claimed, plan)
        except LeaseLost:
            return
        except Later as later:
            log.warning("schedule can not fire now", schedule=row.id, tries=schedule.tries + 1, why=str(later))
            await self._put_off(claimed)
            return
        await self._advance(claimed, fire)

    def _plan(self, schedule: Schedule) -> FirePlan:
        if schedule.firing is not None:
            return FirePlan(schedule.firing, schedule.coalesced)
        now = self._clock.now()
        first = schedule.next_fire
        if schedule.paused or first is None or first > now:
            return FirePlan(None)
        most = self._settings.schedule_catch_up if schedule.missed is Missed.ALL else _MOST_COUNTED
        fires = missed_fires(schedule.cron, schedule.timezone, first, now, most)
        if not fires:
            return FirePlan(None)
        match schedule.missed:
            case Missed.ALL:
                return FirePlan(fires[0])
            case Missed.SKIP:
                return FirePlan(fires[-1] if now - fires[-1] <= self._settings.schedule_grace_seconds else None)
            case Missed.COALESCE:
                return FirePlan(fires[-1], len(fires) - 1)

    async def _claim(self, row: Document, schedule: Schedule, plan: FirePlan) -> Document | None:
        """Write down what is fired, by whom; None if another was first."""
        held = msgspec.structs.replace(
            schedule,
            firing=plan.at,
            coalesced=plan.coalesced,
            holder=self._clock.new_id("hold"),
            tries=schedule.tries + 1,
        )
        crashpoint("schedule.claim.before")
        claimed = await self._records.documents.replace_row(with_schedule(row, held, self._clock.now() + LEASE_SECONDS))
        crashpoint("schedule.claim.after")
        return claimed

    async def _fire_held(self, row: Document, plan: FirePlan) -> Fire:
        """Make the fire while the lease is kept. Raises LeaseLost, Later."""
        firing = asyncio.ensure_future(self._fire(row, plan))
        keeping = asyncio.ensure_future(self._keep_hold(row))
        try:
            await asyncio.wait({firing, keeping}, return_when=asyncio.FIRST_COMPLETED)
            if not firing.done():
                raise LeaseLost
            return firing.result()
        finally:
            for task in (firing, keeping):
                task.cancel()
            await asyncio.gather(firing, keeping, return_exceptions=True)

    async def _keep_hold(self, row: Document) -> None:
        """Prolong the lease for as long as it is ours; ends when it is not."""
        holder = schedule_of(row).holder
        while True:
            await self._clock.sleep(LEASE_SECONDS / 3)
            found = await self._records.documents.document(SCHEDULE, row.tenant, row.id)
            if found is None or schedule_of(found).holder != holder:
                return
            # If somebody has changed it meanwhile, the next time is early enough.
            until = self._clock.now() + LEASE_SECONDS
            await self._records.documents.replace_row(msgspec.structs.replace(found, due_at=until))

    async def _fire(self, row: Document, plan: FirePlan) -> Fire:
        """Make the job, or find it made. What no further try would mend is what came of the fire."""
        assert plan.at is not None
        job_id = fire_job_id(row.tenant, row.id, plan.at)
        tries = schedule_of(row).tries
        error: str | None = None
        try:
            if tries <= _TRIES:
                await self._make_job(row, job_id, plan.at)
            else:
                error = f"The fire was begun {_TRIES} times and never came to an end."
        except IdempotencyInFlight:
            # Its maker died a moment ago, or is at it.
            raise Later("another is making this job") from None
        except SourceUnavailable as unavailable:
            if tries < _READS:
                raise Later(str(unavailable)) from None
            error = str(unavailable)
        except ConveyorError as failed:
            if (failed.status >= _OURS or isinstance(failed, QuotaExceeded)) and tries < _TRIES:
                raise Later(failed.message) from None
            error = failed.message
        if error is not None and await self._records.jobs.job(row.tenant, job_id) is not None:
            # It was made all the same, by a try that did not hear of it.
            error = None
        if error is not None:
            log.warning("schedule fired and no job was made", schedule=row.id, error=error)
            await self._sources.discard(row.tenant, job_id)
        return Fire(plan.at, self._clock.now(), None if error else job_id, error, plan.coalesced)

    async def _make_job(self, row: Document, job_id: JobId, at: float) -> None:
        if await self._records.jobs.job(row.tenant, job_id) is not None:
            return
        schedule = schedule_of(row)
        template = template_of(bytes(schedule.job))
        spec = template.spec
        if spec.name is None:
            spec = msgspec.structs.replace(spec, name=schedule.name)
        source = None
        if template.source is not None:
            source = await self._sources.stage(row.tenant, job_id, template.source)
        name = f"{row.id}:{int(at)}"
        crashpoint("schedule.submit.before")
        try:
            accepted = await self._submit.submit_as(
                job_id, row.tenant, spec, source, IdempotentRequest(ROUTE, name, name)
            )
        except ConveyorError as refused:
            # What fails on our side may have been written all the same.
            if source is not None and refused.status < _OURS:
                await self._sources.drop(source)
            raise
        crashpoint("schedule.submit.after")
        if accepted.replayed and source is not None:
            await self._sources.drop(source)

    async def _put_off(self, row: Document) -> None:
        pause = min(2.0 ** schedule_of(row).tries, _LONGEST_PAUSE)
        await self._records.documents.replace_row(msgspec.structs.replace(row, due_at=self._clock.now() + pause))

    async def _advance(self, row: Document, fire: Fire) -> None:
        """Write the fire down, over whatever was changed meanwhile; nothing if another has done it."""
        holder = schedule_of(row).holder
        found: Document | None = row
        while found is not None and schedule_of(found).holder == holder:
            schedule = schedule_of(found)
            done = msgspec.structs.replace(
                self._past(schedule, fire.at),
                firing=None,
                holder=None,
                tries=0,
                coalesced=0,
                fires=[*schedule.fires, fire][-SHOWN_FIRES:],
                fired=schedule.fired + 1,
            )
            crashpoint("schedule.advance.before")
            if await self._records.documents.replace_row(with_schedule(found, done)) is not None:
                crashpoint("schedule.advance.after")
                log.info(
                    "schedule fired", tenant=row.tenant, schedule=row.id, job=fire.job_id, coalesced=fire.coalesced
                )
                return
            found = await self._records.documents.document(SCHEDULE, row.tenant, row.id)

    def _past(self, schedule: Schedule, at: float) -> Schedule:
        """The schedule, with its next fire after a time; it may have been moved there already."""
        if schedule.next_fire is not None and schedule.next_fire > at:
            return schedule
        following = next(iter(next_fires(schedule.cron, schedule.timezone, at, 1)), None)
        return msgspec.structs.replace(schedule, next_fire=following)
