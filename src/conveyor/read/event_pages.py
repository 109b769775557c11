"""Events of a task, and the public form of an event."""

from typing import Any

from conveyor.clock import iso_text
from conveyor.engines.tasks import Tasks
from conveyor.model import EventRecord, Page, RunKey, Task
from conveyor.states import TaskStatus

# Stored when a task fails; other ends follow from its row.
_STORED_ENDS = frozenset({"task.failed", "task.dead_lettered"})

# DynamoDB looks for the events of a task among others, a bounded number at a time: so often again if it found none.
_MORE_READS = 4


async def task_events(tasks: Tasks, run: RunKey, task: Task, cursor: str | None, limit: int) -> Page[EventRecord]:
    """The stored events of failed attempts, and after the last of them how the task finished."""
    page = await tasks.events(run, task.task_id, cursor, limit)
    for _ in range(_MORE_READS):
        if page.items or page.next_cursor is None:
            break
        page = await tasks.events(run, task.task_id, page.next_cursor, limit)
    if page.next_cursor is not None or task.status is TaskStatus.PENDING:
        return page
    last = page.items[-1] if page.items else None
    if task.status is TaskStatus.FAILED and last is not None and last.event in _STORED_ENDS:
        return page
    if last is not None and len(page.items) >= limit:
        # The end goes to the next page.
        return Page(page.items, str(last.seq))
    return Page([*page.items, _end(run, task, last, cursor)])


def event_json(event: EventRecord) -> dict[str, Any]:
    """An event as listings and streams show it."""
    return {
        "id": event.id,
        "seq": event.seq,
        "at": iso_text(event.at),
        "event": event.event,
        "run_id": event.run_id,
        "index": event.index,
        "data": event.data,
    }


def _end(run: RunKey, task: Task, last: EventRecord | None, cursor: str | None) -> EventRecord:
    data: dict[str, Any] = {"attempt": task.attempts, "http_status": task.http_status}
    if task.detail.error is not None:
        data["error"] = {"code": task.detail.error.code, "message": task.detail.error.message}
    before = int(cursor or 0) if last is None else last.seq
    at = task.finished_at or (0.0 if last is None else last.at)
    return EventRecord(before, at, f"task.{task.status.label}", run.run_id, task.index, data)
