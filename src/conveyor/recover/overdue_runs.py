"""Deadlines: handles overdue runs. Their unfinished tasks are requeued on the recovery queue, with fresh attempts, a
few times; then the run fails, with a dead letter. A run never waits or loops for ever.

Each step is first written to the run's deadline document, on the version that was read, and the document stays due
until the step is done: no other monitor takes part, and after a crash the next one completes the step.
"""

import asyncio
from functools import partial

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.coordination.isolation import Isolation
from conveyor.coordination.trusted_time import TrustedTime
from conveyor.coordination.waits import Wait, publish_wait
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.queue import Queue, QueueName, recovery_queue
from conveyor.engines.records import Document, Records
from conveyor.engines.tasks import Tasks
from conveyor.errors import EngineFailed
from conveyor.faults import crashpoint
from conveyor.jobs.chunks import (
    decode,
    drop_if_ended,
    encode,
    messages,
    pending_seeds,
    request_ingest,
    requeue_pending,
    send_all,
)
from conveyor.jobs.deadlines import DEADLINE, Deadline, deadline_of
from conveyor.lifecycle import Lifecycle
from conveyor.model import Chunk, Job, OutboxEvent, TaskSeed
from conveyor.recover.monitored import Monitored
from conveyor.settings import Settings
from conveyor.states import ENDED, ReasonCode, RunState

log = structlog.get_logger()

# The queue through which the dead letter of an overdue run goes.
OVERDUE = QueueName("overdue")

_PAGE = 100
_PAGES = 10
_ROWS = 5000
# Seconds after which another monitor repeats a step that was started.
_REDO = 300.0
_HOLD_SECONDS = 30.0
_LOOKS = 50
_LOOK_PAUSE = 0.2


class Deadlines:
    """A part of the monitor."""

    def __init__(
        self,
        records: Records,
        tasks: Tasks,
        queue: Queue,
        coordinator: Coordinator,
        lifecycle: Lifecycle,
        clock: Clock,
        settings: Settings,
        trusted: TrustedTime | None = None,
    ) -> None:
        """A deadline has passed when `trusted` says so; by default the clock does."""
        self._records = records
        self._tasks = tasks
        self._queue = queue
        self._coordinator = coordinator
        self._lifecycle = lifecycle
        self._clock = clock
        self._settings = settings
        self._trusted = trusted
        self._isolation = Isolation("monitor", clock)
        # One dead letter at a time: each receives its message from a queue that all share.
        self._writing = asyncio.Lock()

    async def run_once(self, seen: Monitored) -> None:
        for _ in range(_PAGES):
            rows = await self._records.documents.due_documents(DEADLINE, await self._now(), _PAGE)
            await self._isolation.due_rows(self._records, rows, partial(self._look, seen))
            if len(rows) < _PAGE:
                break

    async def _now(self) -> float:
        return self._clock.now() if self._trusted is None else await self._trusted.now()

    async def _look(self, seen: Monitored, row: Document) -> None:
        job = None if row.job_id is None else await self._records.jobs.job(row.tenant, row.job_id)
        deadline = _decoded(row)
        if job is None or deadline is None or job.run.run_id != row.id or job.state in ENDED:
            await self._records.documents.remove_document(row)
            return
        now, seconds = await self._now(), job.options.deadline
        if seconds is None:
            await self._records.documents.remove_document(row)
        elif job.state is RunState.PAUSED:
            # A paused run is not late; its time keeps counting.
            await self._postpone(row, now + self._settings.monitor_seconds)
        elif not deadline.under_way and deadline.since + seconds > now:
            await self._postpone(row, deadline.since + seconds)
        # Repeating an interrupted step is not one more.
        elif deadline.tries + (not deadline.under_way) <= self._settings.deadline_tries:
            await self._requeue_run(job, row, deadline, seconds, seen)
        else:
            await self._fail(job, row, deadline, seconds, seen)

    async def _postpone(self, row: Document, until: float) -> None:
        await self._records.documents.replace_document(msgspec.structs.replace(row, due_at=until))

    async def _requeue_run(self, job: Job, row: Document, deadline: Deadline, seconds: float, seen: Monitored) -> None:
        now, max_tries = await self._now(), self._settings.deadline_tries
        tries = deadline.tries + (not deadline.under_way)
        begun = Deadline(deadline.run_id, now, tries, under_way=True)
        event = None if deadline.under_way else self._event(job, {"tries": tries, "of": max_tries, "deadline": seconds})
        crashpoint("monitor.overdue.before")
        claimed = await self._records.documents.replace_document(_with(row, begun, now + _REDO), event)
        crashpoint("monitor.overdue.after")
        if claimed is None:
            return
        detail = f"past its deadline of {seconds:g} s: its unfinished tasks were requeued, {tries} of {max_tries} times"
        await publish_wait(self._coordinator, job.run.run_id, Wait("deadline", detail, now + seconds), seconds)
        sent = await self._requeue(job)
        crashpoint("monitor.requeue.after")
        done = msgspec.structs.replace(begun, under_way=False)
        await self._records.documents.replace_document(_with(claimed, done, now + seconds))
        seen.overdue += 1
        log.warning("run is past its deadline", job=job.job_id, run=job.run.run_id, tries=tries, tasks=sent)

    async def _requeue(self, job: Job) -> int:
        """Requeue all pending tasks, in bounded memory, and request the ingest if it has not finished."""
        if not job.run.last_batch:
            await request_ingest(self._queue, job, self._clock)
        queue = recovery_queue(job.run.run_id)
        sent = await requeue_pending(self._queue, queue, self._tasks, job, _ROWS, self._clock)
        await drop_if_ended(self._records, self._queue, job, self._clock.now())
        return sent

    async def _fail(self, job: Job, row: Document, deadline: Deadline, seconds: float, seen: Monitored) -> None:
        counts = await self._tasks.counts(job.key)
        left = job.run.total - counts.ended if job.run.last_batch else None
        unfinished = "its list is not ingested" if left is None else f"{left} tasks are unfinished"
        max_tries = self._settings.deadline_tries
        requeued = f", nor after its tasks were requeued {max_tries} times" if max_tries else ""
        reason = f"deadline: not finished within {seconds:g} s{requeued}; {unfinished}"
        begun = msgspec.structs.replace(deadline, tries=max_tries + 1, under_way=True)
        crashpoint("monitor.expire.before")
        claimed = await self._records.documents.replace_document(_with(row, begun, await self._now() + _REDO))
        crashpoint("monitor.expire.after")
        if claimed is None:
            return
        # The dead letter first: an overdue run that shows as failed always has one.
        async with self._writing:
            await self._write_dead_letter(job, reason)
        crashpoint("monitor.letter.after")
        await self._lifecycle.move(job, RunState.FAILED, reason, counts, code=ReasonCode.DEADLINE)
        await self._records.documents.remove_document(claimed)
        seen.expired += 1
        log.error("overdue run failed", job=job.job_id, run=job.run.run_id, reason=reason)

    async def _write_dead_letter(self, job: Job, reason: str) -> None:
        """Write a dead letter with the first of the unfinished tasks. Only a received message can be dead-lettered: it
        is sent, received and dead-lettered, and with it any that another monitor left there."""
        pages = pending_seeds(self._tasks, job, job.options.chunk_size)
        left: list[TaskSeed] = await anext(pages, [])
        await pages.aclose()
        (first, *_) = messages(job.key, left, job.options.chunk_size) or [encode(Chunk(job.key, []))]
        chunk = Chunk(job.key, decode(first.body).refs, lost=reason, code="deadline")
        await send_all(self._queue, OVERDUE, [encode(chunk)], self._clock)
        for _ in range(_LOOKS):
            for delivery in await self._queue.receive(OVERDUE, 10, _HOLD_SECONDS):
                letter = decode(delivery.body)
                await self._queue.dead_letter(OVERDUE, [delivery.receipt], letter.lost)
                if letter.run.run_id == job.run.run_id:
                    return
            await self._clock.sleep(_LOOK_PAUSE)
        raise EngineFailed("The dead letter of an overdue run was not received from its queue.")

    def _event(self, job: Job, data: dict[str, object]) -> OutboxEvent:
        return OutboxEvent(
            notice_id=self._clock.new_id("evt"),
            tenant=job.tenant,
            job_id=job.job_id,
            run_id=job.run.run_id,
            event="run.overdue",
            at=self._clock.now(),
            data=data,
        )


def _with(row: Document, deadline: Deadline, due_at: float) -> Document:
    return msgspec.structs.replace(row, body=msgspec.json.encode(deadline), due_at=due_at)


def _decoded(row: Document) -> Deadline | None:
    try:
        return deadline_of(row)
    except msgspec.MsgspecError:
        log.error("the deadline of a run cannot be read", tenant=row.tenant, row=row.id)
        return None
