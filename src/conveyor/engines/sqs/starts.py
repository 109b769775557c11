"""Starts: on which deliveries of a message work began. Used for redelivered messages only.

SQS cannot store this, so each such message has a document with its started deliveries. On redelivery, each of them was
lost during work. The document expires after its message.
"""

import asyncio
from collections.abc import Sequence

import msgspec

from conveyor.clock import Clock
from conveyor.engines.records import Document, DocumentRecords
from conveyor.engines.sqs.queues import KEEP_SECONDS
from conveyor.model import TenantId

KIND = "queue.start"


class Starts:
    """Starts by SQS message id. A copy of a message has a new id, and carries the lost starts in its envelope."""

    def __init__(self, rows: DocumentRecords, tenant: TenantId, clock: Clock) -> None:
        self._rows = rows
        self._tenant = tenant
        self._clock = clock

    async def lost(self, messages: Sequence[tuple[str, int]]) -> list[int]:
        """For each (id, receive count): the number of earlier started deliveries."""
        return list(await asyncio.gather(*(self._lost(sqs_id, count) for sqs_id, count in messages)))

    async def mark(self, sqs_id: str, count: int) -> None:
        """Mark a delivery as started. Safe to repeat."""
        while True:
            row = await self._rows.document(KIND, self._tenant, sqs_id)
            if row is None:
                until = self._clock.now() + KEEP_SECONDS
                fresh = Document(KIND, self._tenant, sqs_id, msgspec.json.encode([count]), expires_at=until)
                # If another process has created the document, this changes nothing: read again.
                await self._rows.create_documents([fresh])
                continue
            marked = _marked(row)
            if count in marked:
                return
            body = msgspec.json.encode([*marked, count])
            if await self._rows.replace_document(msgspec.structs.replace(row, body=body)) is not None:
                return

    async def _lost(self, sqs_id: str, count: int) -> int:
        if count <= 1:
            return 0
        row = await self._rows.document(KIND, self._tenant, sqs_id)
        return 0 if row is None else sum(each < count for each in _marked(row))


def _marked(row: Document) -> list[int]:
    return msgspec.json.decode(row.body, type=list[int])
