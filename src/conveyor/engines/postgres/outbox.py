"""The outbox on Postgres. It is also the audit trail of a job."""

from collections.abc import Sequence
from typing import Any

import msgspec

from conveyor.clock import Clock
from conveyor.engines.postgres.database import PostgresDatabase, PostgresSession
from conveyor.engines.postgres.events import after, events_page
from conveyor.engines.postgres.queries import named_queries
from conveyor.model import EventRecord, JobId, OutboxEvent, Page, TenantId

SQL = named_queries("outbox.sql")


class PostgresOutbox:
    """OutboxRecords."""

    def __init__(self, database: PostgresDatabase, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def events(self, tenant: TenantId, job_id: JobId, cursor: str | None, limit: int) -> Page[EventRecord]:
        values = {"tenant": tenant, "job_id": job_id, "after": after(cursor), "limit": limit + 1}
        return events_page(await self._database.rows(SQL["events"], values), limit)

    async def undispatched(self, limit: int) -> list[OutboxEvent]:
        rows = await self._database.rows(SQL["undispatched"], {"limit": limit})
        return [
            OutboxEvent(event_id, tenant, job_id, run_id, event, at, msgspec.json.decode(data))
            for event_id, tenant, job_id, run_id, event, at, data in rows
        ]

    async def mark_dispatched(self, notices: Sequence[OutboxEvent]) -> None:
        if notices:
            ids = sorted({notice.notice_id for notice in notices})
            await self._database.change(SQL["mark_dispatched"], {"event_ids": ids})


async def insert_event(db: PostgresSession, notice: OutboxEvent) -> None:
    """The last part of a transaction: append an event to the outbox."""
    await db.change(SQL["insert_event"], event_values(notice))


def event_values(notice: OutboxEvent) -> dict[str, Any]:
    """An event, by the columns of its row."""
    return {
        "event_id": notice.notice_id,
        "tenant": notice.tenant,
        "job_id": notice.job_id,
        "run_id": notice.run_id,
        "event": notice.event,
        "at": notice.at,
        "data": msgspec.json.encode(notice.data).decode(),
    }


async def is_own(db: PostgresSession, notice: OutboxEvent | None) -> bool:
    """Whether an earlier attempt, whose commit was not answered, was committed: its event is then stored."""
    if not db.again or notice is None:
        return False
    return await db.value(SQL["stored_event"], {"event_id": notice.notice_id}) is not None
