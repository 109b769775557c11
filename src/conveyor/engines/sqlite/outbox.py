"""The outbox on SQLite. It is also the audit trail of a job."""

from collections.abc import Sequence
from typing import Any

import apsw
import msgspec

from conveyor.clock import Clock
from conveyor.engines.sqlite.database import SqliteDatabase, named_queries
from conveyor.engines.sqlite.events import after, events_page
from conveyor.model import EventRecord, JobId, OutboxEvent, Page, TenantId

SQL = named_queries("outbox.sql")


class SqliteOutbox:
    """OutboxRecords."""

    def __init__(self, database: SqliteDatabase, clock: Clock) -> None:
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
        ids = msgspec.json.encode([notice.notice_id for notice in notices]).decode()
        await self._database.change(SQL["mark_dispatched"], {"event_ids": ids})


def insert_event(db: apsw.Connection, notice: OutboxEvent) -> None:
    """Part of a transaction: append an event to the outbox."""
    db.execute(SQL["insert_event"], event_values(notice))


def insert_events(db: apsw.Connection, notices: Sequence[OutboxEvent]) -> None:
    """Part of a transaction: append events, in this order, by one statement."""
    rows = [tuple(event_values(notice).values()) for notice in notices]
    db.execute(SQL["insert_events"], {"events": msgspec.json.encode(rows).decode()})


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
