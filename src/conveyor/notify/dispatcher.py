"""Outbox dispatcher: takes events from the outbox, creates a delivery for every receiver that wants the event, then
marks the event as dispatched.

The id of a delivery is made of event and receiver, and one that exists stays as it is: after a crash before the mark,
and beside a second dispatcher, the same deliveries are created again, which changes nothing.

The deliveries of one job are written, and due, in the order of its events; those of different jobs wait for each other
in nothing.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeAlias

import msgspec
import structlog
from pyreqwest.http import Url

from conveyor.clock import Clock
from conveyor.coordination.buckets import ALL_BUCKETS, Buckets
from conveyor.coordination.isolation import Isolation
from conveyor.coordination.parallel import at_once
from conveyor.engines.records import Document, Records
from conveyor.engines.tasks import Tasks
from conveyor.faults import crashpoint
from conveyor.jobs.callbacks import CALLBACK
from conveyor.jobs.event_names import (
    FINAL_EVENTS,
    MAX_NOTIFY,
    NOTIFY,
    WEBHOOK,
    WebhookNotify,
    is_wanted,
    notify_of,
    target_arn,
    wanted_events,
)
from conveyor.jobs.progress_events import ProgressEvents
from conveyor.model import Counts, JobId, OutboxEvent, TenantId
from conveyor.notify.callback_answers import StepAnswers
from conveyor.notify.deliveries import delivery_document
from conveyor.notify.progress_notifier import TOP_ERRORS
from conveyor.notify.webhooks import endpoint_of
from conveyor.settings import Settings

log = structlog.get_logger()

_IDLE = 0.5
# While events come: those of small jobs that end one after the other are dispatched together.
_BUSY = 0.1
_EVENTS = 500
_PAGE = 100
# Documents that every engine can write in one step.
_ROWS = 25
# Between the times at which the deliveries of two events of a job are due: more than a stored time is rounded by.
_STEP = 1e-6

# An event with its deliveries.
Prepared: TypeAlias = tuple[OutboxEvent, list[Document]]


class DispatchCounts(msgspec.Struct):
    """What one pass did."""

    notices: int = 0
    deliveries: int = 0
    # Answers to state machines that were stored.
    answers: int = 0
    # Whether there were as many events as one pass reads.
    is_more: bool = False


class OutboxDispatcher:
    """A role."""

    def __init__(
        self,
        settings: Settings,
        records: Records,
        tasks: Tasks,
        clock: Clock,
        answers: StepAnswers | None = None,
        buckets: Buckets = ALL_BUCKETS,
    ) -> None:
        self.name = "dispatcher"
        self.wake: Callable[[], None] = lambda: None
        self.stopping = False
        self._settings = settings
        self._records = records
        self._tasks = tasks
        self._clock = clock
        self._answers = answers
        self._progress = ProgressEvents(records, clock)
        self._isolation = Isolation(self.name, clock, buckets)

    async def tick(self) -> float:
        counts = await self.run_once()
        if not counts.notices:
            return _IDLE
        return 0.0 if counts.is_more else _BUSY

    async def close(self) -> None:
        """Nothing to release between ticks."""

    async def run_once(self) -> DispatchCounts:
        counts = DispatchCounts()
        # Events whose dispatch failed are the oldest: read that many more.
        limit = _EVENTS + self._isolation.skipped
        events = await self._records.outbox.undispatched(limit)
        counts.is_more = len(events) >= limit
        self._isolation.forget_others({event.notice_id for event in events})
        deliveries: dict[str, list[Document]] = {}
        # After the events: what waits for one of them was stored before it, or looks for it by itself.
        tenants = TenantReads(self._records)

        async def prepare(event: OutboxEvent) -> None:
            deliveries[event.notice_id] = await self._prepare(event, tenants, counts)

        # By job, so that one process dispatches the events of a job.
        own = self._isolation.own(events, _notice_id, lambda event: event.job_id)
        quiet = await self._quiet_tenants({event.tenant for event in own}, tenants)
        deliveries |= {event.notice_id: [] for event in own if event.tenant in quiet and not _has_failures(event)}
        others = [event for event in own if event.notice_id not in deliveries]
        await self._isolation.each_own(others, _notice_id, prepare)
        ready = [(event, deliveries[event.notice_id]) for event in events if event.notice_id in deliveries]
        dispatched = await self._write(ready)
        if dispatched:
            await self._records.outbox.mark_dispatched(dispatched)
            crashpoint("notify.told.after")
        counts.notices = len(dispatched)
        counts.deliveries = sum(len(rows) for rows in deliveries.values())
        return counts

    async def _quiet_tenants(self, wanted: Collection[TenantId], tenants: "TenantReads") -> set[TenantId]:
        """Those of these tenants for whose events nobody waits. Most tenants are, and have an event or two for each of
        thousands of small jobs: these cost no look by event."""
        kinds = (NOTIFY,) if self._answers is None else (NOTIFY, CALLBACK)
        quiet: set[TenantId] = set()
        for tenant in wanted:
            # What fails here fails for each of its events, too, and is logged and counted there.
            with suppress(Exception):
                if not await tenants.endpoints(tenant) and not any(
                    [await tenants.has_any(kind, tenant) for kind in kinds]
                ):
                    quiet.add(tenant)
        return quiet

    async def _prepare(self, event: OutboxEvent, tenants: "TenantReads", counts: DispatchCounts) -> list[Document]:
        """The deliveries of an event, after the answers to state machines that wait for it."""
        deliveries = await self._deliveries(event, tenants)
        if event.event in FINAL_EVENTS:
            await self._report_last_failures(event)
        if self._answers is not None and await tenants.has_any(CALLBACK, event.tenant):
            answers = await self._answers.take(event)
            counts.answers += answers
        return deliveries

    async def _write(self, ready: Sequence[Prepared]) -> list[OutboxEvent]:
        """Write the deliveries of all events in few steps; returns the events whose deliveries are written."""
        dispatched: list[OutboxEvent] = []
        await at_once(_groups(ready, self._clock.now()), partial(self._write_group, dispatched))
        return dispatched

    async def _write_group(self, dispatched: list[OutboxEvent], group: Sequence[Prepared]) -> None:
        try:
            await self._create([delivery for _, deliveries in group for delivery in deliveries])
        except Exception:
            log.warning("deliveries of several events could not be written together; writing those of each event alone")
        else:
            dispatched += [event for event, _ in group]
            return
        for event, deliveries in group:
            with self._isolation.item(event.notice_id):
                await self._create(deliveries)
                dispatched.append(event)

    async def _create(self, rows: Sequence[Document]) -> None:
        for start in range(0, len(rows), _ROWS):
            crashpoint("notify.deliveries.before")
            await self._records.documents.create_documents(rows[start : start + _ROWS])
            crashpoint("notify.deliveries.after")

    async def _deliveries(self, event: OutboxEvent, tenants: "TenantReads") -> list[Document]:
        """One for each endpoint and each `notify` entry that wants the event."""
        endpoints = await tenants.endpoints(event.tenant)
        endpoint_ids = {row.id for row in endpoints}
        # By receiver: an endpoint that the job names too gets the event once.
        lanes = {row.id: row.id for row in endpoints if is_wanted(endpoint_of(row).events, event.event)}
        if await tenants.has_any(NOTIFY, event.tenant):
            page = await self._records.documents.documents(NOTIFY, event.tenant, None, MAX_NOTIFY, event.job_id)
            for row in page.items:
                lanes |= _receiver_and_lane(row, event.event, endpoint_ids)
        now, keep, url = self._clock.now(), self._settings.webhook_log_seconds, self._settings.public_url
        return [delivery_document(event, receiver, lane, now, keep, url) for receiver, lane in lanes.items()]

    async def _report_last_failures(self, event: OutboxEvent) -> None:
        """When a run finishes, report the failed tasks that no batch has reported."""
        counts = msgspec.convert(event.data.get("counts", {}), Counts)
        job = await self._records.jobs.job(event.tenant, event.job_id) if counts.failed else None
        if job is not None:
            run = msgspec.structs.replace(job.key, run_id=event.run_id)
            errors = await self._tasks.error_codes(run, TOP_ERRORS)
            of_job = event.data.get("job") or {"total": job.run.total, "counts": event.data["counts"]}
            await self._progress.report_failures(run, counts, errors, of_job)


class TenantReads:
    """What a pass reads once for each tenant, and not for each event."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._endpoints: dict[TenantId, asyncio.Task[list[Document]]] = {}
        self._kinds: dict[tuple[str, TenantId], asyncio.Task[bool]] = {}

    async def endpoints(self, tenant: TenantId) -> list[Document]:
        """The tenant's webhook endpoints that are not disabled."""
        if tenant not in self._endpoints:
            self._endpoints[tenant] = asyncio.create_task(self._read_endpoints(tenant))
        return await self._endpoints[tenant]

    async def has_any(self, kind: str, tenant: TenantId) -> bool:
        """Whether the tenant may have a document of this kind."""
        if (kind, tenant) not in self._kinds:
            self._kinds[kind, tenant] = asyncio.create_task(self._look_for(kind, tenant))
        return await self._kinds[kind, tenant]

    async def _look_for(self, kind: str, tenant: TenantId) -> bool:
        page = await self._records.documents.documents(kind, tenant, None, 1)
        return bool(page.items) or page.next_cursor is not None

    async def _read_endpoints(self, tenant: TenantId) -> list[Document]:
        endpoints: list[Document] = []
        cursor: str | None = None
        while True:
            page = await self._records.documents.documents(WEBHOOK, tenant, cursor, _PAGE)
            endpoints += [row for row in page.items if not endpoint_of(row).disabled]
            cursor = page.next_cursor
            if cursor is None:
                return endpoints


def _has_failures(event: OutboxEvent) -> bool:
    """Whether the event is about a finished run with failed tasks, which may not be reported yet."""
    return event.event in FINAL_EVENTS and msgspec.convert(event.data.get("counts", {}), Counts).failed > 0


def _notice_id(event: OutboxEvent) -> str:
    return event.notice_id


def _groups(ready: Sequence[Prepared], now: float) -> list[list[Prepared]]:
    """Split events into groups whose deliveries are written together. Those of a job are in one group, in the order of
    its events, and due in that order."""
    by_job: dict[JobId, list[Prepared]] = {}
    for prepared in ready:
        by_job.setdefault(prepared[0].job_id, []).append(prepared)
    groups: list[list[Prepared]] = []
    size = 0
    for events in by_job.values():
        more = sum(len(deliveries) for _, deliveries in events)
        if not groups or size + more > _ROWS:
            groups.append([])
            size = 0
        size += more
        for position, (event, deliveries) in enumerate(events, start=1):
            due_at = now - (len(events) - position) * _STEP
            groups[-1].append((event, [msgspec.structs.replace(row, due_at=due_at) for row in deliveries]))
    return groups


def _receiver_and_lane(row: Document, event: str, endpoints: set[str]) -> dict[str, str]:
    """The receiver and the lane of one of the job's `notify` entries, if it wants the event and exists."""
    entry = notify_of(row)
    if not is_wanted(wanted_events(entry), event):
        return {}
    if not isinstance(entry, WebhookNotify):
        return {row.id: target_arn(entry)}
    if entry.url is not None:
        return {row.id: Url(entry.url).origin_ascii}
    return {entry.endpoint_id: entry.endpoint_id} if entry.endpoint_id in endpoints else {}
