"""Recorder: makes outcomes durable, in batches.

Outcomes of many runners collect for a moment. A flush then writes those of each run (`_write`): store the bodies →
name the run if it has dead letters → finish the tasks → note failures → settle the run → count durations → note retries
→ requeue them → acknowledge the messages that are complete, last.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.coordination.durations import count_durations
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.queue import Outgoing, Queue, QueueName, kind_of, recovery_queue
from conveyor.engines.records import DocumentRecords
from conveyor.engines.tasks import TaskEvent, Tasks
from conveyor.faults import crashpoint
from conveyor.jobs.chunks import delayed_messages, encode, send_all
from conveyor.jobs.dead_lettered_tasks import write_run_document
from conveyor.lifecycle import Lifecycle
from conveyor.model import (
    LONG_KINDS,
    BodyRef,
    Chunk,
    Job,
    OnExhausted,
    Options,
    Outcome,
    RunId,
    TaskEnd,
    TaskRef,
)
from conveyor.process.body_store import BodyStore
from conveyor.process.outcomes import detail_json, with_body, with_dead_letter
from conveyor.process.retry import is_exhausted, late, retry_delay, too_late
from conveyor.states import TaskStatus
from conveyor.telemetry import metrics
from conveyor.telemetry.attempts import record_attempts

log = structlog.get_logger()

_FLUSH_COUNT = 1000
_FLUSH_BYTES = 8 * 1024 * 1024
# Backpressure: above these, runners wait until the store has caught up.
_MAX_COUNT = 8 * _FLUSH_COUNT
_MAX_BYTES = 8 * _FLUSH_BYTES
_FLUSHES_AT_ONCE = 3
_MAX_TRIES = 5

_json = msgspec.json.encode


class LeasedChunk:
    """A message that this worker leases. `left` counts its references without a durable outcome."""

    __slots__ = (
        "generation",
        "left",
        "lost",
        "marking",
        "queue",
        "receipt",
        "recovered",
        "size",
        "suspect",
        "unwritten",
    )

    def __init__(
        self,
        queue: QueueName,
        receipt: str,
        left: int,
        suspect: bool = False,
        *,
        recovered: bool = False,
        size: int = 0,
        generation: int = 0,
    ) -> None:
        self.queue = queue
        self.receipt = receipt
        self.left = left
        # Outcomes that are not written yet: the recorder may still requeue their references.
        self.unwritten = 0
        # Whether it came from the recovery queue, its bytes, and how often the monitor had requeued its task by then.
        self.recovered = recovered
        self.size = size
        self.generation = generation
        # The lease may have expired and another worker may have it: none of its tasks may start here.
        self.lost = False
        # It was delivered before: its start is marked before any of its tasks starts.
        self.suspect = suspect
        self.marking: asyncio.Task[None] | None = None


class RecordedOutcome(msgspec.Struct, gc=False):
    """The outcome of one attempt, on its way to the store."""

    job: Job
    chunk: LeasedChunk
    ref: TaskRef
    outcome: Outcome
    # Seconds until the retry; None if the task is finished.
    delay: float | None
    # The task fails for good, and is a dead letter.
    is_dead_letter: bool = False
    # A failed write is retried as a whole: these steps must not happen twice.
    noted: bool = False
    requeued: bool = False
    counted: bool = False


class Recorder:
    """One for each worker. It calls `on_requeued` with a run and the delay of its first requeued reference."""

    def __init__(
        self,
        documents: DocumentRecords,
        tasks: Tasks,
        queue: Queue,
        bodies: BodyStore,
        lifecycle: Lifecycle,
        coordinator: Coordinator,
        clock: Clock,
        linger: float,
        on_requeued: Callable[[RunId, float], None] = lambda run_id, delay: None,
    ) -> None:
        self._on_requeued = on_requeued
        self._coordinator = coordinator
        self._documents = documents
        self._tasks = tasks
        self._queue = queue
        self._bodies = bodies
        self._lifecycle = lifecycle
        self._clock = clock
        self._linger = linger
        self._waiting: list[RecordedOutcome] = []
        self._waiting_bytes = 0
        self._count = 0
        self._bytes = 0
        self._has_outcomes = asyncio.Event()
        self._has_batch = asyncio.Event()
        self._has_capacity = asyncio.Event()
        self._has_capacity.set()
        self._flushes: set[asyncio.Task[None]] = set()
        self._closing = False

    @property
    def full(self) -> bool:
        return not self._has_capacity.is_set()

    async def mark_started(self, chunk: LeasedChunk) -> None:
        """Mark in the queue that work on a redelivered chunk has begun, once for all its references."""
        if chunk.marking is None:
            chunk.marking = asyncio.create_task(self._queue.mark_started(chunk.queue, [chunk.receipt]))
        marking = chunk.marking
        try:
            await asyncio.shield(marking)
        except Exception:
            # The next caller retries.
            chunk.marking = None if chunk.marking is marking else chunk.marking
            raise

    async def until_capacity(self) -> None:
        """Wait until the store has caught up."""
        await self._has_capacity.wait()

    def add(
        self, job: Job, chunks: Sequence[LeasedChunk], refs: Sequence[TaskRef], outcomes: Sequence[Outcome]
    ) -> None:
        """Add outcomes of attempts. They are durable soon after."""
        options, jitter = job.options, self._clock.jitter
        is_parking = options.on_exhausted is OnExhausted.DEAD_LETTER
        size = 0
        for chunk, ref, outcome in zip(chunks, refs, outcomes, strict=True):
            delay = None
            if outcome.status is not TaskStatus.SUCCEEDED:
                delay = retry_delay(options, ref.attempt, outcome, jitter())
                if delay is not None and options.task_deadline is not None:
                    delay = self._retry_in_time(job, ref, outcome, delay)
            if delay is None and outcome.body is not None:
                size += len(outcome.body)
            is_dead_letter = delay is None and is_parking and _is_exhausted(options, outcome)
            chunk.unwritten += 1
            self._waiting.append(RecordedOutcome(job, chunk, ref, outcome, delay, is_dead_letter))
        self._count += len(refs)
        self._waiting_bytes += size
        self._bytes += size
        self._has_outcomes.set()
        if len(self._waiting) >= _FLUSH_COUNT or self._waiting_bytes >= _FLUSH_BYTES:
            self._has_batch.set()
        if self._count >= _MAX_COUNT or self._bytes >= _MAX_BYTES:
            self._has_capacity.clear()

    def _retry_in_time(self, job: Job, ref: TaskRef, outcome: Outcome, delay: float) -> float | None:
        """Return the delay of the retry. If that is past the task's deadline, fail the outcome and return None."""
        now = self._clock.now()
        if not too_late(job.options, _with_since(ref, outcome, now), now + delay):
            return delay
        outcome.status = TaskStatus.FAILED
        outcome.error = late(job.options, outcome.error)
        outcome.detail = None
        return None

    async def run(self) -> None:
        """Flush batches until closed and empty."""
        while not (self._closing and not self._waiting):
            await self._has_outcomes.wait()
            if not self._closing:
                await self._collect()
            while len(self._flushes) >= _FLUSHES_AT_ONCE:
                await asyncio.wait(self._flushes, return_when=asyncio.FIRST_COMPLETED)
            self._start_flush()
        while self._flushes:
            await asyncio.wait(self._flushes)

    def close(self) -> None:
        """Flush all outcomes and end `run`."""
        self._closing = True
        self._has_outcomes.set()
        self._has_batch.set()

    async def _collect(self) -> None:
        try:
            async with asyncio.timeout(self._linger):
                await self._has_batch.wait()
        except TimeoutError:
            pass

    def _start_flush(self) -> None:
        batch, size = self._waiting, self._waiting_bytes
        self._waiting, self._waiting_bytes = [], 0
        self._has_batch.clear()
        if not self._closing:
            self._has_outcomes.clear()
        if batch:
            task = asyncio.create_task(self._flush(batch, size))
            self._flushes.add(task)
            task.add_done_callback(self._flushes.discard)

    async def _flush(self, batch: list[RecordedOutcome], size: int) -> None:
        try:
            await asyncio.gather(*(self._persist(group) for group in _by_run(batch)))
        finally:
            for record in batch:
                record.chunk.unwritten -= 1
            self._count -= len(batch)
            self._bytes -= size
            if self._count < _MAX_COUNT and self._bytes < _MAX_BYTES:
                self._has_capacity.set()

    async def _persist(self, group: list[RecordedOutcome]) -> None:
        """Write one run's outcomes, with retries while the store fails; at last leave the messages to redelivery."""
        pause = 0.1
        began = self._clock.now()
        job = group[0].job
        for attempt in range(1, _MAX_TRIES + 1):
            try:
                await self._write(group)
                record_attempts(job, group, began, self._clock.now())
                return
            except Exception as error:
                # Any error: a message whose outcomes are neither written nor lost would be leased for ever.
                log.warning("outcomes not written; retrying", run=job.run.run_id, attempt=attempt, error=repr(error))
                await self._clock.sleep(pause)
                pause *= 3
        log.error("outcomes not written; the queue will redeliver their messages", count=len(group))
        for record in group:
            record.chunk.lost = True

    async def _write(self, group: list[RecordedOutcome]) -> None:
        job = group[0].job
        final = [record for record in group if record.delay is None]
        retried = [record for record in group if record.delay is not None and not record.requeued]
        if final:
            bodies = await self._bodies.keep(job, [record.outcome for record in final])
            now = self._clock.now()
            ends = [_task_end(record, body, now) for record, body in zip(final, bodies, strict=True)]
            dead = [record for record in final if record.is_dead_letter]
            if dead:
                await write_run_document(self._documents, job, now)
            finished = await self._tasks.finish(job.key, ends)
            if dead:
                crashpoint("recorder.dead_letter.after")
                _count_dead_letters(record for record in dead if record.ref.index in finished.moved)
            await self._note(job, [record for record in final if not record.is_dead_letter], "task.failed")
            await self._note(job, dead, "task.dead_lettered")
            await self._lifecycle.settle(job, finished.counts)
            await count_durations(self._coordinator, job.run.run_id, [record.outcome.elapsed for record in final])
        if retried:
            await self._note(job, retried, "task.retried")
            await self._requeue(job, retried)
        crashpoint("recorder.ack.before")
        await self._acknowledge(group)

    async def _note(self, job: Job, records: list[RecordedOutcome], event: str) -> None:
        now = self._clock.now()
        failed = [record for record in records if record.outcome.error is not None and not record.noted]
        if failed:
            await self._tasks.note(job.key, [_event(record, event, now) for record in failed])
            for record in failed:
                record.noted = True

    async def _requeue(self, job: Job, retried: list[RecordedOutcome]) -> None:
        """Send references to the recovery queue: failed ones each alone, postponed ones in batches."""
        now = self._clock.now()
        postponed: list[tuple[float, TaskRef]] = []
        outgoing: list[Outgoing] = []
        for record in retried:
            outcome, ref, delay = record.outcome, _next_ref(record, now), record.delay or 0.0
            if outcome.spends_attempt or outcome.error is not None or job.kind in LONG_KINDS:
                due = 0.0 if outcome.is_blocked else now + delay
                outgoing.append(encode(Chunk(job.key, [ref], turn=record.chunk.generation, due=due), delay))
            else:
                postponed.append((delay, ref))
        outgoing += delayed_messages(job.key, postponed, job.options.chunk_size)
        await send_all(self._queue, recovery_queue(job.run.run_id), outgoing, self._clock)
        for record in retried:
            record.requeued = True
        self._on_requeued(job.run.run_id, min(message.delay for message in outgoing))

    async def _acknowledge(self, group: list[RecordedOutcome]) -> None:
        for record in group:
            if not record.counted:
                record.counted = True
                record.chunk.left -= 1
        complete: dict[QueueName, set[str]] = {}
        for record in group:
            if record.chunk.left == 0:
                complete.setdefault(record.chunk.queue, set()).add(record.chunk.receipt)
        for queue, receipts in complete.items():
            await self._queue.ack(queue, list(receipts))


def _is_exhausted(options: Options, outcome: Outcome) -> bool:
    return outcome.status is TaskStatus.FAILED and is_exhausted(options, outcome)


def _count_dead_letters(records: Iterable[RecordedOutcome]) -> None:
    for record in records:
        metrics.DEAD_LETTERED.add(1, kind_of(record.chunk.queue))


def _by_run(batch: Iterable[RecordedOutcome]) -> list[list[RecordedOutcome]]:
    groups: dict[RunId, list[RecordedOutcome]] = {}
    for record in batch:
        groups.setdefault(record.job.run.run_id, []).append(record)
    return list(groups.values())


def _next_ref(record: RecordedOutcome, now: float) -> TaskRef:
    """Return the reference of the next attempt."""
    ref = _with_since(record.ref, record.outcome, now)
    return TaskRef(ref.index, ref.input, ref.attempt + 1, ref.since)


def _with_since(ref: TaskRef, outcome: Outcome, now: float) -> TaskRef:
    """Return the reference with the time when the task's first attempt began, if there was one."""
    attempted = outcome.spends_attempt or outcome.error is not None or outcome.elapsed > 0
    if ref.since or not attempted:
        return ref
    return TaskRef(ref.index, ref.input, ref.attempt, outcome.since or int(now - outcome.elapsed))


def _task_end(record: RecordedOutcome, body: BodyRef | None, now: float) -> TaskEnd:
    outcome = record.outcome
    detail = detail_json(outcome)
    if record.is_dead_letter:
        detail = with_dead_letter(detail)
    return TaskEnd(
        record.ref.index,
        outcome.status,
        record.ref.attempt,
        outcome.http_status,
        outcome.error.code if outcome.error else None,
        with_body(detail, body),
        now,
    )


def _event(record: RecordedOutcome, event: str, now: float) -> TaskEvent:
    data: dict[str, object] = {
        "attempt": record.ref.attempt,
        "error": record.outcome.error,
        "http_status": record.outcome.http_status,
    }
    if record.delay is not None:
        data["retry_in"] = round(record.delay, 3)
    if record.is_dead_letter and record.outcome.error is not None:
        data["reason"] = record.outcome.error.message
    return TaskEvent(record.ref.index, now, event, _json(data).decode())
