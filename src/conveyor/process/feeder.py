"""Feeder: from the queues of runs to the lanes of one worker. Receives for lanes that run low, what comes again before
what is new; guards against what has ended already; splits or gives up messages that were lost with their workers."""

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.engines.queue import Delivery, Queue, QueueName, recovery_queue, run_queue
from conveyor.engines.records import Records
from conveyor.engines.tasks import TaskEvent, Tasks
from conveyor.faults import crashpoint
from conveyor.jobs.chunks import decode, encode, send_all
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
from conveyor.process.executors import WORKER_LOST
from conveyor.process.lane import Lane
from conveyor.process.recorder import LeasedChunk
from conveyor.settings import Settings
from conveyor.states import TaskStatus

log = structlog.get_logger()

_LONGEST_POLL = 1.0
_MOST_CHUNKS = 64
# Lanes that are filled side by side; what they got is weighed before others get more.
_LANES_AT_ONCE = 64
# What a lane may grow to before its first measure of how fast it is.
_FIRST_TASTE = 1
# How soon a chunk is looked at again that could not be tried while another was.
_TRIAL_PAUSE = 0.1
# How soon more is looked through of a run of which all that came was sent back for its targets.
_HELD_UP_PAUSE = 1.0

_progress = msgspec.json.Decoder(TaskProgress)


class Feeder:
    """One for each worker; `wake` has it tick again at once."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        records: Records,
        tasks: Tasks,
        queue: Queue,
        lifecycle: Lifecycle,
        wake: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._records = records
        self._tasks = tasks
        self._queue = queue
        self._lifecycle = lifecycle
        self._wake = wake
        self._on_trial: LeasedChunk | None = None
        # What the messages weigh that the worker holds, as counted a moment ago.
        self._held_bytes = 0
        self._turn = 0

    def weigh(self, lanes: Sequence[Lane]) -> None:
        """Count what is held."""
        self._held_bytes = sum(lane.held_bytes() for lane in lanes)

    async def turn_of(self, job: Job, ref: TaskRef) -> int:
        """How often the monitor has sent the task again."""
        row = await self._records.documents.document(PROGRESS, job.tenant, progress_id(job.run.run_id, ref.index))
        try:
            return 0 if row is None else _progress.decode(row.body).turn
        except msgspec.MsgspecError:
            return 0

    async def fill(self, lanes: Sequence[Lane]) -> None:
        """Receive for those that run low. Who is first changes, for when not all can have something."""
        now = self._clock.monotonic()
        self._turn += 1
        first = self._turn % len(lanes) if lanes else 0
        short = [(lane, *self._shortage(lane, now)) for lane in (*lanes[first:], *lanes[:first])]
        wanting = [(lane, again, new) for lane, again, new in short if again + new > 0]
        for start in range(0, len(wanting), _LANES_AT_ONCE):
            some = wanting[start : start + _LANES_AT_ONCE]
            await asyncio.gather(*(self._fill_lane(*each) for each in some if not self._overweight(each[0])))

    def _shortage(self, lane: Lane, now: float) -> tuple[int, int]:
        """How many references it should be given, of those that come again and of new ones."""
        if lane.closed_until() is not None:
            return 0, 0
        if lane.width == 0 and lane.want == 0 and not lane.crowded:
            again = new = _FIRST_TASTE
        else:
            again, new = lane.shortage()
        return again if now >= lane.next_recovery else 0, new if now >= lane.next_poll else 0

    def _overweight(self, lane: Lane) -> bool:
        """So much is held that a lane with something to do gets no more, and then none does."""
        most = self._settings.worker_held_bytes
        return self._held_bytes >= (most if lane.want else 2 * most)

    async def _fill_lane(self, lane: Lane, again: int, new: int) -> None:
        """Those that come again first. A long task takes a place for hours: then it is one or the other."""
        if lane.held_up() and new:
            # Nothing of it can go on now; others may stand behind.
            new = _MOST_CHUNKS * lane.job.options.chunk_size
            lane.next_poll = self._clock.monotonic() + _HELD_UP_PAUSE
        if lane.job.kind not in LONG_KINDS:
            if again:
                await self._take(lane, again, recovered=True)
            if new:
                await self._take(lane, new, recovered=False)
            return
        asked = [(again, True), (new, False)]
        for count, recovered in reversed(asked) if lane.owes_new else asked:
            if count and await self._take(lane, count, recovered=recovered):
                return

    async def _take(self, lane: Lane, count: int, *, recovered: bool) -> bool:
        """Receive messages and feed them to the lane. False if there were none."""
        job = lane.job
        queue = (recovery_queue if recovered else run_queue)(job.run.run_id)
        # Those that come again mostly stand alone.
        chunks = min(_MOST_CHUNKS, count if recovered else -(-count // job.options.chunk_size))
        deliveries = await self._queue.receive(queue, chunks, self._settings.lease_seconds)
        _set_poll(lane, self._clock.monotonic(), empty=not deliveries, recovered=recovered)
        if not deliveries:
            return False
        self._held_bytes += sum(len(delivery.body) for delivery in deliveries)
        try:
            await self._admit(lane, queue, deliveries, recovered=recovered)
        except Exception:
            # Nothing of them has started, so that it must not count as a lost start.
            unfed = [delivery.receipt for delivery in deliveries if delivery.receipt not in lane.chunks]
            await self._queue.release(queue, unfed, 0.0)
            raise
        if min(lane.next_poll, lane.next_recovery) <= 0.0 and (lane.want == 0 or job.kind in LONG_KINDS):
            # All of it had ended already, as after a crash: no runner will ask for more. Or there is room for more
            # long ones, which are taken one at a time.
            self._wake()
        return True

    async def _admit(self, lane: Lane, queue: QueueName, deliveries: list[Delivery], *, recovered: bool) -> None:
        """The status guard: what has ended already does not start again."""
        chunks = await self._decoded(lane, queue, deliveries)
        indexes = [ref.index for _, chunk in chunks for ref in chunk.refs]
        live = await self._tasks.unfinished(lane.job.key, indexes)
        most = max(1, self._settings.max_lost_starts)
        ended: list[str] = []
        later: list[str] = []
        for delivery, chunk in chunks:
            refs = [ref for ref in chunk.refs if ref.index in live]
            held = LeasedChunk(
                queue,
                delivery.receipt,
                len(refs),
                suspect=chunk.alone or delivery.receives > 1,
                recovered=recovered,
                size=len(delivery.body),
                turn=chunk.turn,
            )
            start = delivery.lost_starts + 1
            if not refs:
                ended.append(delivery.receipt)
            elif chunk.lost:
                await self._give_up(lane.job, held, refs[0], chunk.lost, chunk.code or WORKER_LOST)
            elif delivery.receives > 1 and len(refs) == 1 and await self.turn_of(lane.job, refs[0]) > chunk.turn:
                # The monitor has sent its task again: that message counts.
                ended.append(delivery.receipt)
            elif lane.job.kind in LONG_KINDS:
                # Their lost starts are counted in their rows: see progress.py.
                lane.feed(held, refs)
            elif start > most and len(refs) > 1:
                await self._try_alone(lane.job, held, refs)
            elif start > most:
                why = f"The worker was lost {delivery.lost_starts} times while it ran this task."
                await self._give_up(lane.job, held, refs[0], why)
            elif (chunk.alone or start == most > 1) and not self._on_trial_now(held):
                later.append(delivery.receipt)
            else:
                lane.feed(held, refs)
        if ended:
            await self._queue.ack(queue, ended)
        if later:
            await self._queue.release(queue, later, _TRIAL_PAUSE)
            if lane.want == 0:
                _delay_poll(lane, self._clock.monotonic() + _TRIAL_PAUSE, recovered=recovered)

    def _on_trial_now(self, held: LeasedChunk) -> bool:
        """One chunk at a time has its last start, or is one of those that were split: what a worker dies of would
        otherwise cost all that it holds their last start too."""
        trial = self._on_trial
        if trial is not None and trial.left > 0 and not trial.lost:
            return False
        self._on_trial = held
        return True

    async def _decoded(self, lane: Lane, queue: QueueName, deliveries: list[Delivery]) -> list[tuple[Delivery, Chunk]]:
        """The chunks in messages. One that holds none would fail everybody who takes it."""
        chunks = []
        for delivery in deliveries:
            try:
                chunks.append((delivery, decode(delivery.body)))
            except msgspec.DecodeError as error:
                log.error("message is not a chunk", run=lane.job.run.run_id, error=str(error))
                await self._queue.bury(queue, [delivery.receipt], f"The message is not a chunk: {error}")
        return chunks

    async def _try_alone(self, job: Job, held: LeasedChunk, refs: list[TaskRef]) -> None:
        """A chunk that outlived several workers may hold one task that kills them: each goes on by itself."""
        log.warning("chunk was lost with its workers; its tasks go on one by one", run=job.run.run_id, tasks=len(refs))
        alone = [encode(Chunk(job.key, [ref], alone=True)) for ref in refs]
        await send_all(self._queue, held.queue, alone, self._clock)
        crashpoint("worker.try_alone.between")
        await self._queue.ack(held.queue, [held.receipt])

    async def _give_up(self, job: Job, held: LeasedChunk, ref: TaskRef, message: str, code: str = WORKER_LOST) -> None:
        """Count starts, not failures: a task that takes its worker down leaves no failure behind."""
        log.error("task dead-lettered", run=job.run.run_id, index=ref.index, reason=message)
        detail = msgspec.json.encode(ResultDetail(error=TaskError(code, message))).decode()
        end = TaskEnd(ref.index, TaskStatus.FAILED, ref.attempt, None, code, detail, self._clock.now())
        finished = await self._tasks.finish(job.key, [end])
        data = msgspec.json.encode({"attempt": ref.attempt, "reason": message}).decode()
        await self._tasks.note(job.key, [TaskEvent(ref.index, end.at, "task.dead_lettered", data)])
        await self._lifecycle.settle(job, finished.counts)
        await self._queue.bury(held.queue, [held.receipt], message)


def _set_poll(lane: Lane, now: float, *, empty: bool, recovered: bool) -> None:
    """When the lane's queue is asked next: at once if it had something, else after a pause that grows."""
    pause = lane.recovery_pause if recovered else lane.poll_pause
    pause = min(_LONGEST_POLL, max(0.02, pause * 2)) if empty else 0.0
    if recovered:
        lane.recovery_pause, lane.next_recovery = pause, now + pause if empty else 0.0
    elif empty or lane.next_poll <= now:
        lane.poll_pause, lane.next_poll = pause, now + pause if empty else 0.0


def _delay_poll(lane: Lane, until: float, *, recovered: bool) -> None:
    if recovered:
        lane.next_recovery = until
    else:
        lane.next_poll = until
