"""Herald: tells of runs while they run. A quarter of a run is done; tasks of it have failed, in batches; and how the
counts went, for whoever looks later.

It looks at active runs every now and then, at their kept counts, and never at their tasks; what it finds to tell is
written with the run's milestones, so that it is told once whoever finds it.
"""

from collections.abc import Callable

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.coordination.history import moment, remember
from conveyor.coordination.isolation import Isolation
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.records import Records
from conveyor.engines.tasks import Tasks
from conveyor.jobs.progress_events import ProgressEvents, ReportedProgress
from conveyor.model import Counts, Job, RunId
from conveyor.states import WORKABLE

log = structlog.get_logger()

TOP_ERRORS = 5

_EVERY = 2.0
_QUARTERS = 4


class NotifiedCounts(msgspec.Struct):
    """What one pass did."""

    looked: int = 0
    quarters: int = 0
    failures: int = 0


class ProgressNotifier:
    """A role."""

    def __init__(
        self, records: Records, tasks: Tasks, coordinator: Coordinator, clock: Clock, failure_seconds: float
    ) -> None:
        self.name = "herald"
        self.wake: Callable[[], None] = lambda: None
        self.stopping = False
        self._records = records
        self._tasks = tasks
        self._coordinator = coordinator
        self._clock = clock
        self._failure_seconds = failure_seconds
        self._milestones = ProgressEvents(records, clock)
        # As they were last seen: a run of which there is nothing new costs no read of its row.
        self._seen: dict[RunId, ReportedProgress] = {}
        self._counted: dict[RunId, Counts] = {}
        self._isolation = Isolation(self.name, clock)

    async def tick(self) -> float:
        told = await self.run_once()
        if told != NotifiedCounts(looked=told.looked):
            log.debug("told of runs", **msgspec.structs.asdict(told))
        return _EVERY

    async def close(self) -> None:
        """Nothing is held between ticks."""

    async def run_once(self) -> NotifiedCounts:
        told = NotifiedCounts()
        jobs = [job for job in await self._records.jobs.active_jobs() if job.state in WORKABLE]
        active = {job.run.run_id for job in jobs}
        self._seen = {run_id: reached for run_id, reached in self._seen.items() if run_id in active}
        self._counted = {run_id: counts for run_id, counts in self._counted.items() if run_id in active}
        self._isolation.forget_others(active)
        for job in jobs:
            if not self._isolation.is_resting(job.run.run_id):
                with self._isolation.item(job.run.run_id):
                    await self._look(job, told)
        return told

    async def _look(self, job: Job, told: NotifiedCounts) -> None:
        told.looked += 1
        counts = await self._tasks.counts(job.key)
        await self._remember(job, counts)
        seen = self._seen.get(job.run.run_id, ReportedProgress())
        if _quarter(job, counts) > seen.quarter:
            told.quarters += await self._tell_quarter(job, counts)
        if counts.failed > seen.failures and self._rested(seen):
            told.failures += await self._tell_failures(job, counts)

    async def _remember(self, job: Job, counts: Counts) -> None:
        run_id = job.run.run_id
        if self._counted.get(run_id) != counts:
            self._counted[run_id] = counts
            await remember(self._coordinator, run_id, moment(self._clock.now(), counts))

    async def _tell_quarter(self, job: Job, counts: Counts) -> int:
        quarter = _quarter(job, counts)
        row, reached = await self._milestones.of(job.key)
        self._seen[job.run.run_id] = reached
        if quarter <= reached.quarter:
            return 0
        changed = msgspec.structs.replace(reached, quarter=quarter)
        data = {
            "percent": quarter * 100 // _QUARTERS,
            "total": job.run.total,
            "counts": msgspec.structs.asdict(counts),
        }
        if not await self._milestones.tell(job.key, row, changed, "run.progress", data):
            return 0
        self._seen[job.run.run_id] = changed
        return 1

    async def _tell_failures(self, job: Job, counts: Counts) -> int:
        _, reached = await self._milestones.of(job.key)
        self._seen[job.run.run_id] = reached
        if counts.failed <= reached.failures or not self._rested(reached):
            return 0
        await self._milestones.told_failures(job.key, counts, await self._tasks.error_codes(job.key, TOP_ERRORS))
        return 1

    def _rested(self, reached: ReportedProgress) -> bool:
        return self._clock.now() - reached.failures_at >= self._failure_seconds


def _quarter(job: Job, counts: Counts) -> int:
    """Quarters of the run that are done, but for the last: that is its end. None before the total is final."""
    if not job.run.last_batch or job.run.total == 0:
        return 0
    return min(counts.ended * _QUARTERS // job.run.total, _QUARTERS - 1)
