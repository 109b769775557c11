"""Control: cancel, pause, resume. Each is one write, whatever the size of the job; a resume makes delayed references
visible, too. Workers see it when they next read the active runs, and the sweeper cancels the pending tasks of a
cancelled run. A request for the state that the job has already changes nothing."""

from collections.abc import Collection

import structlog

from conveyor.engines.queue import Hastens, recovery_queue
from conveyor.errors import Conflict, JobEnded, NotFound
from conveyor.faults import crashpoint
from conveyor.jobs.chunks import request_ingest
from conveyor.lifecycle import Lifecycle
from conveyor.model import Job
from conveyor.states import ENDED, WORKABLE, ReasonCode, RunState
from conveyor.system import System

log = structlog.get_logger()

CANCELLED = "cancelled on request"
PAUSED = "paused on request"

# Another process may move the run between our read and our write.
_TRIES = 5


class Control:
    """Moves runs at a client's request. Every method returns the changed job."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._lifecycle = Lifecycle(system.records, system.tasks, system.clock)

    async def cancel(self, job: Job) -> Job:
        """Cancel the job: no further task starts. Raises JobEnded for a job that has completed or failed."""
        for _ in range(_TRIES):
            if job.state is RunState.CANCELLED:
                return job
            _check_active(job)
            await self._move(job, RunState.CANCELLED, CANCELLED, ReasonCode.CANCELLED)
            job = await self._reload(job)
        raise _contended()

    async def pause(self, job: Job) -> Job:
        """Pause the job: no task starts until it is resumed, and running tasks are requeued. Raises JobEnded."""
        for _ in range(_TRIES):
            if job.state is RunState.PAUSED:
                return job
            _check_active(job)
            await self._move(job, RunState.PAUSED, PAUSED, ReasonCode.PAUSED)
            job = await self._reload(job)
        raise _contended()

    async def resume(self, job: Job) -> Job:
        """Resume a paused job, and its ingest if that has not finished. Raises JobEnded."""
        for _ in range(_TRIES):
            if job.state in WORKABLE:
                return job
            _check_active(job)
            resumed = await self._resume(job)
            job = await self._reload(job)
            if resumed:
                return job
        raise _contended()

    async def _resume(self, job: Job) -> bool:
        target = RunState.RUNNING if job.run.last_batch else RunState.INGESTING
        if isinstance(self._system.queue, Hastens):
            # A breaker that some of its tasks wait for may have closed meanwhile. Those that still have to wait are
            # delayed again. Before the move, so that a crash between the two is harmless.
            await self._system.queue.hasten(recovery_queue(job.run.run_id))
        if not await self._move(job, target, None, None, {RunState.PAUSED}):
            return False
        crashpoint("control.resume.between")
        if target is RunState.INGESTING:
            # The ingesters acknowledged its messages while it was paused.
            await request_ingest(self._system.queue, job, self._system.clock)
        else:
            # The last of its tasks may have finished at the moment when it was paused.
            await self._lifecycle.settle(job, await self._system.tasks.counts(job.key))
        return True

    async def _move(
        self,
        job: Job,
        target: RunState,
        reason: str | None,
        code: ReasonCode | None,
        sources: Collection[RunState] | None = None,
    ) -> bool:
        counts = await self._system.tasks.counts(job.key)
        return await self._lifecycle.move(job, target, reason, counts, sources=sources, code=code) is not None

    async def _reload(self, job: Job) -> Job:
        reloaded = await self._system.records.jobs.job(job.tenant, job.job_id)
        if reloaded is None:
            raise NotFound
        return reloaded


def _check_active(job: Job) -> None:
    if job.state in ENDED:
        raise JobEnded(f"The job is {job.state} already.", state=job.state)


def _contended() -> Conflict:
    return Conflict("Other requests changed the state of the job at the same time. Try again.")
