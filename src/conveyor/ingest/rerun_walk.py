"""The ingest of a rerun. It copies tasks of earlier runs of the same job, page by page, instead of reading a list.

Each range is one walk: the matching tasks of one run in one shard, without those that have a later outcome. So over all
walks each task occurs once, with its latest outcome, which is stored with the copy: it is what the copy replaces in the
job's view. The index of the last copied task is the checkpoint of a walk.
Where the engine stores rows by index, and the rerun does not select by status, a run is one walk over all shards, in
the order of the list.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

from conveyor.clock import Clock
from conveyor.engines.blobs import Blobs
from conveyor.engines.records import Records
from conveyor.engines.tasks import TaskFilter, Tasks, by_index
from conveyor.ingest.damaged_bodies import damaged_tasks
from conveyor.ingest.plan import LeaseLostError, Renew
from conveyor.jobs.latest_outcomes import is_extractable, latest_outcomes, only_latest
from conveyor.jobs.task_hosts import task_host
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
    RunKey,
    Task,
    TaskSeed,
    Walk,
    prior_text,
    task_id,
)
from conveyor.states import TaskStatus


async def plan_rerun(records: Records, tasks: Tasks, clock: Clock, job: Job, renew: Renew) -> list[Range]:
    """The ranges of a rerun. Raises LeaseLostError."""
    lineage = _lineage(job)
    runs = _source_runs(lineage, await records.jobs.runs(job.job_id))
    # From here on, the outcomes of all earlier runs are final.
    for run in runs:
        await _cancel_pending(tasks, clock, job, run, renew)
    if lineage.indexes:
        # They are read by index, whichever run and shard they are in.
        return [_range_of(0, Walk(lineage.parent, None, None))]
    if not _is_selective(lineage):
        # The first run has every task.
        runs = runs[:1]
    shards: Sequence[int | None] = range(max(1, job.task_shard_count))
    statuses: Sequence[TaskStatus | None] = lineage.statuses
    if not lineage.statuses:
        shards = shards if by_index(tasks, job.key) is None else [None]
        statuses = [None]
    walks = [
        Walk(run.run_id, shard, status)
        for run in runs
        for status in statuses
        # A task that is cancelled in the job's view is so in the first run.
        if run.number == 1 or status is not TaskStatus.CANCELLED
        for shard in shards
    ]
    return [_range_of(number, walk) for number, walk in enumerate(walks)]


async def copy_tasks(
    records: Records, tasks: Tasks, blobs: Blobs, job: Job, range_: Range
) -> AsyncGenerator[ListBatch, None]:
    """The tasks of a walk from its checkpoint on, a page at a time."""
    assert isinstance(range_.source, Walk)
    walk = range_.source
    lineage = _lineage(job)
    if lineage.indexes:
        if range_.offset == 0:
            yield await _by_index(records, tasks, job, lineage)
        return
    where = TaskFilter(walk.status, lineage.error_code, lineage.http_status, lineage.tag)
    runs = _source_runs(lineage, await records.jobs.runs(job.job_id))
    keys = [job.key_of(run) for run in runs]
    place = next(at for at, run in enumerate(runs) if run.run_id == walk.run_id)
    run = keys[place]
    if walk.shard is None:
        pages = _run_pages(tasks, run, range_, where)
    else:
        pages = _shard_pages(tasks, run, walk.shard, range_, where)
    index, rows_read = range_.index, range_.offset
    async with aclosing(pages):
        async for page in pages:
            chosen = [task for task in page.tasks if _is_chosen(task, lineage)]
            if _is_selective(lineage):
                latest = await only_latest(tasks, place == 0, keys[:place:-1], chosen)
            else:
                latest = await latest_outcomes(tasks, keys, chosen)
            if lineage.extract_only:
                latest = [task for task in latest if is_extractable(task)]
            if lineage.damaged:
                damaged: list[Task] = []
                async for some in damaged_tasks(blobs, latest):
                    damaged += some
                    # The checkpoint stays: the batch only renews the lease.
                    yield ListBatch([], [], index, rows_read)
                latest = sorted(damaged, key=lambda task: task.index)
            await lists.let_others_run()
            index, rows_read = page.last, page.rows_read
            yield ListBatch(list(map(_seed, latest)), [], index, rows_read)


async def _by_index(records: Records, tasks: Tasks, job: Job, lineage: Lineage) -> ListBatch:
    """Tasks that were selected one by one, by their latest outcome."""
    keys = [job.key_of(run) for run in _source_runs(lineage, await records.jobs.runs(job.job_id))]
    latest = await latest_outcomes(tasks, keys, await tasks.at(keys[0], sorted(lineage.indexes)))
    chosen = [task for task in latest if not lineage.statuses or task.status in lineage.statuses]
    seeds = [_seed(task) for task in chosen if is_extractable(task) or not lineage.extract_only]
    return ListBatch(seeds, [], max(lineage.indexes), len(lineage.indexes))


def _is_chosen(task: Task, lineage: Lineage) -> bool:
    """Whether a task matches what no engine filters by."""
    if lineage.dead_lettered and not task.detail.dead_lettered:
        return False
    return lineage.host is None or task_host(bytes(task.input).decode()) == lineage.host


def _seed(latest: Task) -> TaskSeed:
    """The copy of a task, with its latest outcome."""
    return TaskSeed(latest.index, InputJson(bytes(latest.input).decode()), prior_text(latest))


class _WalkPage(NamedTuple):
    """Tasks in order of index; the index after which the walk resumes, and how many rows it has read so far."""

    tasks: list[Task]
    last: int
    rows_read: int


async def _shard_pages(
    tasks: Tasks, run: RunKey, shard: int, range_: Range, where: TaskFilter
) -> AsyncGenerator[_WalkPage, None]:
    rows_read = range_.offset
    after = task_id(run.run_id, range_.index) if rows_read else None
    while page := await tasks.page(run, shard, after, lists.BATCH, where):
        after = page[-1].task_id
        rows_read += len(page)
        yield _WalkPage(sorted(page, key=lambda task: task.index), page[-1].index, rows_read)


async def _run_pages(tasks: Tasks, run: RunKey, range_: Range, where: TaskFilter) -> AsyncGenerator[_WalkPage, None]:
    engine = by_index(tasks, run)
    assert engine is not None
    rows_read = range_.offset
    after = range_.index if rows_read else -1
    while True:
        stretch = await engine.walk(run, after, lists.BATCH, where)
        rows_read += stretch.read
        # No row behind the last match matches, so a resumed walk may read them again.
        indexes = [task.index for task in stretch.tasks] if stretch.last is None else [stretch.last]
        after = max([after, *indexes])
        yield _WalkPage(stretch.tasks, max(after, 0), rows_read)
        if stretch.last is None:
            return


async def _cancel_pending(tasks: Tasks, clock: Clock, job: Job, run: Run, renew: Renew) -> None:
    """Pending tasks of a finished run count as cancelled, whether the sweeper has marked them yet or not."""
    key = job.key_of(run)
    if run.last_batch and (await tasks.counts(key)).ended >= run.total:
        return
    while await tasks.cancel_pending(key, lists.BATCH, clock.now()):
        if not await renew():
            raise LeaseLostError
    if (await tasks.counts(key)).ended < run.total:
        # A process that moved tasks died before it counted them.
        await tasks.recount(key)


def _source_runs(lineage: Lineage, runs: Sequence[Run]) -> list[Run]:
    """The runs whose tasks are copied: the parent and all runs before it."""
    parent = next(run.number for run in runs if run.run_id == lineage.parent)
    return [run for run in runs if run.number <= parent]


def _is_selective(lineage: Lineage) -> bool:
    conditions = (lineage.error_code, lineage.http_status, lineage.tag)
    return bool(lineage.statuses) or lineage.damaged or conditions != (None, None, None)


def _lineage(job: Job) -> Lineage:
    assert job.run.lineage is not None
    return job.run.lineage


def _range_of(number: int, walk: Walk) -> Range:
    return Range(
        number=number,
        source=walk,
        format=ListFormat.JSONL,
        compression=Compression.NONE,
        start=0,
        end=None,
        first_index=0,
    )
