"""Recorder: outcomes in, durable rows out, in batches. What one flush does, in order, is `_write`.

Outcomes of many runners gather for a moment; a flush then keeps their bodies, ends their tasks, sends back what is
to be tried again, lets the lifecycle look at the run, and acknowledges the messages that are done, last.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.coordination.durations import count_durations
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.queue import Outgoing, Queue, QueueName, recovery_queue
from conveyor.engines.tasks import TaskEvent, Tasks
from conveyor.faults import crashpoint
from conveyor.jobs.chunks import encode, gathered, send_all
from conveyor.lifecycle import Lifecycle
from conveyor.model import LONG_KINDS, BodyRef, Chunk, Job, Outcome, RunId, TaskEnd, TaskRef
from conveyor.process.body_store import Bodies
from conveyor.process.outcomes import detail_json, with_body
from conveyor.process.retry import late, retry_delay, too_late
from conveyor.states import TaskStatus
from conveyor.telemetry.attempts import recorded

log = structlog.get_logger()

_FLUSH_COUNT = 1000
_FLUSH_BYTES = 8 * 1024 * 1024
# Above these, runners wait: the store is slower than the targets.
_MOST_COUNT = 8 * _FLUSH_COUNT
_MOST_BYTES = 8 * _FLUSH_BYTES
_FLUSHES_AT_ONCE = 3
_TRIES = 5

_json = msgspec.json.encode


class LeasedChunk:
    """A message that this worker holds, and how many of its references have no durable outcome yet."""

    __slots__ = ("left", "lost", "marking", "queue", "receipt", "recovered", "size", "suspect", "turn", "unwritten")

    def __init__(
        self,
        queue: QueueName,
        receipt: str,
        left: int,
        suspect: bool = False,
        *,
        recovered: bool = False,
        size: int = 0,
        turn: int = 0,
    ) -> None:
        self.queue = queue
        self.receipt = receipt
        self.left = left
        # Outcomes of it that are not written yet: references may still be sent back to its run's queues.
        self.unwritten = 0
        # Whether it came by the recovery queue; its bytes; how often the monitor had sent its task again by then.
        self.recovered = recovered
        self.size = size
        self.turn = turn
        # Somebody else may hold it now: whatever of it has not started is not ours to start.
        self.lost = False
        # It came before and was not done: its start is marked before anything of it starts.
        self.suspect = suspect
        self.marking: asyncio.Task[None] | None = None


class RecordedOutcome(msgspec.Struct, gc=False):
    """One attempt that has an outcome."""

    job: Job
    chunk: LeasedChunk
    ref: TaskRef
    outcome: Outcome
    # Set when the task is to be tried again.
    delay: float | None
    # A write that fails is made again: what was noted, sent back or counted already is not a second time.
    noted: bool = False
    sent: bool = False
    counted: bool = False


class Recorder:
    """One for each worker. `sent_back` is told which run has references that come again, and how soon the first."""

    def __init__(
        self,
        tasks: Tasks,
        queue: Queue,
        bodies: Bodies,
        lifecycle: Lifecycle,
        coordinator: Coordinator,
        clock: Clock,
        linger: float,
        sent_back: Callable[[RunId, float], None] = lambda run_id, delay: None,
    ) -> None:
        self._sent_back = sent_back
        self._coordinator = coordinator
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
        self._some = asyncio.Event()
        self._enough = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._flushes: set[asyncio.Task[None]] = set()
        self._closing = False

    @property
    def full(self) -> bool:
        return not self._room.is_set()

    async def mark_started(self, chunk: LeasedChunk) -> None:
        """Have it known that work on a suspect chunk has begun, once."""
        if chunk.marking is None:
            chunk.marking = asyncio.create_task(self._queue.mark_started(chunk.queue, [chunk.receipt]))
        marking = chunk.marking
        try:
            await asyncio.shield(marking)
        except Exception:
            # Whoever asks next tries again.
            chunk.marking = None if chunk.marking is marking else chunk.marking
            raise

    async def room(self) -> None:
        """Wait until the store has caught up."""
        await self._room.wait()

    def add(
        self, job: Job, chunks: Sequence[LeasedChunk], refs: Sequence[TaskRef], outcomes: Sequence[Outcome]
    ) -> None:
        """Take outcomes of attempts; they are durable soon after."""
        options, jitter = job.options, self._clock.jitter
        size = 0
        for chunk, ref, outcome in zip(chunks, refs, outcomes, strict=True):
            delay = None
            if outcome.status is not TaskStatus.SUCCEEDED:
                delay = retry_delay(options, ref.attempt, outcome, jitter())
                if delay is not None and options.task_deadline is not None:
                    delay = self._in_time(job, ref, outcome, delay)
            if delay is None and outcome.body is not None:
                size += len(outcome.body)
            chunk.unwritten += 1
            self._waiting.append(RecordedOutcome(job, chunk, ref, outcome, delay))
        self._count += len(refs)
        self._waiting_bytes += size
        self._bytes += size
        self._some.set()
        if len(self._waiting) >= _FLUSH_COUNT or self._waiting_bytes >= _FLUSH_BYTES:
            self._enough.set()
        if self._count >= _MOST_COUNT or self._bytes >= _MOST_BYTES:
            self._room.clear()

    def _in_time(self, job: Job, ref: TaskRef, outcome: Outcome, delay: float) -> float | None:
        """The delay of the next attempt, or None, and the outcome says so, if it is too late for one."""
        now = self._clock.now()
        if not too_late(job.options, _begun(ref, outcome, now), now + delay):
            return delay
        outcome.status = TaskStatus.FAILED
        outcome.error = late(job.options, outcome.error)
        outcome.detail = None
        return None

    async def run(self) -> None:
        """Flush until closed and empty."""
        while not (self._closing and not self._waiting):
            await self._some.wait()
            if not self._closing:
                await self._gather()
            while len(self._flushes) >= _FLUSHES_AT_ONCE:
                await asyncio.wait(self._flushes, return_when=asyncio.FIRST_COMPLETED)
            self._start_flush()
        while self._flushes:
            await asyncio.wait(self._flushes)

    def close(self) -> None:
        """Flush what is there and end `run`."""
        self._closing = True
        self._some.set()
        self._enough.set()

    async def _gather(self) -> None:
        try:
            async with asyncio.timeout(self._linger):
                await self._enough.wait()
        except TimeoutError:
            pass

    def _start_flush(self) -> None:
        batch, size = self._waiting, self._waiting_bytes
        self._waiting, self._waiting_bytes = [], 0
        self._enough.clear()
        if not self._closing:
            self._some.clear()
        if batch:
            task = asyncio.create_task(self._flush(batch, size))
            self._flushes.add(task)
            task.add_done_callback(self._flushes.discard)

    async def _flush(self, batch: list[RecordedOutcome], size: int) -> None:
        try:
            await asyncio.gather(*(self._persist(group) for group in _by_run(batch)))
        finally:
            for done in batch:
                done.chunk.unwritten -= 1
            self._count -= len(batch)
            self._bytes -= size
            if self._count < _MOST_COUNT and self._bytes < _MOST_BYTES:
                self._room.set()

    async def _persist(self, group: list[RecordedOutcome]) -> None:
        """Write one run's part of a flush, trying again while the store fails; at last let go of the messages."""
        pause = 0.1
        began = self._clock.now()
        for attempt in range(1, _TRIES + 1):
            try:
                await self._write(group)
                recorded(group[0].job, group, began, self._clock.now())
                return
            except Exception as error:
                # Whatever it is: an outcome that is neither written nor let go of would be held for ever.
                log.warning("results were not written", run=group[0].job.run.run_id, attempt=attempt, error=repr(error))
                await self._clock.sleep(pause)
                pause *= 3
        log.error("results given up; their messages will be delivered again", count=len(group))
        for done in group:
            done.chunk.lost = True

    async def _write(self, group: list[RecordedOutcome]) -> None:
        job = group[0].job
        ended = [done for done in group if done.delay is None]
        again = [done for done in group if done.delay is not None and not done.sent]
        if ended:
            bodies = await self._bodies.keep(job, [done.outcome for done in ended])
            now = self._clock.now()
            ends = [_end(done, body, now) for done, body in zip(ended, bodies, strict=True)]
            finished = await self._tasks.finish(job.key, ends)
            await self._note(job, ended, "task.failed")
            await self._lifecycle.settle(job, finished.counts)
            await count_durations(self._coordinator, job.run.run_id, [done.outcome.elapsed for done in ended])
        if again:
            await self._note(job, again, "task.retried")
            await self._send_back(job, again)
        crashpoint("recorder.ack.before")
        await self._acknowledge(group)

    async def _note(self, job: Job, attempts: list[RecordedOutcome], event: str) -> None:
        now = self._clock.now()
        failed = [done for done in attempts if done.outcome.error is not None and not done.noted]
        if failed:
            await self._tasks.note(job.key, [_event(done, event, now) for done in failed])
            for done in failed:
                done.noted = True

    async def _send_back(self, job: Job, again: list[RecordedOutcome]) -> None:
        """By the recovery queue: each failed one alone, those that only wait in batches."""
        now = self._clock.now()
        waits: list[tuple[float, TaskRef]] = []
        outgoing: list[Outgoing] = []
        for done in again:
            ref, delay = _again(done, now), done.delay or 0.0
            if done.outcome.spend or done.outcome.error is not None or job.kind in LONG_KINDS:
                outgoing.append(encode(Chunk(job.key, [ref], turn=done.chunk.turn), delay))
            else:
                waits.append((delay, ref))
        outgoing += gathered(job.key, waits, job.options.chunk_size)
        await send_all(self._queue, recovery_queue(job.run.run_id), outgoing, self._clock)
        for done in again:
            done.sent = True
        self._sent_back(job.run.run_id, min(one.delay for one in outgoing))

    async def _acknowledge(self, group: list[RecordedOutcome]) -> None:
        for done in group:
            if not done.counted:
                done.counted = True
                done.chunk.left -= 1
        complete: dict[QueueName, set[str]] = {}
        for done in group:
            if done.chunk.left == 0:
                complete.setdefault(done.chunk.queue, set()).add(done.chunk.receipt)
        for queue, receipts in complete.items():
            await self._queue.ack(queue, list(receipts))


def _by_run(batch: Iterable[RecordedOutcome]) -> list[list[RecordedOutcome]]:
    groups: dict[RunId, list[RecordedOutcome]] = {}
    for done in batch:
        groups.setdefault(done.job.run.run_id, []).append(done)
    return list(groups.values())


def _again(done: RecordedOutcome, now: float) -> TaskRef:
    """The reference to the next attempt."""
    ref = _begun(done.ref, done.outcome, now)
    return TaskRef(ref.index, ref.input, ref.attempt + 1, ref.since)


def _begun(ref: TaskRef, outcome: Outcome, now: float) -> TaskRef:
    """The reference with the time at which its first attempt began, if there was one."""
    attempted = outcome.spend or outcome.error is not None or outcome.elapsed > 0
    if ref.since or not attempted:
        return ref
    return TaskRef(ref.index, ref.input, ref.attempt, outcome.since or int(now - outcome.elapsed))


def _end(done: RecordedOutcome, body: BodyRef | None, now: float) -> TaskEnd:
    outcome = done.outcome
    return TaskEnd(
        done.ref.index,
        outcome.status,
        done.ref.attempt,
        outcome.http_status,
        outcome.error.code if outcome.error else None,
        with_body(detail_json(outcome), body),
        now,
    )


def _event(done: RecordedOutcome, event: str, now: float) -> TaskEvent:
    data: dict[str, object] = {
        "attempt": done.ref.attempt,
        "error": done.outcome.error,
        "http_status": done.outcome.http_status,
    }
    if done.delay is not None:
        data["retry_in"] = round(done.delay, 3)
    return TaskEvent(done.ref.index, now, event, _json(data).decode())
