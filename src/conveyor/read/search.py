"""Search: tasks of a job by their index, their id, or some text in their input. No engine has an index over inputs, so
rows are read for that, and only so many of them for one page: a page may be empty and still not be the last."""

import re
from collections.abc import Sequence

import msgspec

from conveyor.engines.tasks import TaskFilter, Tasks
from conveyor.model import Page, RunKey, Task, TaskId, is_task_id
from conveyor.read.listing import listing_page
from conveyor.read.walk import matches

# Rows that are read at once, and about how many for one page.
_ROWS = 500
_MOST_ROWS = 5000

_INDEX = re.compile(r"[0-9]{1,15}", re.ASCII)


class SearchPage(msgspec.Struct, frozen=True):
    """Tasks that match, where to go on, and how many rows that took."""

    page: Page[Task]
    read: int


async def search_page(
    tasks: Tasks, runs: Sequence[RunKey], where: TaskFilter, text: str, limit: int, cursor: str | None
) -> SearchPage:
    """Up to `limit` tasks that match. Raises BadCursor."""
    named = await _named(tasks, runs, text)
    items = [task for task in named if cursor is None and matches(task, where)]
    known = {task.index for task in named}
    read = 0
    while len(items) < limit and read < _MOST_ROWS:
        room = limit - len(items)
        asked = _ROWS
        page = await listing_page(tasks, runs, where, asked, cursor)
        found = _with(text, page.items, known)
        if len(found) > room:
            # A cursor stands behind the rows that were read: so no more of them than there is room for.
            asked = room
            page = await listing_page(tasks, runs, where, asked, cursor)
            found = _with(text, page.items, known)
        items += found
        read += len(page.items)
        cursor = page.next_cursor
        if cursor is None or len(page.items) < asked:
            # The end, or as many rows as a page may look at.
            break
    return SearchPage(Page(items, cursor), read)


async def _named(tasks: Tasks, runs: Sequence[RunKey], text: str) -> list[Task]:
    """The task that this is the index or the id of, as the newest run has it."""
    for run in reversed(runs):
        if _INDEX.fullmatch(text) and (found := await tasks.at(run, [int(text)])):
            return found
        if is_task_id(text) and (one := await tasks.task(run, TaskId(text))):
            return [one]
    return []


def _with(text: str, found: Sequence[Task], but: set[int]) -> list[Task]:
    """Those with the text in their input, whatever the case: in its JSON as it was given, or in what that says."""
    wanted = text.casefold()
    return [
        task
        for task in found
        if task.index not in but and (wanted in _json(task).casefold() or wanted in _said(task).casefold())
    ]


def _json(task: Task) -> str:
    return bytes(task.input).decode(errors="replace")


def _said(task: Task) -> str:
    """A text without its quotes and backslashes."""
    value = msgspec.json.decode(task.input)
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
