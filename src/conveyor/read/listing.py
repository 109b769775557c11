"""Listings of results: a page, or all as JSON lines, of one run or of the latest outcome of each task."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import structlog

from conveyor.engines.tasks import TaskFilter, Tasks
from conveyor.errors import ConveyorError
from conveyor.model import RunKey, Task
from conveyor.read import cursors
from conveyor.read.latest import latest_batches, latest_page
from conveyor.read.list_order import batches_in_list_order, engine_in_list_order, page_in_list_order
from conveyor.read.results import TaskPage, result_page

log = structlog.get_logger()

# Tasks that are read and sent together.
_ROWS = 500

# Makes the public form of tasks.
Show = Callable[[Sequence[Task]], Awaitable[list[dict[str, Any]]]]
# Tasks, and the cursor after them.
_Batch = tuple[list[Task], str | None]


async def listing_page(
    tasks: Tasks, runs: Sequence[RunKey], where: TaskFilter, limit: int, cursor: str | None
) -> TaskPage:
    """Up to `limit` tasks, in list order where the engine has it, else in order of task_id. Raises BadCursor."""
    engine = engine_in_list_order(tasks, runs, cursor)
    if engine is not None:
        return await page_in_list_order(tasks, engine, runs, where, limit, cursor)
    if len(runs) == 1:
        return await result_page(tasks, runs[0], where, limit, cursor)
    return await latest_page(tasks, runs, where, limit, cursor)


def order_of(tasks: Tasks, runs: Sequence[RunKey], cursor: str | None) -> str:
    """How the page at this cursor is sorted: by `index` or by `task_id`."""
    return "task_id" if engine_in_list_order(tasks, runs, cursor) is None else "index"


async def listing_lines(
    tasks: Tasks, runs: Sequence[RunKey], where: TaskFilter, cursor: str | None, show: Show
) -> AsyncIterator[bytes]:
    """All tasks after the cursor as JSON lines, read as the client takes them. An error before the first line is
    raised; a later one is reported in the last line, with the cursor to resume from. Raises BadCursor."""
    has_lines = False
    try:
        async with aclosing(_batches(tasks, runs, where, cursor)) as batches:
            async for items, after in batches:
                if items:
                    yield b"".join(map(_line, await show(items)))
                    has_lines = True
                cursor = after
    except Exception as error:
        if not has_lines:
            raise
        log.exception("result stream failed", run=runs[-1].run_id)
        yield _line({"stream_error": _error_json(error, cursor)})


def _batches(
    tasks: Tasks, runs: Sequence[RunKey], where: TaskFilter, cursor: str | None
) -> AsyncGenerator[_Batch, None]:
    engine = engine_in_list_order(tasks, runs, cursor)
    if engine is not None:
        return batches_in_list_order(tasks, engine, runs, where, cursor)
    if len(runs) == 1:
        return _run_batches(tasks, runs[0], where, cursor)
    return latest_batches(tasks, runs, where, cursor)


async def _run_batches(
    tasks: Tasks, run: RunKey, where: TaskFilter, cursor: str | None
) -> AsyncGenerator[_Batch, None]:
    """Shard by shard: a reader of all tasks needs no common order."""
    now = cursors.decode(cursor, run.shard_count)
    for shard in range(max(run.shard_count, 1)):
        more = True
        while more:
            scanned = await tasks.scan(run, shard, now[shard], _ROWS, where)
            more = scanned.last is not None
            now[shard] = scanned.last or (scanned.tasks[-1].task_id if scanned.tasks else now[shard])
            yield scanned.tasks, cursors.encode(now) if any(now) else None


def _line(value: Any) -> bytes:
    text = msgspec.json.encode(value)
    # The input is included as submitted. A newline in it is whitespace: inside a JSON string it would be escaped.
    return (text.replace(b"\n", b" ") if b"\n" in text else text) + b"\n"


def _error_json(error: Exception, cursor: str | None) -> dict[str, str | None]:
    if isinstance(error, ConveyorError):
        return {"code": error.code, "detail": error.message, "next_cursor": cursor}
    return {"code": ConveyorError.code, "detail": ConveyorError().message, "next_cursor": cursor}
