"""Documents on DynamoDB."""

from collections.abc import Sequence

import msgspec
from aiodynamo.expressions import Condition, F, HashKey, KeyCondition, RangeKey
from aiodynamo.operations import Operation

from conveyor.clock import Clock
from conveyor.engines.dynamodb.access import read_request, release_upload, request_keys
from conveyor.engines.dynamodb.items import notices_key, readable, row_item, row_key, row_of, upload_row_key
from conveyor.engines.dynamodb.outbox import notice_writes
from conveyor.engines.dynamodb.schema import DUE, LISTED
from conveyor.engines.dynamodb.spread import spread
from conveyor.engines.dynamodb.table import MAX_IN_A_WRITE, Item, Key, ReadItem, Table, WritePlan
from conveyor.engines.records import Document, IdempotencyClaim
from conveyor.engines.tasks import MAX_SCANNED
from conveyor.model import JobId, OutboxEvent, Page, TenantId

# Longer than any id: a client may send any cursor.
_LONGEST_CURSOR = 200


class DynamoDocuments:
    """DocumentRecords. TTL removes expired documents; no reader sees them."""

    def __init__(self, table: Table, clock: Clock) -> None:
        self._table = table
        self._clock = clock

    async def create_documents(
        self, rows: Sequence[Document], notice: OutboxEvent | None = None, answer: IdempotencyClaim | None = None
    ) -> IdempotencyClaim | None:
        if len(rows) > MAX_IN_A_WRITE:
            raise ValueError(f"at most {MAX_IN_A_WRITE} documents per call, not {len(rows)}")
        asked = request_keys(answer)
        keys = [*asked, *(row_key(row.kind, row.tenant, row.id) for row in rows), *_counter_keys(notice)]

        async def plan() -> WritePlan[IdempotencyClaim | None]:
            stored = await self._table.read(*keys)
            counter = stored[len(asked) + len(rows) :]
            request = read_request(stored, answer)
            if request.standing is not None:
                return WritePlan(request.standing)
            writes = [
                *row_writes(self._table, stored[len(asked) : len(asked) + len(rows)], rows, self._clock.now()),
                *(notice_writes(self._table, counter[0], notice) if counter else ()),
                *request.writes(self._table),
            ]
            return WritePlan(None, writes)

        return await self._table.change(plan)

    async def document(self, kind: str, tenant: TenantId, id: str) -> Document | None:
        item = await self._table.get(row_key(kind, tenant, id))
        return None if item is None or _expired(item, self._clock.now()) else row_of(item)

    async def replace_document(self, row: Document, notice: OutboxEvent | None = None) -> Document | None:
        key = row_key(row.kind, row.tenant, row.id)
        replaced = msgspec.structs.replace(row, version=row.version + 1)
        # The upload that the document referred to before.
        left: list[str] = []

        async def plan() -> WritePlan[Document | None]:
            stored, *counter = await self._table.read(key, *_counter_keys(notice))
            if stored.item is None or row_of(stored.item).version != row.version:
                return WritePlan(None)
            if _expired(stored.item, self._clock.now()):
                return WritePlan(None)
            before = row_of(stored.item)
            left[:] = [before.upload_id] if before.upload_id and before.upload_id != row.upload_id else []
            writes = [
                self._table.save(stored, row_item(replaced)),
                *(self._table.remove(upload_row_key(upload_id, row)) for upload_id in left),
                *(_refer(self._table, row) if before.upload_id != row.upload_id else ()),
                *(notice_writes(self._table, counter[0], notice) if counter else ()),
            ]
            return WritePlan(replaced, writes)

        written = await self._table.change(plan)
        if written is not None:
            await self._release(left)
        return written

    async def remove_document(self, row: Document) -> bool:
        left: list[str] = []

        async def plan() -> WritePlan[bool]:
            (stored,) = await self._table.read(row_key(row.kind, row.tenant, row.id))
            if stored.item is None or row_of(stored.item).version != row.version:
                return WritePlan(False)
            upload_id = row_of(stored.item).upload_id
            left[:] = [upload_id] if upload_id else []
            reference = [self._table.remove(upload_row_key(each, row)) for each in left]
            return WritePlan(True, [self._table.drop(stored), *reference])

        removed = await self._table.change(plan)
        if removed:
            await self._release(left)
        return removed

    async def _release(self, uploads: Sequence[str]) -> None:
        """A separate step. After a crash before it, the upload still expires at its own time."""
        for upload_id in uploads:
            await release_upload(self._table, upload_id, self._clock.now())

    async def documents(
        self, kind: str, tenant: TenantId, cursor: str | None, limit: int, job_id: JobId | None = None
    ) -> Page[Document]:
        after = (cursor or "")[:_LONGEST_CURSOR]
        index: str | None = None
        where: KeyCondition = HashKey("pk", row_key(kind, tenant, "").pk) & RangeKey("sk").gt(f"row#{after}")
        if job_id is not None:
            index, under = LISTED, f"{kind}#{tenant}#"
            # After `after`, within the kind and tenant: "$" is the character after "#".
            within = RangeKey("ls").between(f"{under}{after}\0", f"{under[:-1]}$")
            where = HashKey("lp", f"JobRows#{job_id}") & within
        keep = _unexpired(self._clock.now())
        stored, last = await self._table.query_some(where, rows=MAX_SCANNED, limit=limit + 1, index=index, keep=keep)
        if len(stored) > limit:
            last = stored[limit - 1]
        items = readable(stored[:limit], row_of)
        return Page(items, None if last is None else last["sk"].removeprefix("row#"))

    async def due_documents(self, kind: str, by: float, limit: int, after: float = 0.0) -> list[Document]:
        within = RangeKey("ds").between(after, by)
        stored = await spread(self._table, "dp", f"Due#{kind}", within, index=DUE, limit=limit)
        return readable(stored, row_of)


def row_writes(table: Table, stored: Sequence[ReadItem], rows: Sequence[Document], now: float) -> list[Operation]:
    """Part of a transaction: insert documents that do not exist. An expired document counts as missing."""
    writes: dict[Key, list[Operation]] = {}
    for there, row in zip(stored, rows, strict=True):
        if there.key not in writes and (there.item is None or _expired(there.item, now)):
            writes[there.key] = [table.save(there, row_item(row)), *_refer(table, row)]
    return [write for each in writes.values() for write in each]


def _refer(table: Table, row: Document) -> list[Operation]:
    """Record at the upload that the document refers to it."""
    return [] if row.upload_id is None else [table.put(upload_row_key(row.upload_id, row), {"kind": row.kind})]


def _unexpired(now: float) -> Condition:
    return F("expires_at").does_not_exist() | F("expires_at").gt(now)


def _expired(item: Item, now: float) -> bool:
    return "expires_at" in item and item["expires_at"] <= now


def _counter_keys(notice: OutboxEvent | None) -> list[Key]:
    return [] if notice is None else [notices_key(notice.tenant, notice.job_id)]
