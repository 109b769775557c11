"""Backlog: samples the active runs, a bounded number in each pass, and remembers the others. From the samples follow
the depth of all queues, the longest time without progress, and the work that waits: the figure for autoscaling.

Work waiting, in seconds of fleet time: how long the live workers would take for the tasks that could start now.

    sum over runs of min(waiting tasks x seconds a task, concurrency x HORIZON) / slots

Waiting tasks are written and neither finished nor running, without the share of them that is delayed: for runs that
share a queue, the share of all its messages. A run that is paused or blocked has none. A run that has finished no task
yet takes the mean of the others, and DEFAULT_SECONDS if there is none. The limit by its concurrency leaves out what
more workers would not make faster. Slots are those of the live workers, at least of one: without any, work still waits.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import msgspec

from conveyor.coordination.breaker_states import current_wait
from conveyor.coordination.durations import mean_seconds
from conveyor.coordination.fail_open import FailOpen
from conveyor.coordination.isolation import Isolation
from conveyor.coordination.limits import run_slots
from conveyor.coordination.revisits import Revisits
from conveyor.engines.queue import Depth, QueueName, ReportsMessageAge, SharesQueues, run_queues
from conveyor.model import Job, RunId
from conveyor.system import System

DEFAULT_SECONDS = 1.0
HORIZON = 300.0

# The maximum number of runs that one pass reads.
_RUNS = 100
# The longest pause between two samples of a run in which nothing moves, in passes.
_LONGEST_PAUSE = 4
# What holds back a whole run: a breaker, and the job that it replaces.
_BLOCKING = ("breaker", "replacing")


class QueueSample(msgspec.Struct, frozen=True):
    """A queue: its messages, and since when the oldest that is ready waits, if the engine knows."""

    depth: Depth
    since: float | None


class RunSample(msgspec.Struct, frozen=True):
    """A run at one moment."""

    queue: QueueSample
    recovery: QueueSample
    # Written tasks that have not finished, and how many of these run.
    unfinished: int
    running: int
    concurrency: int
    # The mean duration of its tasks; None before the first has finished.
    task_seconds: float | None
    is_blocked: bool
    # What changes with its progress, and since when it has not changed.
    progress: tuple[int, int, float]
    moved_at: float

    def waiting(self, shared: Depth) -> float:
        """The tasks that could start now if there were slots. `shared` is the depth of the queue that runs share."""
        if self.is_blocked:
            return 0.0
        depths = [self.queue.depth, self.recovery.depth]
        if any(depth.unknown for depth in depths):
            # Its messages, or some of them, are among those of others.
            depths.append(shared)
        total, delayed = sum(depth.total for depth in depths), sum(depth.delayed for depth in depths)
        # Messages that nobody can count may all be ready.
        share = 1.0 if total == 0 else 1.0 - delayed / total
        return max(0, self.unfinished - self.running) * share


class WorkWaiting(msgspec.Struct, frozen=True):
    """Tasks that could start now, and the seconds that the fleet would take for them."""

    tasks: float
    seconds: float


def work_waiting(runs: Iterable[RunSample], slots: int, shared: QueueSample | None = None) -> WorkWaiting:
    """The figure for autoscaling. `shared` is the queue that runs share, if there is one."""
    depth = Depth(0, 0, 0) if shared is None else shared.depth
    waiting = [(run, run.waiting(depth)) for run in runs]
    known = [run.task_seconds for run, _ in waiting if run.task_seconds is not None]
    usual = sum(known) / len(known) if known else DEFAULT_SECONDS
    work = sum(
        min(tasks * (usual if run.task_seconds is None else run.task_seconds), run.concurrency * HORIZON)
        for run, tasks in waiting
    )
    return WorkWaiting(sum(tasks for _, tasks in waiting), work / max(1, slots))


class Backlog:
    """The samples of the active runs."""

    def __init__(self, system: System) -> None:
        clock, seconds = system.clock, system.settings.sample_seconds
        self._system = system
        self._coordinator = FailOpen(system.coordinator, clock)
        self._isolation = Isolation("sampler", clock)
        self._visits = Revisits(clock, seconds, seconds * _LONGEST_PAUSE)
        self.runs: Mapping[RunId, RunSample] = {}

    async def sample(self, jobs: Sequence[Job]) -> int:
        """Sample those of the workable jobs that are due, and forget all others. Returns how many there was no time
        for."""
        known = {job.run.run_id for job in jobs}
        self._isolation.forget_others(known)
        samples = {run_id: sample for run_id, sample in self.runs.items() if run_id in known}
        due = self._visits.due(jobs, lambda job: job.run.run_id, _mark)
        await self._isolation.each(due[:_RUNS], lambda job: job.run.run_id, partial(self._sample, samples))
        self.runs = samples
        return max(0, len(due) - _RUNS)

    async def queue(self, name: QueueName) -> QueueSample:
        """Sample a queue."""
        queue = self._system.queue
        depth = await queue.depth(name)
        since = await queue.waiting_since(name) if depth.ready and isinstance(queue, ReportsMessageAge) else None
        return QueueSample(depth, since)

    async def shared(self) -> QueueSample | None:
        """Sample the queue that several runs share, once for all of them; None if there is none."""
        queue = self._system.queue
        depth = await queue.shared_depth() if isinstance(queue, SharesQueues) else None
        return None if depth is None else QueueSample(depth, None)

    async def _sample(self, samples: dict[RunId, RunSample], job: Job) -> None:
        run = job.run
        counts = await self._system.tasks.counts(job.key)
        queue, recovery = run_queues(run.run_id)
        queued, recovering, running, seconds, wait = await asyncio.gather(
            self.queue(queue),
            self.queue(recovery),
            self._coordinator.permits_in_use(run_slots(run.run_id)),
            mean_seconds(self._coordinator, run.run_id),
            current_wait(self._coordinator, self._system.clock, job),
        )
        progress = (counts.ended, run.total, run.touched_at)
        before = samples.get(run.run_id)
        has_moved = before is None or before.progress != progress
        sample = RunSample(
            queued,
            recovering,
            max(0, run.total - counts.ended),
            running,
            job.options.concurrency,
            seconds,
            wait is not None and wait.code in _BLOCKING,
            progress,
            self._system.clock.now() if before is None or has_moved else before.moved_at,
        )
        samples[run.run_id] = sample
        found = (counts, queued.depth, recovering.depth, running, sample.is_blocked)
        self._visits.checked(run.run_id, _mark(job), found)


def _mark(job: Job) -> object:
    """Changes when somebody changes the job or more of it is ingested."""
    return job.state, job.version, job.run.total
