"""Resume: continues a failed ingest from its checkpoint."""

from conveyor.errors import Conflict
from conveyor.faults import crashpoint
from conveyor.jobs.chunks import request_ingest
from conveyor.jobs.deadlines import restart_deadline
from conveyor.lifecycle import Lifecycle
from conveyor.model import Job, is_resumable
from conveyor.states import RunState
from conveyor.system import System


async def resume_ingest(system: System, job: Job) -> None:
    """Move the run back to ingesting and request its ingest. Raises Conflict for a run whose ingest did not fail."""
    if not is_resumable(job):
        raise Conflict(f"The job is {job.state}; only a job whose ingest failed can be resumed.", state=job.state)
    if not await reopen_ingest(system, job):
        raise Conflict("The job has changed its state meanwhile. Read it again.")
    crashpoint("resume.moved.after")
    await request_ingest(system.queue, job, system.clock)


async def reopen_ingest(system: System, job: Job) -> bool:
    """Move a run whose ingest failed back to ingesting. False if another process was first."""
    # Before the move: the monitor removes the deadline of a finished run, but a run without the document has none.
    crashpoint("resume.deadline.before")
    await restart_deadline(system.records, job, system.clock.now())
    crashpoint("resume.deadline.after")
    lifecycle = Lifecycle(system.records, system.tasks, system.clock)
    counts = await system.tasks.counts(job.key)
    return await lifecycle.move(job, RunState.INGESTING, None, counts) is not None
