"""Copy results to the job of a repaired list from the jobs of the unreadable lists before it.

A task with the same line in both lists gets its old result in the new job and does not run again. The new job must not
run yet. Copying is idempotent.
"""

from collections.abc import AsyncIterator, Sequence

import msgspec

from conveyor.errors import ListUnreadable
from conveyor.faults import crashpoint
from conveyor.ingest.plan import make_plan, range_pieces, reading_of
from conveyor.lists.list_bytes import ListBytes
from conveyor.lists.reader import ListBatch, read
from conveyor.model import Job, Task, TaskEnd, TaskSeed
from conveyor.states import TaskStatus
from conveyor.system import System

_FINISHED = frozenset({TaskStatus.SUCCEEDED, TaskStatus.FAILED})


async def take_over(system: System, before: Sequence[Job], job: Job) -> int:
    """Copy results of the earlier jobs, newest last, to this job. Return the number of tasks copied."""
    count = 0
    async for batch in _batches(system, job):
        inputs = {seed.index: seed for seed in batch.seeds}
        for old in reversed(before):
            tasks = await system.tasks.at(old.key, list(inputs))
            same = [task for task in tasks if _is_result_of(task, inputs[task.index])]
            await _finish(system, job, [inputs.pop(task.index) for task in same], same)
            count += len(same)
    return count


async def _batches(system: System, job: Job) -> AsyncIterator[ListBatch]:
    """Read the list as far as possible. The ingester reports what is wrong with the rest."""
    assert job.source is not None
    settings = system.settings
    lists = ListBytes(system.blobs, job.tenant, settings.max_list_bytes)

    async def renew() -> bool:
        return True

    try:
        await lists.pin(job.source)
        ranges = await make_plan(lists, job.source, job.kind, settings.ingest_range_bytes, renew)
        for list_range in ranges:
            pieces = range_pieces(lists, list_range)
            async for batch in read(pieces, reading_of(list_range, job.kind)):
                yield batch
    except ListUnreadable:
        return


def _is_result_of(task: Task, seed: TaskSeed) -> bool:
    return task.status in _FINISHED and bytes(task.input) == seed.input.encode()


async def _finish(system: System, job: Job, seeds: Sequence[TaskSeed], tasks: Sequence[Task]) -> None:
    if not seeds:
        return
    crashpoint("takeover.before")
    await system.tasks.put(job.key, seeds)
    await system.tasks.finish(job.key, [_end_of(task) for task in tasks])
    crashpoint("takeover.after")


def _end_of(task: Task) -> TaskEnd:
    detail = msgspec.json.encode(task.detail).decode()
    at = task.finished_at or 0.0
    return TaskEnd(task.index, task.status, task.attempts, task.http_status, task.error_code, detail, at)
