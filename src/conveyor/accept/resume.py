"""Resume: an ingest that was given up goes on where it stopped, once what stopped it is mended."""

import msgspec

from conveyor.engines.queue import CONTROL, Outgoing
from conveyor.errors import Conflict
from conveyor.faults import crashpoint
from conveyor.jobs.chunks import send_all
from conveyor.jobs.deadlines import restart_deadline
from conveyor.lifecycle import Lifecycle
from conveyor.model import IngestJob, Job, resumable
from conveyor.states import RunState
from conveyor.system import System


async def resume_ingest(system: System, job: Job) -> None:
    """Move the run back to ingesting and have its list looked at again. Raises Conflict for any other run."""
    if not resumable(job):
        raise Conflict(f"The job is {job.state}; only a job whose ingest failed can be resumed.", state=job.state)
    if not await reopen(system, job):
        raise Conflict("The job has moved meanwhile; look at it again.")
    crashpoint("resume.moved.after")
    await request_ingest(system, job)


async def reopen(system: System, job: Job) -> bool:
    """Move a run that can be resumed back to ingesting. False if somebody else was first."""
    # Before the move: a row of a run that stays ended goes when it is due, a run without its row has no deadline.
    crashpoint("resume.deadline.before")
    await restart_deadline(system.records, job, system.clock.now())
    crashpoint("resume.deadline.after")
    lifecycle = Lifecycle(system.records, system.tasks, system.clock)
    counts = await system.tasks.counts(job.key)
    return await lifecycle.move(job, RunState.INGESTING, None, counts) is not None


async def request_ingest(system: System, job: Job) -> None:
    """Have whoever is free look at what the run is to be made of. Once too often does no harm."""
    message = msgspec.json.encode(IngestJob(job.tenant, job.job_id, job.run.run_id))
    await send_all(system.queue, CONTROL, [Outgoing(message)], system.clock)
