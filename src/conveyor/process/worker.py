"""Worker: opens a lane for each run that it serves, feeds the lanes, and deals its slots to them.

One tick: open and drop lanes → release lost and leftover messages → fill lanes that run low → deal the slots → leave
runs that are quiet. Lanes and the recorder work between the ticks. So that no engine holds up another, errands beside
the ticks look for runs (seats.py), share breakers (breaker_sharing.py), watch attempts and send heartbeats, and
lease_renewal.py renews leases.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import inf

import structlog

from conveyor.clock import Clock
from conveyor.coordination.breaker import Breakers
from conveyor.coordination.limits import TargetLimits, run_slots
from conveyor.coordination.paces import Paces
from conveyor.coordination.ready_marks import owner_of
from conveyor.coordination.tenant_workers import TenantWorkers
from conveyor.coordination.trusted_time import CLOCK_LOOK_SECONDS, TrustedTime
from conveyor.coordination.waits import publish_disk_wait
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.queue import Hastens, Queue, QueueName, recovery_queue, run_of
from conveyor.engines.records import AtomicFlush, Records
from conveyor.engines.tasks import Tasks
from conveyor.errors import ConveyorError, DiskUnwritable, Unavailable
from conveyor.faults import crashpoint
from conveyor.jobs.announced_workers import WorkerAnnouncement
from conveyor.jobs.chunks import encode, send_all
from conveyor.lifecycle import Lifecycle
from conveyor.model import WORKERS, Chunk, Job, JobKind, RunId, TaskRef
from conveyor.process.arrivals import Arrivals
from conveyor.process.body_store import BodyStore
from conveyor.process.breakdown_parts import BreakdownParts
from conveyor.process.breaker_sharing import BreakerSharing
from conveyor.process.dropped_lanes import DroppedLanes
from conveyor.process.earlier_outcomes import EarlierOutcomes
from conveyor.process.errand import Errand
from conveyor.process.executors import Executor
from conveyor.process.executors.stored_body_executor import StoredBodyExecutor, is_extract_only, without_targets
from conveyor.process.extraction import Extractor
from conveyor.process.feeder import Feeder
from conveyor.process.gate import Gate
from conveyor.process.heartbeat import Heartbeat
from conveyor.process.in_progress_sharing import InProgressSharing
from conveyor.process.lane import Lane, LaneTools
from conveyor.process.lease_renewal import LeaseRenewal, by_queue
from conveyor.process.load_tally import LoadTally
from conveyor.process.page_copies import PageCopies
from conveyor.process.recorder import LeasedChunk, Recorder
from conveyor.process.run_permits import RunPermits
from conveyor.process.seats import SeatChanges, Seats
from conveyor.process.slot_dealer import SlotDealer
from conveyor.process.turnover import Turnover
from conveyor.settings import Settings

log = structlog.get_logger()

_LOOK_FOR_RUNS = 0.25
# How often a worker without lanes looks at breakers.
_IDLE_SECONDS = 1.0
# How long records may take to say whether an attempt was superseded.
_WATCH_PATIENCE = 2.0
# How long a lane is quiet before the worker leaves the run, and how long it waits in vain for a slot of the run.
_QUIET_SECONDS = 1.0
_DRAIN_SECONDS = 5.0
# How often to share the paces of hosts.
_PACE_SECONDS = 1.0
# How often to share which tenants are served.
_TENANT_SECONDS = 2.0
# How soon a worker without a free slot polls for a long task again.
_NO_SLOT_PAUSE = 2.0
# How soon the queue redelivers a message whose references were lost with a fetcher.
_LOST_PAUSE = 0.5
# The longest delay of a task that waits for a breaker, on a queue that cannot hasten it once the breaker closes.
_MAX_BLOCKED_DELAY = 30.0


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
        atomic_flush: AtomicFlush | None = None,
        handlers: Sequence[str] | None = None,
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
        self._extractor = Extractor(executors.get(JobKind.PYTHON), bodies.blobs, clock)
        self._copies = PageCopies(bodies.blobs, clock)
        self._earlier = EarlierOutcomes(records, tasks)
        self._stored = StoredBodyExecutor(self._earlier)
        self._lanes: dict[RunId, Lane] = {}
        load = LoadTally(coordinator, self.name)
        self._breakdowns = BreakdownParts(records.documents, clock, self.name, load)
        self._deadline_time = TrustedTime(records.documents, clock, deadlines=True)
        self._recorder = Recorder(
            records.documents,
            tasks,
            queue,
            bodies,
            lifecycle,
            coordinator,
            clock,
            self._breakdowns,
            settings.flush_seconds,
            self._on_requeued,
            atomic_flush,
            self._is_busy,
            self._on_finished,
            self._deadline_time.peek,
        )
        self._breakers = Breakers(coordinator, clock, settings, self.name, self._deadline_time.peek)
        self._paces = Paces(coordinator, clock, self.name)
        self._max_blocked_delay = inf if isinstance(queue, Hastens) else _MAX_BLOCKED_DELAY
        self._feeder = Feeder(settings, clock, records, tasks, queue, lifecycle, self.request_tick)
        lease = settings.lease_seconds
        self._heart = Heartbeat(records, coordinator, clock, self.name, lease)
        self._seats = Seats(
            coordinator, records.jobs, tasks, clock, self.name, lease, executors.keys(), self._has_in_flight
        )
        self._arrivals, self._turnover = Arrivals(queue), Turnover(clock)
        self._permits = RunPermits(coordinator, clock, self.name, lease)
        self._renewal = LeaseRenewal(queue, clock, lease, self._in_flight)
        self._tenant_workers = TenantWorkers(coordinator, self.name)
        self._dealer = SlotDealer(settings, clock, self._permits, self._seats.ask_help, self._tenant_workers.count)
        self._dropped = DroppedLanes(queue, coordinator, executors, self._lanes, self.name, lease)
        self._sharing = BreakerSharing(
            self._breakers, coordinator, queue, clock, self._lanes, lambda: self._seats.is_built
        )
        self._look_errand = Errand("look for runs", self._look, clock)
        self._share_errand = Errand("share breakers", self._share, clock)
        watching, beating = Errand("watch", self._watch, clock), Errand("heartbeat", self._beat, clock)
        slots = settings.worker_concurrency
        self._announcement = WorkerAnnouncement(
            records.documents, clock, self.name, slots, handlers, settings.allow_private_targets
        )
        announcing = Errand("announce", self._announcement.renew, clock)
        self._breakdown_errand = Errand("write breakdowns", self._breakdowns.write_due, clock)
        self._errands = [
            self._look_errand,
            self._share_errand,
            watching,
            beating,
            announcing,
            Errand("share paces", self._share_paces, clock),
            Errand("share tenants", self._share_tenants, clock),
            Errand(
                "share tasks in progress", InProgressSharing(coordinator, clock, self.name, self._lanes).share, clock
            ),
            self._breakdown_errand,
            Errand("share load", load.share, clock),
            Errand("look at the clock", self._look_at_clock, clock),
        ]
        self._recording: asyncio.Task[None] | None = None
        # What looks have changed, for the next tick.
        self._changes: list[SeatChanges] = []
        self._lost: list[LeasedChunk] = []
        # Runs that this worker has finished, and whose lanes are still open.
        self._finished: list[RunId] = []
        # Whether somebody wants a whole tick, or only that unused slots are passed on; when the next whole one is due.
        self._is_asked = False
        self._is_passing_on = False
        self._round_at = 0.0
        self._is_started = False

    async def tick(self) -> float:
        if self._recording is None:
            # Before any task: the clock may have jumped while nothing ran.
            await self._deadline_time.now()
            self._recording = asyncio.create_task(self._recorder.run())
            self._renewal.start()
            for errand in self._errands:
                errand.start()
        while self._changes:
            await self._apply(self._changes.pop(0))
        if self._finished and self._turnover.is_full:
            # There may be room for the next runs.
            self._look_errand.hurry()
        while self._finished:
            await self._leave_finished(self._finished.pop())
        if self._is_passing_on and not self._is_asked and self._clock.monotonic() < self._round_at:
            # Hundreds of small runs end one after the other: what each leaves takes no look at all the others.
            self._is_passing_on = False
            await self._dealer.pass_on_idle(self._lanes)
            self._look_if_room()
            return max(0.001, self._round_at - self._clock.monotonic())
        self._is_passing_on = self._is_asked = False
        if self._breakers.is_urgent:
            self._share_errand.hurry()
        if self._sharing.to_hasten:
            await self._sharing.hasten()
        if self._lost:
            await self._redeliver_lost()
        if self._dropped:
            await self._dropped.release_written()
            self._share_errand.hurry()
        try:
            await self._feeder.fill(list(self._lanes.values()))
        except DiskUnwritable as error:
            await publish_disk_wait(self._coordinator, list(self._lanes), error)
            raise
        self._recorder.check_batch()
        await self._dealer.deal(list(self._lanes.values()))
        await self._shed_long_tasks()
        await self._leave_quiet()
        delay = self._delay()
        self._round_at = self._clock.monotonic() + delay
        return delay

    async def close(self) -> None:
        """Give running attempts a moment, record their outcomes, release everything else."""
        lanes = list(self._lanes.values())
        self._lanes.clear()
        for lane in lanes:
            self._dealer.forget(lane)
        unfinished = await asyncio.gather(*(lane.stop(_DRAIN_SECONDS) for lane in lanes))
        self._recorder.close()
        if self._recording is not None:
            await self._recording
        await self.halt()
        await self._breakdowns.close()
        for lane, chunks in zip(lanes, unfinished, strict=True):
            self._dropped.add(lane, chunks)
        await self._dropped.close()
        await self._seats.close()
        await self._breakers.report()
        try:
            await self._heart.close()
            await self._announcement.close()
        except ConveyorError as error:
            log.warning("heartbeat not ended; it expires", error=str(error))

    async def halt(self) -> None:
        """Stop what goes on beside the ticks."""
        await asyncio.gather(self._renewal.close(), *(errand.close() for errand in self._errands))

    @property
    def take_counts(self) -> tuple[int, int]:
        """How many recovered and how many new tasks this worker has taken."""
        counts = [self._dropped.take_counts, *(lane.take_counts for lane in self._lanes.values())]
        return sum(recovered for recovered, _ in counts), sum(new for _, new in counts)

    def request_tick(self) -> None:
        """Tick soon."""
        self._is_asked = True
        self.wake()

    def on_slots_freed(self, lane: Lane) -> None:
        """Attempts beyond the lane's width have ended: their slots may go to other lanes."""
        self._dealer.on_slots_freed(lane)

    def on_slots_idle(self, lane: Lane) -> None:
        """A lane has no references for slots that it has: they go to others that wait."""
        if self._dealer.is_contended or self._turnover.is_full:
            self._dealer.note_idle(lane)
            self._is_passing_on = True
            self.wake()

    def _pass_on_soon(self) -> None:
        """Give slots that are not used to lanes that wait for some. Where none waits, tick."""
        if self._dealer.is_contended:
            self._is_passing_on = True
            self.wake()
        else:
            self.request_tick()

    def on_message(self, queue: QueueName) -> None:
        """A message was sent to this queue, or has arrived from it."""
        if (run_id := run_of(queue)) is None:
            return
        lane = self._lanes.get(run_id)
        if lane is not None and queue == recovery_queue(run_id):
            if lane.recovery_pause > 0:
                lane.recovery_pause = lane.next_recovery = 0.0
                self.request_tick()
        else:
            if lane is None and self._arrivals.has(queue):
                self._seats.return_to(run_id)
            self.on_ready([run_id])

    def on_offer(self, queue: QueueName, body: bytes) -> bool:
        """A message of a run that this worker does not serve has arrived in a queue that runs share. Returns whether
        the worker will serve the run."""
        run_id, (tenant, job_id) = run_of(queue), owner_of(body)
        if run_id is None or not tenant or not self._seats.adopt(run_id, tenant, job_id):
            return False
        self._look_errand.hurry()
        return True

    def on_ready(self, run_ids: Collection[RunId]) -> None:
        """These runs may have messages: look for them, or poll at once if their lanes pause because they had none."""
        for run_id in run_ids:
            lane = self._lanes.get(run_id)
            if lane is None:
                self._look_errand.hurry()
            elif lane.poll_pause > 0:
                lane.poll_pause = lane.next_poll = 0.0
                self.request_tick()

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
        self.request_tick()

    def _look_if_room(self) -> None:
        """Look for runs if the last look found no free slot, and there are some now."""
        if self._turnover.is_full and self._dealer.has_room:
            self._look_errand.hurry()

    def _on_requeued(self, run_id: RunId, delay: float) -> None:
        """The recorder has requeued references of a run; the first is due after `delay` seconds."""
        lane = self._lanes.get(run_id)
        if lane is not None:
            lane.next_recovery = min(lane.next_recovery, self._clock.monotonic() + delay)
            lane.recovery_pause = 0.0
            if delay < _LOOK_FOR_RUNS:
                self.request_tick()

    def _on_finished(self, run_id: RunId) -> None:
        """The recorder has recorded the last outcome of a run."""
        if run_id in self._breakdowns:
            self._breakdown_errand.hurry()
        if run_id in self._lanes:
            self._finished.append(run_id)
            self._pass_on_soon()

    async def _look(self) -> float:
        """Look for runs to serve, and for changes of those that are served."""
        if not self._is_started:
            await self._start()
        lanes, slots = self._lanes.values(), self._settings.worker_concurrency
        new_runs = max(0, len(self._seats) - len(lanes))
        free_slots = self._dealer.free_slots(lanes, new_runs)
        self._turnover.note_look(self._recorder.outcomes, is_full=free_slots == 0)
        is_quick = free_slots == 0 and self._turnover.is_quick(lanes, new_runs, slots)
        changes = await self._seats.look(free_slots=free_slots, slots=slots, is_quick=is_quick)
        if changes:
            self._changes.append(changes)
            self.request_tick()
        return 0.0 if changes.is_more else _LOOK_FOR_RUNS

    async def _start(self) -> None:
        """Send the first heartbeat. The first worker after a restart tries blocked targets, and looks at all runs."""
        is_first = await self._coordinator.permits_in_use(WORKERS) == 0
        await self._heart.beat([])
        if is_first:
            await self._sharing.restart()
            await self._seats.rebuild(is_urgent=True)
        self._is_started = True

    async def _apply(self, changes: SeatChanges) -> None:
        """Open lanes for new runs, follow changed jobs, and drop the lanes of runs that are finished or paused."""
        # Asked now: an attempt that began after the look must not be cancelled.
        unseated = [run_id for run_id in changes.unseated if not self._seats.reclaim(run_id)]
        for run_id in (*changes.closed, *unseated):
            if (lane := self._lanes.get(run_id)) is not None:
                await self._drop(lane)
        for job in (*changes.opened, *changes.changed):
            run_id = job.run.run_id
            lane = self._lanes.get(run_id)
            if lane is not None:
                self._sharing.note_changed(lane.job, job)
                lane.follow(job)
            elif job in changes.opened:
                self._lanes[run_id] = self._open_lane(job)
                self._sharing.note_opened(job)
        await self._arrivals.give_back(changes.refused)

    def _has_in_flight(self, run_id: RunId) -> bool:
        return run_id in self._lanes and self._lanes[run_id].has_in_flight()

    def _is_busy(self) -> bool:
        """Whether more outcomes are to be expected soon. The lanes that were opened last are looked at first."""
        return bool(self._changes) or any(lane.is_busy for lane in reversed(self._lanes.values()))

    def _in_flight(self) -> Iterator[LeasedChunk]:
        for lane in self._lanes.values():
            yield from lane.chunks.values()
        yield from self._dropped.in_flight()

    def _open_lane(self, job: Job) -> Lane:
        settings, executor, limited = self._settings, self._executors[job.kind], job
        if is_extract_only(job):
            executor, limited = self._stored, without_targets(job)
        tools = LaneTools(
            owner=self,
            recorder=self._recorder,
            limits=TargetLimits(self._coordinator, limited, self.name, settings.lease_seconds),
            gate=Gate(self._breakers, limited, executor.origins(job), settings.gateway, self._max_blocked_delay),
            clock=self._clock,
            recovery_ratio=settings.recovery_ratio,
            stuck_after=job.options.stuck_after or settings.stuck_after,
            copies=self._copies,
            extractor=self._extractor,
            earlier=self._earlier,
            paces=self._paces if limited is job else None,
            deadline_now=self._deadline_time.peek,
        )
        return executor.lane(job, tools)

    async def _share(self) -> float:
        """Share breakers, and the slots of stopped runs."""
        await self._sharing.share()
        if self._sharing.to_hasten:
            self.request_tick()
        if self._dropped.has_lingering:
            await self._dropped.keep_slots()
        return _LOOK_FOR_RUNS if self._lanes or self._breakers.is_watching else _IDLE_SECONDS

    async def _share_paces(self) -> float:
        """Share the paces of hosts with other workers."""
        await self._paces.share({lane.job.tenant for lane in self._lanes.values() if lane.is_paced})
        return _PACE_SECONDS

    async def _share_tenants(self) -> float:
        """Share which tenants this worker serves, while it has too few slots for all of them."""
        if self._dealer.is_contended:
            await self._tenant_workers.share({lane.job.tenant for lane in self._lanes.values() if lane.demand})
        return _TENANT_SECONDS

    async def _watch(self) -> float:
        """Watch what runs: processes and attempts that hang, bytes that are leased."""
        for executor in self._executors.values():
            executor.watch()
        self._feeder.count_leased_bytes(list(self._lanes.values()))
        watched = [(lane, attempt) for lane in self._lanes.values() for attempt in lane.watch()]
        async with asyncio.timeout(_WATCH_PATIENCE):
            for lane, attempt in watched:
                # Generations only grow, so this holds for chunks of other versions too.
                if await self._feeder.generation_of(lane.job, attempt.refs[0]) > attempt.generation:
                    attempt.supersede()
        return _LOOK_FOR_RUNS

    async def _beat(self) -> float:
        """Renew slots and probes, and send a heartbeat."""
        if self._is_started:
            for lane in self._lanes.values():
                lane.forget_finished()
                lane.renew_slots()
            await self._breakers.renew_probes()
            await self._heart.beat([task for lane in self._lanes.values() for task in lane.long_tasks()])
        return self._settings.lease_seconds / 3

    async def _look_at_clock(self) -> float:
        await self._deadline_time.now()
        return CLOCK_LOOK_SECONDS

    async def _redeliver_lost(self) -> None:
        """Have the queue redeliver messages soon whose fetcher died. Each redelivery counts as a lost start."""
        lost, self._lost = self._lost, []
        for queue, chunks in by_queue(lost).items():
            await self._queue.extend(queue, [chunk.receipt for chunk in chunks], _LOST_PAUSE)

    async def _drop(self, lane: Lane) -> None:
        await self._stop(lane)
        self.request_tick()

    async def _stop(self, lane: Lane) -> None:
        self._lanes.pop(lane.job.run.run_id, None)
        self._permits.forget(run_slots(lane.job.run.run_id))
        self._dealer.forget(lane)
        self._dropped.add(lane, await lane.stop(0.0))

    async def _shed_long_tasks(self) -> None:
        """Release long tasks that wait for a slot: another worker may have one free."""
        for lane in self._lanes.values():
            shed = lane.shed_long_tasks()
            if shed:
                await self._dropped.release(shed)
                lane.next_poll = lane.next_recovery = self._clock.monotonic() + _NO_SLOT_PAUSE
                self._dealer.note_behind(lane, is_behind=True)

    async def _leave_finished(self, run_id: RunId) -> None:
        lane = self._lanes.get(run_id)
        # A lane that still has slots of targets first gives them back; the next look closes it.
        if lane is not None and not lane.has_targets:
            self._seats.leave_finished(run_id)
            await self._stop(lane)

    async def _leave_quiet(self) -> None:
        """Leave runs that have nothing to do now, and those whose slots other workers have."""
        now = self._clock.monotonic()
        for run_id, lane in list(self._lanes.items()):
            if now - lane.starved_since >= _QUIET_SECONDS:
                self._seats.leave(run_id, _QUIET_SECONDS)
            elif lane.has_in_flight() or lane.demand or run_id in self._sharing.to_hasten:
                lane.quiet_since = inf
                continue
            elif (until := lane.open_until()) is not None:
                self._seats.leave(run_id, until - self._clock.now(), was_busy=lane.was_fed)
            elif self._is_quiet(lane, now):
                self._seats.leave(run_id, was_busy=lane.was_fed)
            else:
                continue
            await self._drop(lane)

    def _is_quiet(self, lane: Lane, now: float) -> bool:
        """Whether both queues of the run have been empty for a while, or hold only what is due later."""
        polls = ((lane.poll_pause, lane.next_poll), (lane.recovery_pause, lane.next_recovery))
        if not all(pause > 0 or at > now + _QUIET_SECONDS for pause, at in polls):
            lane.quiet_since = inf
            return False
        lane.quiet_since = min(lane.quiet_since, now)
        is_checked = not lane.was_fed and self._seats.is_recheck(lane.job.run.run_id)
        return is_checked or now - lane.quiet_since >= _QUIET_SECONDS

    def _delay(self) -> float:
        """Return the seconds until the next tick."""
        now = self._clock.monotonic()
        polls = [at for lane in self._lanes.values() for at in (lane.next_poll, lane.next_recovery) if at > now]
        return max(0.001, min([now + _LOOK_FOR_RUNS, *polls]) - now)
