"""The dead letters of a tenant, messages and tasks, as the API lists them."""

from typing import Any

from conveyor.jobs.dead_lettered_tasks import DeadLetterFilter
from conveyor.model import TenantId
from conveyor.read.dead_letter_pages import dead_letters_page
from conveyor.system import System


async def dead_letters(system: System, tenant: str = "acme", limit: int = 100) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        page = await dead_letters_page(
            system.records, system.tasks, system.queue, TenantId(tenant), DeadLetterFilter(), limit, cursor
        )
        items += page.items
        cursor = page.next_cursor
        if cursor is None:
            return items
