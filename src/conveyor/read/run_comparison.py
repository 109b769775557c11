"""Two runs of a job side by side: tasks that a later run mended, broke or left failed. A page reads a bounded number of
rows: it may be empty and still not be the last."""

from collections.abc import Awaitable, Callable
from enum import StrEnum

from conveyor.engines.tasks import MAX_SCANNED, TaskFilter, Tasks
from conveyor.model import RunKey, Task
from conveyor.read.listing import listing_page
from conveyor.read.results import TaskPage
from conveyor.states import TaskStatus

# Rows of one read.
_ROWS = 500


class Change(StrEnum):
    """How a task ended in the earlier run, and how in the later one."""

    FIXED = "fixed"
    NEWLY_FAILED = "newly_failed"
    STILL_FAILED = "still_failed"


_STATUSES = {
    Change.FIXED: (TaskStatus.FAILED, TaskStatus.SUCCEEDED),
    Change.NEWLY_FAILED: (TaskStatus.SUCCEEDED, TaskStatus.FAILED),
    Change.STILL_FAILED: (TaskStatus.FAILED, TaskStatus.FAILED),
}


async def compared_page(
    tasks: Tasks, earlier: RunKey, later: RunKey, change: Change, limit: int, cursor: str | None
) -> TaskPage:
    """Up to `limit` tasks of the later run that changed in this way since the earlier one. Raises BadCursor."""
    before, after = _STATUSES[change]
    # Read from the run in which few rows match; the other is looked up by index.
    is_by_earlier = before is TaskStatus.FAILED and after is TaskStatus.SUCCEEDED
    source, other = (earlier, later) if is_by_earlier else (later, earlier)
    wanted, known = (after, before) if is_by_earlier else (before, after)

    async def matching(page: list[Task]) -> list[Task]:
        found = {task.index: task for task in await tasks.at(other, [task.index for task in page])}
        pairs = [(task, found[task.index]) for task in page if task.index in found]
        chosen = [(task, match) for task, match in pairs if match.status is wanted]
        return [match if is_by_earlier else task for task, match in chosen]

    return await _filtered(tasks, source, TaskFilter(known), limit, cursor, matching)


async def _filtered(
    tasks: Tasks,
    run: RunKey,
    where: TaskFilter,
    limit: int,
    cursor: str | None,
    matching: Callable[[list[Task]], Awaitable[list[Task]]],
) -> TaskPage:
    items: list[Task] = []
    read = 0
    while len(items) < limit and read < MAX_SCANNED:
        room = limit - len(items)
        page = await listing_page(tasks, [run], where, _ROWS, cursor)
        found = await matching(page.items)
        read += page.read
        if len(found) > room:
            # The cursor points behind all rows that were read, so read no more than fit on the page.
            page = await listing_page(tasks, [run], where, room, cursor)
            found = await matching(page.items)
            read += page.read
        items += found
        cursor = page.next_cursor
        if cursor is None:
            break
    return TaskPage(items, cursor, read)
