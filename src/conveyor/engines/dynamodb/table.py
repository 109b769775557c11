"""One table: reads, queries, and optimistic changes.

Every write raises the revision of an item. A change reads the items that it depends on, plans the writes, and sends
them as one transaction, on the condition that no revision has changed; otherwise it reads and plans again. The token of
the transaction makes repeated attempts idempotent.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar
from zlib import crc32

import msgspec
from aiodynamo.expressions import (
    Condition,
    F,
    HashKey,
    KeyCondition,
    Parameters,
    ProjectionExpression,
    UpdateExpression,
)
from aiodynamo.operations import ConditionCheck, Delete, Operation, Put, Update
from aiodynamo.utils import dy2py, py2dy

from conveyor.clock import Clock
from conveyor.engines.dynamodb.lanes import drain
from conveyor.engines.dynamodb.wire import DynamoRefused, Wire
from conveyor.faults import crashpoint

T = TypeVar("T")

Item = dict[str, Any]

MAX_IN_A_READ = 100
MAX_IN_A_WRITE = 25
# Items that a filtered query reads at least per call.
_FILTERED_PAGE = 100


class Key(NamedTuple):
    """The primary key of an item."""

    pk: str
    sk: str


class ReadItem(NamedTuple):
    """An item as it was read; None if it did not exist."""

    key: Key
    item: Item | None


class QueriedItems(NamedTuple):
    """Items that a query found, and the key of the last one that it read; None at the end."""

    items: list[Item]
    last: Item | None


class WritePlan(msgspec.Struct, Generic[T], frozen=True):
    """The writes of one change, and its result. Without writes, nothing is sent."""

    result: T
    writes: Sequence[Operation] = ()


class Table:
    """A table by name. Items are plain dictionaries; whole numbers are read as int."""

    def __init__(self, wire: Wire, name: str, clock: Clock) -> None:
        self.wire = wire
        self.name = name
        self._clock = clock

    async def read(self, *keys: Key) -> list[ReadItem]:
        """Items by key, read consistently, in the order of the keys."""
        read = map(plain, await self.read_raw(list(dict.fromkeys(keys))))
        items = {Key(item["pk"], item["sk"]): item for item in read}
        return [ReadItem(key, items.get(key)) for key in keys]

    async def read_raw(self, keys: Sequence[Key], only: ProjectionExpression | None = None) -> list[Item]:
        """The existing items of these keys, read consistently, in any order and in DynamoDB's own form."""
        shape: Item = {"ConsistentRead": True}
        if only is not None:
            parameters = Parameters()
            shape |= {"ProjectionExpression": only.encode(parameters), **parameters.to_request_payload()}
        stored: list[Item] = []

        async def send(batch: list[Key]) -> list[Key]:
            request = {**shape, "Keys": [raw_key(key) for key in batch]}
            answer = await self.wire.once("BatchGetItem", {"RequestItems": {self.name: request}})
            stored.extend(answer["Responses"].get(self.name, ()))
            left = answer.get("UnprocessedKeys", {}).get(self.name, {}).get("Keys", ())
            return list(map(_key, left))

        await drain(self.wire, [keys], MAX_IN_A_READ, send)
        return stored

    async def get(self, key: Key) -> Item | None:
        (stored,) = await self.read(key)
        return stored.item

    async def query(
        self,
        where: KeyCondition,
        *,
        limit: int | None = None,
        index: str | None = None,
        keep: Condition | None = None,
        forward: bool = True,
        only: ProjectionExpression | None = None,
    ) -> list[Item]:
        """Items in order of the sort key: all, or the first `limit` that match `keep`. The table is read consistently;
        an index lags slightly behind it."""
        found = await self.query_some(where, rows=None, limit=limit, index=index, keep=keep, forward=forward, only=only)
        return found.items

    async def query_some(
        self,
        where: KeyCondition,
        *,
        rows: int | None,
        limit: int | None = None,
        index: str | None = None,
        keep: Condition | None = None,
        forward: bool = True,
        only: ProjectionExpression | None = None,
    ) -> "QueriedItems":
        """Like `query`, but reads at most `rows` items, of which perhaps few match `keep`."""
        stored: list[Item] = []
        start: Item | None = None
        read = 0
        while True:
            left = None if limit is None else limit - len(stored)
            if left is not None and keep is not None:
                # What does not match counts too.
                left = max(left, _FILTERED_PAGE)
            if rows is not None:
                left = min(rows - read, rows if left is None else left)
            payload = query_payload(
                self.name, where, index=index, keep=keep, forward=forward, only=only, limit=left, start=start
            )
            answer = await self.wire.call("Query", payload)
            stored.extend(map(plain, answer["Items"]))
            read += answer["ScannedCount"]
            start = answer.get("LastEvaluatedKey")
            full = limit is not None and len(stored) >= limit
            if start is None or full or (rows is not None and read >= rows):
                return QueriedItems(stored[:limit], None if start is None else plain(start))

    async def under(self, pk: str, only: ProjectionExpression | None = None) -> list[Item]:
        """All items of one partition."""
        return await self.query(HashKey("pk", pk), only=only)

    async def change(self, plan: Callable[[], Awaitable[WritePlan[T]]]) -> T:
        """Make a change: plan, write, and plan again if an item has changed in between."""
        pauses = self.wire.pauses()
        while True:
            planned = await plan()
            if not planned.writes:
                return planned.result
            try:
                await self.write(planned.writes)
            except DynamoRefused as failure:
                await pauses.after(failure)
            else:
                return planned.result

    async def write(self, writes: Sequence[Operation]) -> None:
        """Write all of these or none. Raises DynamoRefused if a condition did not hold."""
        payload = {
            # Also with the table's name: where several have one clock, their tokens differ.
            "ClientRequestToken": f"{crc32(self.name.encode()):08x}-{self._clock.new_id('t')[-26:]}",
            "TransactItems": [write.to_request_payload() for write in writes],
        }
        crashpoint("dynamodb.write.before")
        await self.wire.call("TransactWriteItems", payload)
        crashpoint("dynamodb.write.after")

    async def delete(self, keys: Sequence[Key]) -> None:
        """Delete items unconditionally."""

        async def send(batch: list[Key]) -> list[Key]:
            left = await self._batch_write([{"DeleteRequest": {"Key": raw_key(key)}} for key in batch])
            return [_key(each["DeleteRequest"]["Key"]) for each in left]

        await drain(self.wire, by_partition(keys), MAX_IN_A_WRITE, send)

    async def put_new(self, items: Sequence[Item]) -> None:
        """Write items that no other process writes."""
        lanes: dict[str, list[Item]] = {}
        for item in items:
            lanes.setdefault(item["pk"], []).append(item)

        async def send(batch: list[Item]) -> list[Item]:
            left = await self._batch_write([{"PutRequest": {"Item": py2dy(item)}} for item in batch])
            return [plain(each["PutRequest"]["Item"]) for each in left]

        await drain(self.wire, list(lanes.values()), MAX_IN_A_WRITE, send)

    async def _batch_write(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        crashpoint("dynamodb.batch.before")
        answer = await self.wire.once("BatchWriteItem", {"RequestItems": {self.name: requests}})
        crashpoint("dynamodb.batch.after")
        left: list[dict[str, Any]] = answer.get("UnprocessedItems", {}).get(self.name, [])
        return left

    def save(self, stored: ReadItem, item: Item) -> Operation:
        """Write over the item that was read. A None value removes an attribute. Attributes that are not named stay: a
        newer version may have written them."""
        item = _written(item)
        if stored.item is None:
            kept = {name: value for name, value in item.items() if value is not None}
            return Put(self.name, {**stored.key._asdict(), **kept, "rev": 1}, F("pk").does_not_exist())
        expression = F("rev").set(stored.item.get("rev", 0) + 1)
        for name, value in item.items():
            if value is None:
                expression &= F(name).remove() if name in stored.item else UpdateExpression()
            elif name not in stored.item or stored.item[name] != value:
                expression &= F(name).set(value)
        return Update(self.name, stored.key._asdict(), expression, _stands(stored.item))

    def put(self, key: Key, item: Item) -> Operation:
        """Write an item without attributes, whether or not it exists."""
        return Put(self.name, {**key._asdict(), **_written(item)})

    def remove(self, key: Key) -> Operation:
        """Delete an item unconditionally."""
        return Delete(self.name, key._asdict())

    def drop(self, stored: ReadItem) -> Operation:
        assert stored.item is not None
        return Delete(self.name, stored.key._asdict(), _stands(stored.item))

    def unchanged(self, stored: ReadItem) -> Operation:
        """Write nothing, but make the transaction depend on this item being unchanged."""
        condition = F("pk").does_not_exist() if stored.item is None else _stands(stored.item)
        return ConditionCheck(self.name, stored.key._asdict(), condition)


def query_payload(
    table: str,
    where: KeyCondition,
    *,
    index: str | None = None,
    keep: Condition | None = None,
    forward: bool = True,
    only: ProjectionExpression | None = None,
    limit: int | None = None,
    start: Item | None = None,
) -> dict[str, Any]:
    """A Query; consistent, except on an index."""
    parameters = Parameters()
    payload: dict[str, Any] = {
        "TableName": table,
        "KeyConditionExpression": where.encode(parameters),
        "ScanIndexForward": forward,
        "ConsistentRead": index is None,
    }
    if index is not None:
        payload["IndexName"] = index
    if keep is not None:
        payload["FilterExpression"] = keep.encode(parameters)
    if only is not None:
        payload["ProjectionExpression"] = only.encode(parameters)
    if limit is not None:
        payload["Limit"] = limit
    if start is not None:
        payload["ExclusiveStartKey"] = start
    payload.update(parameters.to_request_payload())
    return payload


def plain(raw: dict[str, Any]) -> Item:
    """An item as Python values."""
    return dy2py(raw, _number)


def by_partition(keys: Sequence[Key]) -> list[list[Key]]:
    lanes: dict[str, list[Key]] = {}
    for key in keys:
        lanes.setdefault(key.pk, []).append(key)
    return list(lanes.values())


def _written(value: Any) -> Any:
    """Numbers in DynamoDB's own form: 5.0 is 5. A repeated transaction then has the same content."""
    if isinstance(value, dict):
        return {name: _written(each) for name, each in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _number(text: str) -> int | float:
    return int(text) if text.lstrip("-").isdigit() else float(text)


def _key(raw: Item) -> Key:
    return Key(raw["pk"]["S"], raw["sk"]["S"])


def raw_key(key: Key) -> dict[str, dict[str, str]]:
    return {"pk": {"S": key.pk}, "sk": {"S": key.sk}}


def _stands(item: Item) -> Condition:
    # Older items have no revision.
    revision = item.get("rev")
    exists = F("pk").exists()
    return exists & (F("rev").does_not_exist() if revision is None else F("rev").equals(revision))
