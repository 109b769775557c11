"""The long tasks of a job that are in progress: each by its task, and its downloads added up in bytes."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from conveyor.clock import iso_text
from conveyor.engines.records import Document, DocumentRecords
from conveyor.engines.tasks import Tasks
from conveyor.model import LONG_KINDS, PROGRESS, Job, JobKind, Task, TaskProgress
from conveyor.states import ENDED, TaskStatus

# Tasks whose progress is added up at most, and documents that are read for them: more would make a status expensive.
MAX_TRANSFERS = 200
MAX_READ = 1_000
# Kinds whose tasks may report progress.
_REPORTING = LONG_KINDS | {JobKind.PYTHON}

_progress = msgspec.json.Decoder(TaskProgress)


class Transfers(msgspec.Struct, frozen=True, array_like=True):
    """The downloads in progress. `total` is null while the size of one is unknown."""

    tasks: int
    done: int
    total: int | None
    # Bytes a second.
    rate: float


async def transfers(documents: DocumentRecords, tasks: Tasks, job: Job) -> Transfers | None:
    """Those of the latest run, by the progress that was last stored; None if it downloads nothing now."""
    if job.kind not in LONG_KINDS:
        return None
    found = await _in_progress(documents, tasks, job)
    if not found:
        return None
    totals = [task.total for task in found if task.total is not None]
    total = sum(totals) if len(totals) == len(found) else None
    return Transfers(len(found), sum(task.done for task in found), total, round(sum(task.rate for task in found), 1))


async def progress_of(
    documents: DocumentRecords, tasks: Tasks, job: Job, page: Sequence[Task]
) -> Mapping[int, TaskProgress]:
    """The progress of those tasks of a page that an attempt of the latest run has now, by index."""
    wanted = {task.index for task in page if task.status is TaskStatus.PENDING}
    if job.kind not in _REPORTING or not wanted:
        return {}
    found = await _in_progress(documents, tasks, job)
    return {progress.index: progress for progress in found if progress.index in wanted}


def progress_json(progress: TaskProgress) -> dict[str, Any]:
    """The progress of a task, as the API shows it."""
    return {
        "at": iso_text(progress.at),
        "attempt": progress.attempt,
        "done": progress.done,
        "total": progress.total,
        "rate": progress.rate,
        "note": progress.note,
    }


async def _in_progress(documents: DocumentRecords, tasks: Tasks, job: Job) -> list[TaskProgress]:
    """The document of a finished task stays until it is due: whether the task has finished is in its row."""
    if job.run.state in ENDED:
        return []
    found: list[TaskProgress] = []
    cursor: str | None = None
    for _ in range(MAX_READ // MAX_TRANSFERS):
        page = await documents.documents(PROGRESS, job.tenant, cursor, MAX_TRANSFERS, job.job_id)
        held = [progress for row in page.items if (progress := _held(row, job)) is not None]
        if held:
            unfinished = await tasks.unfinished(job.key, [progress.index for progress in held])
            found += [progress for progress in held if progress.index in unfinished]
        cursor = page.next_cursor
        if cursor is None or len(found) >= MAX_TRANSFERS:
            break
    return found[:MAX_TRANSFERS]


def _held(row: Document, job: Job) -> TaskProgress | None:
    """The progress, if an attempt of the latest run has the task: between attempts its document is never due."""
    if row.due_at is None:
        return None
    progress = _progress.decode(row.body)
    return progress if progress.run_id == job.run.run_id and progress.holder else None
