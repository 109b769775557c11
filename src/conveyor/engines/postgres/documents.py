"""Documents on Postgres."""

from collections.abc import Sequence
from typing import Any

import msgspec

from conveyor.clock import Clock
from conveyor.engines.postgres.access import answer_claim, release_upload
from conveyor.engines.postgres.database import PostgresDatabase, PostgresSession
from conveyor.engines.postgres.outbox import insert_event, is_own
from conveyor.engines.postgres.queries import named_queries
from conveyor.engines.records import Document, IdempotencyClaim
from conveyor.model import JobId, OutboxEvent, Page, TenantId

SQL = named_queries("documents.sql")

# The maximum that every engine can write in one transaction.
_MAX_DOCUMENTS = 25


class PostgresDocuments:
    """DocumentRecords."""

    def __init__(self, database: PostgresDatabase, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def create_documents(
        self, rows: Sequence[Document], notice: OutboxEvent | None = None, answer: IdempotencyClaim | None = None
    ) -> IdempotencyClaim | None:
        if len(rows) > _MAX_DOCUMENTS:
            raise ValueError(f"at most {_MAX_DOCUMENTS} documents per call, not {len(rows)}")
        now = self._clock.now()

        async def work(db: PostgresSession) -> IdempotencyClaim | None:
            if await is_own(db, notice):
                return None
            standing = await answer_claim(db, answer)
            if standing is not None:
                return None if db.again and standing == answer else standing
            await insert_documents(db, rows, now)
            if notice is not None:
                await insert_event(db, notice)
            return None

        return await self._database.write(work)

    async def document(self, kind: str, tenant: TenantId, id: str) -> Document | None:
        values = {"kind": kind, "tenant": tenant, "id": id, "now": self._clock.now()}
        stored = await self._database.row(SQL["document"], values)
        return Document(*stored) if stored else None

    async def replace_document(self, row: Document, notice: OutboxEvent | None = None) -> Document | None:
        values = {**msgspec.structs.asdict(row), "now": self._clock.now()}
        replaced = msgspec.structs.replace(row, version=row.version + 1)

        async def work(db: PostgresSession) -> bool:
            before = await db.row(SQL["replace_document"], values)
            if before is None:
                return db.again and await _there(db, row) == replaced
            if before["left_upload"] != row.upload_id:
                await release_upload(db, before["left_upload"], values["now"])
            if notice is not None:
                await insert_event(db, notice)
            return True

        return replaced if await self._database.write(work) else None

    async def remove_document(self, row: Document) -> bool:
        values, now = msgspec.structs.asdict(row), self._clock.now()

        async def work(db: PostgresSession) -> bool:
            gone = await db.row(SQL["remove_document"], values)
            if gone is None:
                return db.again and await _there(db, row) is None
            await release_upload(db, gone["upload_id"], now)
            return True

        return await self._database.write(work)

    async def documents(
        self, kind: str, tenant: TenantId, cursor: str | None, limit: int, job_id: JobId | None = None
    ) -> Page[Document]:
        values: dict[str, Any] = {
            "kind": kind,
            "tenant": tenant,
            "job_id": job_id,
            "after": cursor or "",
            "now": self._clock.now(),
            "limit": limit + 1,
        }
        stored = await self._database.rows(SQL["documents" if job_id is None else "documents_of_job"], values)
        items = [Document(*each) for each in stored[:limit]]
        return Page(items, items[-1].id if len(stored) > limit else None)

    async def due_documents(self, kind: str, by: float, limit: int, after: float = 0.0) -> list[Document]:
        values = {"kind": kind, "by": by, "limit": limit, "after": after}
        stored = await self._database.rows(SQL["due_documents"], values)
        return [Document(*each) for each in stored]


async def insert_documents(db: PostgresSession, rows: Sequence[Document], now: float) -> None:
    """Part of a transaction: insert documents. A document that already exists stays as it is. All writers insert in the
    same order: different orders would deadlock."""
    for row in sorted(rows, key=lambda each: (each.kind, each.tenant, each.id)):
        await db.change(SQL["insert_document"], {**msgspec.structs.asdict(row), "now": now})


async def _there(db: PostgresSession, row: Document) -> Document | None:
    stored = await db.row(SQL["stored_document"], msgspec.structs.asdict(row))
    return Document(*stored) if stored else None
