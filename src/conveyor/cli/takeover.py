"""A list that could not be read to its end, and was mended: the results of its job go over to that of the whole list.

Gets a job that nobody works at yet, and the ones before it; a task whose line is the same in both lists ends in the new
job as it did in the old one, and is not run again. Doing it twice changes nothing.
"""

from collections.abc import AsyncIterator, Sequence

import msgspec

from conveyor.errors import ListUnreadable
from conveyor.faults import crashpoint
from conveyor.ingest.plan import make_plan, range_pieces, reading_of
from conveyor.lists.reader import ListBatch, read
from conveyor.model import Job, Task, TaskEnd, TaskSeed
from conveyor.states import TaskStatus
from conveyor.system import System

_FINISHED = frozenset({TaskStatus.SUCCEEDED, TaskStatus.FAILED})


async def take_over(system: System, before: Sequence[Job], job: Job) -> int:
    """How many tasks of the jobs before, the newest last, have their results in this one now."""
    count = 0
    async for batch in _batches(system, job):
        inputs = {seed.index: seed for seed in batch.seeds}
        for old in reversed(before):
            found = await system.tasks.at(old.key, list(inputs))
            same = [task for task in found if _is_result_of(task, inputs[task.index])]
            await _finish(system, job, [inputs.pop(task.index) for task in same], same)
            count += len(same)
    return count


async def _batches(system: System, job: Job) -> AsyncIterator[ListBatch]:
    """The list, as far as it can be read: what is wrong with the rest is the ingest's to say."""
    assert job.source is not None
    settings, most = system.settings, system.settings.max_list_bytes

    async def keep_hold() -> bool:
        return True

    try:
        for one in await make_plan(system.blobs, job.source, job.kind, settings.ingest_range_bytes, most, keep_hold):
            async for batch in read(range_pieces(system.blobs, one, most), reading_of(one, job.kind)):
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
