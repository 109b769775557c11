"""Notifier: takes notices from the outbox and makes of each a delivery to everyone who wants it, then marks it told.

Deliveries have the names of their event and their receiver, and one that is there stays as it is: a notifier that dies
before the mark, and one beside it, make the same ones again and change nothing.
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
from conveyor.jobs.event_names import ENDS, MAX_NOTIFY, NOTIFY, WEBHOOK, notify_of, wanted
from conveyor.jobs.progress_events import ProgressEvents
from conveyor.model import Counts, OutboxEvent, TenantId
from conveyor.notify.deliveries import delivery_row
from conveyor.notify.progress_notifier import TOP_ERRORS
from conveyor.notify.step_functions import StepAnswers
from conveyor.notify.webhooks import endpoint_of
from conveyor.settings import Settings

log = structlog.get_logger()

_IDLE = 0.5
_NOTICES = 100
_PAGE = 100
# What every engine can write in one step.
_ROWS = 25


class DispatchCounts(msgspec.Struct):
    """What one pass did."""

    notices: int = 0
    deliveries: int = 0
    # Answers to state machines that are there now.
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
        self.name = "notifier"
        self.wake: Callable[[], None] = lambda: None
        self.stopping = False
        self._settings = settings
        self._records = records
        self._tasks = tasks
        self._clock = clock
        self._answers = answers
        self._milestones = ProgressEvents(records, clock)
        self._isolation = Isolation(self.name, clock)

    async def tick(self) -> float:
        passed = await self.run_once()
        return 0.0 if passed.notices else _IDLE

    async def close(self) -> None:
        """Nothing is held between ticks."""

    async def run_once(self) -> DispatchCounts:
        passed = DispatchCounts()
        # Those that failed before are the oldest: as many more are asked for.
        notices = await self._records.untold(_NOTICES + self._isolation.failing)
        self._isolation.forget_others({notice.notice_id for notice in notices})
        endpoints: dict[TenantId, list[Document]] = {}
        ready: list[tuple[OutboxEvent, list[Document]]] = []
        for notice in notices:
            if not self._isolation.is_resting(notice.notice_id):
                with self._isolation.item(notice.notice_id):
                    ready.append((notice, await self._prepare(notice, endpoints, passed)))
        told = await self._written(ready)
        if told:
            await self._records.mark_told(told)
            crashpoint("notify.told.after")
        passed.notices = len(told)
        passed.deliveries = sum(len(rows) for _, rows in ready)
        return passed

    async def _prepare(
        self, notice: OutboxEvent, endpoints: dict[TenantId, list[Document]], passed: DispatchCounts
    ) -> list[Document]:
        """The deliveries of a notice, and what else is to be said when it is there."""
        if notice.tenant not in endpoints:
            endpoints[notice.tenant] = await self._endpoints(notice.tenant)
        rows = await self._deliveries(notice, endpoints[notice.tenant])
        if notice.event in ENDS:
            await self._tell_last_failures(notice)
        if self._answers is not None:
            passed.answers += await self._answers.take(notice)
        return rows

    async def _written(self, ready: Sequence[tuple[OutboxEvent, list[Document]]]) -> list[OutboxEvent]:
        """Write the deliveries of all notices in as few steps as can be; the notices whose deliveries are there."""
        rows = [row for _, own in ready for row in own]
        try:
            await self._create(rows)
        except Exception:
            log.warning("deliveries of several notices could not be written together; each is written alone")
        else:
            return [notice for notice, _ in ready]
        told = []
        for notice, own in ready:
            with self._isolation.item(notice.notice_id):
                await self._create(own)
                told.append(notice)
        return told

    async def _create(self, rows: Sequence[Document]) -> None:
        for start in range(0, len(rows), _ROWS):
            crashpoint("notify.deliveries.before")
            await self._records.create_rows(rows[start : start + _ROWS])
            crashpoint("notify.deliveries.after")

    async def _endpoints(self, tenant: TenantId) -> list[Document]:
        found: list[Document] = []
        cursor: str | None = None
        while True:
            page = await self._records.rows(WEBHOOK, tenant, cursor, _PAGE)
            found += [row for row in page.items if not endpoint_of(row).disabled]
            cursor = page.next_cursor
            if cursor is None:
                return found

    async def _deliveries(self, notice: OutboxEvent, endpoints: Sequence[Document]) -> list[Document]:
        """One to each endpoint and each URL that wants the event."""
        there = {row.id for row in endpoints}
        # By receiver: an endpoint that a job names too gets the event once.
        lanes = {row.id: row.id for row in endpoints if wanted(endpoint_of(row).events, notice.event)}
        page = await self._records.rows(NOTIFY, notice.tenant, None, MAX_NOTIFY, notice.job_id)
        for row in page.items:
            lanes |= _named(row, notice.event, there)
        now, keep = self._clock.now(), self._settings.webhook_log_seconds
        return [delivery_row(notice, receiver, lane, now, keep) for receiver, lane in lanes.items()]

    async def _tell_last_failures(self, notice: OutboxEvent) -> None:
        """A run that ends tells of failures that no batch has told of: they are all told then."""
        counts = msgspec.convert(notice.data.get("counts", {}), Counts)
        job = await self._records.job(notice.tenant, notice.job_id) if counts.failed else None
        if job is not None:
            run = msgspec.structs.replace(job.key, run_id=notice.run_id)
            await self._milestones.told_failures(run, counts, await self._tasks.error_codes(run, TOP_ERRORS))


def _named(row: Document, event: str, endpoints: set[str]) -> dict[str, str]:
    """Receiver and lane of an entry of a job's own, if it wants the event and is there."""
    entry = notify_of(row)
    if not wanted(entry.events, event):
        return {}
    if entry.url is not None:
        return {row.id: Url(entry.url).origin_ascii}
    return {entry.endpoint_id: entry.endpoint_id} if entry.endpoint_id in endpoints else {}
