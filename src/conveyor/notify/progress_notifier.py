"""Progress notifier: reports the progress of active runs. A quarter of a run is finished; tasks of it have failed, in
batches. It also records the history of the counts.

It reads the counts of active runs at intervals, the less often the longer they stay the same, and never their tasks.
Each event is written with the run's document of reported progress, so that one of several notifiers reports it, once.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.coordination.buckets import ALL_BUCKETS, Buckets
from conveyor.coordination.history import add_moment, moment
from conveyor.coordination.isolation import Isolation
from conveyor.coordination.revisits import Revisits
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.records import Records
from conveyor.engines.tasks import Tasks
from conveyor.jobs.active_jobs import ActiveJobs
from conveyor.jobs.job_counts import JobCounts, counts_json, job_counts
from conveyor.jobs.progress_events import ProgressEvents, ReportedProgress
from conveyor.model import Counts, Job, RunId
from conveyor.states import WORKABLE

log = structlog.get_logger()

TOP_ERRORS = 5

_EVERY = 2.0
# The longest pause between two checks of a run whose counts stay the same, in passes.
_LONGEST_PAUSE = 15
_QUARTERS = 4


class NotifiedCounts(msgspec.Struct):
    """What one pass did."""

    checked: int = 0
    quarters: int = 0
    failures: int = 0


class ProgressNotifier:
    """A role."""

    def __init__(
        self,
        records: Records,
        tasks: Tasks,
        coordinator: Coordinator,
        clock: Clock,
        failure_seconds: float,
        active: ActiveJobs | None = None,
        buckets: Buckets = ALL_BUCKETS,
    ) -> None:
        self.name = "progress-notifier"
        self.wake: Callable[[], None] = lambda: None
        self.stopping = False
        self._records = records
        self._tasks = tasks
        self._coordinator = coordinator
        self._clock = clock
        self._failure_seconds = failure_seconds
        self._progress = ProgressEvents(records, clock)
        # As last read: a run with nothing new to report costs no read of its document.
        self._seen: dict[RunId, ReportedProgress] = {}
        self._active = active or ActiveJobs(records.jobs, clock)
        self._visits = Revisits(clock, _EVERY, _EVERY * _LONGEST_PAUSE)
        self._isolation = Isolation(self.name, clock, buckets)

    async def tick(self) -> float:
        notified = await self.run_once()
        if notified != NotifiedCounts(checked=notified.checked):
            log.debug("progress reported", **msgspec.structs.asdict(notified))
        return _EVERY

    async def close(self) -> None:
        """Nothing to release between ticks."""

    async def run_once(self) -> NotifiedCounts:
        notified = NotifiedCounts()
        jobs = [job for job in await self._active.read() if job.state in WORKABLE]
        active = {job.run.run_id for job in jobs}
        self._seen = {run_id: reported for run_id, reported in self._seen.items() if run_id in active}
        self._isolation.forget_others(active)
        due = self._visits.due(jobs, _run_id, _mark, self._active.listed_at)
        await self._isolation.each(due, _run_id, partial(self._check, notified))
        return notified

    async def _check(self, notified: NotifiedCounts, job: Job) -> None:
        notified.checked += 1
        run_id = job.run.run_id
        counts = await self._tasks.counts(job.key)
        if counts != self._visits.last_found(run_id):
            await add_moment(self._coordinator, run_id, moment(self._clock.now(), counts))
        await self._report(notified, job, counts)
        self._visits.checked(run_id, _mark(job), counts, self._due_by(run_id, counts))

    async def _report(self, notified: NotifiedCounts, job: Job, counts: Counts) -> None:
        """Report what is new, unless the run has finished: the active jobs were read some time ago."""
        seen = self._seen.get(job.run.run_id, ReportedProgress())
        is_quarter_new = _quarter(job, counts) > seen.quarter
        are_failures_due = counts.failed > seen.failures and self._is_failure_report_due(seen)
        if not (is_quarter_new or are_failures_due) or not await self._is_workable(job):
            return
        if is_quarter_new:
            quarters = await self._report_quarter(job, counts)
            notified.quarters += quarters
        if are_failures_due:
            failures = await self._report_failures(job, counts)
            notified.failures += failures

    async def _is_workable(self, job: Job) -> bool:
        run = await self._records.jobs.run(job.job_id, job.run.run_id)
        return run is not None and run.state in WORKABLE

    def _due_by(self, run_id: RunId, counts: Counts) -> float:
        """When the next report of failed tasks is due, if there is anything to report."""
        seen = self._seen.get(run_id, ReportedProgress())
        return seen.failures_at + self._failure_seconds if counts.failed > seen.failures else math.inf

    async def _report_quarter(self, job: Job, counts: Counts) -> int:
        quarter = _quarter(job, counts)
        document, reported = await self._progress.read(job.key)
        self._seen[job.run.run_id] = reported
        if quarter <= reported.quarter:
            return 0
        changed = msgspec.structs.replace(reported, quarter=quarter)
        data = {
            "percent": quarter * 100 // _QUARTERS,
            "total": job.run.total,
            "counts": msgspec.structs.asdict(counts),
            "job": await self._of_job(job, counts),
        }
        # Read last: the active jobs were read some time ago, and no quarter is reported of a run that has finished.
        run = await self._records.jobs.run(job.job_id, job.run.run_id)
        if run is None or run.state not in WORKABLE:
            return 0
        if not await self._progress.report(job.key, document, changed, "run.progress", data):
            return 0
        self._seen[job.run.run_id] = changed
        return 1

    async def _report_failures(self, job: Job, counts: Counts) -> int:
        _, reported = await self._progress.read(job.key)
        self._seen[job.run.run_id] = reported
        if counts.failed <= reported.failures or not self._is_failure_report_due(reported):
            return 0
        errors = await self._tasks.error_codes(job.key, TOP_ERRORS)
        await self._progress.report_failures(job.key, counts, errors, await self._of_job(job, counts))
        return 1

    async def _of_job(self, job: Job, counts: Counts) -> dict[str, Any]:
        """The counts of the job, for an event with the counts of its run."""
        if job.run.number == 1:
            return counts_json(JobCounts(job.run.total, counts))
        return counts_json(await job_counts(self._records, self._tasks, job, self._coordinator))

    def _is_failure_report_due(self, reported: ReportedProgress) -> bool:
        return self._clock.now() - reported.failures_at >= self._failure_seconds


def _run_id(job: Job) -> str:
    return job.run.run_id


def _mark(job: Job) -> object:
    """Changes when a run is latched or resumed, or more of it is ingested."""
    return job.state, job.run.total, job.run.last_batch


def _quarter(job: Job, counts: Counts) -> int:
    """Finished quarters of the run, at most three: its completion reports the fourth. 0 until the total is final."""
    if not job.run.last_batch or job.run.total == 0:
        return 0
    return min(counts.ended * _QUARTERS // job.run.total, _QUARTERS - 1)
