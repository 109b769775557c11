"""Recorder: collects outcomes of many runners for a moment, and has them written in batches (outcome_writer.py). Where
no other outcome is to be expected, it does not wait for one.

What is attempted and not yet durable is attempted again after a crash. So it is bounded in time: runners wait while the
outcomes that are not written yet are more than the store records in a part of a second.
"""

import asyncio
from collections.abc import Callable, Sequence

from conveyor.clock import Clock
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.queue import Queue
from conveyor.engines.records import AtomicFlush, DocumentRecords
from conveyor.engines.tasks import Tasks
from conveyor.lifecycle import Lifecycle
from conveyor.model import Job, OnExhausted, Options, Outcome, RunId, TaskRef
from conveyor.process.body_store import BodyStore
from conveyor.process.breakdown_parts import BreakdownParts
from conveyor.process.outcome_writer import OutcomeWriter, with_since
from conveyor.process.recorded_outcomes import LeasedChunk, RecordedOutcome, RecordedPages
from conveyor.process.retry import is_exhausted, late, retry_delay, too_late
from conveyor.process.unrecorded_limit import UnrecordedLimit
from conveyor.states import TaskStatus

__all__ = ["LeasedChunk", "Recorder"]

_FLUSH_COUNT = 1000
_FLUSH_BYTES = 8 * 1024 * 1024
# Backpressure: above these, and above an UnrecordedLimit, runners wait until the store has caught up.
_UNRECORDED_SECONDS = 0.3
_MAX_BYTES = 8 * _FLUSH_BYTES
_FLUSHES_AT_ONCE = 3


class Recorder:
    """One for each worker. It calls `on_requeued` with a run and the delay of its first requeued reference, and
    `on_finished` with a run that it has finished; `is_busy` says whether more outcomes are on their way."""

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
        linger: float,
        on_requeued: Callable[[RunId, float], None] = lambda run_id, delay: None,
        atomic: AtomicFlush | None = None,
        is_busy: Callable[[], bool] = lambda: True,
        on_finished: Callable[[RunId], None] = lambda run_id: None,
        deadline_now: Callable[[], float] | None = None,
    ) -> None:
        """Tasks reach their deadlines by `deadline_now`; by the clock without one."""
        self._queue = queue
        self._clock = clock
        self._deadline_now = deadline_now or clock.now
        self._linger = linger
        self._is_busy = is_busy
        self._writer = OutcomeWriter(
            documents,
            tasks,
            queue,
            bodies,
            lifecycle,
            coordinator,
            clock,
            breakdowns,
            atomic,
            on_requeued,
            on_finished,
        )
        self._waiting: list[RecordedOutcome] = []
        self._waiting_pages: list[RecordedPages] = []
        self._waiting_count = 0
        self._waiting_bytes = 0
        self._count = 0
        self._bytes = 0
        # How many there were so far.
        self.outcomes = 0
        self._has_outcomes = asyncio.Event()
        # Set when outcomes are added and when a flush ends: the batch may be complete.
        self._has_changed = asyncio.Event()
        # Set when a flush ends: whoever waits for capacity looks again.
        self._flushed = asyncio.Event()
        # Lanes that wait for capacity, without a coroutine for each.
        self._resumes: dict[Callable[[], None], None] = {}
        # When the first outcome was added that is not recorded yet: of each flush, and of those that wait for one.
        self._since: dict[int, float] = {}
        self._flush_number = 0
        self._limit = UnrecordedLimit()
        self._flushes: set[asyncio.Task[None]] = set()
        self._closing = False

    @property
    def full(self) -> bool:
        """Whether runners have to wait: a crash would repeat more than a part of a second of work."""
        if self._count >= self._limit.count or self._bytes >= _MAX_BYTES:
            return True
        oldest = next(iter(self._since.values()), None)
        return oldest is not None and self._clock.monotonic() - oldest > _UNRECORDED_SECONDS

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
        while self.full:
            self._flushed.clear()
            await self._flushed.wait()

    def when_capacity(self, resume: Callable[[], None]) -> None:
        """Call `resume` when the store may have caught up: once, however often it was asked."""
        self._resumes[resume] = None

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
            if delay is None:
                size += len(outcome.body or b"") + len(outcome.extracted or b"")
            is_dead_letter = delay is None and is_parking and _is_exhausted(options, outcome)
            chunk.unwritten += 1
            self._waiting.append(RecordedOutcome(job, chunk, ref, outcome, delay, is_dead_letter))
        self._on_added(len(refs), size)

    def add_pages(self, pages: RecordedPages) -> None:
        """Add pages that a fetcher has stored. They are durable soon after."""
        for chunk, count in pages.counts.items():
            chunk.unwritten += count
        self._waiting_pages.append(pages)
        self._on_added(len(pages), 0)

    def _on_added(self, count: int, size: int) -> None:
        now = self._clock.monotonic()
        self._since.setdefault(self._flush_number, now)
        self._count += count
        self.outcomes += count
        self._waiting_count += count
        self._waiting_bytes += size
        self._bytes += size
        self._has_outcomes.set()
        self._has_changed.set()

    def _retry_in_time(self, job: Job, ref: TaskRef, outcome: Outcome, delay: float) -> float | None:
        """Return the delay of the retry. If that is past the task's deadline, fail the outcome and return None."""
        begun = with_since(ref, outcome, self._clock.now())
        if not too_late(job.options, begun, self._deadline_now() + delay):
            return delay
        outcome.status = TaskStatus.FAILED
        outcome.error = late(job.options, outcome.error)
        outcome.detail = None
        return None

    def check_batch(self) -> None:
        """Flush if nothing more is on its way: `is_busy` may answer otherwise than before."""
        self._has_changed.set()

    async def run(self) -> None:
        """Flush batches until closed and empty."""
        while not (self._closing and not self._waiting_count):
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
        self._has_changed.set()

    async def _collect(self) -> None:
        """Wait until the batch is complete, or for as long as an outcome may wait."""
        try:
            async with asyncio.timeout(self._linger):
                while not self._is_complete():
                    self._has_changed.clear()
                    await self._has_changed.wait()
        except TimeoutError:
            pass

    def _is_complete(self) -> bool:
        """Whether nothing more should join the batch: it is full, runners wait for it, or nothing is on its way. What
        comes while another flush is written joins."""
        if self._closing or self._waiting_count >= _FLUSH_COUNT or self._waiting_bytes >= _FLUSH_BYTES:
            return True
        return not self._flushes and (self.full or not self._is_busy())

    def _start_flush(self) -> None:
        batch, pages, size = self._waiting, self._waiting_pages, self._waiting_bytes
        self._waiting, self._waiting_pages, self._waiting_count, self._waiting_bytes = [], [], 0, 0
        if not self._closing:
            self._has_outcomes.clear()
        if batch or pages:
            task = asyncio.create_task(self._flush(self._flush_number, batch, pages, size))
            self._flush_number += 1
            self._flushes.add(task)
            task.add_done_callback(self._on_flushed)

    async def _flush(self, number: int, batch: list[RecordedOutcome], pages: list[RecordedPages], size: int) -> None:
        self._limit.begin_flush(self._clock.monotonic())
        try:
            await self._writer.write(batch, pages)
        finally:
            for record in batch:
                record.chunk.unwritten -= 1
            for stored in pages:
                for chunk, count in stored.counts.items():
                    chunk.unwritten -= count
            count = len(batch) + sum(map(len, pages))
            self._count -= count
            self._bytes -= size
            now = self._clock.monotonic()
            self._limit.end_flush(now, count, self._since.pop(number, now))
            self._on_capacity()

    def _on_capacity(self) -> None:
        self._flushed.set()
        resumes, self._resumes = self._resumes, {}
        for resume in resumes:
            asyncio.get_running_loop().call_soon(resume)

    def _on_flushed(self, task: asyncio.Task[None]) -> None:
        self._flushes.discard(task)
        self._has_changed.set()


def _is_exhausted(options: Options, outcome: Outcome) -> bool:
    return outcome.status is TaskStatus.FAILED and is_exhausted(options, outcome)
