"""Dead letters as documents, because SQS can neither list a queue nor find a message in it.

The id of a dead letter consists of the time at which its message was first sent and of the message's id: a repeat after
a crash writes the same document, and dead letters sort by the time of sending. Redrive claims a dead letter by its
version, sends the message, and removes the dead letter last. After a crash in between it remains, and can be redriven
again after a minute.
"""

import zlib
from collections.abc import Awaitable, Callable, Collection, Sequence

import msgspec

from conveyor.clock import Clock
from conveyor.engines.queue import DeadLetter, QueueName
from conveyor.engines.records import Document, DocumentRecords
from conveyor.errors import BadCursor
from conveyor.faults import crashpoint
from conveyor.model import Page, TenantId

KIND = "queue.letter"

_CURSOR = "letter:"
_CLAIM_SECONDS = 60.0
_ROWS_AT_ONCE = 25
_LONGEST_REASON = 2000

# Sends a body to a queue; False if SQS did not accept it.
Send = Callable[[QueueName, bytes], Awaitable[bool]]


class StoredDeadLetter(msgspec.Struct, frozen=True, array_like=True):
    """The body of a dead letter's document."""

    queue: QueueName
    deflated: bytes
    reason: str
    at: float
    # When a redrive claimed it.
    claimed_at: float = 0.0


class NewDeadLetter(msgspec.Struct, frozen=True):
    """A message to dead-letter."""

    queue: QueueName
    sent_at: float
    message_id: str
    body: bytes
    reason: str


class DeadLetterDocuments:
    """The dead letters of one installation, under a name that no tenant has."""

    def __init__(self, rows: DocumentRecords, tenant: TenantId, clock: Clock) -> None:
        self._rows = rows
        self._tenant = tenant
        self._clock = clock

    async def dead_letter(self, dead_letters: Sequence[NewDeadLetter]) -> None:
        """Store dead letters. One that already exists stays as it is."""
        now = self._clock.now()
        rows = [
            Document(
                KIND,
                self._tenant,
                f"{int(letter.sent_at * 1000):014d}-{letter.message_id}",
                msgspec.msgpack.encode(
                    StoredDeadLetter(letter.queue, zlib.compress(letter.body, 1), letter.reason[:_LONGEST_REASON], now)
                ),
            )
            for letter in dead_letters
        ]
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            await self._rows.create_documents(rows[start : start + _ROWS_AT_ONCE])

    async def page(self, cursor: str | None, limit: int) -> Page[DeadLetter]:
        if cursor is not None and not cursor.startswith(_CURSOR):
            raise BadCursor
        after = None if cursor is None else cursor.removeprefix(_CURSOR)
        page = await self._rows.documents(KIND, self._tenant, after, limit)
        following = None if page.next_cursor is None else f"{_CURSOR}{page.next_cursor}"
        return Page([_letter(row) for row in page.items], following)

    async def some(self, ids: Collection[str]) -> list[DeadLetter]:
        return [_letter(row) for row in await self._found(ids)]

    async def discard(self, ids: Collection[str]) -> int:
        return sum([await self._rows.remove_document(row) for row in await self._found(ids)])

    async def redrive(self, ids: Collection[str], send: Send) -> int:
        count = 0
        for row in await self._found(ids):
            claimed = await self._claimed(row)
            if claimed is None:
                continue
            kept = _kept(claimed)
            crashpoint("sqs.redrive.before")
            if await send(kept.queue, zlib.decompress(kept.deflated)):
                crashpoint("sqs.redrive.between")
                count += await self._rows.remove_document(claimed)
        return count

    async def _claimed(self, row: Document) -> Document | None:
        kept, now = _kept(row), self._clock.now()
        if kept.claimed_at + _CLAIM_SECONDS > now:
            return None
        body = msgspec.msgpack.encode(msgspec.structs.replace(kept, claimed_at=now))
        return await self._rows.replace_document(msgspec.structs.replace(row, body=body))

    async def _found(self, ids: Collection[str]) -> list[Document]:
        rows = [await self._rows.document(KIND, self._tenant, letter) for letter in sorted(set(ids)) if letter]
        return [row for row in rows if row is not None]


def _kept(row: Document) -> StoredDeadLetter:
    return msgspec.msgpack.decode(row.body, type=StoredDeadLetter)


def _letter(row: Document) -> DeadLetter:
    kept = _kept(row)
    return DeadLetter(row.id, kept.queue, zlib.decompress(kept.deflated), kept.reason, kept.at)
