"""Outbox dispatcher: takes events from the outbox, creates a delivery for every receiver that wants the event, then
marks the event as dispatched.

The id of a delivery is made of event and receiver, and one that exists stays as it is: after a crash before the mark,
and beside a second dispatcher, the same deliveries are created again, which changes nothing.
"""

from collections.abc import Callable, Sequence

import msgspec
import structlog
from pyreqwest.http import Url

from conveyor.clock import Clock
from conveyor.coordination.isolation import Isolation
from conveyor.engines.records import Document, Records
from conveyor.engines.tasks import Tasks
from conveyor.faults import crashpoint
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
from conveyor.model import Counts, OutboxEvent, TenantId
from conveyor.notify.callback_answers import StepAnswers
from conveyor.notify.deliveries import delivery_document
from conveyor.notify.progress_notifier import TOP_ERRORS
from conveyor.notify.webhooks import endpoint_of
from conveyor.settings import Settings

log = structlog.get_logger()

_IDLE = 0.5
_EVENTS = 100
_PAGE = 100
# Documents that every engine can write in one step.
_ROWS = 25


class DispatchCounts(msgspec.Struct):
    """What one pass did."""

    notices: int = 0
    deliveries: int = 0
    # Answers to state machines that were stored.
    answers: int = 0


class OutboxDispatcher:
    """A role."""

    def __init__(
        self,
        settings: Settings,
        records: Records,
        tasks: Tasks,
        clock: Clock,
        answers: StepAnswers | None = None,
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
        self._isolation = Isolation(self.name, clock)

    async def tick(self) -> float:
        counts = await self.run_once()
        return 0.0 if counts.notices else _IDLE

    async def close(self) -> None:
        """Nothing to release between ticks."""

    async def run_once(self) -> DispatchCounts:
        counts = DispatchCounts()
        # Events whose dispatch failed are the oldest: read that many more.
        events = await self._records.outbox.undispatched(_EVENTS + self._isolation.failing)
        self._isolation.forget_others({event.notice_id for event in events})
        endpoints: dict[TenantId, list[Document]] = {}
        ready: list[tuple[OutboxEvent, list[Document]]] = []
        for event in events:
            if not self._isolation.is_resting(event.notice_id):
                with self._isolation.item(event.notice_id):
                    ready.append((event, await self._prepare(event, endpoints, counts)))
        dispatched = await self._write(ready)
        if dispatched:
            await self._records.outbox.mark_dispatched(dispatched)
            crashpoint("notify.told.after")
        counts.notices = len(dispatched)
        counts.deliveries = sum(len(deliveries) for _, deliveries in ready)
        return counts

    async def _prepare(
        self, event: OutboxEvent, endpoints: dict[TenantId, list[Document]], counts: DispatchCounts
    ) -> list[Document]:
        """The deliveries of an event, after the answers to state machines that wait for it."""
        if event.tenant not in endpoints:
            endpoints[event.tenant] = await self._endpoints(event.tenant)
        deliveries = await self._deliveries(event, endpoints[event.tenant])
        if event.event in FINAL_EVENTS:
            await self._report_last_failures(event)
        if self._answers is not None:
            counts.answers += await self._answers.take(event)
        return deliveries

    async def _write(self, ready: Sequence[tuple[OutboxEvent, list[Document]]]) -> list[OutboxEvent]:
        """Write the deliveries of all events in few steps; returns the events whose deliveries are written."""
        try:
            await self._create([delivery for _, deliveries in ready for delivery in deliveries])
        except Exception:
            log.warning("deliveries of several events could not be written together; writing those of each event alone")
        else:
            return [event for event, _ in ready]
        dispatched = []
        for event, deliveries in ready:
            with self._isolation.item(event.notice_id):
                await self._create(deliveries)
                dispatched.append(event)
        return dispatched

    async def _create(self, rows: Sequence[Document]) -> None:
        for start in range(0, len(rows), _ROWS):
            crashpoint("notify.deliveries.before")
            await self._records.documents.create_documents(rows[start : start + _ROWS])
            crashpoint("notify.deliveries.after")

    async def _endpoints(self, tenant: TenantId) -> list[Document]:
        endpoints: list[Document] = []
        cursor: str | None = None
        while True:
            page = await self._records.documents.documents(WEBHOOK, tenant, cursor, _PAGE)
            endpoints += [row for row in page.items if not endpoint_of(row).disabled]
            cursor = page.next_cursor
            if cursor is None:
                return endpoints

    async def _deliveries(self, event: OutboxEvent, endpoints: Sequence[Document]) -> list[Document]:
        """One for each endpoint and each `notify` entry that wants the event."""
        endpoint_ids = {row.id for row in endpoints}
        # By receiver: an endpoint that the job names too gets the event once.
        lanes = {row.id: row.id for row in endpoints if is_wanted(endpoint_of(row).events, event.event)}
        page = await self._records.documents.documents(NOTIFY, event.tenant, None, MAX_NOTIFY, event.job_id)
        for row in page.items:
            lanes |= _receiver_and_lane(row, event.event, endpoint_ids)
        now, keep = self._clock.now(), self._settings.webhook_log_seconds
        return [delivery_document(event, receiver, lane, now, keep) for receiver, lane in lanes.items()]

    async def _report_last_failures(self, event: OutboxEvent) -> None:
        """When a run finishes, report the failed tasks that no batch has reported."""
        counts = msgspec.convert(event.data.get("counts", {}), Counts)
        job = await self._records.jobs.job(event.tenant, event.job_id) if counts.failed else None
        if job is not None:
            run = msgspec.structs.replace(job.key, run_id=event.run_id)
            errors = await self._tasks.error_codes(run, TOP_ERRORS)
            of_job = event.data.get("job") or {"total": job.run.total, "counts": event.data["counts"]}
            await self._progress.report_failures(run, counts, errors, of_job)


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
