"""Pages of tasks in the order of the user's list, on engines that store tasks by index.

One run, or the latest outcome of each task over all runs of a job. The cursor is `ix:` and the last index that was
read, the same for all runs, so that a listing resumes after a rerun was added. Listings that began in the order of
task_id keep that order: their cursors say so.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence

import msgspec

from conveyor.engines.tasks import MAX_SCANNED, ReadsByIndex, TaskFilter, Tasks, Walked, by_index
from conveyor.errors import BadCursor
from conveyor.jobs.latest_outcomes import latest_outcomes, only_latest
from conveyor.model import OUTCOMES, RunKey, Task
from conveyor.read.results import TaskPage, count_rows
from conveyor.states import TaskStatus

PREFIX = "ix:"

# Rows of one read of a listing with a filter.
_ROWS = 500
# Rows of each run of a job that are read at once, however many runs it has.
_FEWEST_ROWS = 20

_CURSOR = re.compile(r"ix:([0-9]{1,15})", re.ASCII)


def engine_in_list_order(tasks: Tasks, runs: Sequence[RunKey], cursor: str | None) -> ReadsByIndex | None:
    """The engine that lists these runs in list order; None where it cannot, or where the listing began otherwise."""
    if cursor is not None and not cursor.startswith(PREFIX):
        return None
    engine = by_index(tasks, runs[0])
    if engine is None and cursor is not None:
        raise BadCursor
    return engine


async def page_in_list_order(
    tasks: Tasks, engine: ReadsByIndex, runs: Sequence[RunKey], where: TaskFilter, limit: int, cursor: str | None
) -> TaskPage:
    """Up to `limit` tasks whose latest outcome over these runs matches; `runs` are one, or all of a job, oldest first.
    A page may have fewer tasks and still not be the last. Raises BadCursor."""
    after = _decode(cursor)
    where = _with_status(where)
    items: list[Task] = []
    read = 0
    while True:
        # One more than fits tells whether there is a next page.
        rows = limit + 1 - len(items) if where == TaskFilter() else _ROWS
        walked = await _stretch(tasks, engine, runs, where, after, rows)
        read += walked.read
        items += walked.tasks
        if len(items) > limit:
            items = items[:limit]
            count_rows(read, limit)
            return TaskPage(items, _encode(items[-1].index), read)
        if walked.last is None or read >= MAX_SCANNED:
            count_rows(read, len(items))
            return TaskPage(items, None if walked.last is None else _encode(walked.last), read)
        after = walked.last


async def batches_in_list_order(
    tasks: Tasks, engine: ReadsByIndex, runs: Sequence[RunKey], where: TaskFilter, cursor: str | None
) -> AsyncGenerator[tuple[list[Task], str | None], None]:
    """All matching tasks after the cursor: batches of tasks with the cursors after them. Raises BadCursor."""
    after = _decode(cursor)
    where = _with_status(where)
    while True:
        walked = await _stretch(tasks, engine, runs, where, after, _ROWS)
        if walked.last is None:
            yield walked.tasks, _encode(walked.tasks[-1].index) if walked.tasks else cursor
            return
        after, cursor = walked.last, _encode(walked.last)
        yield walked.tasks, cursor


async def _stretch(
    tasks: Tasks, engine: ReadsByIndex, runs: Sequence[RunKey], where: TaskFilter, after: int, rows: int
) -> Walked:
    """The matching tasks among the next rows, in the job's view of them."""
    if len(runs) == 1:
        return await engine.walk(runs[0], after, rows, where)
    if where == TaskFilter(tag=where.tag):
        # The first run has every task, and a tag is the same in all runs.
        walked = await engine.walk(runs[0], after, rows, where)
        return Walked(await latest_outcomes(tasks, runs, walked.tasks), walked.read, walked.last)
    sources = runs if where.status is None or where.status in OUTCOMES else runs[:1]
    # Together about as many rows as of one run.
    each = max(_FEWEST_ROWS, rows // len(sources))
    walks = await asyncio.gather(*(engine.walk(run, after, each, where) for run in sources))
    ends = [walked.last for walked in walks if walked.last is not None]
    # Up to here all of them were read.
    known = min(ends, default=None)
    found: list[Task] = []
    for place, walked in enumerate(walks):
        reached = [task for task in walked.tasks if known is None or task.index <= known]
        found += await only_latest(tasks, place == 0, runs[:place:-1], reached)
    return Walked(sorted(found, key=lambda task: task.index), sum(walked.read for walked in walks), known)


def _with_status(where: TaskFilter) -> TaskFilter:
    """Only failed tasks have an error code, and engines find failed ones."""
    if where.error_code is None or where.status is not None:
        return where
    return msgspec.structs.replace(where, status=TaskStatus.FAILED)


def _encode(index: int) -> str:
    return f"{PREFIX}{index}"


def _decode(cursor: str | None) -> int:
    if cursor is None:
        return -1
    match = _CURSOR.fullmatch(cursor)
    if match is None:
        raise BadCursor
    return int(match[1])
