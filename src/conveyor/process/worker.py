"""Worker: finds runs with work, takes their chunks fairly, guards against what has ended already, and feeds lanes.

One tick: who is there → deal the slots → fill what runs low → keep what is held. The runners of the lanes and the
recorder work between the ticks.
"""

import asyncio
from collections.abc import Callable, Mapping

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.coordination.breaker import Breakers
from conveyor.coordination.limits import TargetLimits
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.queue import Delivery, Queue, QueueName, recovery_queue, run_queue
from conveyor.engines.records import Records
from conveyor.engines.tasks import TaskEvent, Tasks
from conveyor.errors import Unavailable
from conveyor.faults import crashpoint
from conveyor.lifecycle import Lifecycle
from conveyor.model import (
    LONG_KINDS,
    PROGRESS,
    Chunk,
    Job,
    JobKind,
    Progress,
    ResultDetail,
    RunId,
    TaskEnd,
    TaskError,
    TaskRef,
    progress_id,
)
from conveyor.process.bodies import Bodies
from conveyor.process.dispatch import Demand, deal
from conveyor.process.executors import WORKER_LOST, Executor
from conveyor.process.fetchers import Fetchers
from conveyor.process.gate import Gate
from conveyor.process.heartbeat import Heartbeat
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
# How soon more is looked through of a run of which all that came was sent back for its targets.
_HELD_UP_PAUSE = 1.0

# What all workers hold of together, where the fleet has a limit.
ROLE = "role:worker"

_progress = msgspec.json.Decoder(Progress)


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
        self._recorder = Recorder(
            tasks, queue, bodies, lifecycle, coordinator, clock, settings.flush_seconds, self._sent_back
        )
        self._breakers = Breakers(coordinator, clock, settings, self.name)
        self._heart = Heartbeat(records, coordinator, clock, self.name, settings.lease_seconds)
        self._recording: asyncio.Task[None] | None = None
        self._lanes: dict[RunId, Lane] = {}
        self._gone: list[HeldChunk] = []
        self._on_trial: HeldChunk | None = None
        # What the messages weigh that it holds, as counted a moment ago.
        self._held_bytes = 0
        # Tasks that were taken up, of lanes that are gone: those that came again, and new ones.
        self._taken = (0, 0)
        self._turn = 0
        self._look_at = 0.0
        self._beat_at = clock.monotonic() + settings.lease_seconds / 3

    async def tick(self) -> float:
        if self._recording is None:
            self._recording = asyncio.create_task(self._recorder.run())
            await self._heart.beat([])
        now = self._clock.monotonic()
        if now >= self._look_at:
            await self._look_for_runs()
            await self._watch()
            self._look_at = now + _LOOK_FOR_RUNS
        if self._breakers.urgent:
            await self._ask_breakers()
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
        await self._breakers.tell()
        await self._heart.close()

    @property
    def taken(self) -> tuple[int, int]:
        """Tasks that were taken up: those that came by the recovery queue, and new ones."""
        counts = [self._taken, *(lane.taken for lane in self._lanes.values())]
        return sum(again for again, _ in counts), sum(new for _, new in counts)

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
        gate = Gate(self._breakers, job, executor.target, self._settings.gateway)
        parts = (self._recorder, limits, self._clock, self._hungry, gate)
        ratio = self._settings.recovery_ratio
        if isinstance(executor, Fetchers):
            return RemoteLane(job, executor, *parts, self._lost, recovery_ratio=ratio)
        stuck_after = job.options.stuck_after or self._settings.stuck_after
        return Lane(job, executor, *parts, self, recovery_ratio=ratio, stuck_after=stuck_after)

    async def _ask_breakers(self) -> None:
        """Tell what attempts came to, and hear which targets are down."""
        await self._breakers.tell()
        if await self._breakers.look():
            for lane in self._lanes.values():
                lane.hold_back()

    async def _watch(self) -> None:
        """Look after what is under way: targets that fail, attempts that hang, what all of it weighs."""
        await self._ask_breakers()
        for executor in self._executors.values():
            if isinstance(executor, Fetchers):
                executor.watch()
        for lane in self._lanes.values():
            for attempt in lane.watch():
                # Also of another version: a task is sent again under a turn that only grows.
                if await self._turn_of(lane.job, attempt.refs[0]) > attempt.turn:
                    attempt.overtaken = True
                    attempt.task.cancel()
        self._held_bytes = sum(lane.held_bytes() for lane in self._lanes.values())

    async def _turn_of(self, job: Job, ref: TaskRef) -> int:
        """How often the monitor has sent the task again."""
        row = await self._records.row(PROGRESS, job.tenant, progress_id(job.run.run_id, ref.index))
        try:
            return 0 if row is None else _progress.decode(row.body).turn
        except msgspec.MsgspecError:
            return 0

    def _sent_back(self, run_id: RunId, delay: float) -> None:
        lane = self._lanes.get(run_id)
        if lane is not None:
            lane.next_recovery = min(lane.next_recovery, self._clock.monotonic() + delay)
            lane.recovery_pause = 0.0
            if delay < _LOOK_FOR_RUNS:
                self.wake()

    def heard(self, queue: QueueName) -> None:
        """Something was sent to this queue: a lane that pauses because it found nothing looks again."""
        for lane in self._lanes.values():
            if lane.poll_pause > 0 and run_queue(lane.job.run.run_id) == queue:
                lane.poll_pause = lane.next_poll = 0.0
                self.wake()

    def _hungry(self) -> None:
        self.wake()

    def _lost(self, job: Job, chunks: list[HeldChunk]) -> None:
        self._gone.extend(chunks)
        self.wake()

    async def overtaken(self, chunk: HeldChunk) -> None:
        """Another attempt has the task, and a message of its own: this one is not needed for it any more."""
        chunk.left -= 1
        if chunk.left > 0:
            return
        try:
            await self._queue.ack(chunk.queue, [chunk.receipt])
        except Unavailable as error:
            # It comes again, and finds the task with the other attempt or ended.
            log.warning("a message that is not needed was not removed", queue=chunk.queue, error=repr(error))

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
        self._taken = (self._taken[0] + lane.taken[0], self._taken[1] + lane.taken[1])
        self._lanes.pop(lane.job.run.run_id, None)
        await self._give_back(lane, await lane.stop(grace))

    async def _give_back(self, lane: Lane, undone: list[HeldChunk]) -> None:
        await self._release(undone)
        for chunk in undone:
            chunk.lost = True
        await self._coordinator.hold(f"run:{lane.job.run.run_id}", self.name, 0, 1, 1.0)

    async def _release(self, chunks: list[HeldChunk]) -> None:
        for queue, some in _by_queue(chunks).items():
            await self._queue.release(queue, [chunk.receipt for chunk in some], 0.0)

    async def _deal(self) -> None:
        self._turn += 1
        demands = [
            Demand(lane.job.tenant, run_id, min(lane.want, lane.job.options.concurrency), lane.job.options.priority)
            for run_id, lane in self._lanes.items()
        ]
        widths = deal(demands, await self._slots(demands), self._turn)
        for run_id, lane in self._lanes.items():
            lane.spread(await self._granted(lane, widths.get(run_id, 0)))
            surplus = lane.surplus()
            if surplus:
                await self._release(surplus)
                lane.next_poll = lane.next_recovery = self._clock.monotonic() + _NO_SLOT_PAUSE

    async def _granted(self, lane: Lane, width: int) -> int:
        """What the run's concurrency leaves this worker; held, it is also the count of what runs. That is more than
        it is dealt while attempts from a wider deal go on."""
        ttl = self._settings.lease_seconds
        name = f"run:{lane.job.run.run_id}"
        want = max(width, lane.active)
        return min(width, await self._coordinator.hold(name, self.name, want, lane.job.options.concurrency, ttl))

    async def _slots(self, demands: list[Demand]) -> int:
        """How many tasks this worker may run at once: its own limit, and what that of the fleet leaves it."""
        own, most = self._settings.worker_concurrency, self._settings.fleet_concurrency
        if most == 0:
            return own
        want = min(own, sum(demand.want for demand in demands))
        want = max(want, sum(lane.active for lane in self._lanes.values()))
        return min(own, await self._coordinator.hold(ROLE, self.name, want, most, self._settings.lease_seconds))

    async def _fill(self) -> None:
        now = self._clock.monotonic()
        lanes = list(self._lanes.values())
        first = self._turn % len(lanes) if lanes else 0
        short = [(lane, *self._shortage(lane, now)) for lane in lanes[first:] + lanes[:first]]
        await asyncio.gather(*(self._fill_lane(lane, again, new) for lane, again, new in short if again + new > 0))

    def _shortage(self, lane: Lane, now: float) -> tuple[int, int]:
        """How many references it should be given, of those that come again and of new ones."""
        if lane.closed_until() is not None or self._overweight(lane):
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
            self.wake()
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
            held = HeldChunk(
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
            elif delivery.receives > 1 and len(refs) == 1 and await self._turn_of(lane.job, refs[0]) > chunk.turn:
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

    def _on_trial_now(self, held: HeldChunk) -> bool:
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

    async def _try_alone(self, job: Job, held: HeldChunk, refs: list[TaskRef]) -> None:
        """A chunk that outlived several workers may hold one task that kills them: each goes on by itself."""
        log.warning("chunk was lost with its workers; its tasks go on one by one", run=job.run.run_id, tasks=len(refs))
        alone = [encode(Chunk(job.key, [ref], alone=True)) for ref in refs]
        await send_all(self._queue, held.queue, alone, self._clock)
        crashpoint("worker.try_alone.between")
        await self._queue.ack(held.queue, [held.receipt])

    async def _give_up(self, job: Job, held: HeldChunk, ref: TaskRef, message: str, code: str = WORKER_LOST) -> None:
        """Count starts, not failures: a task that takes its worker down leaves no failure behind."""
        log.error("task dead-lettered", run=job.run.run_id, index=ref.index, reason=message)
        detail = msgspec.json.encode(ResultDetail(error=TaskError(code, message))).decode()
        end = TaskEnd(ref.index, TaskStatus.FAILED, ref.attempt, None, code, detail, self._clock.now())
        finished = await self._tasks.finish(job.key, [end])
        data = msgspec.json.encode({"attempt": ref.attempt, "reason": message}).decode()
        await self._tasks.note(job.key, [TaskEvent(ref.index, end.at, "task.dead_lettered", data)])
        await self._lifecycle.settle(job, finished.counts)
        await self._queue.bury(held.queue, [held.receipt], message)

    async def _keep_held(self) -> None:
        for lane in self._lanes.values():
            lane.forget_done()
            await lane.keep_targets()
            for queue, chunks in _by_queue(list(lane.chunks.values())).items():
                receipts = [chunk.receipt for chunk in chunks]
                for receipt in await self._queue.extend(queue, receipts, self._settings.lease_seconds):
                    # Done in the meantime, or lapsed; either way nothing of it may start here any more.
                    lane.chunks[receipt].lost = True
        await self._breakers.keep()
        await self._heart.beat([task for lane in self._lanes.values() for task in lane.long_tasks()])

    def _rest(self) -> float:
        now = self._clock.monotonic()
        polls = [at for lane in self._lanes.values() for at in (lane.next_poll, lane.next_recovery) if at > now]
        return max(0.001, min([self._look_at, self._beat_at, *polls]) - now)


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


def _by_queue(chunks: list[HeldChunk]) -> dict[QueueName, list[HeldChunk]]:
    queues: dict[QueueName, list[HeldChunk]] = {}
    for chunk in chunks:
        queues.setdefault(chunk.queue, []).append(chunk)
    return queues
