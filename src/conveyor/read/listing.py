"""Listings of results: a page, or all of them as lines, of one run or of the newest outcome of each task."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import structlog

from conveyor.engines.tasks import TaskFilter, Tasks
from conveyor.errors import ConveyorError
from conveyor.model import Page, RunKey, Task, TaskId
from conveyor.read import cursors
from conveyor.read.latest import union_page, union_tasks
from conveyor.read.results import result_page

log = structlog.get_logger()

# Tasks that are read, and sent, at once.
_ROWS = 500

# Tasks as they are shown.
Shown = Callable[[Sequence[Task]], Awaitable[list[dict[str, Any]]]]
_Stretch = tuple[list[Task], list[TaskId | None]]


async def listing_page(
    tasks: Tasks, runs: Sequence[RunKey], where: TaskFilter, limit: int, cursor: str | None
) -> Page[Task]:
    """Up to `limit` tasks. Raises BadCursor."""
    if len(runs) == 1:
        return await result_page(tasks, runs[0], where, limit, cursor)
    return await union_page(tasks, runs, where, limit, cursor)


async def listing_lines(
    tasks: Tasks, runs: Sequence[RunKey], where: TaskFilter, cursor: str | None, shown: Shown
) -> AsyncIterator[bytes]:
    """All that follow the cursor, as JSON lines, read as they are taken away. What goes wrong before the first of them
    is raised; after that the last line tells of it, with the cursor to go on from. Raises BadCursor."""
    positions = cursors.decode(cursor, runs[0].shard_count)
    began = False
    try:
        async with aclosing(_stretches(tasks, runs, where, positions)) as found:
            async for items, after in found:
                if items:
                    yield b"".join(map(_line, await shown(items)))
                    began = True
                positions = after
    except Exception as error:
        if not began:
            raise
        log.exception("a stream of results broke off", run=runs[-1].run_id)
        yield _line({"stream_error": _told(error, cursors.encode(positions))})


def _stretches(
    tasks: Tasks, runs: Sequence[RunKey], where: TaskFilter, positions: Sequence[TaskId | None]
) -> AsyncGenerator[_Stretch, None]:
    if len(runs) == 1:
        return _of_run(tasks, runs[0], where, positions)
    return union_tasks(tasks, runs, where, positions)


async def _of_run(
    tasks: Tasks, run: RunKey, where: TaskFilter, positions: Sequence[TaskId | None]
) -> AsyncGenerator[_Stretch, None]:
    """Shard by shard: who takes all of them needs no common order."""
    now = list(positions)
    for shard in range(max(run.shard_count, 1)):
        more = True
        while more:
            scanned = await tasks.scan(run, shard, now[shard], _ROWS, where)
            more = scanned.last is not None
            now[shard] = scanned.last or (scanned.tasks[-1].task_id if scanned.tasks else now[shard])
            yield scanned.tasks, list(now)


def _line(value: Any) -> bytes:
    text = msgspec.json.encode(value)
    # An input goes in as it was written. Inside a JSON string a newline is escaped, so this one is but space.
    return (text.replace(b"\n", b" ") if b"\n" in text else text) + b"\n"


def _told(error: Exception, cursor: str) -> dict[str, str]:
    if isinstance(error, ConveyorError):
        return {"code": error.code, "detail": error.message, "next_cursor": cursor}
    return {"code": ConveyorError.code, "detail": ConveyorError().message, "next_cursor": cursor}
