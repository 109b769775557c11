"""Sampler: measures at intervals, within bounds, how much work waits and how late it is. A scrape of the metrics reads
these samples and costs the stores nothing. It runs with the role `sweep`; several samplers show the same figures. The
documents of runs that turn out to have no dead letters left are removed on the way.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from conveyor.coordination.breaker_states import count_breakers
from conveyor.engines.queue import CONTROL, Depth, QueueName, ReportsMessageAge, recovery_queue, run_queue
from conveyor.errors import ConveyorError
from conveyor.jobs.callbacks import CALLBACK
from conveyor.jobs.dead_lettered_tasks import oldest_dead_lettered
from conveyor.jobs.deadlines import DEADLINE
from conveyor.model import BEAT, PROGRESS, WORKERS, Job, RunId
from conveyor.states import WORKABLE, RunState
from conveyor.system import System
from conveyor.telemetry import metrics

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
# The maximum number of runs whose queues one pass reads, and of dead letters that it counts.
_RUNS = 100
_LETTERS = 100

# The progress of a run: finished tasks, total, and when a batch was last added.
_Mark = tuple[int, int, float]


class Sampler:
    """A role."""

    def __init__(self, system: System) -> None:
        self.name = "sampler"
        self.wake: Callable[[], None] = lambda: None
        self.stopping = False
        self._system = system
        # The progress of each run, and since when it has not changed.
        self._marks: dict[RunId, tuple[_Mark, float]] = {}

    async def tick(self) -> float:
        active = await self._system.records.jobs.active_jobs()
        states = Counter(job.state for job in active)
        for state in _ACTIVE:
            metrics.RUNS.set(states[state], state)
        workable = [job for job in active if job.state in WORKABLE]
        sampled = workable[:_RUNS]
        metrics.RUNS_UNSAMPLED.set(len(workable) - len(sampled))
        await self._queues(sampled)
        await self._letters()
        await self._movement(sampled)
        await self._lateness()
        await self._coordinated()
        return self._system.settings.sample_seconds

    async def close(self) -> None:
        """Nothing to release between ticks."""

    async def _queues(self, jobs: Sequence[Job]) -> None:
        lanes = {
            "control": [CONTROL],
            "runs": [run_queue(job.run.run_id) for job in jobs],
            "recovery": [recovery_queue(job.run.run_id) for job in jobs],
        }
        for lane, queues in lanes.items():
            depth, since = await self._depth(queues)
            metrics.QUEUE_MESSAGES.set(depth.ready, lane, "ready")
            metrics.QUEUE_MESSAGES.set(depth.held, lane, "in_flight")
            metrics.QUEUE_MESSAGES.set(depth.delayed, lane, "delayed")
            if isinstance(self._system.queue, ReportsMessageAge):
                metrics.QUEUE_AGE_SECONDS.set(self._late(since), lane)

    async def _depth(self, queues: Sequence[QueueName]) -> tuple[Depth, float | None]:
        """The sum over these queues, and since when the oldest message waits."""
        queue, ready, held, delayed = self._system.queue, 0, 0, 0
        oldest: float | None = None
        for name in queues:
            depth = await queue.depth(name)
            ready, held, delayed = ready + depth.ready, held + depth.held, delayed + depth.delayed
            if depth.ready and isinstance(queue, ReportsMessageAge):
                since = await queue.waiting_since(name)
                oldest = since if oldest is None else min(oldest, since or oldest)
        return Depth(ready, held, delayed), oldest

    async def _letters(self) -> None:
        system = self._system
        letters = (await system.queue.dead_letters(None, _LETTERS)).items
        left = _LETTERS - len(letters)
        count, since = await oldest_dead_lettered(system.records, system.tasks, system.clock.now(), left)
        metrics.DEAD_LETTERS.set(len(letters) + count)
        times = [*(letter.at for letter in letters[:1]), *([] if since is None else [since])]
        metrics.QUEUE_AGE_SECONDS.set(self._late(min(times, default=None)), "dead_letters")

    async def _movement(self, jobs: Sequence[Job]) -> None:
        now = self._system.clock.now()
        marks: dict[RunId, tuple[_Mark, float]] = {}
        for job in jobs:
            ended = (await self._system.tasks.counts(job.key)).ended
            mark = (ended, job.run.total, job.run.touched_at)
            before = self._marks.get(job.run.run_id)
            marks[job.run.run_id] = before if before is not None and before[0] == mark else (mark, now)
        self._marks = marks
        metrics.RUN_IDLE_SECONDS.set(max((now - since for _, since in marks.values()), default=0.0))

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
            metrics.WORKERS.set(await coordinator.permits_in_use(WORKERS))
        except ConveyorError:
            # Roles continue without the coordinator; its failures are counted at its seam.
            return
        metrics.BREAKERS.set(opened, "open")
        metrics.BREAKERS.set(half_open, "half_open")

    def _late(self, since: float | None) -> float:
        return 0.0 if since is None else max(0.0, self._system.clock.now() - since)
