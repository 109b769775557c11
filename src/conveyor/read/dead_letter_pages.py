"""Dead letters of one tenant. Gets a cursor, reads the dead letters, and returns those of the tenant."""

from typing import Any

from conveyor.engines.queue import Queue
from conveyor.jobs.dead_letters import DeadLetterOwner, RedrivePlan, decode_dead_letter
from conveyor.model import Page, TenantId
from conveyor.read.results import iso_time

# Reads for one page at most. Pages skip dead letters of other tenants, and are short rather than slow.
_MAX_READS = 20


async def dead_letters_page(queue: Queue, tenant: TenantId, limit: int, cursor: str | None) -> Page[DeadLetterOwner]:
    """Up to `limit` dead letters of the tenant, oldest first. A page may have fewer and still not be the last."""
    items: list[DeadLetterOwner] = []
    for _ in range(_MAX_READS):
        page = await queue.dead_letters(cursor, limit - len(items))
        read = [letter for letter in map(decode_dead_letter, page.items) if letter is not None]
        items += [letter for letter in read if letter.tenant == tenant]
        cursor = page.next_cursor
        if cursor is None or len(items) == limit:
            break
    return Page(items, cursor)


def dead_letter_json(letter: DeadLetterOwner, plan: RedrivePlan) -> dict[str, Any]:
    """A dead letter as the API shows it, without its message, and what redriving it does."""
    return {
        "id": letter.message_id,
        "queue": "control" if letter.chunk is None else "run",
        "job_id": letter.job_id,
        "run_id": letter.run_id,
        "reason": letter.reason,
        "at": iso_time(letter.at),
        "redrive": plan.action,
        "redrive_effect": plan.effect,
    }
