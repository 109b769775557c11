"""Union: the tasks of a job as each came out last, over all its runs.

Every task is in the first run, and in as many later ones as it was run again in. The first run gives the order and the
cursor; for each stretch of it the later runs are asked, newest first, for what they have of it.
"""

from collections.abc import AsyncGenerator, Sequence

from conveyor.engines.tasks import TaskFilter, Tasks
from conveyor.model import Page, RunKey, Task, TaskId, shard_of
from conveyor.read import cursors
from conveyor.read.results import result_page
from conveyor.read.walk import matches

# Rows of the first run that are looked up in the later ones at once.
STRETCH = 500
# Of which one page looks at so many: where few match, it ends early rather than late.
_MOST_STRETCHES = 20


async def union_page(
    tasks: Tasks, runs: Sequence[RunKey], where: TaskFilter, limit: int, cursor: str | None
) -> Page[Task]:
    """Up to `limit` tasks that match as they came out last, in the order of the first run; `runs` are in order, oldest
    first. A page may have fewer and still not be the last. Raises BadCursor."""
    first = runs[0]
    stretch = limit if where == TaskFilter() else STRETCH
    items: list[Task] = []
    for _ in range(_MOST_STRETCHES):
        page = await result_page(tasks, first, TaskFilter(), stretch, cursor)
        for place, task in enumerate(await newest(tasks, runs, page.items)):
            if len(items) == limit:
                # The rest of the stretch is for the next page.
                return Page(items, _after(cursor, page.items[:place], first))
            if matches(task, where):
                items.append(task)
        cursor = page.next_cursor
        if cursor is None or len(items) == limit:
            break
    return Page(items, cursor)


async def union_tasks(
    tasks: Tasks, runs: Sequence[RunKey], where: TaskFilter, positions: Sequence[TaskId | None]
) -> AsyncGenerator[tuple[list[Task], list[TaskId | None]], None]:
    """All of them, shard by shard from these positions: some tasks, and the positions after them."""
    first, now = runs[0], list(positions)
    for shard in range(max(first.shard_count, 1)):
        while page := await tasks.page(first, shard, now[shard], STRETCH, TaskFilter()):
            now[shard] = page[-1].task_id
            yield [task for task in await newest(tasks, runs, page) if matches(task, where)], list(now)


async def newest(tasks: Tasks, runs: Sequence[RunKey], found: Sequence[Task]) -> list[Task]:
    """These tasks of the first run, each as the newest run has it that has it."""
    left = {task.index for task in found}
    by_index = {task.index: task for task in found}
    for run in reversed(runs[1:]):
        if not left:
            break
        for task in await tasks.at(run, sorted(left)):
            by_index[task.index] = task
            left.discard(task.index)
    return [by_index[task.index] for task in found]


def _after(cursor: str | None, taken: Sequence[Task], run: RunKey) -> str:
    """The cursor that follows these tasks too."""
    positions = cursors.decode(cursor, run.shard_count)
    for task in taken:
        positions[shard_of(task.task_id, run.shard_count)] = task.task_id
    return cursors.encode(positions)
