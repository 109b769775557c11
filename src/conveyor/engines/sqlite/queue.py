"""The Queue on SQLite. A receipt is "<id>.<delivery>": a redelivery of the message makes it stale."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import apsw
import msgspec

from conveyor.clock import Clock
from conveyor.engines.queue import DeadLetter, Delivery, Depth, Outgoing, QueueName
from conveyor.engines.sqlite.database import SqliteDatabase, named_queries
from conveyor.engines.sqlite.events import after as after_seq
from conveyor.faults import crashpoint
from conveyor.model import Page

SQL = named_queries("queue.sql")

# The queue, id, delivery, receives, body in hex, and starts of messages.
_taken = msgspec.json.Decoder(list[tuple[str, int, int, int, str, int]])

_names = msgspec.json.Decoder(list[QueueName])

_ROWS_IN_ONE_INSERT = 50
_LONGEST_ID = 18


class _Take(NamedTuple):
    """One receive."""

    queue: QueueName
    limit: int
    visibility: float
    now: float


class SqliteQueue:
    """All queues in one table."""

    def __init__(self, database: SqliteDatabase, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def send(self, queue: QueueName, messages: Sequence[Outgoing]) -> list[int]:
        now = self._clock.now()
        crashpoint("queue.send.before")
        await self._database.write(lambda db: insert_messages(db, now, queue, messages))
        crashpoint("queue.send.after")
        return []

    async def receive(self, queue: QueueName, limit: int, visibility: float) -> list[Delivery]:
        now = self._clock.now()
        # Idle queues are polled often: a read needs no commit.
        if self._database.read_one(SQL["is_due"], {"queue": queue, "now": now}) is None:
            return []
        rows = await self._database.write_jointly(_take_all, _Take(queue, limit, visibility, now))
        crashpoint("queue.receive.after")
        return _deliveries(rows)

    async def receive_many(self, takes: Sequence[tuple[QueueName, int]], visibility: float) -> list[list[Delivery]]:
        now = self._clock.now()
        queues = msgspec.json.encode([queue for queue, _ in takes]).decode()
        # As in `receive`, for all of them.
        due = set(_names.decode(self._database.read_one(SQL["have_due"], {"queues": queues, "now": now})[0]))
        wanted = [_Take(queue, limit, visibility, now) for queue, limit in takes if queue in due]
        if not wanted:
            return [[] for _ in takes]
        rows = await self._database.write(lambda db: _take_all(db, wanted))
        crashpoint("queue.receive.after")
        taken = {take.queue: _deliveries(own) for take, own in zip(wanted, rows, strict=True)}
        return [taken.get(queue, []) for queue, _ in takes]

    async def extend(self, queue: QueueName, receipts: Sequence[str], visibility: float) -> frozenset[str]:
        until = self._clock.now() + visibility
        return await self._each("extend", queue, receipts, {"until": until})

    async def mark_started(self, queue: QueueName, receipts: Sequence[str]) -> None:
        await self._each("mark_started", queue, receipts, {})

    async def ack(self, queue: QueueName, receipts: Sequence[str]) -> frozenset[str]:
        crashpoint("queue.ack.before")
        stale = await self._each("ack", queue, receipts, {})
        crashpoint("queue.ack.after")
        return stale

    async def release(self, queue: QueueName, receipts: Sequence[str], delay: float) -> None:
        await self._each("release", queue, receipts, {"until": self._clock.now() + delay})

    async def dead_letter(self, queue: QueueName, receipts: Sequence[str], reason: str) -> None:
        values = {"reason": reason, "now": self._clock.now()}

        def work(db: apsw.Connection) -> None:
            _apply(db, "dead_letter", queue, receipts, values)
            _apply(db, "ack", queue, receipts, {})

        crashpoint("queue.bury.before")
        await self._database.write(work)
        crashpoint("queue.bury.after")

    async def dead_letters(self, cursor: str | None, limit: int) -> Page[DeadLetter]:
        values = {"after": after_seq(cursor), "limit": limit + 1}
        rows = await self._database.rows(SQL["dead_letters"], values)
        items = [_letter(row) for row in rows[:limit]]
        return Page(items, items[-1].message_id if len(rows) > limit else None)

    async def find_dead_letters(self, message_ids: Collection[str]) -> list[DeadLetter]:
        rows = await self._database.rows(SQL["letters"], {"ids": _ids(message_ids)})
        return [_letter(row) for row in rows]

    async def discard(self, message_ids: Collection[str]) -> int:
        return await self._database.change(SQL["discard"], {"ids": _ids(message_ids)})

    async def redrive(self, message_ids: Collection[str]) -> int:
        values = {"ids": _ids(message_ids), "now": self._clock.now()}

        def work(db: apsw.Connection) -> int:
            db.execute(SQL["redrive_send"], values)
            db.execute(SQL["discard"], {"ids": values["ids"]})
            return int(db.changes())

        return await self._database.write(work)

    async def depth(self, queue: QueueName) -> Depth:
        # The queues of finished runs are nearly always empty, and all of them are asked: that needs no thread.
        if self._database.read_one(SQL["has_messages"], {"queue": queue}) is None:
            return Depth(0, 0, 0)
        values = {"queue": queue, "now": self._clock.now()}
        row = await self._database.row(SQL["depth"], values)
        return Depth(*row)

    async def waiting_since(self, queue: QueueName) -> float | None:
        since: float | None = (await self._database.row(SQL["since"], {"queue": queue, "now": self._clock.now()}))[0]
        return since

    async def next_queue(self, after: QueueName | None) -> QueueName | None:
        name: QueueName | None = (await self._database.row(SQL["next_queue"], {"after": after or ""}))[0]
        return name

    async def hasten(self, queue: QueueName) -> None:
        values = {"queue": queue, "now": self._clock.now()}
        crashpoint("queue.hasten.before")
        await self._database.change(SQL["hasten"], values)
        crashpoint("queue.hasten.after")

    async def delayed_queues(self, queues: Sequence[QueueName]) -> frozenset[QueueName]:
        values = {"queues": msgspec.json.encode(queues).decode(), "now": self._clock.now()}
        return frozenset(_names.decode(self._database.read_one(SQL["have_delayed"], values)[0]))

    async def reveal(self, queue: QueueName, beyond: float) -> int:
        now = self._clock.now()
        values = {"queue": queue, "now": now, "beyond": now + beyond}
        # Quiet runs are checked often: a read needs no commit.
        if self._database.read_one(SQL["hidden_beyond"], {"queue": queue, "beyond": values["beyond"]}) is None:
            return 0
        return await self._database.change(SQL["reveal"], values)

    async def drop(self, queue: QueueName) -> None:
        # The queues of finished runs are nearly always empty.
        if self._database.read_one(SQL["has_messages"], {"queue": queue}) is not None:
            await self._database.change(SQL["drop"], {"queue": queue})

    async def release_all(self) -> None:
        """Release the messages in flight of the last owner, when a new owner opens the database."""
        values = {"now": self._clock.now()}
        await self._database.change(SQL["release_all"], values)

    async def _each(
        self, query: str, queue: QueueName, receipts: Sequence[str], values: dict[str, Any]
    ) -> frozenset[str]:
        return await self._database.write(lambda db: _apply(db, query, queue, receipts, values))


def _take_all(db: apsw.Connection, takes: list[_Take]) -> list[list[Any]]:
    """Receive for many receivers: a statement for those that want as many messages for as long."""
    groups: dict[tuple[int, float, int], dict[QueueName, int]] = {}
    receivers: Counter[QueueName] = Counter()
    for place, take in enumerate(takes):
        # A queue with several receivers is in as many groups: each message is for one of them.
        groups.setdefault((take.limit, take.visibility, receivers[take.queue]), {})[take.queue] = place
        receivers[take.queue] += 1
    taken: list[list[Any]] = [[] for _ in takes]
    for (limit, visibility, _), places in groups.items():
        now = max(takes[place].now for place in places.values())
        queues = msgspec.json.encode(list(places)).decode()
        values = {"queues": queues, "now": now, "until": now + visibility, "limit": limit}
        for queue, *row in _take_few(db, values) if len(places) == 1 else _take_many(db, values):
            taken[places[QueueName(str(queue))]].append(row)
    return taken


def _take_few(db: apsw.Connection, values: dict[str, Any]) -> list[Any]:
    """Take messages of one queue, of which there may be megabytes."""
    rows: list[Any] = db.execute(SQL["take"], values).fetchall()
    return rows


def _take_many(db: apsw.Connection, values: dict[str, Any]) -> list[Any]:
    """Take messages of many queues: few steps, however many there are."""
    ((ids,),) = db.execute(SQL["due"], values).fetchall()
    values |= {"ids": ids}
    db.execute(SQL["take_due"], values)
    taken: Any = db.execute(SQL["taken"], values).fetchall()[0][0]
    return [
        (queue, number, delivery, receives, bytes.fromhex(body), starts)
        for queue, number, delivery, receives, body, starts in _taken.decode(taken)
    ]


def _deliveries(rows: Sequence[Any]) -> list[Delivery]:
    return [Delivery(str(row[0]), f"{row[0]}.{row[1]}", row[2], row[3], row[4]) for row in rows]


def _ids(message_ids: Collection[str]) -> str:
    """The ids as a JSON list, without those that cannot be ids."""
    known = [int(text) for text in message_ids if text.isascii() and text.isdigit() and len(text) <= _LONGEST_ID]
    return msgspec.json.encode(known).decode()


def _letter(row: Any) -> DeadLetter:
    return DeadLetter(str(row[0]), QueueName(row[1]), row[2], row[3], row[4])


def insert_messages(db: apsw.Connection, now: float, queue: QueueName, messages: Sequence[Outgoing]) -> None:
    """Part of a transaction: insert messages of one queue."""
    insert_queued(db, now, [(queue, message) for message in messages])


def insert_queued(db: apsw.Connection, now: float, messages: Sequence[tuple[QueueName, Outgoing]]) -> None:
    """Part of a transaction: insert messages, many per statement (see database.py)."""
    for start in range(0, len(messages), _ROWS_IN_ONE_INSERT):
        batch = messages[start : start + _ROWS_IN_ONE_INSERT]
        values = [value for queue, message in batch for value in (queue, now + message.delay, message.body)]
        marks = ",".join(["(?,?,?)"] * len(batch))
        db.execute(f"INSERT INTO messages (queue, visible_at, body) VALUES {marks}", values)  # noqa: S608


def _apply(
    db: apsw.Connection, query: str, queue: QueueName, receipts: Sequence[str], values: dict[str, Any]
) -> frozenset[str]:
    stale = set()
    for receipt in receipts:
        message, _, delivery = receipt.partition(".")
        db.execute(SQL[query], {"id": int(message), "queue": queue, "delivery": int(delivery), **values})
        if db.changes() == 0:
            stale.add(receipt)
    return frozenset(stale)
