"""Outcome writer: gets outcomes of many runs and makes them durable.

Where records, tasks and queue are one database, the outcomes of all runs are written together (`_write_together`):
store the bodies → name the runs that have dead letters → one transaction that finishes the tasks, notes failures and
retries, requeues, acknowledges complete messages and moves runs that are complete → settle the other runs → count
durations.

Elsewhere, and where that fails, so that one run does not stop the others, each run is written by itself (`_write`), in
the same order: bodies, rows, notes, the run's state, retries, and the acknowledgement last.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec
import structlog

from conveyor.clock import CLOCK_SLACK, Clock
from conveyor.coordination.durations import count_durations
from conveyor.coordination.waits import publish_disk_wait
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.queue import Outgoing, Queue, QueueName, kind_of, recovery_queue
from conveyor.engines.records import AtomicFlush, DocumentRecords, RunFlush, RunFlushed
from conveyor.engines.tasks import TaskEvent, Tasks, is_configured
from conveyor.errors import DiskUnwritable
from conveyor.faults import crashpoint
from conveyor.jobs.chunks import delayed_messages, encode, send_all
from conveyor.jobs.dead_lettered_tasks import write_run_document
from conveyor.lifecycle import Lifecycle
from conveyor.model import LONG_KINDS, UNCHANGED, BodyRef, Chunk, Counts, Job, JobKind, Outcome, RunId, TaskEnd, TaskRef
from conveyor.process.body_store import BodyStore
from conveyor.process.breakdown_parts import BreakdownParts
from conveyor.process.outcomes import (
    SLOW_SECONDS,
    detail_json,
    with_body,
    with_dead_letter,
    with_extracted,
    with_worker,
)
from conveyor.process.recorded_outcomes import LeasedChunk, RecordedOutcome, RecordedPages, RunOutcomes, by_run
from conveyor.states import ENDED, RunState
from conveyor.telemetry import metrics, traces
from conveyor.telemetry.attempts import count_attempts, count_successes, record_attempts

log = structlog.get_logger()

_MAX_TRIES = 5

_json = msgspec.json.encode

Group = list[RecordedOutcome]


class OutcomeWriter:
    """One for each recorder. It calls `on_requeued` with a run and the delay of its first requeued reference, and
    `on_finished` with a run that its last outcomes have finished."""

    def __init__(
        self,
        documents: DocumentRecords,
        tasks: Tasks,
        queue: Queue,
        bodies: BodyStore,
        lifecycle: Lifecycle,
        coordinator: Coordinator,
        clock: Clock,
        breakdowns: BreakdownParts,
        atomic: AtomicFlush | None,
        on_requeued: Callable[[RunId, float], None],
        on_finished: Callable[[RunId], None] = lambda run_id: None,
    ) -> None:
        self._documents = documents
        self._tasks = tasks
        self._queue = queue
        self._bodies = bodies
        self._lifecycle = lifecycle
        self._coordinator = coordinator
        self._clock = clock
        self._breakdowns = breakdowns
        self._atomic = atomic
        self._on_requeued = on_requeued
        self._on_finished = on_finished

    async def write(self, batch: Sequence[RecordedOutcome], pages: Sequence[RecordedPages] = ()) -> None:
        """Write outcomes. Those that cannot be written are left to redelivery, and so are retries of lost messages."""
        together: list[RunOutcomes] = []
        alone: list[Group] = []
        for run in by_run((record for record in batch if not _is_lost_retry(record)), pages):
            if self._atomic is not None and is_configured(self._tasks, run.job.key):
                together.append(run)
            else:
                alone.append(run.one_by_one())
        if together and self._atomic is not None:
            alone += await self._try_together(self._atomic, together)
        await asyncio.gather(*(self._persist(group) for group in alone))

    async def _try_together(self, atomic: AtomicFlush, runs: list[RunOutcomes]) -> list[Group]:
        """Write the outcomes of these runs together. Returns those of the runs that are to be written by themselves."""
        began = self._clock.now()
        try:
            done = await self._write_together(atomic, runs)
        except Exception as error:
            log.warning("outcomes not written together; writing each run", runs=len(runs), error=repr(error))
            groups = [run.one_by_one() for run in runs]
            for group in groups:
                for record in group:
                    record.may_be_written = True
            return groups
        written = self._clock.now()
        _record_attempts([run for run, is_done in zip(runs, done, strict=True) if is_done], began, written)
        return [_as_written(run) for run, is_done in zip(runs, done, strict=True) if not is_done]

    async def _write_together(self, atomic: AtomicFlush, runs: list[RunOutcomes]) -> list[bool]:
        """Returns for each run whether it is done."""
        finals = [[record for record in run.records if record.delay is None] for run in runs]
        kept = await self._bodies.keep(
            [(run.job, [record.outcome for record in final]) for run, final in zip(runs, finals, strict=True)],
            {stored.pages.segment for run in runs for stored in run.pages},
        )
        now = self._clock.now()
        for final in finals:
            if any(record.is_dead_letter for record in final):
                await write_run_document(self._documents, final[0].job, now)
        flushes = [
            self._flush_of(run, final, bodies, now) for run, final, bodies in zip(runs, finals, kept, strict=True)
        ]
        acks = _complete_after(runs)
        crashpoint("recorder.flush.before")
        flushed = await atomic.record_flush(flushes, [(chunk.queue, chunk.receipt) for chunk in acks])
        crashpoint("recorder.flush.after")
        for run in runs:
            for record in run.records:
                record.noted = record.requeued = True
        await self._acknowledge_late(atomic, runs, acks)
        for run, final, flush, result in zip(runs, finals, flushes, flushed, strict=True):
            self._note_written(run, final, flush, result)
        done = await self._settle_all(flushes, flushed)
        seconds = {run.job.run.run_id: _seconds(run, final) for run, final in zip(runs, finals, strict=True)}
        await count_durations(self._coordinator, seconds)
        return done

    def _flush_of(self, run: RunOutcomes, final: Group, bodies: list[BodyRef | None], now: float) -> RunFlush:
        job = run.job
        retried = [record for record in run.records if record.delay is not None and not record.requeued]
        worker = self._breakdowns.worker
        ends = [_task_end(record, body, now, worker) for record, body in zip(final, bodies, strict=True)]
        for stored in run.pages:
            ends += stored.ends(now, worker)
        return RunFlush(
            job,
            ends,
            [
                _event(record, now, worker)
                for record in run.records
                if record.outcome.error is not None and not record.noted
            ],
            recovery_queue(job.run.run_id),
            self._outgoing(job, retried, now),
            self._lifecycle.decision(job) or (lambda counts: None),
        )

    async def _acknowledge_late(
        self, atomic: AtomicFlush, runs: Sequence[RunOutcomes], acked: Sequence[LeasedChunk]
    ) -> None:
        """Acknowledge messages of which another flush has recorded a part meanwhile."""
        chunks = {record.chunk for run in runs for record in run.records}
        for run in runs:
            _count_recorded(run.records)
            for stored in run.pages:
                chunks.update(stored.counts)
                _count_pages(stored)
        late = [chunk for chunk in chunks.difference(acked) if chunk.left == 0]
        if late:
            crashpoint("recorder.ack.before")
            await atomic.record_flush([], [(chunk.queue, chunk.receipt) for chunk in late])

    def _note_written(self, run: RunOutcomes, final: Group, flush: RunFlush, flushed: RunFlushed) -> None:
        """Tell others what the transaction has written."""
        job, finished = run.job, flushed.finished
        self._breakdowns.add(job, run.records, run.pages, finished.moved, self._clock.now())
        if flush.messages:
            self._on_requeued(job.run.run_id, min(message.delay for message in flush.messages))
        _count_dead_letters(record for record in final if record.is_dead_letter and record.ref.index in finished.moved)
        if flushed.moved is not None:
            self._lifecycle.on_moved(job, flushed.moved, finished.counts)
            self._note_state(job, flushed.moved.target, finished.counts)

    async def _settle_all(self, flushes: Sequence[RunFlush], flushed: Sequence[RunFlushed]) -> list[bool]:
        """Settle the runs that the transaction did not move. Returns for each run whether it is done: if not, it is to
        be written once more, by itself."""
        done = [True] * len(flushes)
        places = [at for at, each in enumerate(flushed) if each.moved is None and self._may_settle(flushes[at], each)]
        settled = await asyncio.gather(*(self._settle(flushes[at].job, flushed[at].finished.counts) for at in places))
        for at, is_done in zip(places, settled, strict=True):
            done[at] = is_done
        return done

    def _may_settle(self, flush: RunFlush, flushed: RunFlushed) -> bool:
        """Whether the move of the run needs a read, or two workers have finished its last tasks at the same time."""
        counts = flushed.finished.counts
        return bool(flush.ends) and (not self._lifecycle.decides(flush.job) or flush.decide(counts) is not None)

    async def _settle(self, job: Job, counts: Counts) -> bool:
        try:
            self._note_state(job, await self._lifecycle.settle(job, counts), counts)
        except Exception as error:
            log.warning("run not settled; retrying", run=job.run.run_id, error=repr(error))
            return False
        return True

    def _note_state(self, job: Job, state: RunState | None, counts: Counts) -> None:
        if state in ENDED:
            self._breakdowns.finish(job.run.run_id, counts.ended)
            self._on_finished(job.run.run_id)

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
                if isinstance(error, DiskUnwritable):
                    await publish_disk_wait(self._coordinator, [job.run.run_id], error)
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
            (bodies,) = await self._bodies.keep([(job, [record.outcome for record in final])])
            now = self._clock.now()
            worker = self._breakdowns.worker
            ends = [_task_end(record, body, now, worker) for record, body in zip(final, bodies, strict=True)]
            dead = [record for record in final if record.is_dead_letter]
            if dead:
                await write_run_document(self._documents, job, now)
            finished = await self._tasks.finish(job.key, ends)
            for record in final:
                # A transaction whose answer was lost has finished the task, and noted it.
                record.noted |= record.may_be_written and record.ref.index not in finished.moved
                record.may_be_written = False
            if dead:
                crashpoint("recorder.dead_letter.after")
                _count_dead_letters(record for record in dead if record.ref.index in finished.moved)
            self._breakdowns.add(job, final, (), finished.moved, now)
            await self._note(job, final)
            self._note_state(job, await self._lifecycle.settle(job, finished.counts), finished.counts)
            await count_durations(self._coordinator, {job.run.run_id: [record.outcome.elapsed for record in final]})
        if retried:
            await self._note(job, retried)
            await self._requeue(job, retried)
            self._breakdowns.add(job, retried, (), (), self._clock.now())
        crashpoint("recorder.ack.before")
        await self._acknowledge(group)

    async def _note(self, job: Job, records: list[RecordedOutcome]) -> None:
        now = self._clock.now()
        failed = [record for record in records if record.outcome.error is not None and not record.noted]
        if failed:
            await self._tasks.note(job.key, [_event(record, now, self._breakdowns.worker) for record in failed])
            for record in failed:
                record.noted = True

    async def _requeue(self, job: Job, retried: list[RecordedOutcome]) -> None:
        outgoing = self._outgoing(job, retried, self._clock.now())
        await send_all(self._queue, recovery_queue(job.run.run_id), outgoing, self._clock)
        for record in retried:
            record.requeued = True
        self._on_requeued(job.run.run_id, min(message.delay for message in outgoing))

    def _outgoing(self, job: Job, retried: Sequence[RecordedOutcome], now: float) -> list[Outgoing]:
        """The messages that requeue references: failed ones each alone, postponed ones in batches."""
        postponed: list[tuple[float, TaskRef]] = []
        outgoing: list[Outgoing] = []
        for record in retried:
            outcome, ref, delay = record.outcome, _next_ref(record, now), record.delay or 0.0
            if outcome.spends_attempt or outcome.error is not None or job.kind in LONG_KINDS:
                due = 0.0 if outcome.is_blocked else now + delay
                outgoing.append(encode(Chunk(job.key, [ref], turn=record.chunk.generation, due=due), delay))
            else:
                postponed.append((delay, ref))
        return outgoing + delayed_messages(job.key, postponed, job.options.chunk_size)

    async def _acknowledge(self, group: list[RecordedOutcome]) -> None:
        _count_recorded(group)
        complete: dict[QueueName, set[str]] = {}
        for record in group:
            if record.chunk.left == 0:
                complete.setdefault(record.chunk.queue, set()).add(record.chunk.receipt)
        for queue, receipts in complete.items():
            await self._queue.ack(queue, list(receipts))


def _is_lost_retry(record: RecordedOutcome) -> bool:
    """Whether the record is a retry of a message that this worker no longer leases. The message still has the
    reference; and the sweeper may have dropped the run's queues for good, because none was in flight."""
    return record.delay is not None and record.chunk.lost


def _complete_after(runs: Iterable[RunOutcomes]) -> list[LeasedChunk]:
    """The messages of which these are the last outcomes: no other flush has one of them."""
    counts: Counter[LeasedChunk] = Counter()
    for run in runs:
        counts.update([record.chunk for record in run.records if not record.counted])
        for stored in run.pages:
            counts.update(stored.counts)
    return [chunk for chunk, count in counts.items() if chunk.left == count]


def _record_attempts(runs: Iterable[RunOutcomes], began: float, written: float) -> None:
    """Record the attempts of all runs of one kind at once, and those of each run that is traced by themselves."""
    records: dict[JobKind, Group] = {}
    pages: dict[JobKind, list[RecordedPages]] = {}
    for run in runs:
        if traces.is_traced(run.job.job_id):
            record_attempts(run.job, run.one_by_one(), began, written)
            continue
        records.setdefault(run.job.kind, []).extend(run.records)
        pages.setdefault(run.job.kind, []).extend(run.pages)
    for kind, group in records.items():
        count_attempts(kind, group, written)
    for kind, each in pages.items():
        refs = [ref for stored in each for ref in stored.refs]
        count_successes(kind, refs, [seconds for stored in each for seconds in stored.pages.elapsed], written)


def _seconds(run: RunOutcomes, final: Group) -> list[float]:
    """How long the attempts took that were the last ones of their tasks."""
    seconds = [record.outcome.elapsed for record in final]
    for stored in run.pages:
        seconds += stored.pages.elapsed
    return seconds


def _as_written(run: RunOutcomes) -> Group:
    """The outcomes of a run one by one, after a transaction has recorded them."""
    group = run.one_by_one()
    for record in group:
        record.noted = record.requeued = True
    return group


def _count_pages(stored: RecordedPages) -> None:
    """Count pages as durable, once."""
    if not stored.counted:
        stored.counted = True
        for chunk, count in stored.counts.items():
            chunk.left -= count


def _count_recorded(records: Iterable[RecordedOutcome]) -> None:
    """Count outcomes as durable, once."""
    for record in records:
        if not record.counted:
            record.counted = True
            record.chunk.left -= 1


def _count_dead_letters(records: Iterable[RecordedOutcome]) -> None:
    for record in records:
        metrics.DEAD_LETTERED.add(1, kind_of(record.chunk.queue))


def _next_ref(record: RecordedOutcome, now: float) -> TaskRef:
    """Return the reference of the next attempt."""
    ref = with_since(record.ref, record.outcome, now)
    return TaskRef(ref.index, ref.input, ref.attempt + 1, ref.since)


def with_since(ref: TaskRef, outcome: Outcome, now: float) -> TaskRef:
    """Return the reference with the time when the task's first attempt began, if there was one. A time that a clock set
    which was ahead counts from now on."""
    attempted = outcome.spends_attempt or outcome.error is not None or outcome.elapsed > 0
    is_known = 0 < ref.since <= now + CLOCK_SLACK
    if is_known or not attempted:
        return ref
    began = outcome.since if 0 < outcome.since <= now + CLOCK_SLACK else int(now - outcome.elapsed)
    return TaskRef(ref.index, ref.input, ref.attempt, began)


def _task_end(record: RecordedOutcome, body: BodyRef | None, now: float, worker: str) -> TaskEnd:
    outcome = record.outcome
    detail = detail_json(outcome)
    if outcome.elapsed >= SLOW_SECONDS:
        detail = with_worker(detail, worker)
    if record.is_dead_letter:
        detail = with_dead_letter(detail)
    return TaskEnd(
        record.ref.index,
        outcome.status,
        record.ref.attempt,
        outcome.http_status,
        _code_of(outcome),
        with_extracted(with_body(detail, body), outcome.extracted_ref),
        now,
    )


def _code_of(outcome: Outcome) -> str | None:
    if outcome.error is not None:
        return outcome.error.code
    return UNCHANGED if outcome.unchanged else None


def _event(record: RecordedOutcome, now: float, worker: str) -> TaskEvent:
    event = "task.failed"
    if record.delay is not None:
        event = "task.retried"
    elif record.is_dead_letter:
        event = "task.dead_lettered"
    data: dict[str, object] = {
        "attempt": record.ref.attempt,
        "error": record.outcome.error,
        "http_status": record.outcome.http_status,
        "elapsed": round(record.outcome.elapsed, 3),
        "worker": worker,
    }
    if record.outcome.first_byte > 0:
        data["first_byte"] = round(record.outcome.first_byte, 3)
    if record.delay is not None:
        data["retry_in"] = round(record.delay, 3)
    if record.is_dead_letter and record.outcome.error is not None:
        data["reason"] = record.outcome.error.message
    return TaskEvent(record.ref.index, now, event, _json(data).decode())
