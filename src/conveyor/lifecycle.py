"""Lifecycle: the only code that moves a run from one state to another.

A run is complete when it is latched and as many tasks have finished as its total says. The worker checks that after it
has finished tasks, the ingester after it has set the latch, and the sweeper; one conditional write wins.
"""

from collections.abc import Collection

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.engines.records import Records
from conveyor.engines.tasks import Tasks
from conveyor.faults import crashpoint
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
        return await self.move(job, RunState.COMPLETED, None, counts)

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
        event = OutboxEvent(
            notice_id=self._clock.new_id("evt"),
            tenant=job.tenant,
            job_id=job.job_id,
            run_id=job.run.run_id,
            event=_EVENTS[target],
            at=self._clock.now(),
            data={"counts": msgspec.structs.asdict(counts), "reason": reason, "reason_code": code},
        )
        crashpoint("lifecycle.move.before")
        moved = await self._records.jobs.move_run(
            job.job_id, job.run.run_id, sources or sources_of(target), target, reason, event, keep, code
        )
        crashpoint("lifecycle.move.after")
        if not moved:
            return None
        if target in ENDED:
            traces.trace_run(job, target, event.at, reason)
        log.info("run moved", job=job.job_id, run=job.run.run_id, state=target, **msgspec.structs.asdict(counts))
        return target


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
