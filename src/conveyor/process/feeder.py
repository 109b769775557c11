"""Feeder: from the queues of runs to the lanes of one worker.

It receives chunks for lanes that run low, from the recovery queue before the run's queue; drops references of finished
tasks; and splits or dead-letters chunks that were lost with their workers (chunk_decision.py).
"""

from collections.abc import Callable, Sequence
from typing import assert_never

import msgspec
import structlog

from conveyor.clock import CLOCK_SLACK, Clock
from conveyor.coordination.parallel import together
from conveyor.engines.queue import Delivery, Queue, QueueName, ReceivesMany, kind_of, recovery_queue, run_queue
from conveyor.engines.records import Records
from conveyor.engines.tasks import TaskEvent, Tasks
from conveyor.faults import crashpoint
from conveyor.jobs.chunks import decode, encode, send_all
from conveyor.jobs.dead_lettered_tasks import write_run_document
from conveyor.lifecycle import Lifecycle
from conveyor.model import (
    LONG_KINDS,
    PROGRESS,
    Chunk,
    Job,
    ResultDetail,
    TaskEnd,
    TaskError,
    TaskProgress,
    TaskRef,
    progress_id,
)
from conveyor.process.chunk_decision import ChunkDecision, can_be_superseded, decide
from conveyor.process.lane import Lane
from conveyor.process.recorder import LeasedChunk
from conveyor.process.retry import WORKER_LOST, longest_delay
from conveyor.process.trial import Trial
from conveyor.settings import Settings
from conveyor.states import TaskStatus
from conveyor.telemetry import metrics

log = structlog.get_logger()

# How soon an empty queue is polled again; the pause doubles. Retries of this worker, and what others announce, are
# polled for at once.
_FIRST_POLL = 0.02
_FIRST_RECOVERY_POLL = 0.1
_LONGEST_POLL = 1.0
_MAX_CHUNKS = 64
# Lanes that are filled at once. Their bytes count before other lanes get more.
_LANES_AT_ONCE = 64
# References for a lane whose throughput is not known yet.
_FIRST_REFERENCES = 1
# How soon a chunk becomes visible again that has to wait for another chunk's trial.
_TRIAL_PAUSE = 0.1
# How soon to poll again for a run whose last references were all postponed.
_BLOCKED_PAUSE = 1.0
# A chunk that is due within this many seconds may start.
_EARLY = 1.0

_progress = msgspec.json.Decoder(TaskProgress)


class Feeder:
    """One for each worker. `request_tick` makes the worker tick again at once."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        records: Records,
        tasks: Tasks,
        queue: Queue,
        lifecycle: Lifecycle,
        request_tick: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._records = records
        self._tasks = tasks
        self._queue = queue
        # Asked once: the check of a capability is slow.
        self._many = queue if isinstance(queue, ReceivesMany) else None
        self._lifecycle = lifecycle
        self._request_tick = request_tick
        self._trial = Trial(clock)
        # Size of the chunks that the worker leases, as of the last count.
        self._leased_bytes = 0
        self._round = 0

    def count_leased_bytes(self, lanes: Sequence[Lane]) -> None:
        """Count the bytes that the worker leases."""
        self._leased_bytes = sum(lane.leased_bytes() for lane in lanes)

    async def generation_of(self, job: Job, ref: TaskRef) -> int:
        """Return how often the monitor has requeued the task."""
        document = await self._records.documents.document(PROGRESS, job.tenant, progress_id(job.run.run_id, ref.index))
        try:
            return 0 if document is None else _progress.decode(document.body).turn
        except msgspec.MsgspecError:
            return 0

    async def fill(self, lanes: Sequence[Lane]) -> None:
        """Receive for lanes that run low. Each round begins with another lane, in case the bytes do not suffice."""
        if self._trial.is_exclusive(lanes):
            return
        now = self._clock.monotonic()
        self._round += 1
        first = self._round % len(lanes) if lanes else 0
        shortages = [(lane, *self._shortage(lane, now)) for lane in (*lanes[first:], *lanes[:first])]
        short = [(lane, recovered, new) for lane, recovered, new in shortages if recovered + new > 0]
        for start in range(0, len(short), _LANES_AT_ONCE):
            batch = [entry for entry in short[start : start + _LANES_AT_ONCE] if not self._is_over_budget(entry[0])]
            if self._many is None:
                await together(*(self._fill_lane(*entry) for entry in batch))
            else:
                await self._fill_many(self._many, batch)

    def _shortage(self, lane: Lane, now: float) -> tuple[int, int]:
        """Return how many recovered and how many new references the lane should get."""
        if now < lane.next_poll and now < lane.next_recovery and not lane.is_crowded:
            # The usual case where many small runs are served: each has all of its references.
            return 0, 0
        if lane.open_until() is not None:
            return 0, 0
        if lane.width == 0 and lane.demand == 0 and not lane.is_crowded:
            recovered = new = _FIRST_REFERENCES
        else:
            recovered, new = lane.shortage()
        return recovered if now >= lane.next_recovery else 0, new if now >= lane.next_poll else 0

    def _is_over_budget(self, lane: Lane) -> bool:
        """Return whether the worker leases too many bytes to receive more. A lane with nothing to do gets twice as
        many."""
        budget = self._settings.worker_held_bytes
        return self._leased_bytes >= (budget if lane.demand else 2 * budget)

    async def _fill_many(self, queue: ReceivesMany, batch: Sequence[tuple[Lane, int, int]]) -> None:
        """Receive for many lanes: recovered references of all of them by one call, then new ones by another."""
        quick = [entry for entry in batch if entry[0].job.kind not in LONG_KINDS]
        recovering = [(lane, recovered) for lane, recovered, _ in quick if recovered]
        starting = [(lane, new) for lane, _, wanted in quick if (new := self._look_further(lane, wanted))]
        for wants, is_recovered in ((recovering, True), (starting, False)):
            if wants:
                await self._receive_many(queue, wants, recovered=is_recovered)
        long = [entry for entry in batch if entry[0].job.kind in LONG_KINDS]
        if long:
            await together(*(self._fill_lane(*entry) for entry in long))

    async def _receive_many(self, queue: ReceivesMany, wants: Sequence[tuple[Lane, int]], *, recovered: bool) -> None:
        takes = [_take_of(lane, count, recovered=recovered) for lane, count in wants]
        received = await queue.receive_many(takes, self._settings.lease_seconds)
        now = self._clock.monotonic()
        admitting = []
        for (lane, _), (name, _), deliveries in zip(wants, takes, received, strict=True):
            _set_poll(lane, now, empty=not deliveries, recovered=recovered)
            if deliveries:
                admitting.append(self._take_in(lane, name, deliveries, recovered=recovered))
        await together(*admitting)

    def _look_further(self, lane: Lane, new: int) -> int:
        """How many new references to receive: more, further down the queue, if nothing that was received can start."""
        if not (lane.check_blocked() and new):
            return new
        lane.next_poll = self._clock.monotonic() + _BLOCKED_PAUSE
        return _MAX_CHUNKS * lane.job.options.chunk_size

    async def _fill_lane(self, lane: Lane, recovered: int, new: int) -> None:
        """Receive recovered references first. A long task takes a slot for hours, so its lane gets one or the other."""
        new = self._look_further(lane, new)
        if lane.job.kind not in LONG_KINDS:
            if recovered:
                await self._receive(lane, recovered, recovered=True)
            if new:
                await self._receive(lane, new, recovered=False)
            return
        order = [(recovered, True), (new, False)]
        for count, is_recovered in reversed(order) if lane.is_new_due else order:
            if count and await self._receive(lane, count, recovered=is_recovered):
                return

    async def _receive(self, lane: Lane, count: int, *, recovered: bool) -> bool:
        """Receive chunks and feed them to the lane. Returns False if the queue was empty."""
        queue, chunks = _take_of(lane, count, recovered=recovered)
        deliveries = await self._queue.receive(queue, chunks, self._settings.lease_seconds)
        _set_poll(lane, self._clock.monotonic(), empty=not deliveries, recovered=recovered)
        if not deliveries:
            return False
        await self._take_in(lane, queue, deliveries, recovered=recovered)
        return True

    async def _take_in(self, lane: Lane, queue: QueueName, deliveries: list[Delivery], *, recovered: bool) -> None:
        """Feed what was received to the lane."""
        self._leased_bytes += sum(len(delivery.body) for delivery in deliveries)
        try:
            await self._admit(lane, queue, deliveries, recovered=recovered)
        except Exception:
            # No task of these has started: released, they do not count as lost starts.
            unfed = [delivery.receipt for delivery in deliveries if delivery.receipt not in lane.chunks]
            await self._queue.release(queue, unfed, 0.0)
            raise
        if min(lane.next_poll, lane.next_recovery) <= 0.0 and (lane.demand == 0 or lane.job.kind in LONG_KINDS):
            # After a crash all of these may have been finished: no runner will ask for more. Long tasks are received
            # one at a time: there may be slots for more.
            self._request_tick()

    async def _admit(self, lane: Lane, queue: QueueName, deliveries: list[Delivery], *, recovered: bool) -> None:
        """Look up which tasks are unfinished, decide on each chunk, and act on the decision."""
        chunks = await self._decode_all(lane, queue, deliveries, recovered=recovered)
        unfinished = await self._tasks.unfinished(
            lane.job.key, [ref.index for _, chunk in chunks for ref in chunk.refs]
        )
        finished: list[str] = []
        deferred: list[str] = []
        for delivery, chunk in chunks:
            refs = [ref for ref in chunk.refs if ref.index in unfinished]
            leased = _lease(queue, delivery, chunk, refs, recovered=recovered)
            decision = await self._decide(lane.job, delivery, chunk, refs)
            match decision:
                case ChunkDecision.FEED:
                    lane.feed(leased, refs)
                case ChunkDecision.TRY | ChunkDecision.TRY_EXCLUSIVELY:
                    exclusive = decision is ChunkDecision.TRY_EXCLUSIVELY
                    if not self._trial.begin(lane, leased, refs, exclusive=exclusive):
                        deferred.append(delivery.receipt)
                case ChunkDecision.ACKNOWLEDGE:
                    finished.append(delivery.receipt)
                case ChunkDecision.SPLIT:
                    await self._split(lane.job, leased, refs)
                case ChunkDecision.DEAD_LETTER:
                    await self._dead_letter(lane.job, leased, refs[0], _death_of(delivery, chunk))
                case _:
                    assert_never(decision)
        if finished:
            await self._queue.ack(queue, finished)
        if deferred:
            await self._queue.release(queue, deferred, _TRIAL_PAUSE)
            if lane.demand == 0:
                _delay_poll(lane, self._clock.monotonic() + _TRIAL_PAUSE, recovered=recovered)

    def _count_received(self, lane: Lane, chunks: Sequence[tuple[Delivery, Chunk]]) -> None:
        """Count new references. A lane that has all of its run polls seldom: what others return is marked as ready."""
        lane.received += sum(len(chunk.refs) for delivery, chunk in chunks if delivery.receives == 1)
        if lane.has_whole_run and lane.poll_pause == 0:
            lane.poll_pause = _LONGEST_POLL
            lane.next_poll = self._clock.monotonic() + _LONGEST_POLL
            if lane.recovery_pause > 0:
                lane.recovery_pause, lane.next_recovery = lane.poll_pause, lane.next_poll

    async def _release_early(
        self, lane: Lane, queue: QueueName, chunks: list[tuple[Delivery, Chunk]]
    ) -> list[tuple[Delivery, Chunk]]:
        """Release chunks that were hastened and are not due yet, and those that breakers still block as a whole.
        Returns the others."""
        now = self._clock.now()
        ready = []
        for delivery, chunk in chunks:
            # A time further away than any delay was set by a clock that was ahead of this one.
            is_early = _EARLY < chunk.due - now <= longest_delay(lane.job.options) + CLOCK_SLACK
            delay = chunk.due - now if is_early else lane.hold_time(chunk.refs)
            if delay is None:
                ready.append((delivery, chunk))
            else:
                await self._queue.release(queue, [delivery.receipt], delay)
                lane.count_blocked(len(chunk.refs))
        return ready

    async def _decide(self, job: Job, delivery: Delivery, chunk: Chunk, refs: list[TaskRef]) -> ChunkDecision:
        superseded = can_be_superseded(delivery, chunk, refs) and await self.generation_of(job, refs[0]) > chunk.turn
        max_lost_starts = max(1, self._settings.max_lost_starts)
        return decide(job.kind, delivery, chunk, refs, max_lost_starts, superseded=superseded)

    async def _decode_all(
        self, lane: Lane, queue: QueueName, deliveries: list[Delivery], *, recovered: bool
    ) -> list[tuple[Delivery, Chunk]]:
        """Decode messages; returns those that may start. One that is not a chunk would fail every worker that receives
        it: it is dead-lettered."""
        chunks = []
        for delivery in deliveries:
            try:
                chunks.append((delivery, decode(delivery.body)))
            except msgspec.DecodeError as error:
                log.error("message is not a chunk", run=lane.job.run.run_id, error=str(error))
                await self._queue.dead_letter(queue, [delivery.receipt], f"The message is not a chunk: {error}")
        if recovered:
            return await self._release_early(lane, queue, chunks)
        self._count_received(lane, chunks)
        return chunks

    async def _split(self, job: Job, chunk: LeasedChunk, refs: list[TaskRef]) -> None:
        """Send each task of a chunk that several workers died with in a message of its own: one may be poison."""
        log.warning("chunk lost with its workers; each of its tasks goes on alone", run=job.run.run_id, tasks=len(refs))
        alone = [encode(Chunk(job.key, [ref], alone=True)) for ref in refs]
        await send_all(self._queue, chunk.queue, alone, self._clock)
        crashpoint("worker.try_alone.between")
        await self._queue.ack(chunk.queue, [chunk.receipt])

    async def _dead_letter(self, job: Job, chunk: LeasedChunk, ref: TaskRef, error: TaskError) -> None:
        """Fail a task that no worker survives, and mark it as dead-lettered."""
        log.error("task dead-lettered", run=job.run.run_id, index=ref.index, reason=error.message)
        detail = msgspec.json.encode(ResultDetail(error=error, dead_lettered=True)).decode()
        end = TaskEnd(ref.index, TaskStatus.FAILED, ref.attempt, None, error.code, detail, self._clock.now())
        await write_run_document(self._records.documents, job, end.at)
        finished = await self._tasks.finish(job.key, [end])
        metrics.DEAD_LETTERED.add(len(finished.moved), kind_of(chunk.queue))
        crashpoint("worker.dead_letter.after")
        data = msgspec.json.encode({"attempt": ref.attempt, "error": error, "reason": error.message}).decode()
        await self._tasks.note(job.key, [TaskEvent(ref.index, end.at, "task.dead_lettered", data)])
        await self._lifecycle.settle(job, finished.counts)
        await self._queue.ack(chunk.queue, [chunk.receipt])


def _take_of(lane: Lane, count: int, *, recovered: bool) -> tuple[QueueName, int]:
    """The queue, and how many messages to take from it for so many references."""
    run_id, size = lane.job.run.run_id, lane.job.options.chunk_size
    # Most recovered references travel alone.
    chunks = min(_MAX_CHUNKS, count if recovered else -(-count // size))
    return (recovery_queue if recovered else run_queue)(run_id), chunks


def _lease(
    queue: QueueName, delivery: Delivery, chunk: Chunk, refs: Sequence[TaskRef], *, recovered: bool
) -> LeasedChunk:
    return LeasedChunk(
        queue,
        delivery.receipt,
        len(refs),
        suspect=chunk.alone or delivery.receives > 1,
        recovered=recovered,
        size=len(delivery.body),
        generation=chunk.turn,
    )


def _death_of(delivery: Delivery, chunk: Chunk) -> TaskError:
    """Return why a chunk's task is dead-lettered: what the sender says, or the count of its lost starts."""
    if chunk.lost:
        return TaskError(chunk.code or WORKER_LOST, chunk.lost)
    return TaskError(WORKER_LOST, f"The worker was lost {delivery.lost_starts} times while it ran this task alone.")


def _set_poll(lane: Lane, now: float, *, empty: bool, recovered: bool) -> None:
    """Set when to poll the queue again: at once if it had messages, else after a growing pause."""
    pause = lane.recovery_pause if recovered else lane.poll_pause
    first = _FIRST_RECOVERY_POLL if recovered else _FIRST_POLL
    pause = min(_LONGEST_POLL, max(first, pause * 2)) if empty else 0.0
    if recovered:
        lane.recovery_pause, lane.next_recovery = pause, now + pause if empty else 0.0
    elif empty or lane.next_poll <= now:
        lane.poll_pause, lane.next_poll = pause, now + pause if empty else 0.0


def _delay_poll(lane: Lane, until: float, *, recovered: bool) -> None:
    if recovered:
        lane.next_recovery = until
    else:
        lane.next_poll = until
