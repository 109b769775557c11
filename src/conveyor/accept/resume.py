"""Resume: continues a failed ingest from its checkpoint."""

from conveyor.errors import Conflict
from conveyor.faults import crashpoint
from conveyor.jobs.chunks import request_ingest
from conveyor.jobs.deadlines import restart_deadline
from conveyor.lifecycle import Lifecycle
from conveyor.model import Job, is_resumable, lifetime_of
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
    """Move a run whose ingest failed back to ingesting. False if another process was first. Raises Conflict for a run
    at its maximum lifetime, which would fail at once, for good."""
    lifetime = lifetime_of(job, system.settings.max_lifetime_seconds)
    if job.run.created_at + lifetime <= system.clock.now():
        raise Conflict(
            f"The run has reached its maximum lifetime of {lifetime:g} s. Raise its `max_lifetime` to resume it; the "
            "server may have a limit of its own.",
            state=job.state,
        )
    # Before the move: the monitor removes the deadline of a finished run, but a run without the document has none.
    crashpoint("resume.deadline.before")
    await restart_deadline(system.records, job, system.clock.now())
    crashpoint("resume.deadline.after")
    lifecycle = Lifecycle(system.records, system.tasks, system.clock)
    counts = await system.tasks.counts(job.key)
    return await lifecycle.move(job, RunState.INGESTING, None, counts) is not None
