"""Sampler: measures at intervals, within bounds, how much work waits and how late it is. A scrape of the metrics reads
these samples and costs the stores nothing. It runs with the role `sweep`; of several processes, the one that leads the
others samples. The documents of runs that turn out to have no dead letters left are removed on the way.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from conveyor.coordination.breaker_states import count_breakers
from conveyor.coordination.buckets import ALL_BUCKETS, Buckets
from conveyor.coordination.isolation import run_all
from conveyor.engines.queue import CONTROL, Depth, ReportsMessageAge
from conveyor.errors import ConveyorError
from conveyor.jobs.active_jobs import ActiveJobs
from conveyor.jobs.callbacks import CALLBACK
from conveyor.jobs.dead_lettered_tasks import oldest_dead_lettered
from conveyor.jobs.deadlines import DEADLINE
from conveyor.model import BEAT, PROGRESS, WORKERS, Job
from conveyor.recover.backlog import Backlog, QueueSample, WorkWaiting, work_waiting
from conveyor.recover.load_keeper import LoadKeeper
from conveyor.states import WORKABLE, RunState
from conveyor.system import System
from conveyor.telemetry import metrics
from conveyor.telemetry.cloudwatch import embedded_metrics

# The kinds of documents that have a due time, by their label in the metric.
_DUE = {
    "delivery": "delivery",
    "schedule": "schedule",
    "callback": CALLBACK,
    "deadline": DEADLINE,
    "progress": PROGRESS,
    "worker": BEAT,
}
_ACTIVE = (RunState.INGESTING, RunState.RUNNING, RunState.PAUSED)
# The maximum number of dead letters that one pass counts.
_LETTERS = 100
# How often a process that does not lead looks whether it does.
_FOLLOWER_SECONDS = 1.0


class Sampler:
    """A role."""

    def __init__(self, system: System, active: ActiveJobs | None = None, buckets: Buckets = ALL_BUCKETS) -> None:
        self.name = "sampler"
        self.wake: Callable[[], None] = lambda: None
        self.stopping = False
        self._system = system
        self._active = active or ActiveJobs(system.records.jobs, system.clock)
        self._buckets = buckets
        self._backlog = Backlog(system)
        self._load = LoadKeeper(system)
        # Live workers, as last read.
        self._workers = 0

    async def tick(self) -> float:
        if self._buckets.leads:
            jobs = await self._active.read()
            await run_all(partial(self._sample, jobs), partial(self._keep_load, jobs), self._letters, self._lateness)
            return self._system.settings.sample_seconds
        for gauge in metrics.SAMPLED:
            gauge.clear()
        # It may lead soon: after a start, or when the leader has died.
        return min(_FOLLOWER_SECONDS, self._system.settings.sample_seconds)

    async def close(self) -> None:
        """Nothing to release between ticks."""

    async def _sample(self, jobs: Sequence[Job]) -> None:
        states = Counter(job.state for job in jobs)
        for state in _ACTIVE:
            metrics.RUNS.set(states[state], state)
        await self._coordinated()
        metrics.RUNS_UNSAMPLED.set(await self._backlog.sample([job for job in jobs if job.state in WORKABLE]))
        shared = await self._backlog.shared()
        await self._queues(shared)
        now = self._system.clock.now()
        idle = [now - run.moved_at for run in self._backlog.runs.values()]
        metrics.RUN_IDLE_SECONDS.set(max(idle, default=0.0))
        self._publish(work_waiting(self._backlog.runs.values(), self._slots(), shared))

    async def _keep_load(self, jobs: Sequence[Job]) -> None:
        await self._load.keep(jobs, self._backlog.runs)

    async def _queues(self, shared: QueueSample | None) -> None:
        runs = self._backlog.runs.values()
        lanes = {
            "control": [await self._backlog.queue(CONTROL)],
            "runs": [*(run.queue for run in runs), *([] if shared is None else [shared])],
            "recovery": [run.recovery for run in runs],
        }
        for lane, queues in lanes.items():
            depth = _sum(queues)
            metrics.QUEUE_MESSAGES.set(depth.ready, lane, "ready")
            metrics.QUEUE_MESSAGES.set(depth.held, lane, "in_flight")
            metrics.QUEUE_MESSAGES.set(depth.delayed, lane, "delayed")
            if isinstance(self._system.queue, ReportsMessageAge):
                times = [queue.since for queue in queues if queue.since is not None]
                metrics.QUEUE_AGE_SECONDS.set(self._late(min(times, default=None)), lane)

    def _slots(self) -> int:
        """How many tasks the live workers run at once, or one worker if there is none."""
        settings = self._system.settings
        slots = max(1, self._workers) * settings.worker_concurrency
        return min(slots, settings.fleet_concurrency or slots)

    def _publish(self, work: WorkWaiting) -> None:
        metrics.WORK_WAITING_SECONDS.set(work.seconds)
        metrics.TASKS_WAITING.set(work.tasks)
        namespace = self._system.settings.cloudwatch_namespace
        if namespace is not None:
            figures = {
                "WorkWaitingSeconds": (work.seconds, "Seconds"),
                "TasksWaiting": (work.tasks, "Count"),
                "Workers": (float(self._workers), "Count"),
            }
            sys.stdout.write(embedded_metrics(namespace, self._system.clock.now(), figures) + "\n")
            sys.stdout.flush()

    async def _letters(self) -> None:
        system = self._system
        letters = (await system.queue.dead_letters(None, _LETTERS)).items
        left = _LETTERS - len(letters)
        count, since = await oldest_dead_lettered(system.records, system.tasks, system.clock.now(), left)
        metrics.DEAD_LETTERS.set(len(letters) + count)
        times = [*(letter.at for letter in letters[:1]), *([] if since is None else [since])]
        metrics.QUEUE_AGE_SECONDS.set(self._late(min(times, default=None)), "dead_letters")

    async def _lateness(self) -> None:
        records, now = self._system.records, self._system.clock.now()
        for kind, row_kind in _DUE.items():
            rows = await records.documents.due_documents(row_kind, now, 1)
            metrics.DUE_LAG_SECONDS.set(self._late(rows[0].due_at if rows else None), kind)
        events = await records.outbox.undispatched(1)
        metrics.DUE_LAG_SECONDS.set(self._late(events[0].at if events else None), "outbox")

    async def _coordinated(self) -> None:
        coordinator = self._system.coordinator
        try:
            opened, half_open = await count_breakers(coordinator, self._system.clock)
            self._workers = await coordinator.permits_in_use(WORKERS)
        except ConveyorError:
            # Roles continue without the coordinator; its failures are counted at its seam.
            return
        metrics.WORKERS.set(self._workers)
        metrics.BREAKERS.set(opened, "open")
        metrics.BREAKERS.set(half_open, "half_open")

    def _late(self, since: float | None) -> float:
        return 0.0 if since is None else max(0.0, self._system.clock.now() - since)


def _sum(queues: Sequence[QueueSample]) -> Depth:
    depths = [queue.depth for queue in queues]
    return Depth(
        sum(depth.ready for depth in depths),
        sum(depth.held for depth in depths),
        sum(depth.delayed for depth in depths),
    )
