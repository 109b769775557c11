"""Documents on SQLite."""

from collections.abc import Sequence
from typing import Any

import apsw
import msgspec

from conveyor.clock import Clock
from conveyor.engines.records import Document, IdempotencyClaim
from conveyor.engines.sqlite.access import answer_claim, release_upload
from conveyor.engines.sqlite.database import SqliteDatabase, named_queries
from conveyor.engines.sqlite.outbox import insert_event
from conveyor.model import JobId, OutboxEvent, Page, TenantId

SQL = named_queries("documents.sql")

# The maximum that every engine can write in one transaction.
_MAX_DOCUMENTS = 25
# Documents of one job that are read on the event loop.
_READ_ON_LOOP = 20


class SqliteDocuments:
    """DocumentRecords."""

    def __init__(self, database: SqliteDatabase, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def create_documents(
        self, rows: Sequence[Document], notice: OutboxEvent | None = None, answer: IdempotencyClaim | None = None
    ) -> IdempotencyClaim | None:
        if len(rows) > _MAX_DOCUMENTS:
            raise ValueError(f"at most {_MAX_DOCUMENTS} documents per call, not {len(rows)}")
        now = self._clock.now()

        def work(db: apsw.Connection) -> IdempotencyClaim | None:
            standing = answer_claim(db, answer)
            if standing is not None:
                return standing
            insert_documents(db, rows, now)
            if notice is not None:
                insert_event(db, notice)
            return None

        return await self._database.write(work)

    async def document(self, kind: str, tenant: TenantId, id: str) -> Document | None:
        values = {"kind": kind, "tenant": tenant, "id": id, "now": self._clock.now()}
        stored = self._database.read_one(SQL["document"], values)
        return Document(*stored) if stored else None

    async def replace_document(self, row: Document, notice: OutboxEvent | None = None) -> Document | None:
        values = {**msgspec.structs.asdict(row), "now": self._clock.now()}

        def work(db: apsw.Connection) -> bool:
            left = db.execute(SQL["replaced_upload"], values).fetchone()
            db.execute(SQL["replace_document"], values)
            if db.changes() == 0:
                return False
            if left is not None:
                release_upload(db, left[0], values["now"])
            if notice is not None:
                insert_event(db, notice)
            return True

        replaced = await self._database.write(work)
        return msgspec.structs.replace(row, version=row.version + 1) if replaced else None

    async def remove_document(self, row: Document) -> bool:
        values, now = msgspec.structs.asdict(row), self._clock.now()

        def work(db: apsw.Connection) -> bool:
            gone = db.execute(SQL["remove_document"], values).fetchone()
            if gone is None:
                return False
            release_upload(db, gone[0], now)
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
        if job_id is not None and limit <= _READ_ON_LOOP:
            stored = self._database.read_few(SQL["documents_of_job"], values)
        else:
            stored = await self._database.rows(SQL["documents" if job_id is None else "documents_of_job"], values)
        items = [Document(*each) for each in stored[:limit]]
        return Page(items, items[-1].id if len(stored) > limit else None)

    async def due_documents(self, kind: str, by: float, limit: int, after: float = 0.0) -> list[Document]:
        values = {"kind": kind, "by": by, "limit": limit, "after": after}
        stored = await self._database.rows(SQL["due_documents"], values)
        return [Document(*each) for each in stored]


def insert_documents(db: apsw.Connection, rows: Sequence[Document], now: float) -> None:
    """Part of a transaction: insert documents. A document that already exists stays as it is."""
    for row in rows:
        db.execute(SQL["insert_document"], {**msgspec.structs.asdict(row), "now": now})
