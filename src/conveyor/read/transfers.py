"""The downloads of a job that are in progress, added up: how many bytes they have, of how many."""

import msgspec

from conveyor.engines.records import DocumentRecords
from conveyor.model import LONG_KINDS, PROGRESS, Job, TaskProgress
from conveyor.states import RunState

# Tasks whose progress is added up at most: more at once would make a status expensive.
MAX_TRANSFERS = 200

_progress = msgspec.json.Decoder(TaskProgress)


class Transfers(msgspec.Struct, frozen=True, array_like=True):
    """The downloads in progress. `total` is null while the size of one is unknown."""

    tasks: int
    done: int
    total: int | None
    # Bytes a second.
    rate: float


async def transfers(documents: DocumentRecords, job: Job) -> Transfers | None:
    """Those of the latest run, by the progress that was last stored; None if it downloads nothing now."""
    if job.kind not in LONG_KINDS or job.run.state is not RunState.RUNNING:
        return None
    rows = (await documents.documents(PROGRESS, job.tenant, None, MAX_TRANSFERS, job.job_id)).items
    found = [task for row in rows if (task := _progress.decode(row.body)).run_id == job.run.run_id and task.holder]
    if not found:
        return None
    totals = [task.total for task in found if task.total is not None]
    total = sum(totals) if len(totals) == len(found) else None
    return Transfers(len(found), sum(task.done for task in found), total, round(sum(task.rate for task in found), 1))
