"""Latest results: the latest result of each task of a job, over all its runs.

The first run has every task; a rerun has those that it ran again. The first run gives the order and the cursor. For
each batch of its rows, the later runs are read, newest first.
"""

from collections.abc import AsyncGenerator, Sequence

from conveyor.engines.tasks import TaskFilter, Tasks
from conveyor.model import Page, RunKey, Task, TaskId, shard_of
from conveyor.read import cursors
from conveyor.read.results import result_page
from conveyor.read.walk import matches

# Rows of the first run that are looked up in the later runs together.
BATCH = 500
# Batches that one page reads at most: where few tasks match, a page is short rather than slow.
_MAX_BATCHES = 20


async def latest_page(
    tasks: Tasks, runs: Sequence[RunKey], where: TaskFilter, limit: int, cursor: str | None
) -> Page[Task]:
    """Up to `limit` tasks whose latest result matches, in the order of the first run. `runs` are oldest first. A page
    may have fewer tasks and still not be the last. Raises BadCursor."""
    first = runs[0]
    batch = limit if where == TaskFilter() else BATCH
    items: list[Task] = []
    for _ in range(_MAX_BATCHES):
        page = await result_page(tasks, first, TaskFilter(), batch, cursor)
        for place, task in enumerate(await newest(tasks, runs, page.items)):
            if len(items) == limit:
                # The next page starts in the middle of this batch.
                return Page(items, _after(cursor, page.items[:place], first))
            if matches(task, where):
                items.append(task)
        cursor = page.next_cursor
        if cursor is None or len(items) == limit:
            break
    return Page(items, cursor)


async def latest_batches(
    tasks: Tasks, runs: Sequence[RunKey], where: TaskFilter, positions: Sequence[TaskId | None]
) -> AsyncGenerator[tuple[list[Task], list[TaskId | None]], None]:
    """All tasks whose latest result matches, shard by shard: batches of tasks with the positions after them."""
    first, now = runs[0], list(positions)
    for shard in range(max(first.shard_count, 1)):
        while page := await tasks.page(first, shard, now[shard], BATCH, TaskFilter()):
            now[shard] = page[-1].task_id
            yield [task for task in await newest(tasks, runs, page) if matches(task, where)], list(now)


async def newest(tasks: Tasks, runs: Sequence[RunKey], first_run: Sequence[Task]) -> list[Task]:
    """The latest result of each of these tasks of the first run."""
    left = {task.index for task in first_run}
    by_index = {task.index: task for task in first_run}
    for run in reversed(runs[1:]):
        if not left:
            break
        for task in await tasks.at(run, sorted(left)):
            by_index[task.index] = task
            left.discard(task.index)
    return [by_index[task.index] for task in first_run]


def _after(cursor: str | None, taken: Sequence[Task], run: RunKey) -> str:
    """The cursor after these tasks."""
    positions = cursors.decode(cursor, run.shard_count)
    for task in taken:
        positions[shard_of(task.task_id, run.shard_count)] = task.task_id
    return cursors.encode(positions)
