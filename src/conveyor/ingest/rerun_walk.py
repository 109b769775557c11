"""The ingest of a rerun: tasks of earlier runs of the same job, walked in pages, in place of a list.

Each range is one walk: the tasks of one run in one shard that match, without those that a later run has too, so that
over all walks each task is met once, as it came out last. How far a walk is follows from the index of its last task.
Where rows stand by index and no index helps to choose, a run is walked whole, in the order of the list.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

import msgspec

from conveyor.clock import Clock
from conveyor.engines.records import Records
from conveyor.engines.tasks import TaskFilter, Tasks, WalksByIndex
from conveyor.ingest.plan import KeepHold, LeaseLostError
from conveyor.lists import reader as lists
from conveyor.lists.reader import ListBatch
from conveyor.model import (
    Compression,
    InputJson,
    Job,
    Lineage,
    ListFormat,
    Range,
    Run,
    RunId,
    RunKey,
    Source,
    Task,
    TaskSeed,
    task_id,
)
from conveyor.states import TaskStatus

# In the place of a shard: all of them.
_WHOLE = -1


class Walk(msgspec.Struct, frozen=True, array_like=True):
    """Which tasks a range stands for. It is kept as the key of the range's source."""

    run_id: RunId
    shard: int
    # None: however they ended.
    status: TaskStatus | None


_walks = msgspec.json.Decoder(Walk)


async def plan_rerun(records: Records, tasks: Tasks, clock: Clock, job: Job, keep_hold: KeepHold) -> list[Range]:
    """The ranges of a rerun. Raises HoldLost."""
    lineage = _lineage(job)
    runs = _sources(lineage, await records.runs(job.job_id))
    if TaskStatus.CANCELLED in lineage.statuses:
        for run in runs:
            await _cancel_rest(tasks, clock, job, run, keep_hold)
    if lineage.indexes:
        # They are read by index, whichever run and shard they are in.
        return [_range(0, Walk(lineage.parent, _WHOLE, None))]
    if not _chooses(lineage):
        # The first run has every task.
        runs = runs[:1]
    shards: Sequence[int] = range(max(1, job.task_shard_count))
    statuses: Sequence[TaskStatus | None] = lineage.statuses
    if not lineage.statuses:
        shards = [_WHOLE] if isinstance(tasks, WalksByIndex) else shards
        statuses = [None]
    walks = [Walk(run.run_id, shard, status) for run in runs for status in statuses for shard in shards]
    return [_range(number, walk) for number, walk in enumerate(walks)]


async def copied(records: Records, tasks: Tasks, job: Job, one: Range) -> AsyncGenerator[ListBatch, None]:
    """The tasks of one range from where it is, a page at a time."""
    lineage = _lineage(job)
    if lineage.indexes:
        if one.offset == 0:
            yield await _by_index(records, tasks, job, lineage)
        return
    walk = _walks.decode(one.source.key)
    where = TaskFilter(walk.status, lineage.error_code, lineage.http_status, lineage.tag)
    later = await _later(records, job, lineage, walk)
    steps = _whole if walk.shard == _WHOLE else _shard
    async with aclosing(steps(tasks, _key(job, walk.run_id), walk, one, where)) as found:
        async for step in found:
            seeds = [TaskSeed(task.index, InputJson(bytes(task.input).decode())) for task in step.tasks]
            yield ListBatch(await _without(tasks, later, seeds), [], step.last, step.walked)


async def _by_index(records: Records, tasks: Tasks, job: Job, lineage: Lineage) -> ListBatch:
    """Tasks that were chosen one by one, each as the latest run that has it says."""
    seeds: list[TaskSeed] = []
    missing = set(lineage.indexes)
    for run in reversed(_sources(lineage, await records.runs(job.job_id))):
        tasks_of_run = await tasks.at(job.key_of(run), sorted(missing)) if missing else []
        missing -= {task.index for task in tasks_of_run}
        seeds += [
            TaskSeed(task.index, InputJson(bytes(task.input).decode()))
            for task in tasks_of_run
            if task.status in lineage.statuses
        ]
    seeds.sort(key=lambda seed: seed.index)
    return ListBatch(seeds, [], max(lineage.indexes), len(lineage.indexes))


class _Step(NamedTuple):
    """Tasks in order of index; the index that the walk goes on after, and how many rows it has met."""

    tasks: list[Task]
    last: int
    walked: int


async def _shard(tasks: Tasks, run: RunKey, walk: Walk, one: Range, where: TaskFilter) -> AsyncGenerator[_Step, None]:
    walked = one.offset
    after = task_id(run.run_id, one.index) if walked else None
    while page := await tasks.page(run, walk.shard, after, lists.BATCH, where):
        after = page[-1].task_id
        walked += len(page)
        yield _Step(sorted(page, key=lambda task: task.index), page[-1].index, walked)


async def _whole(tasks: Tasks, run: RunKey, walk: Walk, one: Range, where: TaskFilter) -> AsyncGenerator[_Step, None]:
    assert isinstance(tasks, WalksByIndex)
    walked = one.offset
    after = one.index if walked else -1
    while True:
        stretch = await tasks.walk(run, after, lists.BATCH, where)
        walked += stretch.read
        # What is behind the last that matched, up to the end, is of no interest the second time either.
        met = [task.index for task in stretch.tasks] if stretch.last is None else [stretch.last]
        after = max([after, *met])
        yield _Step(stretch.tasks, max(after, 0), walked)
        if stretch.last is None:
            return


async def _without(tasks: Tasks, later: Sequence[RunKey], seeds: list[TaskSeed]) -> list[TaskSeed]:
    """Those that no later run has: where one has, that one says how they came out."""
    for run in later:
        if seeds:
            known = {task.index for task in await tasks.at(run, [seed.index for seed in seeds])}
            seeds = [seed for seed in seeds if seed.index not in known]
    return seeds


async def _later(records: Records, job: Job, lineage: Lineage, walk: Walk) -> list[RunKey]:
    if not _chooses(lineage):
        return []
    runs = _sources(lineage, await records.runs(job.job_id))
    number = next(run.number for run in runs if run.run_id == walk.run_id)
    return [_key(job, run.run_id) for run in reversed(runs) if run.number > number]


async def _cancel_rest(tasks: Tasks, clock: Clock, job: Job, run: Run, keep_hold: KeepHold) -> None:
    """What an ended run left pending counts as cancelled, swept or not yet."""
    key = _key(job, run.run_id)
    if run.last_batch and (await tasks.counts(key)).ended >= run.total:
        return
    while await tasks.cancel_pending(key, lists.BATCH, clock.now()):
        if not await keep_hold():
            raise LeaseLostError


def _sources(lineage: Lineage, runs: Sequence[Run]) -> list[Run]:
    """The runs that tasks are taken from: the parent, and those before it."""
    last = next(run.number for run in runs if run.run_id == lineage.parent)
    return [run for run in runs if run.number <= last]


def _chooses(lineage: Lineage) -> bool:
    return bool(lineage.statuses) or (lineage.error_code, lineage.http_status, lineage.tag) != (None, None, None)


def _lineage(job: Job) -> Lineage:
    assert job.run.lineage is not None
    return job.run.lineage


def _key(job: Job, run_id: RunId) -> RunKey:
    return msgspec.structs.replace(job.key, run_id=run_id)


def _range(number: int, walk: Walk) -> Range:
    return Range(
        number=number,
        source=Source(msgspec.json.encode(walk).decode(), 0, "", ListFormat.JSONL, Compression.NONE),
        format=ListFormat.JSONL,
        compression=Compression.NONE,
        start=0,
        end=None,
        first_index=0,
    )
