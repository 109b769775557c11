"""Worker: finds runs with work, takes their chunks fairly, guards against what has ended already, and feeds lanes.

One tick: who is there → deal the slots → fill what runs low → keep what is held. The runners of the lanes and the
recorder work between the ticks.
"""

import asyncio
from collections.abc import Callable, Mapping

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.coordination.limits import TargetLimits
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.queue import Delivery, Queue, QueueName, run_queue
from conveyor.engines.records import Records
from conveyor.engines.tasks import TaskEvent, Tasks
from conveyor.faults import crashpoint
from conveyor.lifecycle import Lifecycle
from conveyor.model import LONG_KINDS, Chunk, Job, JobKind, ResultDetail, RunId, TaskEnd, TaskError, TaskRef
from conveyor.process.bodies import Bodies
from conveyor.process.dispatch import Demand, deal
from conveyor.process.executors import WORKER_LOST, Executor
from conveyor.process.fetchers import Fetchers
from conveyor.process.lane import Lane
from conveyor.process.recorder import HeldChunk, Recorder
from conveyor.process.remote_lane import RemoteLane
from conveyor.references import decode, encode, send_all
from conveyor.settings import Settings
from conveyor.states import WORKABLE, TaskStatus

log = structlog.get_logger()

_LOOK_FOR_RUNS = 0.25
_LONGEST_POLL = 1.0
_MOST_CHUNKS = 64
# What a lane may grow to before its first measure of how fast it is.
_FIRST_TASTE = 1
_DRAIN_SECONDS = 5.0
# How soon a chunk is looked at again that could not be tried while another was.
_TRIAL_PAUSE = 0.1
# How soon a worker without a free slot asks for a long task again.
_NO_SLOT_PAUSE = 2.0
# How soon a message comes again whose references went down with the process that had them.
_LOST_PAUSE = 0.5


class Worker:
    """A role; several may run in one process and many in a fleet."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        records: Records,
        tasks: Tasks,
        queue: Queue,
        coordinator: Coordinator,
        bodies: Bodies,
        lifecycle: Lifecycle,
        executors: Mapping[JobKind, Executor],
    ) -> None:
        self.name = clock.new_id("worker")
        self.wake: Callable[[], None] = lambda: None
        self.stopping = False
        self._settings = settings
        self._clock = clock
        self._records = records
        self._tasks = tasks
        self._queue = queue
        self._coordinator = coordinator
        self._lifecycle = lifecycle
        self._executors = executors
        self._recorder = Recorder(tasks, queue, bodies, lifecycle, coordinator, clock, settings.flush_seconds)
        self._recording: asyncio.Task[None] | None = None
        self._lanes: dict[RunId, Lane] = {}
        self._gone: list[HeldChunk] = []
        self._on_trial: HeldChunk | None = None
        self._turn = 0
        self._look_at = 0.0
        self._beat_at = clock.monotonic() + settings.lease_seconds / 3

    async def tick(self) -> float:
        if self._recording is None:
            self._recording = asyncio.create_task(self._recorder.run())
        now = self._clock.monotonic()
        if now >= self._look_at:
            await self._look_for_runs()
            self._look_at = now + _LOOK_FOR_RUNS
        if now >= self._beat_at:
            await self._keep_held()
            self._beat_at = now + self._settings.lease_seconds / 3
        if self._gone:
            await self._let_go()
        await self._fill()
        await self._deal()
        return self._rest()

    async def close(self) -> None:
        """Give running attempts a moment, record what they came to, give everything else back."""
        lanes = list(self._lanes.values())
        self._lanes.clear()
        undone = await asyncio.gather(*(lane.stop(_DRAIN_SECONDS) for lane in lanes))
        self._recorder.close()
        if self._recording is not None:
            await self._recording
        for lane, chunks in zip(lanes, undone, strict=True):
            await self._give_back(lane, chunks)

    async def _look_for_runs(self) -> None:
        active = await self._records.active_jobs()
        jobs = {job.run.run_id: job for job in active if job.state in WORKABLE and job.kind in self._executors}
        for run_id in [run_id for run_id in self._lanes if run_id not in jobs]:
            await self._drop(self._lanes[run_id], 0.0)
        for run_id, job in jobs.items():
            lane = self._lanes.get(run_id)
            if lane is None:
                self._lanes[run_id] = self._lane(job)
            elif lane.job != job:
                lane.follow(job)

    def _lane(self, job: Job) -> Lane:
        limits = TargetLimits(self._coordinator, job, self.name)
        executor = self._executors[job.kind]
        if isinstance(executor, Fetchers):
            return RemoteLane(job, executor, self._recorder, limits, self._clock, self._hungry, self._lost)
        return Lane(job, executor, self._recorder, limits, self._clock, self._hungry, self)

    def _hungry(self) -> None:
        self.wake()

    def _lost(self, job: Job, chunks: list[HeldChunk]) -> None:
        self._gone.extend(chunks)
        self.wake()

    async def overtaken(self, chunk: HeldChunk) -> None:
        """Another attempt has the task, and a message of its own: this one is not needed any more."""
        await self._queue.ack(chunk.queue, [chunk.receipt])

    async def condemned(self, job: Job, chunk: HeldChunk, ref: TaskRef, why: str) -> None:
        """A task that takes every process along goes back alone; whoever takes it next gives it up."""
        verdict = encode(Chunk(job.key, [ref], alone=True, lost=why))
        await send_all(self._queue, chunk.queue, [verdict], self._clock)
        crashpoint("worker.condemn.between")
        chunk.left -= 1
        if chunk.left == 0:
            await self._queue.ack(chunk.queue, [chunk.receipt])

    async def _let_go(self) -> None:
        """Have messages come again soon whose fetcher is gone; that they come again counts as a lost start."""
        gone, self._gone = self._gone, []
        for queue, chunks in _by_queue(gone).items():
            await self._queue.extend(queue, [chunk.receipt for chunk in chunks], _LOST_PAUSE)

    async def _drop(self, lane: Lane, grace: float) -> None:
        self._lanes.pop(lane.job.run.run_id, None)
        await self._give_back(lane, await lane.stop(grace))

    async def _give_back(self, lane: Lane, undone: list[HeldChunk]) -> None:
        if undone:
            queue = run_queue(lane.job.run.run_id)
            await self._queue.release(queue, [chunk.receipt for chunk in undone], 0.0)
            for chunk in undone:
                chunk.lost = True
        await self._coordinator.hold(f"run:{lane.job.run.run_id}", self.name, 0, 1, 1.0)

    async def _deal(self) -> None:
        self._turn += 1
        demands = [
            Demand(lane.job.tenant, run_id, min(lane.want, lane.job.options.concurrency), lane.job.options.priority)
            for run_id, lane in self._lanes.items()
        ]
        widths = deal(demands, self._settings.worker_concurrency, self._turn)
        for run_id, lane in self._lanes.items():
            lane.spread(await self._granted(lane, widths.get(run_id, 0)))
            surplus = lane.surplus()
            if surplus:
                await self._queue.release(run_queue(run_id), [chunk.receipt for chunk in surplus], 0.0)
                lane.next_poll = self._clock.monotonic() + _NO_SLOT_PAUSE

    async def _granted(self, lane: Lane, width: int) -> int:
        """What the run's concurrency leaves this worker; held, it is also the count of what runs. That is more than
        it is dealt while attempts from a wider deal go on."""
        ttl = self._settings.lease_seconds
        name = f"run:{lane.job.run.run_id}"
        want = max(width, lane.active)
        return min(width, await self._coordinator.hold(name, self.name, want, lane.job.options.concurrency, ttl))

    async def _fill(self) -> None:
        now = self._clock.monotonic()
        short = [(lane, self._shortage(lane)) for lane in self._lanes.values() if now >= lane.next_poll]
        await asyncio.gather(*(self._fill_lane(lane, count) for lane, count in short if count > 0))

    def _shortage(self, lane: Lane) -> int:
        if lane.width == 0 and lane.want == 0 and not lane.crowded:
            return _FIRST_TASTE
        return lane.shortage()

    async def _fill_lane(self, lane: Lane, count: int) -> None:
        job = lane.job
        chunks = min(_MOST_CHUNKS, -(-count // job.options.chunk_size))
        deliveries = await self._queue.receive(run_queue(job.run.run_id), chunks, self._settings.lease_seconds)
        if not deliveries:
            lane.poll_pause = min(_LONGEST_POLL, max(0.02, lane.poll_pause * 2))
            lane.next_poll = self._clock.monotonic() + lane.poll_pause
            return
        lane.poll_pause = lane.next_poll = 0.0
        try:
            await self._admit(lane, deliveries)
        except Exception:
            # Nothing of them has started, so that it must not count as a lost start.
            unfed = [delivery.receipt for delivery in deliveries if delivery.receipt not in lane.chunks]
            await self._queue.release(run_queue(job.run.run_id), unfed, 0.0)
            raise
        if lane.next_poll == 0.0 and (lane.want == 0 or job.kind in LONG_KINDS):
            # All of it had ended already, as after a crash: no runner will ask for more. Or there is room for more
            # long ones, which are taken one at a time.
            self.wake()

    async def _admit(self, lane: Lane, deliveries: list[Delivery]) -> None:
        """The status guard: what has ended already does not start again."""
        chunks = await self._decoded(lane, deliveries)
        indexes = [ref.index for _, chunk in chunks for ref in chunk.refs]
        live = await self._tasks.unfinished(lane.job.key, indexes)
        queue = run_queue(lane.job.run.run_id)
        most = max(1, self._settings.max_lost_starts)
        ended: list[str] = []
        later: list[str] = []
        for delivery, chunk in chunks:
            refs = [ref for ref in chunk.refs if ref.index in live]
            held = HeldChunk(queue, delivery.receipt, len(refs), suspect=chunk.alone or delivery.receives > 1)
            start = delivery.lost_starts + 1
            if not refs:
                ended.append(delivery.receipt)
            elif chunk.lost:
                await self._give_up(lane.job, held, refs[0], chunk.lost)
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
                lane.next_poll = self._clock.monotonic() + _TRIAL_PAUSE

    def _on_trial_now(self, held: HeldChunk) -> bool:
        """One chunk at a time has its last start, or is one of those that were split: what a worker dies of would
        otherwise cost all that it holds their last start too."""
        trial = self._on_trial
        if trial is not None and trial.left > 0 and not trial.lost:
            return False
        self._on_trial = held
        return True

    async def _decoded(self, lane: Lane, deliveries: list[Delivery]) -> list[tuple[Delivery, Chunk]]:
        """The chunks in messages. One that holds none would fail everybody who takes it."""
        chunks = []
        for delivery in deliveries:
            try:
                chunks.append((delivery, decode(delivery.body)))
            except msgspec.DecodeError as error:
                log.error("message is not a chunk", run=lane.job.run.run_id, error=str(error))
                queue = run_queue(lane.job.run.run_id)
                await self._queue.bury(queue, [delivery.receipt], f"The message is not a chunk: {error}")
        return chunks

    async def _try_alone(self, job: Job, held: HeldChunk, refs: list[TaskRef]) -> None:
        """A chunk that outlived several workers may hold one task that kills them: each goes on by itself."""
        log.warning("chunk was lost with its workers; its tasks go on one by one", run=job.run.run_id, tasks=len(refs))
        alone = [encode(Chunk(job.key, [ref], alone=True)) for ref in refs]
        await send_all(self._queue, held.queue, alone, self._clock)
        crashpoint("worker.try_alone.between")
        await self._queue.ack(held.queue, [held.receipt])

    async def _give_up(self, job: Job, held: HeldChunk, ref: TaskRef, message: str) -> None:
        """Count starts, not failures: a task that takes its worker down leaves no failure behind."""
        log.error("task dead-lettered", run=job.run.run_id, index=ref.index, reason=message)
        detail = msgspec.json.encode(ResultDetail(error=TaskError(WORKER_LOST, message))).decode()
        end = TaskEnd(ref.index, TaskStatus.FAILED, ref.attempt, None, WORKER_LOST, detail, self._clock.now())
        finished = await self._tasks.finish(job.key, [end])
        data = msgspec.json.encode({"attempt": ref.attempt, "reason": message}).decode()
        await self._tasks.note(job.key, [TaskEvent(ref.index, end.at, "task.dead_lettered", data)])
        await self._lifecycle.settle(job, finished.counts)
        await self._queue.bury(held.queue, [held.receipt], message)

    async def _keep_held(self) -> None:
        for run_id, lane in self._lanes.items():
            lane.forget_done()
            await lane.keep_targets()
            receipts = list(lane.chunks)
            if receipts:
                stale = await self._queue.extend(run_queue(run_id), receipts, self._settings.lease_seconds)
                for receipt in stale:
                    # Done in the meantime, or lapsed; either way nothing of it may start here any more.
                    lane.chunks[receipt].lost = True

    def _rest(self) -> float:
        now = self._clock.monotonic()
        polls = [lane.next_poll for lane in self._lanes.values() if lane.next_poll > now]
        return max(0.001, min([self._look_at, self._beat_at, *polls]) - now)


def _by_queue(chunks: list[HeldChunk]) -> dict[QueueName, list[HeldChunk]]:
    queues: dict[QueueName, list[HeldChunk]] = {}
    for chunk in chunks:
        queues.setdefault(chunk.queue, []).append(chunk)
    return queues
