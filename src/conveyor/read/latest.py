"""The view of a job: the latest outcome of each of its tasks, over all its runs, in pages and in batches.

The first run has every task, so it gives the order and the cursor of a listing without a filter by outcome. A listing
with such a filter reads the matching tasks of one run after the other, and leaves out those with a later outcome: few
rows match, and the engines find them.
"""

import re
from collections.abc import AsyncGenerator, Sequence

from conveyor.engines.tasks import MAX_SCANNED, TaskFilter, Tasks
from conveyor.errors import BadCursor
from conveyor.jobs.latest_outcomes import latest_outcomes, only_latest
from conveyor.model import OUTCOMES, RunKey, Task, TaskId, shard_of
from conveyor.read import cursors
from conveyor.read.results import TaskPage, result_page

# Tasks that are read together.
BATCH = 500
# Pages of runs that one page of the view reads at most: where few tasks are left, it is short rather than slow.
_MAX_READS = 20

# The place of a run among those that are read, and the cursor in it.
_CURSOR = re.compile(r"run:([0-9]{1,6}):(.*)", re.ASCII | re.DOTALL)


async def latest_page(
    tasks: Tasks, runs: Sequence[RunKey], where: TaskFilter, limit: int, cursor: str | None
) -> TaskPage:
    """Up to `limit` tasks whose latest outcome matches. `runs` are all runs of the job, oldest first. A page may have
    fewer tasks and still not be the last. Raises BadCursor."""
    if not _is_by_outcome(where):
        page = await result_page(tasks, runs[0], where, limit, cursor)
        return TaskPage(await latest_outcomes(tasks, runs, page.items), page.next_cursor, page.read)
    place, inner = _decode(cursor, len(runs))
    sources = runs if where.status is None or where.status in OUTCOMES else runs[:1]
    items: list[Task] = []
    read = 0
    for _ in range(_MAX_READS):
        if place >= len(sources):
            return TaskPage(items, None, read)
        run = sources[place]
        page = await result_page(tasks, run, where, limit, inner)
        read += page.read
        latest = await only_latest(tasks, place == 0, runs[:place:-1], page.items)
        room = limit - len(items)
        items += latest[:room]
        if len(latest) > room:
            taken = page.items[: page.items.index(latest[room - 1]) + 1]
            return TaskPage(items, _encode(place, _after(inner, taken, run)), read)
        place, inner = (place, page.next_cursor) if page.next_cursor is not None else (place + 1, None)
        if len(items) == limit or read >= MAX_SCANNED:
            break
    return TaskPage(items, _encode(place, inner) if place < len(sources) else None, read)


async def latest_batches(
    tasks: Tasks, runs: Sequence[RunKey], where: TaskFilter, cursor: str | None
) -> AsyncGenerator[tuple[list[Task], str | None], None]:
    """All tasks whose latest outcome matches, after the cursor: batches of tasks with the cursors after them. Raises
    BadCursor."""
    if _is_by_outcome(where):
        while True:
            page = await latest_page(tasks, runs, where, BATCH, cursor)
            cursor = page.next_cursor
            yield page.items, cursor
            if cursor is None:
                return
    first, now = runs[0], cursors.decode(cursor, runs[0].shard_count)
    for shard in range(max(first.shard_count, 1)):
        while page_of_shard := await tasks.page(first, shard, now[shard], BATCH, where):
            now[shard] = page_of_shard[-1].task_id
            yield await latest_outcomes(tasks, runs, page_of_shard), cursors.encode(now)


def _is_by_outcome(where: TaskFilter) -> bool:
    """Whether the filter is by what may differ between the runs of a task. Its tag is the same in all."""
    return where != TaskFilter(tag=where.tag)


def _encode(place: int, cursor: str | None) -> str:
    return f"run:{place}:{cursor or ''}"


def _decode(cursor: str | None, runs: int) -> tuple[int, str | None]:
    """The place of the run, and the cursor in it. A cursor of the job's only run resumes after a rerun was added."""
    if cursor is None or not cursor.startswith("run:"):
        return 0, cursor
    match = _CURSOR.fullmatch(cursor)
    if match is None or int(match[1]) >= runs:
        raise BadCursor
    return int(match[1]), match[2] or None


def _after(cursor: str | None, taken: Sequence[Task], run: RunKey) -> str:
    """The cursor after these tasks."""
    positions: list[TaskId | None] = cursors.decode(cursor, run.shard_count)
    for task in taken:
        positions[shard_of(task.task_id, run.shard_count)] = task.task_id
    return cursors.encode(positions)
