"""Dead letters: which job each belongs to, and what redrive does with it.

The message in a dead letter names its tenant, job and run; it is decoded only here. What redrive does follows from the
state of the job and of its tasks at that moment, and is never stored: a redrive that was interrupted is repeated.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from conveyor.engines.queue import CONTROL, DeadLetter
from conveyor.engines.records import Records
from conveyor.engines.tasks import Tasks, is_reachable
from conveyor.jobs.chunks import decode
from conveyor.jobs.latest_outcomes import latest_outcomes
from conveyor.model import (
    Chunk,
    IngestJob,
    IngestRange,
    Job,
    JobId,
    RunId,
    Task,
    TenantId,
    is_resumable,
)
from conveyor.states import ENDED, WORKABLE, ReasonCode, RunState, TaskStatus

_control = msgspec.json.Decoder(IngestJob | IngestRange)


class DeadLetterOwner(msgspec.Struct, frozen=True):
    """A decoded dead letter."""

    message_id: str
    tenant: TenantId
    job_id: JobId
    run_id: RunId
    # The tasks in it; None for a part of an ingest.
    chunk: Chunk | None
    reason: str
    at: float


class RedriveAction(StrEnum):
    """What redrive does with a dead letter."""

    # Sends the message back to its queue.
    REQUEUE = "requeue"
    # Starts a rerun of the failed tasks in it.
    RERUN_TASK = "rerun_task"
    NONE = "none"


class RedrivePlan(msgspec.Struct, frozen=True):
    """What redrive does with one dead letter, and a sentence that says so."""

    action: RedriveAction
    effect: str
    job: Job | None = None
    # The tasks to rerun, and the error of the first.
    indexes: Sequence[int] = ()
    error_code: str | None = None


def decode_dead_letter(letter: DeadLetter) -> DeadLetterOwner | None:
    """None for a message that this version cannot decode: it belongs to nobody."""
    try:
        if letter.queue == CONTROL:
            message = _control.decode(letter.body)
            return _owner(letter, message.tenant, message.job_id, message.run_id, None)
        chunk = decode(letter.body)
        return _owner(letter, chunk.run.tenant, chunk.run.job_id, chunk.run.run_id, chunk)
    except msgspec.MsgspecError:
        return None


async def plan_redrives(
    records: Records, tasks: Tasks, letters: Sequence[DeadLetterOwner]
) -> list[tuple[DeadLetterOwner, RedrivePlan]]:
    """What redrive does with each of these dead letters of one tenant. Reads each job once."""
    plans: dict[str, RedrivePlan] = {}
    by_job: dict[JobId, list[DeadLetterOwner]] = {}
    for letter in letters:
        by_job.setdefault(letter.job_id, []).append(letter)
    for job_id, group in by_job.items():
        job = await records.jobs.job(group[0].tenant, job_id)
        if job is None:
            gone = RedrivePlan(RedriveAction.NONE, "Nothing: the job was deleted.")
            plans |= {letter.message_id: gone for letter in group}
            continue
        if not is_reachable(tasks, job.key):
            where = f"Nothing: the tasks of the job are in the task engine {job.task_store}, not open here."
            elsewhere = RedrivePlan(RedriveAction.NONE, where)
            plans |= {letter.message_id: elsewhere for letter in group}
            continue
        latest = await _latest_outcomes(records, tasks, job, group)
        plans |= {letter.message_id: _plan(job, letter, latest) for letter in group}
    return [(letter, plans[letter.message_id]) for letter in letters]


async def _latest_outcomes(
    records: Records, tasks: Tasks, job: Job, letters: Iterable[DeadLetterOwner]
) -> dict[int, Task]:
    """The tasks in these letters, each with its latest outcome over all runs; those that the run in progress has still
    to finish are pending."""
    chunks = [letter.chunk for letter in letters if letter.chunk is not None]
    indexes = sorted({ref.index for chunk in chunks for ref in chunk.refs})
    if not indexes:
        return {}
    runs = [job.run] if job.run.number == 1 else await records.jobs.runs(job.job_id)
    keys = [job.key_of(run) for run in runs]
    seen = await latest_outcomes(tasks, keys, await tasks.at(keys[0], indexes))
    if len(runs) > 1 and job.state not in ENDED:
        seen += [task for task in await tasks.at(job.key, indexes) if task.status is TaskStatus.PENDING]
    return {task.index: task for task in seen}


def _plan(job: Job, letter: DeadLetterOwner, latest: dict[int, Task]) -> RedrivePlan:
    if letter.chunk is None:
        return _ingest_plan(job, letter)
    chosen = [latest[ref.index] for ref in letter.chunk.refs if ref.index in latest]
    pending = any(task.status is TaskStatus.PENDING for task in chosen)
    if pending and job.run.run_id == letter.run_id and job.state in WORKABLE:
        return RedrivePlan(RedriveAction.REQUEUE, "Sends its unfinished tasks back to the queue.", job)
    if letter.chunk.code == ReasonCode.DEADLINE:
        return RedrivePlan(
            RedriveAction.NONE, "Nothing: the run missed its deadline. Rerun the cancelled tasks of the job instead."
        )
    failed = [task for task in chosen if task.status is TaskStatus.FAILED]
    if not failed:
        return RedrivePlan(RedriveAction.NONE, "Nothing: none of its tasks is failed now.")
    plan = plan_rerun_of(job, len(failed))
    return msgspec.structs.replace(plan, indexes=[task.index for task in failed], error_code=failed[0].error_code)


def plan_rerun_of(job: Job, count: int) -> RedrivePlan:
    """What redrive does with dead-lettered tasks of a job."""
    if is_resumable(job):
        return RedrivePlan(RedriveAction.NONE, "Nothing: resume the failed ingest of the job first.")
    what = "the task" if count == 1 else f"{count} tasks"
    later = "" if job.state in ENDED else " once the run in progress has finished"
    return RedrivePlan(RedriveAction.RERUN_TASK, f"Starts a rerun of {what}{later}.", job)


def _ingest_plan(job: Job, letter: DeadLetterOwner) -> RedrivePlan:
    if job.run.run_id == letter.run_id:
        if is_resumable(job):
            return RedrivePlan(RedriveAction.REQUEUE, "Resumes the ingest of the job.", job)
        if job.state is RunState.INGESTING:
            return RedrivePlan(RedriveAction.REQUEUE, "Sends this part of the ingest back to the queue.", job)
    return RedrivePlan(RedriveAction.NONE, "Nothing: the ingest is not in progress and cannot be resumed.")


def _owner(letter: DeadLetter, tenant: TenantId, job_id: JobId, run_id: RunId, chunk: Chunk | None) -> DeadLetterOwner:
    return DeadLetterOwner(letter.message_id, tenant, job_id, run_id, chunk, letter.reason, letter.at)
