"""The Queue on Postgres. A receipt is "<id>.<delivery>"; the delivery is a unique name.

All queues share one table. Receivers use SKIP LOCKED in the order of (visible_at, id). Received and acknowledged
messages leave dead entries in that index, and vacuum cannot remove them while any transaction holds an old snapshot: a
receiver that started at the beginning of the index would read all of them each time. So each process remembers, per
queue, the position before which it found no message, and starts there: a receive reads recent entries only. A message
may still appear below that position, because of a slow commit, a slow clock, or a receiver that crashed. So the
position stays a few seconds in the past, and every few seconds a receiver scans from the start.

(Rotating tables with TRUNCATE would free the space too, but would lock out all receivers, move the remaining messages,
and wait for every reader. Bodies above 2 KB are stored outside the row, so little accumulates under an old snapshot.)
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from conveyor.clock import Clock
from conveyor.engines.postgres.database import PostgresDatabase, PostgresSession
from conveyor.engines.postgres.events import after as after_seq
from conveyor.engines.postgres.joint_calls import JointCalls
from conveyor.engines.postgres.queries import named_queries
from conveyor.engines.postgres.wakes import WAKE_WITHIN, Waker
from conveyor.engines.queue import DeadLetter, Delivery, Depth, Outgoing, QueueName
from conveyor.errors import ConveyorError
from conveyor.faults import crashpoint
from conveyor.model import Page

SQL = named_queries("queue.sql")

_LONGEST_ID = 18
_LAST_ID = 1 << 62
# Seconds by which a message may appear late in the order.
_SLACK = 3.0
# Seconds after which a receiver scans from the start again; sooner if the queue was empty.
_LOOK_AT_ALL = 10.0
_LOOK_IF_EMPTY = 1.0
_MAX_KNOWN = 10_000
_DROP_AT_ONCE = 5000
_HASTEN_AT_ONCE = 5000


class _Floor(NamedTuple):
    """No message is left at or before (visible_at, id). From `until` on, scan from the start again."""

    visible_at: float
    id: int
    until: float


_BOTTOM = _Floor(0.0, 0, 0.0)


class _Receive(NamedTuple):
    """One receive."""

    queue: QueueName
    limit: int
    visibility: float


class PostgresQueue:
    """All queues in one table."""

    def __init__(self, database: PostgresDatabase, clock: Clock, waker: Waker) -> None:
        self._database = database
        self._clock = clock
        self._waker = waker
        self._floors: dict[QueueName, _Floor] = {}
        self._receives = JointCalls(self._receive_all)
        self._depths = JointCalls(self._all_depths)
        self._hidden = JointCalls(self._have_hidden)
        self._drops = JointCalls(self._drop_all)

    async def send(self, queue: QueueName, messages: Sequence[Outgoing]) -> list[int]:
        if not messages:
            return []
        now = self._clock.now()
        crashpoint("queue.send.before")
        await self._database.step(lambda db: insert_messages(db, now, queue, messages))
        crashpoint("queue.send.after")
        await self.wake(queue, messages)
        return []

    async def wake(self, queue: QueueName, messages: Sequence[Outgoing]) -> None:
        """Notify the listeners of a queue that these messages were sent to it, unless all of them are delayed."""
        if any(message.delay <= WAKE_WITHIN for message in messages):
            await self._waker.wake(queue)

    async def receive(self, queue: QueueName, limit: int, visibility: float) -> list[Delivery]:
        if limit <= 0:
            return []
        got = await self._receives.call(_Receive(queue, limit, visibility))
        crashpoint("queue.receive.after")
        if isinstance(got, ConveyorError):
            raise got
        return got

    async def receive_many(self, takes: Sequence[tuple[QueueName, int]], visibility: float) -> list[list[Delivery]]:
        limits = {queue: limit for queue, limit in takes if limit > 0}
        taken: dict[QueueName, list[Delivery]] = {queue: [] for queue, _ in takes}
        if limits:
            for queue, delivery in await self._take_from(limits, visibility):
                taken[queue].append(delivery)
            crashpoint("queue.receive.after")
        return [taken[queue] for queue, _ in takes]

    async def _receive_all(self, takes: Sequence[_Receive]) -> list[list[Delivery] | ConveyorError]:
        """Receive for many receivers: a statement for those that want messages for as long. A statement that fails is
        the error of its receivers only: what the others have taken is theirs."""
        groups: dict[tuple[float, int], dict[QueueName, int]] = {}
        receivers: Counter[QueueName] = Counter()
        for place, take in enumerate(takes):
            # A queue with several receivers is in as many groups: each message is for one of them.
            groups.setdefault((take.visibility, receivers[take.queue]), {})[take.queue] = place
            receivers[take.queue] += 1
        got: list[list[Delivery] | ConveyorError] = [[] for _ in takes]
        for (visibility, _), places in groups.items():
            limits = {queue: takes[place].limit for queue, place in places.items()}
            taken: dict[QueueName, list[Delivery]] = {queue: [] for queue in limits}
            try:
                for queue, delivery in await self._take_from(limits, visibility):
                    taken[queue].append(delivery)
            except ConveyorError as error:
                for place in places.values():
                    got[place] = error
                continue
            for queue, deliveries in taken.items():
                got[places[queue]] = deliveries
        return got

    async def _take_from(self, limits: Mapping[QueueName, int], visibility: float) -> list[tuple[QueueName, Delivery]]:
        now = self._clock.now()
        floors = {queue: self._floor(queue, now) for queue in limits}
        name = self._clock.new_id("d")
        values = {
            "queues": list(limits),
            "limits": list(limits.values()),
            "floors": [floor.visible_at for floor in floors.values()],
            "floor_ids": [floor.id for floor in floors.values()],
            "now": now,
            "until": now + visibility,
            "delivery": name,
        }
        by_queue: dict[QueueName, list[Any]] = {queue: [] for queue in limits}
        rows = await self._database.step(lambda db: _take(db, values))
        for row in rows:
            by_queue[row[0]].append(row)
        if len(self._floors) + len(limits) > _MAX_KNOWN:
            self._floors.clear()
        for queue, taken in by_queue.items():
            edge = max((row[5], row[1]) for row in taken) if len(taken) == limits[queue] else (now, _LAST_ID)
            visible_at, last = min(edge, (now - _SLACK, _LAST_ID))
            until = floors[queue].until if taken else min(floors[queue].until, now + _LOOK_IF_EMPTY)
            self._floors[queue] = _Floor(visible_at, last, until)
        return [(row[0], Delivery(str(row[1]), f"{row[1]}.{name}", row[2], row[3], row[4])) for row in rows]

    def _floor(self, queue: QueueName, now: float) -> _Floor:
        floor = self._floors.get(queue, _BOTTOM)
        return floor if now < floor.until <= now + _LOOK_AT_ALL else _Floor(0.0, 0, now + _LOOK_AT_ALL)

    async def extend(self, queue: QueueName, receipts: Sequence[str], visibility: float) -> frozenset[str]:
        return await self._each("extend", queue, receipts, {"until": self._clock.now() + visibility})

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
        crashpoint("queue.bury.before")
        await self._each("dead_letter", queue, receipts, {"reason": reason, "now": self._clock.now()})
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
        return await self._end_letters("discard", message_ids)

    async def redrive(self, message_ids: Collection[str]) -> int:
        return await self._end_letters("redrive", message_ids)

    async def _end_letters(self, query: str, message_ids: Collection[str]) -> int:
        values = {"ids": _ids(message_ids), "now": self._clock.now()}
        ended: set[int] = set()

        async def work(db: PostgresSession) -> int:
            there = {row[0] for row in await db.rows(SQL["lock_letters"], values)}
            if there:
                await db.change(SQL[query], values)
            # Dead letters that an attempt with an unanswered commit has removed.
            ended.update(there)
            return len(ended)

        return await self._database.write(work) if values["ids"] else 0

    async def depth(self, queue: QueueName) -> Depth:
        return await self._depths.call(queue)

    async def _all_depths(self, queues: Sequence[QueueName]) -> list[Depth]:
        rows = await self._database.rows(SQL["depth"], {"queues": queues, "now": self._clock.now()})
        depths = {queue: Depth(*counts) for queue, *counts in rows}
        return [depths[queue] for queue in queues]

    async def waiting_since(self, queue: QueueName) -> float | None:
        since: float | None = (await self._database.row(SQL["since"], {"queue": queue, "now": self._clock.now()}))[0]
        return since

    async def next_queue(self, after: QueueName | None) -> QueueName | None:
        name: QueueName | None = (await self._database.row(SQL["next_queue"], {"after": after or ""}))[0]
        return name

    async def hasten(self, queue: QueueName) -> None:
        values = {"queue": queue, "now": self._clock.now(), "limit": _HASTEN_AT_ONCE}
        crashpoint("queue.hasten.before")
        while await self._database.change(SQL["hasten"], values) == _HASTEN_AT_ONCE:
            pass
        crashpoint("queue.hasten.after")

    async def delayed_queues(self, queues: Sequence[QueueName]) -> frozenset[QueueName]:
        rows = await self._database.rows(SQL["have_delayed"], {"queues": list(queues), "now": self._clock.now()})
        return frozenset(row[0] for row in rows)

    async def reveal(self, queue: QueueName, beyond: float) -> int:
        now = self._clock.now()
        # Quiet runs are checked often, and nearly never have one: one read for many of them.
        if not await self._hidden.call((queue, now + beyond)):
            return 0
        values = {"queue": queue, "now": now, "beyond": now + beyond, "limit": _HASTEN_AT_ONCE}
        revealed = 0
        while count := await self._database.change(SQL["reveal"], values):
            revealed += count
        return revealed

    async def _have_hidden(self, wanted: Sequence[tuple[QueueName, float]]) -> list[bool]:
        values = {"queues": [queue for queue, _ in wanted], "beyonds": [beyond for _, beyond in wanted]}
        hidden = {(row[0], row[1]) for row in await self._database.rows(SQL["have_hidden"], values)}
        return [each in hidden for each in wanted]

    async def drop(self, queue: QueueName) -> None:
        self._floors.pop(queue, None)
        await self._drops.call(queue)

    async def _drop_all(self, queues: Sequence[QueueName]) -> list[None]:
        while await self._database.change(SQL["drop"], {"queues": list(queues), "limit": _DROP_AT_ONCE}):
            pass
        return [None] * len(queues)

    async def _each(
        self, query: str, queue: QueueName, receipts: Sequence[str], values: dict[str, Any]
    ) -> frozenset[str]:
        known = sorted(set(filter(None, map(parsed_receipt, receipts))))
        if not known:
            return frozenset(receipts)
        values |= {"queue": queue, "ids": [each[0] for each in known], "deliveries": [each[1] for each in known]}
        done = await self._database.step(lambda db: _apply(db, query, values))
        return frozenset(receipts) - {f"{message}.{delivery}" for message, delivery in done}


async def insert_messages(db: PostgresSession, now: float, queue: QueueName, messages: Sequence[Outgoing]) -> None:
    """Part of a transaction, or a statement of its own: insert messages."""
    values = {
        "queue": queue,
        "times": [now + message.delay for message in messages],
        "bodies": [message.body for message in messages],
    }
    await db.change(SQL["send"], values)


async def _take(db: PostgresSession, values: dict[str, Any]) -> list[Any]:
    if db.again:
        # An unanswered attempt may have received some: only it has this delivery name.
        taken = await db.rows(SQL["taken"], values)
        if taken:
            return [(*row, values["now"]) for row in taken]
    return await db.rows(SQL["take"], values)


async def _apply(db: PostgresSession, query: str, values: dict[str, Any]) -> set[tuple[int, str]]:
    """The receipts that were not stale, as (id, delivery)."""
    done = {(row[0], row[1]) for row in await db.rows(SQL[query], values)}
    if db.again and query == "ack":
        there = {row[0] for row in await db.rows(SQL["there"], values)}
        # An unanswered attempt removed these.
        done |= {each for each in zip(values["ids"], values["deliveries"], strict=True) if each[0] not in there}
    return done


def parsed_receipt(receipt: str) -> tuple[int, str] | None:
    """The id of the message and the name of the delivery; None if this cannot be a receipt."""
    message, _, delivery = receipt.partition(".")
    return next(((number, delivery) for number in _ids([message])), None)


def _ids(message_ids: Collection[str]) -> list[int]:
    """The ids, without those that cannot be ids."""
    return [int(text) for text in message_ids if text.isascii() and text.isdigit() and len(text) <= _LONGEST_ID]


def _letter(row: Any) -> DeadLetter:
    return DeadLetter(str(row[0]), QueueName(row[1]), row[2], row[3], row[4])
