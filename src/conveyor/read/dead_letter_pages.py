"""Dead letters of one tenant: first messages, then dead-lettered tasks. Gets a cursor and a filter, returns a page."""

from typing import Any

from conveyor.engines.queue import Queue
from conveyor.engines.records import Records
from conveyor.engines.tasks import Tasks
from conveyor.jobs.dead_lettered_tasks import CURSOR, DeadLetteredTask, DeadLetterFilter, dead_lettered_page
from conveyor.jobs.dead_letters import (
    DeadLetterOwner,
    RedrivePlan,
    decode_dead_letter,
    plan_redrives,
    plan_rerun_of,
)
from conveyor.model import Page, TenantId
from conveyor.read.results import error_json, iso_time

# Reads for one page at most. Pages skip dead letters of other tenants, and are short rather than slow.
_MAX_READS = 20
# The listing begins with the messages.
_TASKS_FIRST = f"{CURSOR}first"


async def dead_letters_page(
    records: Records,
    tasks: Tasks,
    queue: Queue,
    tenant: TenantId,
    where: DeadLetterFilter,
    limit: int,
    cursor: str | None,
) -> Page[dict[str, Any]]:
    """Up to `limit` dead letters of the tenant, as the API shows them. A page may have fewer and still not be the
    last."""
    items: list[dict[str, Any]] = []
    if cursor is None or not cursor.startswith(CURSOR):
        letters = await _messages_page(queue, tenant, where, limit, cursor)
        for letter, plan in await plan_redrives(records, tasks, letters.items):
            if where.error_code in (None, plan.error_code):
                items.append(_message_json(letter, plan))
        if letters.next_cursor is not None or len(items) >= limit:
            return Page(items, letters.next_cursor or _TASKS_FIRST)
        cursor = _TASKS_FIRST
    start = None if cursor == _TASKS_FIRST else cursor
    page = await dead_lettered_page(records, tasks, tenant, where, limit - len(items), start)
    return Page(items + [_task_json(each) for each in page.items], page.next_cursor)


async def _messages_page(
    queue: Queue, tenant: TenantId, where: DeadLetterFilter, limit: int, cursor: str | None
) -> Page[DeadLetterOwner]:
    items: list[DeadLetterOwner] = []
    for _ in range(_MAX_READS):
        page = await queue.dead_letters(cursor, limit - len(items))
        read = [letter for letter in map(decode_dead_letter, page.items) if letter is not None]
        own = [letter for letter in read if letter.tenant == tenant]
        items += [letter for letter in own if where.job_id in (None, letter.job_id)]
        cursor = page.next_cursor
        if cursor is None or len(items) == limit:
            break
    return Page(items, cursor)


def _message_json(letter: DeadLetterOwner, plan: RedrivePlan) -> dict[str, Any]:
    """A dead letter of the queue, without its message."""
    return {
        "id": letter.message_id,
        "queue": "control" if letter.chunk is None else "run",
        "job_id": letter.job_id,
        "run_id": letter.run_id,
        "task_id": None,
        "index": None,
        "attempts": None,
        "error_code": plan.error_code,
        "reason": letter.reason,
        "at": iso_time(letter.at),
        "redrive": plan.action,
        "redrive_effect": plan.effect,
    }


def _task_json(letter: DeadLetteredTask) -> dict[str, Any]:
    plan, error = plan_rerun_of(letter.job, 1), error_json(letter.task)
    return {
        "id": letter.id,
        "queue": "run",
        "job_id": letter.job.job_id,
        "run_id": letter.run.run_id,
        "task_id": letter.task.task_id,
        "index": letter.task.index,
        "attempts": letter.task.attempts,
        "error_code": letter.task.error_code,
        "reason": "" if error is None else error.message,
        "at": iso_time(letter.task.finished_at),
        "redrive": plan.action,
        "redrive_effect": plan.effect,
    }
