"""Worker: finds runs with work, opens a lane for each, feeds the lanes, and deals its slots to them.

One tick: find runs and watch attempts → report to the breakers → renew leases → release lost and leftover messages →
fill lanes that run low → deal the slots. Lanes and the recorder work between the ticks.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from math import inf

import structlog

from conveyor.clock import Clock
from conveyor.coordination.breaker import Breakers
from conveyor.coordination.breaker_states import MAX_RUNS, split_key
from conveyor.coordination.limits import TargetLimits, run_slots
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.queue import Hastens, Queue, QueueName, recovery_queue, run_queue
from conveyor.engines.records import Records
from conveyor.engines.tasks import Tasks
from conveyor.errors import Unavailable
from conveyor.faults import crashpoint
from conveyor.jobs.chunks import encode, send_all
from conveyor.lifecycle import Lifecycle
from conveyor.model import WORKERS, Chunk, Job, JobKind, RunId, TaskRef
from conveyor.process.body_store import BodyStore
from conveyor.process.dispatch import Demand, deal
from conveyor.process.executors import Executor
from conveyor.process.feeder import Feeder
from conveyor.process.gate import Gate
from conveyor.process.heartbeat import Heartbeat
from conveyor.process.lane import Lane, LaneTools
from conveyor.process.recorder import LeasedChunk, Recorder
from conveyor.settings import Settings
from conveyor.states import WORKABLE

log = structlog.get_logger()

_LOOK_FOR_RUNS = 0.25
_DRAIN_SECONDS = 5.0
# How soon a worker without a free slot polls for a long task again.
_NO_SLOT_PAUSE = 2.0
_NO_LIMIT = 1 << 40
# How soon the queue redelivers a message whose references were lost with a fetcher.
_LOST_PAUSE = 0.5
# The longest delay of a task that waits for a breaker, on a queue that cannot hasten it once the breaker closes.
_MAX_BLOCKED_DELAY = 30.0

# The semaphore that all workers share if the fleet has a limit.
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
        bodies: BodyStore,
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
            records.documents,
            tasks,
            queue,
            bodies,
            lifecycle,
            coordinator,
            clock,
            settings.flush_seconds,
            self._on_requeued,
        )
        self._breakers = Breakers(coordinator, clock, settings, self.name)
        self._max_blocked_delay = inf if isinstance(queue, Hastens) else _MAX_BLOCKED_DELAY
        self._feeder = Feeder(settings, clock, records, tasks, queue, lifecycle, self.request_tick)
        self._heart = Heartbeat(records, coordinator, clock, self.name, settings.lease_seconds)
        self._recording: asyncio.Task[None] | None = None
        self._lanes: dict[RunId, Lane] = {}
        # Lanes that were stopped, with the unfinished messages that they still lease.
        self._leaving: list[tuple[Lane, list[LeasedChunk]]] = []
        # Runs whose lanes were stopped while calls of them go on (Executor.lingering).
        self._lingering: dict[RunId, Job] = {}
        self._lost: list[LeasedChunk] = []
        # Recovered and new tasks that dropped lanes had taken.
        self._past_counts = (0, 0)
        self._round = 0
        # Whether no other worker was alive when this one started.
        self._is_first = False
        # Runs whose tasks no longer have to wait for a breaker.
        self._to_hasten: set[RunId] = set()
        # Unfinished runs of all kinds and states.
        self._unfinished: frozenset[RunId] = frozenset()
        self._look_at = 0.0
        self._beat_at = clock.monotonic() + settings.lease_seconds / 3

    async def tick(self) -> float:
        if self._recording is None:
            self._recording = asyncio.create_task(self._recorder.run())
            await self._start()
        now = self._clock.monotonic()
        if now >= self._look_at:
            await self._look_for_runs()
            await self._watch()
            self._look_at = now + _LOOK_FOR_RUNS
        if self._breakers.is_urgent:
            await self._sync_breakers(None)
        if self._to_hasten:
            await self._hasten_blocked()
        if now >= self._beat_at:
            await self._renew_leases()
            self._beat_at = now + self._settings.lease_seconds / 3
        if self._lost:
            await self._redeliver_lost()
        if self._leaving:
            await self._release_leaving()
        if self._lingering:
            await self._keep_lingering()
        await self._feeder.fill(list(self._lanes.values()))
        await self._deal_slots()
        return self._delay()

    async def _start(self) -> None:
        """Send the first heartbeat. The first worker after a restart tries blocked targets at once."""
        self._is_first = await self._coordinator.permits_in_use(WORKERS) == 0
        await self._heart.beat([])
        if self._is_first:
            await self._breakers.half_open_all()
            await self._breakers.refresh()

    async def close(self) -> None:
        """Give running attempts a moment, record their outcomes, release everything else."""
        lanes = list(self._lanes.values())
        self._lanes.clear()
        unfinished = await asyncio.gather(*(lane.stop(_DRAIN_SECONDS) for lane in lanes))
        self._recorder.close()
        if self._recording is not None:
            await self._recording
        self._leaving += zip(lanes, unfinished, strict=True)
        await self._release_leaving()
        for run_id in self._lingering:
            # The executors close next, and end what lingers.
            await self._set_slots(run_id, 0)
        await self._breakers.report()
        await self._heart.close()

    @property
    def take_counts(self) -> tuple[int, int]:
        """How many recovered and how many new tasks this worker has taken."""
        counts = [self._past_counts, *(lane.take_counts for lane in self._lanes.values())]
        return sum(recovered for recovered, _ in counts), sum(new for _, new in counts)

    def request_tick(self) -> None:
        """Tick soon."""
        self.wake()

    def on_message(self, queue: QueueName) -> None:
        """A message was sent to this queue: poll it at once if its lane pauses because it was empty."""
        for lane in self._lanes.values():
            if lane.poll_pause > 0 and run_queue(lane.job.run.run_id) == queue:
                lane.poll_pause = lane.next_poll = 0.0
                self.wake()

    async def on_superseded(self, chunk: LeasedChunk) -> None:
        """A newer attempt owns one task of this chunk and has a message of its own."""
        chunk.left -= 1
        if chunk.left > 0:
            return
        try:
            await self._queue.ack(chunk.queue, [chunk.receipt])
        except Unavailable as error:
            # The queue redelivers it. By then its task is finished, or the chunk's generation is too old.
            log.warning("superseded message not acknowledged", queue=chunk.queue, error=repr(error))

    async def on_poisoned(self, job: Job, chunk: LeasedChunk, ref: TaskRef, reason: str) -> None:
        """Requeue a poison task alone, with the reason. The worker that receives it dead-letters it."""
        message = encode(Chunk(job.key, [ref], alone=True, lost=reason))
        await send_all(self._queue, chunk.queue, [message], self._clock)
        crashpoint("worker.condemn.between")
        chunk.left -= 1
        if chunk.left == 0:
            await self._queue.ack(chunk.queue, [chunk.receipt])

    def on_lost(self, chunks: list[LeasedChunk]) -> None:
        """A fetcher died with references of these chunks."""
        self._lost.extend(chunks)
        self.wake()

    def _on_requeued(self, run_id: RunId, delay: float) -> None:
        """The recorder has requeued references of a run; the first is due after `delay` seconds."""
        lane = self._lanes.get(run_id)
        if lane is not None:
            lane.next_recovery = min(lane.next_recovery, self._clock.monotonic() + delay)
            lane.recovery_pause = 0.0
            if delay < _LOOK_FOR_RUNS:
                self.wake()

    async def _look_for_runs(self) -> None:
        """Open lanes for runs with work and drop those of runs that are finished or paused."""
        active = await self._records.jobs.active_jobs()
        self._unfinished = frozenset(job.run.run_id for job in active)
        jobs = {job.run.run_id: job for job in active if job.state in WORKABLE and job.kind in self._executors}
        for run_id in [run_id for run_id in self._lanes if run_id not in jobs]:
            await self._drop(self._lanes[run_id], 0.0)
        for run_id, job in jobs.items():
            lane = self._lanes.get(run_id)
            if lane is None:
                self._lanes[run_id] = self._open_lane(job)
                if self._is_first or self._breakers.closed_lately(run_id):
                    self._to_hasten.add(run_id)
            elif lane.job != job:
                skips_breakers = lane.job.options.breaker.enabled and not job.options.breaker.enabled
                lane.follow(job)
                if skips_breakers:
                    self._to_hasten.add(run_id)
        self._is_first = False

    def _open_lane(self, job: Job) -> Lane:
        settings, executor = self._settings, self._executors[job.kind]
        tools = LaneTools(
            owner=self,
            recorder=self._recorder,
            limits=TargetLimits(self._coordinator, job, self.name, settings.lease_seconds),
            gate=Gate(self._breakers, job, executor.origins(job), settings.gateway, self._max_blocked_delay),
            clock=self._clock,
            recovery_ratio=settings.recovery_ratio,
            stuck_after=job.options.stuck_after or settings.stuck_after,
        )
        return executor.lane(job, tools)

    async def _sync_breakers(self, unfinished: Collection[RunId] | None) -> None:
        """Report outcomes to the breakers, and read which of them are open."""
        await self._breakers.report()
        if await self._breakers.refresh(unfinished):
            for lane in self._lanes.values():
                lane.recheck_targets()
        for key, state in self._breakers.take_closed().items():
            tenant = split_key(key)[0]
            knows_all = 0 < len(state.runs) < MAX_RUNS
            self._to_hasten.update(
                run_id
                for run_id, lane in self._lanes.items()
                if lane.job.tenant == tenant and (run_id in state.runs or not knows_all)
            )

    async def _hasten_blocked(self) -> None:
        """Make tasks that waited for a breaker start soon."""
        for run_id in list(self._to_hasten):
            if isinstance(self._queue, Hastens):
                await self._queue.hasten(recovery_queue(run_id))
            self._to_hasten.discard(run_id)
            lane = self._lanes.get(run_id)
            if lane is not None:
                lane.next_recovery = lane.recovery_pause = 0.0

    async def _watch(self) -> None:
        """Watch what runs: targets that fail, processes and attempts that hang, bytes that are leased."""
        await self._sync_breakers(self._unfinished)
        for executor in self._executors.values():
            executor.watch()
        for lane in self._lanes.values():
            for attempt in lane.watch():
                # Generations only grow, so this holds for chunks of other versions too.
                if await self._feeder.generation_of(lane.job, attempt.refs[0]) > attempt.generation:
                    attempt.supersede()
        self._feeder.count_leased_bytes(list(self._lanes.values()))

    async def _redeliver_lost(self) -> None:
        """Have the queue redeliver messages soon whose fetcher died. Each redelivery counts as a lost start."""
        lost, self._lost = self._lost, []
        for queue, chunks in _by_queue(lost).items():
            await self._queue.extend(queue, [chunk.receipt for chunk in chunks], _LOST_PAUSE)

    async def _drop(self, lane: Lane, grace: float) -> None:
        recovered, new = lane.take_counts
        self._past_counts = (self._past_counts[0] + recovered, self._past_counts[1] + new)
        self._lanes.pop(lane.job.run.run_id, None)
        self._leaving.append((lane, await lane.stop(grace)))

    async def _release_leaving(self) -> None:
        """Release messages of stopped lanes once all their outcomes are written. Until then their leases show the
        sweeper that references may still be sent to the queues of a finished run."""
        leaving, self._leaving = self._leaving, []
        for lane, chunks in leaving:
            if any(chunk.unwritten for chunk in chunks):
                self._leaving.append((lane, chunks))
                continue
            await self._release(chunks)
            for chunk in chunks:
                chunk.lost = True
            self._lingering[lane.job.run.run_id] = lane.job
            await self._keep_lingering()

    async def _keep_lingering(self) -> None:
        """Keep the slots of stopped runs until no call of them goes on: a job that replaces another waits for that."""
        for run_id, job in list(self._lingering.items()):
            if run_id in self._lanes:
                # It was resumed: its lane counts its slots.
                del self._lingering[run_id]
                continue
            count = self._executors[job.kind].lingering(run_id)
            await self._set_slots(run_id, count)
            if count == 0:
                del self._lingering[run_id]

    async def _set_slots(self, run_id: RunId, count: int) -> None:
        ttl = self._settings.lease_seconds
        await self._coordinator.acquire(run_slots(run_id), self.name, count, _NO_LIMIT, ttl)

    async def _release(self, chunks: list[LeasedChunk]) -> None:
        for queue, group in _by_queue(chunks).items():
            await self._queue.release(queue, [chunk.receipt for chunk in group], 0.0)

    async def _deal_slots(self) -> None:
        self._round += 1
        demands = [
            Demand(lane.job.tenant, run_id, min(lane.demand, lane.job.options.concurrency), lane.job.options.priority)
            for run_id, lane in self._lanes.items()
        ]
        widths = deal(demands, await self._slots(demands), self._round)
        for run_id, lane in self._lanes.items():
            lane.set_width(await self._granted_width(lane, widths.get(run_id, 0)))
            shed = lane.shed_long_tasks()
            if shed:
                await self._release(shed)
                lane.next_poll = lane.next_recovery = self._clock.monotonic() + _NO_SLOT_PAUSE

    async def _granted_width(self, lane: Lane, width: int) -> int:
        """Return how much of the width the run's concurrency leaves to this worker. The semaphore also counts what
        runs, so the worker asks for more than the width while attempts of a wider deal go on."""
        ttl = self._settings.lease_seconds
        name = run_slots(lane.job.run.run_id)
        want = max(width, lane.active)
        return min(width, await self._coordinator.acquire(name, self.name, want, lane.job.options.concurrency, ttl))

    async def _slots(self, demands: list[Demand]) -> int:
        """Return how many tasks this worker may run at once: within its own limit and the fleet's."""
        own, fleet = self._settings.worker_concurrency, self._settings.fleet_concurrency
        if fleet == 0:
            return own
        want = min(own, sum(demand.want for demand in demands))
        want = max(want, sum(lane.active for lane in self._lanes.values()))
        return min(own, await self._coordinator.acquire(ROLE, self.name, want, fleet, self._settings.lease_seconds))

    async def _renew_leases(self) -> None:
        """Renew the leases of messages, slots and probes, and send a heartbeat."""
        for lane in self._lanes.values():
            lane.forget_finished()
            lane.renew_slots()
            for queue, chunks in _by_queue(list(lane.chunks.values())).items():
                receipts = [chunk.receipt for chunk in chunks]
                for receipt in await self._queue.extend(queue, receipts, self._settings.lease_seconds):
                    # Acknowledged meanwhile, or expired. Either way no task of it may start here.
                    lane.chunks[receipt].lost = True
        await self._breakers.renew_probes()
        await self._heart.beat([task for lane in self._lanes.values() for task in lane.long_tasks()])

    def _delay(self) -> float:
        """Return the seconds until the next tick."""
        now = self._clock.monotonic()
        polls = [at for lane in self._lanes.values() for at in (lane.next_poll, lane.next_recovery) if at > now]
        return max(0.001, min([self._look_at, self._beat_at, *polls]) - now)


def _by_queue(chunks: list[LeasedChunk]) -> dict[QueueName, list[LeasedChunk]]:
    queues: dict[QueueName, list[LeasedChunk]] = {}
    for chunk in chunks:
        queues.setdefault(chunk.queue, []).append(chunk)
    return queues
