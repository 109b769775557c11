"""Search: tasks of a job by index, by id, or by text in their input. No engine has an index over inputs, so a search
reads rows, a bounded number per page: a page may be empty and still not be the last."""

import re
from collections.abc import Sequence

import msgspec

from conveyor.engines.tasks import TaskFilter, Tasks
from conveyor.jobs.latest_outcomes import latest_outcomes
from conveyor.jobs.secrets import shown_input
from conveyor.model import Page, RunKey, Task, TaskId, is_task_id
from conveyor.read.listing import listing_page
from conveyor.read.walk import matches

# Rows of one read, and about how many one page reads at most.
_ROWS = 500
_MAX_ROWS = 5000

_INDEX = re.compile(r"[0-9]{1,15}", re.ASCII)


class SearchPage(msgspec.Struct, frozen=True):
    """A page of matching tasks, and in how many tasks the text was looked for."""

    page: Page[Task]
    read: int


async def search_page(
    tasks: Tasks, runs: Sequence[RunKey], where: TaskFilter, text: str, limit: int, cursor: str | None
) -> SearchPage:
    """Up to `limit` matching tasks. Raises BadCursor."""
    named = await _named(tasks, runs, text)
    items = [task for task in named if cursor is None and matches(task, where)]
    known = {task.index for task in named}
    looked = read = 0
    while len(items) < limit and read < _MAX_ROWS:
        room = limit - len(items)
        asked = _ROWS
        page = await listing_page(tasks, runs, where, asked, cursor)
        read += page.read
        hits = _containing(text, page.items, known)
        if len(hits) > room:
            # The cursor points behind all rows that were read, so read no more than fit on the page.
            asked = room
            page = await listing_page(tasks, runs, where, asked, cursor)
            hits = _containing(text, page.items, known)
            read += page.read
        items += hits
        looked += len(page.items)
        cursor = page.next_cursor
        if cursor is None or len(page.items) < asked:
            # The end, or the bound on the rows of a listing.
            break
    return SearchPage(Page(items, cursor), looked)


async def _named(tasks: Tasks, runs: Sequence[RunKey], text: str) -> list[Task]:
    """The task with this index, or with this id in one of the runs, with its latest outcome."""
    indexes = [int(text)] if _INDEX.fullmatch(text) else []
    if is_task_id(text):
        for run in reversed(runs):
            if task := await tasks.task(run, TaskId(text)):
                indexes = [task.index]
                break
    return await latest_outcomes(tasks, runs, await tasks.at(runs[0], indexes)) if indexes else []


def _containing(text: str, tasks: Sequence[Task], known: set[int]) -> list[Task]:
    """The tasks, except the known ones, with the text in their input, ignoring case: in its JSON as it is shown, or
    decoded."""
    wanted = text.casefold()
    return [
        task
        for task in tasks
        if task.index not in known and (wanted in _json(task).casefold() or wanted in _decoded(task).casefold())
    ]


def _json(task: Task) -> str:
    return bytes(shown_input(task.input)).decode(errors="replace")


def _decoded(task: Task) -> str:
    """A string without its quotes and escapes; other values as compact JSON."""
    value = msgspec.json.decode(shown_input(task.input))
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
