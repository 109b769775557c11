"""Deadlines of runs: the row that is made with a run that has one, and is due when its time is over. Whoever makes runs
writes it, the monitor looks at it (recover/overdue_runs.py)."""

import msgspec

from conveyor.engines.records import Document, Records
from conveyor.errors import EngineFailed
from conveyor.model import Job, RunId

DEADLINE = "deadline"

_TRIES = 5


class Deadline(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of the row, as JSON. The run's time counts from `since`."""

    run_id: RunId
    since: float
    # Times that its unfinished tasks were queued again.
    tries: int = 0
    # Whether that, or the end of the run, is still to be seen through.
    under_way: bool = False


_decoder = msgspec.json.Decoder(Deadline)


def deadline_rows(job: Job, since: float | None = None) -> list[Document]:
    """The rows to write with the run: one, or none. Its time counts from its making, unless `since` is given."""
    if job.options.deadline is None:
        return []
    fresh = Deadline(job.run.run_id, job.run.created_at if since is None else since)
    due_at = fresh.since + job.options.deadline
    return [
        Document(DEADLINE, job.tenant, job.run.run_id, msgspec.json.encode(fresh), due_at=due_at, job_id=job.job_id),
    ]


def deadline_of(row: Document) -> Deadline:
    """Raises msgspec.MsgspecError."""
    return _decoder.decode(row.body)


async def follow_deadline(records: Records, job: Job) -> None:
    """Have a run whose options were changed, or that was just made, looked at in time. One that has none any more is
    found so when its row is due."""
    for row in deadline_rows(job):
        for _ in range(_TRIES):
            standing = await records.documents.document(DEADLINE, job.tenant, row.id)
            if standing is None:
                await records.documents.create_rows([row])
                return
            due_at = deadline_of(standing).since + (job.options.deadline or 0.0)
            if standing.due_at == due_at or deadline_of(standing).under_way:
                return
            if await records.documents.replace_row(msgspec.structs.replace(standing, due_at=due_at)):
                return


async def restart_deadline(records: Records, job: Job, now: float) -> None:
    """Give a run that goes on after its end its whole time again, from now on. While it had ended the monitor may have
    removed its row."""
    for row in deadline_rows(job, now):
        for _ in range(_TRIES):
            standing = await records.documents.document(DEADLINE, job.tenant, row.id)
            if standing is None:
                await records.documents.create_rows([row])
                return
            if await records.documents.replace_row(msgspec.structs.replace(row, version=standing.version)):
                return
        raise EngineFailed("The deadline of a run could not be written: others write it all the time.")
