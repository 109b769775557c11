"""Deadlines of runs: a document for each run that has one, due when the run is overdue. It is written with the run, and
read by the monitor (recover/overdue_runs.py)."""

import msgspec

from conveyor.engines.records import Document, Records
from conveyor.errors import EngineFailed
from conveyor.model import Job, RunId

DEADLINE = "deadline"

_TRIES = 5


class Deadline(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of the document, as JSON. The run's time counts from `since`."""

    run_id: RunId
    since: float
    # How often its unfinished tasks were requeued.
    tries: int = 0
    # Whether a monitor has started to requeue them, or to fail the run, and has not finished.
    under_way: bool = False


_decoder = msgspec.json.Decoder(Deadline)


def deadline_documents(job: Job, since: float | None = None) -> list[Document]:
    """The documents to write with the run: one, or none. Its time counts from its creation, or from `since`."""
    if job.options.deadline is None:
        return []
    fresh = Deadline(job.run.run_id, job.run.created_at if since is None else since)
    due_at = fresh.since + job.options.deadline
    return [
        Document(DEADLINE, job.tenant, job.run.run_id, msgspec.json.encode(fresh), due_at=due_at, job_id=job.job_id),
    ]


def with_since(row: Document, now: float) -> Document:
    """The document of a run whose time counts from now on, for the same time."""
    deadline = deadline_of(row)
    left = max(0.0, (row.due_at or now) - deadline.since)
    body = msgspec.json.encode(msgspec.structs.replace(deadline, since=now))
    return msgspec.structs.replace(row, body=body, due_at=now + left)


def deadline_of(row: Document) -> Deadline:
    """Raises msgspec.MsgspecError."""
    return _decoder.decode(row.body)


async def write_deadline(records: Records, job: Job) -> None:
    """Write the deadline of a run that was just created, or whose options were changed. If the run has no deadline any
    more, the monitor removes the document when it is due."""
    for row in deadline_documents(job):
        for _ in range(_TRIES):
            existing = await records.documents.document(DEADLINE, job.tenant, row.id)
            if existing is None:
                await records.documents.create_documents([row])
                return
            due_at = deadline_of(existing).since + (job.options.deadline or 0.0)
            if existing.due_at == due_at or deadline_of(existing).under_way:
                return
            if await records.documents.replace_document(msgspec.structs.replace(existing, due_at=due_at)):
                return


async def restart_deadline(records: Records, job: Job, now: float) -> None:
    """Give a resumed run its whole time again, from now on. The monitor may have removed its document meanwhile."""
    for row in deadline_documents(job, now):
        for _ in range(_TRIES):
            existing = await records.documents.document(DEADLINE, job.tenant, row.id)
            if existing is None:
                await records.documents.create_documents([row])
                return
            if await records.documents.replace_document(msgspec.structs.replace(row, version=existing.version)):
                return
        raise EngineFailed("The deadline of a run could not be written: too many concurrent writes.")
