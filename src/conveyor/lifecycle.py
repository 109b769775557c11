"""Lifecycle: the only code that moves a run from one state to another.

A run is complete when it is latched and as many tasks have finished as its total says. The worker checks that after it
has finished tasks, the ingester after it has set the latch, and the sweeper; one conditional write wins.
"""

from collections.abc import Callable, Collection

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.engines.records import Records, RunMove
from conveyor.engines.tasks import Tasks
from conveyor.faults import crashpoint
from conveyor.jobs.job_counts import JobCounts, counts_json, job_counts
from conveyor.jobs.progress_events import ProgressEvents
from conveyor.model import Counts, FailureThreshold, Job, JobId, OutboxEvent, Run
from conveyor.states import ENDED, ReasonCode, RunState, sources_of
from conveyor.telemetry import traces

log = structlog.get_logger()

_EVENTS = {
    RunState.COMPLETED: "run.completed",
    RunState.FAILED: "run.failed",
    RunState.CANCELLED: "run.cancelled",
    RunState.PAUSED: "run.paused",
    RunState.RUNNING: "run.resumed",
    RunState.INGESTING: "run.resumed",
}


class Lifecycle:
    """Moves runs. Each move writes its outbox event in the same step."""

    def __init__(self, records: Records, tasks: Tasks, clock: Clock) -> None:
        self._records = records
        self._tasks = tasks
        self._clock = clock
        self._progress = ProgressEvents(records, clock)

    async def settle(self, job: Job, counts: Counts) -> RunState | None:
        """Complete the run, or fail it at its failure threshold, if these counts say so. Returns the new state."""
        breach = _breach(job.options.failure_threshold, counts)
        if breach is not None:
            return await self.move(job, RunState.FAILED, breach, counts, code=ReasonCode.FAILURE_THRESHOLD)
        # The job may have been read before the latch was set. Once it is, total and latch are final.
        run = job.run if job.run.last_batch else await self._records.jobs.run(job.job_id, job.run.run_id)
        if run is None or not _complete(run, counts):
            return None
        return await self.move(msgspec.structs.replace(job, run=run), RunState.COMPLETED, None, counts)

    def decides(self, job: Job) -> bool:
        """Whether `decision` needs no read."""
        return job.run.number == 1 and job.run.last_batch

    def decision(self, job: Job) -> Callable[[Counts], RunMove | None] | None:
        """As `settle`, as data for a transaction that knows the counts: the move that they lead to, if any. None if
        that needs a read: of the latch, or of the job's other runs."""
        if not self.decides(job):
            return None
        notice_id, now = self._clock.new_id("evt"), self._clock.now()

        def decide(counts: Counts) -> RunMove | None:
            breach = _breach(job.options.failure_threshold, counts)
            if breach is None and not _complete(job.run, counts):
                return None
            target = RunState.COMPLETED if breach is None else RunState.FAILED
            code = None if breach is None else ReasonCode.FAILURE_THRESHOLD
            whole = JobCounts(job.run.total, counts)
            event = _event(notice_id, now, job, target, breach, code, counts, whole)
            return RunMove(sources_of(target), target, breach, code, event)

        return decide

    def on_moved(self, job: Job, move: RunMove, counts: Counts) -> None:
        """A transaction made the move that a decision led to."""
        _report(job, move.target, move.event.at, move.reason, counts)

    async def latch(self, job: Job, total: int, invalid: int) -> None:
        """All tasks are written: set the total, then the latch, then complete the run if all tasks have finished."""
        crashpoint("lifecycle.total.before")
        await self._records.jobs.set_total(job.job_id, job.run.run_id, total, invalid)
        # Before the latch, so that `job.ingested` precedes the events that only a latched run can have.
        await self._progress.report_ingested(job.key, total, invalid)
        crashpoint("lifecycle.latch.before")
        run = await self._records.jobs.latch(job.job_id, job.run.run_id)
        crashpoint("lifecycle.latch.after")
        if run is not None:
            latched = msgspec.structs.replace(job, run=run)
            await self.settle(latched, await self._tasks.counts(job.key))

    async def cancel_replaced(self, job: Job, successor: JobId) -> RunState | None:
        """Cancel a job that another one replaces; None if its run has finished already."""
        reason = f"replaced by {successor}"
        counts = await self._tasks.counts(job.key)
        return await self.move(job, RunState.CANCELLED, reason, counts, code=ReasonCode.REPLACED)

    async def move(
        self,
        job: Job,
        target: RunState,
        reason: str | None,
        counts: Counts,
        keep: bool = False,
        sources: Collection[RunState] | None = None,
        code: ReasonCode | None = None,
    ) -> RunState | None:
        """Move the run to `target` if its state allows that, or is one of `sources`; None if another process was first.
        With `keep`, the sweeper does not clear the run."""
        counted = await job_counts(self._records, self._tasks, job, top_errors=0) if job.run.number > 1 else None
        whole = JobCounts(job.run.total, counts) if counted is None else counted
        event = _event(self._clock.new_id("evt"), self._clock.now(), job, target, reason, code, counts, whole)
        crashpoint("lifecycle.move.before")
        moved = await self._records.jobs.move_run(
            job.job_id, job.run.run_id, sources or sources_of(target), target, reason, event, keep, code
        )
        crashpoint("lifecycle.move.after")
        if not moved:
            return None
        _report(job, target, event.at, reason, counts)
        return target


def _event(
    notice_id: str,
    now: float,
    job: Job,
    target: RunState,
    reason: str | None,
    code: ReasonCode | None,
    counts: Counts,
    whole: JobCounts,
) -> OutboxEvent:
    return OutboxEvent(
        notice_id=notice_id,
        tenant=job.tenant,
        job_id=job.job_id,
        run_id=job.run.run_id,
        event=_EVENTS[target],
        at=now,
        data={
            "counts": msgspec.structs.asdict(counts),
            "job": counts_json(whole),
            "reason": reason,
            "reason_code": code,
        },
    )


def _report(job: Job, target: RunState, at: float, reason: str | None, counts: Counts) -> None:
    if target in ENDED:
        traces.trace_run(job, target, at, reason)
    log.info("run moved", job=job.job_id, run=job.run.run_id, state=target, **msgspec.structs.asdict(counts))


def _complete(run: Run, counts: Counts) -> bool:
    return run.last_batch and counts.ended >= run.total


def _breach(threshold: FailureThreshold | None, counts: Counts) -> str | None:
    if threshold is None:
        return None
    if threshold.failed is not None and counts.failed >= threshold.failed:
        return f"failure threshold: {counts.failed} tasks failed, the limit is {threshold.failed}"
    # Without a finished task there is no ratio, whatever `after` is.
    if threshold.ratio is not None and counts.ended >= max(1, threshold.after):
        ratio = counts.failed / counts.ended
        if ratio > threshold.ratio:
            return f"failure threshold: {ratio:.0%} of {counts.ended} tasks failed, the limit is {threshold.ratio:.0%}"
    return None
