"""BreakerSharing: one worker's part in the breakers that all workers share. It reports outcomes, learns which breakers
are open, and makes tasks start soon that waited for one."""

from collections.abc import Callable, Collection, Mapping

from conveyor.clock import Clock
from conveyor.coordination.breaker import Breakers
from conveyor.coordination.breaker_states import MAX_RUNS, split_key
from conveyor.coordination.parallel import at_once
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.queue import Hastens, Queue, QueueName, recovery_queue
from conveyor.engines.ready import ReadyMark
from conveyor.model import Job, RunId
from conveyor.process.lane import Lane

# How often to ask which open breakers nobody needs.
_NEEDED_SECONDS = 0.5
# How long the first worker after a restart has tasks of the runs that it takes start at once.
_RESTART_SECONDS = 10.0


class BreakerSharing:
    """`lanes` are those of the worker; `is_index_built` says whether the ready index knows all unfinished runs."""

    def __init__(
        self,
        breakers: Breakers,
        coordinator: Coordinator,
        queue: Queue,
        clock: Clock,
        lanes: Mapping[RunId, Lane],
        is_index_built: Callable[[], bool],
    ) -> None:
        self._breakers = breakers
        self._coordinator = coordinator
        # Asked once: the check of a capability is slow.
        self._hastens = queue if isinstance(queue, Hastens) else None
        self._clock = clock
        self._lanes = lanes
        self._is_index_built = is_index_built
        self._needed_at = 0.0
        self._restarted_until = 0.0
        self._restarted_at = 0.0
        # Runs whose lanes were opened since the restart.
        self._opened: set[RunId] = set()
        # Runs whose tasks no longer have to wait for a breaker.
        self.to_hasten: set[RunId] = set()

    async def restart(self) -> None:
        """No worker was alive: try blocked targets at once."""
        self._restarted_until = self._clock.monotonic() + _RESTART_SECONDS
        self._restarted_at = self._clock.now()
        await self._breakers.half_open_all()
        await self._breakers.refresh()

    async def share(self) -> None:
        """Report outcomes to the breakers, and read which of them are open."""
        await self._breakers.report()
        if await self._breakers.refresh(await self._needed_runs()):
            for lane in self._lanes.values():
                lane.recheck_targets()
        elsewhere: list[ReadyMark] = []
        for key, state in self._breakers.take_closed().items():
            tenant = split_key(key)[0]
            knows_all = 0 < len(state.runs) < MAX_RUNS
            self.to_hasten.update(
                run_id
                for run_id, lane in self._lanes.items()
                if lane.job.tenant == tenant and (run_id in state.runs or not knows_all)
            )
            # Whoever takes the others makes their tasks start soon.
            if knows_all:
                elsewhere += [ReadyMark(run_id, delay=0.0) for run_id in state.runs if run_id not in self._lanes]
            else:
                await self._coordinator.hasten_tenant(tenant)
        if elsewhere:
            await self._coordinator.mark_runs(elsewhere)

    def note_opened(self, job: Job) -> None:
        """A lane was opened: its tasks may wait for a breaker that no longer blocks them."""
        is_unblocked = job.version > 1 and not job.options.breaker.enabled
        # A run that began after the restart has waited for none.
        is_old = job.run.created_at <= self._restarted_at
        if self._clock.monotonic() >= self._restarted_until:
            self._opened.clear()
            is_restarted = False
        else:
            # Once: later, its tasks wait for their own backoff.
            is_restarted = is_old and job.run.run_id not in self._opened
            self._opened.add(job.run.run_id)
        if is_restarted or is_unblocked or self._breakers.closed_lately(job.tenant, job.run.run_id):
            self.to_hasten.add(job.run.run_id)

    def note_changed(self, before: Job, job: Job) -> None:
        """The options of a run have changed."""
        if before.options.breaker.enabled and not job.options.breaker.enabled:
            self.to_hasten.add(job.run.run_id)

    async def hasten(self) -> None:
        """Make tasks that waited for a breaker start soon. After a restart these are all runs; few have any."""
        queues = {recovery_queue(run_id): run_id for run_id in self.to_hasten}
        delayed = frozenset[QueueName]() if self._hastens is None else await self._hastens.delayed_queues(list(queues))
        for queue, run_id in queues.items():
            if queue not in delayed:
                self._look_again(run_id)
        await at_once([queues[queue] for queue in delayed], self._hasten)

    async def _hasten(self, run_id: RunId) -> None:
        assert self._hastens is not None
        await self._hastens.hasten(recovery_queue(run_id))
        self._look_again(run_id)

    def _look_again(self, run_id: RunId) -> None:
        self.to_hasten.discard(run_id)
        lane = self._lanes.get(run_id)
        if lane is not None:
            lane.next_recovery = lane.recovery_pause = 0.0

    async def _needed_runs(self) -> Collection[RunId] | None:
        """Which runs of open breakers have not finished; None if that is not known, or was asked lately."""
        now = self._clock.monotonic()
        runs = self._breakers.blocked_runs()
        if not runs or not self._is_index_built() or now < self._needed_at:
            return None
        self._needed_at = now + _NEEDED_SECONDS
        return await self._coordinator.known_runs(runs)
