"""Control: cancel, pause, resume. Each is one write, whatever the size of the job; workers see it at their next look at
the active runs, and what a cancelled run leaves pending is swept behind it. Asking for what is so already changes
nothing."""

from collections.abc import Collection

import structlog

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

# The run may move between our reading and our writing; not for ever.
_TRIES = 5


class Control:
    """Moves runs at a client's wish. Every method returns the job as it is then."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._lifecycle = Lifecycle(system.records, system.tasks, system.clock)

    async def cancel(self, job: Job) -> Job:
        """Start nothing more of it, for good. Raises JobEnded if it ended otherwise."""
        for _ in range(_TRIES):
            if job.state is RunState.CANCELLED:
                return job
            _check_active(job)
            await self._move(job, RunState.CANCELLED, CANCELLED, ReasonCode.CANCELLED)
            job = await self._again(job)
        raise _restless()

    async def pause(self, job: Job) -> Job:
        """Start nothing more of it until it is resumed; what runs is given back. Raises JobEnded."""
        for _ in range(_TRIES):
            if job.state is RunState.PAUSED:
                return job
            _check_active(job)
            await self._move(job, RunState.PAUSED, PAUSED, ReasonCode.PAUSED)
            job = await self._again(job)
        raise _restless()

    async def resume(self, job: Job) -> Job:
        """Go on with a paused job: with its list, if that was not read to its end. Raises JobEnded."""
        for _ in range(_TRIES):
            if job.state in WORKABLE:
                return job
            _check_active(job)
            resumed = await self._resume(job)
            job = await self._again(job)
            if resumed:
                return job
        raise _restless()

    async def _resume(self, job: Job) -> bool:
        target = RunState.RUNNING if job.run.last_batch else RunState.INGESTING
        if not await self._move(job, target, None, None, {RunState.PAUSED}):
            return False
        crashpoint("control.resume.between")
        if target is RunState.INGESTING:
            # Its messages were let go of while it was paused.
            await request_ingest(self._system.queue, job, self._system.clock)
        else:
            # The last of its tasks may have ended in the moment it was paused.
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

    async def _again(self, job: Job) -> Job:
        found = await self._system.records.job(job.tenant, job.job_id)
        if found is None:
            raise NotFound
        return found


def _check_active(job: Job) -> None:
    if job.state in ENDED:
        raise JobEnded(f"The job is {job.state} already.", state=job.state)


def _restless() -> Conflict:
    return Conflict("The job was moved by others again and again; send this once more.")
