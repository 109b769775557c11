"""Worker: finds runs with work, takes their chunks fairly, guards against what has ended already, and feeds lanes.

One tick: who is there → deal the slots → fill what runs low → keep what is held. The runners of the lanes and the
recorder work between the ticks.
"""

import asyncio
from collections.abc import Callable, Mapping

import structlog

from conveyor.clock import Clock
from conveyor.coordination.breaker import Breakers
from conveyor.coordination.limits import TargetLimits, run_slots
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.queue import Queue, QueueName, run_queue
from conveyor.engines.records import Records
from conveyor.engines.tasks import Tasks
from conveyor.errors import Unavailable
from conveyor.faults import crashpoint
from conveyor.jobs.chunks import encode, send_all
from conveyor.lifecycle import Lifecycle
from conveyor.model import (
    Chunk,
    Job,
    JobKind,
    RunId,
    TaskRef,
)
from conveyor.process.body_store import Bodies
from conveyor.process.dispatch import Demand, deal
from conveyor.process.executors import Executor
from conveyor.process.executors.fetch.fetchers import Fetchers
from conveyor.process.executors.fetch.remote_lane import RemoteLane
from conveyor.process.feeder import Feeder
from conveyor.process.gate import Gate
from conveyor.process.heartbeat import Heartbeat
from conveyor.process.lane import Lane
from conveyor.process.recorder import LeasedChunk, Recorder
from conveyor.settings import Settings
from conveyor.states import WORKABLE

log = structlog.get_logger()

_LOOK_FOR_RUNS = 0.25
_DRAIN_SECONDS = 5.0
# How soon a worker without a free slot asks for a long task again.
_NO_SLOT_PAUSE = 2.0
# How soon a message comes again whose references went down with the process that had them.
_LOST_PAUSE = 0.5

# What all workers hold of together, where the fleet has a limit.
ROLE = "role:worker"


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
        self._feeder = Feeder(settings, clock, records, tasks, queue, lifecycle, self._hungry)
        self._heart = Heartbeat(records, coordinator, clock, self.name, settings.lease_seconds)
        self._recording: asyncio.Task[None] | None = None
        self._lanes: dict[RunId, Lane] = {}
        # Lanes of runs that are not ours to work on any more, with the messages that they still hold.
        self._leaving: list[tuple[Lane, list[LeasedChunk]]] = []
        self._gone: list[LeasedChunk] = []
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
        if self._leaving:
            await self._leave()
        await self._feeder.fill(list(self._lanes.values()))
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
        self._leaving += zip(lanes, undone, strict=True)
        await self._leave()
        await self._breakers.tell()
        await self._heart.close()

    @property
    def taken(self) -> tuple[int, int]:
        """Tasks that were taken up: those that came by the recovery queue, and new ones."""
        counts = [self._taken, *(lane.taken for lane in self._lanes.values())]
        return sum(again for again, _ in counts), sum(new for _, new in counts)

    async def _look_for_runs(self) -> None:
        active = await self._records.jobs.active_jobs()
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
        limits = TargetLimits(self._coordinator, job, self.name, self._settings.lease_seconds)
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
                if await self._feeder.turn_of(lane.job, attempt.refs[0]) > attempt.turn:
                    attempt.overtake()
        self._feeder.weigh(list(self._lanes.values()))

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

    def _lost(self, job: Job, chunks: list[LeasedChunk]) -> None:
        self._gone.extend(chunks)
        self.wake()

    async def overtaken(self, chunk: LeasedChunk) -> None:
        """Another attempt has the task, and a message of its own: this one is not needed for it any more."""
        chunk.left -= 1
        if chunk.left > 0:
            return
        try:
            await self._queue.ack(chunk.queue, [chunk.receipt])
        except Unavailable as error:
            # It comes again, and finds the task with the other attempt or ended.
            log.warning("a message that is not needed was not removed", queue=chunk.queue, error=repr(error))

    async def condemned(self, job: Job, chunk: LeasedChunk, ref: TaskRef, why: str) -> None:
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
        self._leaving.append((lane, await lane.stop(grace)))

    async def _leave(self) -> None:
        """Give messages back once nothing of them waits to be written. Until then they are held, by which the sweeper
        knows that references may still be sent to the queues of an ended run."""
        leaving, self._leaving = self._leaving, []
        for lane, chunks in leaving:
            if any(chunk.unwritten for chunk in chunks):
                self._leaving.append((lane, chunks))
            else:
                await self._give_back(lane, chunks)

    async def _give_back(self, lane: Lane, undone: list[LeasedChunk]) -> None:
        await self._release(undone)
        for chunk in undone:
            chunk.lost = True
        await self._coordinator.hold(run_slots(lane.job.run.run_id), self.name, 0, 1, 1.0)

    async def _release(self, chunks: list[LeasedChunk]) -> None:
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
        name = run_slots(lane.job.run.run_id)
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

    async def _keep_held(self) -> None:
        for lane in self._lanes.values():
            lane.forget_done()
            lane.keep_targets()
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


def _by_queue(chunks: list[LeasedChunk]) -> dict[QueueName, list[LeasedChunk]]:
    queues: dict[QueueName, list[LeasedChunk]] = {}
    for chunk in chunks:
        queues.setdefault(chunk.queue, []).append(chunk)
    return queues
