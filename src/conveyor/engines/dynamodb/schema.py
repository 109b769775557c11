"""The two tables: their keys, their indexes, and how `migrate` creates them.

Both have the key (pk, sk). The table of tasks has no index. The table of records has four sparse indexes: an item is
in an index only while it has its attributes. Entries that are read across tenants are spread over a few partitions.

| index | key | holds |
|---|---|---|
| listed | lp, ls | jobs of a tenant, documents of a job, API keys |
| active | ap, as | the keys and revisions of active jobs, by bucket (active_index.py) |
| due | dp, ds | finished runs that are not swept, documents by due time, events that are not dispatched |
| expiring | ep, es | jobs and uploads by expiry |
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple
from zlib import crc32

from aiodynamo.errors import AIODynamoError

from conveyor.engines.dynamodb.address import DynamoAddress, WarmThroughput
from conveyor.engines.dynamodb.wire import Wire
from conveyor.errors import EngineFailed

LISTED, ACTIVE, DUE, EXPIRING = "listed", "active", "due", "expiring"
TTL = "ttl"

# Partitions of an index over all tenants.
BUCKETS = 4
# Partitions of the index of active jobs, which every worker reads; each has a few buckets of jobs.
ACTIVE_PARTITIONS = 16


class TableIndex(NamedTuple):
    """An index of a table: its key, the type of its sort key, and the attributes that it copies; None: all."""

    pk: str
    sk: str
    kind: str
    copied: tuple[str, ...] | None = None


INDEXES = {
    LISTED: TableIndex("lp", "ls", "S"),
    ACTIVE: TableIndex("ap", "as", "S", ("rev",)),
    DUE: TableIndex("dp", "ds", "N"),
    EXPIRING: TableIndex("ep", "es", "N"),
}
_POLL_SECONDS = 0.5
_POLLS = 600


def bucket(name: str) -> int:
    """The partition of an index for this name."""
    return crc32(name.encode()) % BUCKETS


async def migrate(wire: Wire, address: DynamoAddress) -> None:
    """Create missing tables and indexes, and wait until they are active. Safe to repeat."""
    for name, indexes in _expected(address):
        warm = address.warm_records if name == address.records else address.warm_tasks
        await _ensure_table(wire, name, indexes, warm)
        if warm is not None:
            await _ensure_warm(wire, name, warm)
        await _ensure_ttl(wire, name)
        if address.pitr:
            await _ensure_pitr(wire, name)


async def describe(wire: Wire, name: str) -> dict[str, Any] | None:
    """The description of the table; None if it does not exist."""
    try:
        answer = await wire.call("DescribeTable", {"TableName": name})
    except EngineFailed as failure:
        if _is(failure, "TableNotFound"):
            return None
        raise
    table: dict[str, Any] = answer["Table"]
    return table


async def problems(wire: Wire, address: DynamoAddress) -> dict[str, str | None]:
    """The problem of each table, or None."""
    return {name: await _problem(wire, name, indexes) for name, indexes in _expected(address)}


def _expected(address: DynamoAddress) -> list[tuple[str, dict[str, TableIndex]]]:
    return [(address.records, INDEXES), (address.tasks, {})]


async def _problem(wire: Wire, name: str, indexes: dict[str, TableIndex]) -> str | None:
    table = await describe(wire, name)
    if table is None:
        return "it does not exist: run `conveyor migrate`"
    if not _active(table):
        return f"it is {table['TableStatus']}: wait until it is ACTIVE"
    missing = set(indexes) - _index_names(table)
    if missing:
        return f"it has no index {', '.join(sorted(missing))}: run `conveyor migrate`"
    if not await _has_ttl(wire, name):
        return f"its TTL is not on the attribute `{TTL}`: run `conveyor migrate`"
    return None


async def _ensure_table(wire: Wire, name: str, indexes: dict[str, TableIndex], warm: WarmThroughput | None) -> None:
    table = await describe(wire, name)
    if table is None:
        await _tolerate(wire, "CreateTable", create_payload(name, indexes, warm), "ResourceInUse", "TableInUse")
    await _until(lambda: _is_active(wire, name), f"table {name} did not become ACTIVE")
    present = _index_names(await describe(wire, name) or {})
    for index, shape in indexes.items():
        if index not in present:
            payload = {
                "TableName": name,
                "AttributeDefinitions": _attributes({index: shape}, with_key=False),
                "GlobalSecondaryIndexUpdates": [{"Create": _index_payload(index, shape, warm)}],
            }
            await _tolerate(wire, "UpdateTable", payload, "ResourceInUse")
            await _until(lambda: _is_active(wire, name), f"index {index} of {name} did not become ACTIVE")


async def _ensure_warm(wire: Wire, name: str, warm: WarmThroughput) -> None:
    """Raise what the table and its indexes take at once. It never falls: DynamoDB refuses that."""
    table = await describe(wire, name) or {}
    if not _is_warm(table, warm):
        await _warm_up(wire, name, {"WarmThroughput": _units(warm, table)})
    for index in table.get("GlobalSecondaryIndexes") or ():
        if not _is_warm(index, warm):
            update = {"IndexName": index["IndexName"], "WarmThroughput": _units(warm, index)}
            await _warm_up(wire, name, {"GlobalSecondaryIndexUpdates": [{"Update": update}]})


async def _warm_up(wire: Wire, name: str, change: dict[str, Any]) -> None:
    await wire.call("UpdateTable", {"TableName": name, **change})
    await _until(lambda: _is_active(wire, name), f"table {name} did not become ACTIVE")


def _is_warm(described: dict[str, Any], warm: WarmThroughput) -> bool:
    return _units(warm, described) == _units(WarmThroughput(0, 0), described)


def _units(warm: WarmThroughput, described: dict[str, Any] | None = None) -> dict[str, int]:
    """What is asked for, or what a table or an index has, whichever is more."""
    present = (described or {}).get("WarmThroughput") or {}
    return {
        "ReadUnitsPerSecond": max(warm.reads, present.get("ReadUnitsPerSecond", 0)),
        "WriteUnitsPerSecond": max(warm.writes, present.get("WriteUnitsPerSecond", 0)),
    }


async def _ensure_ttl(wire: Wire, name: str) -> None:
    if not await _has_ttl(wire, name):
        specification = {"AttributeName": TTL, "Enabled": True}
        payload = {"TableName": name, "TimeToLiveSpecification": specification}
        await _tolerate(wire, "UpdateTimeToLive", payload, "ValidationException")


async def _ensure_pitr(wire: Wire, name: str) -> None:
    await wire.call(
        "UpdateContinuousBackups",
        {"TableName": name, "PointInTimeRecoverySpecification": {"PointInTimeRecoveryEnabled": True}},
    )


async def _has_ttl(wire: Wire, name: str) -> bool:
    answer = await wire.call("DescribeTimeToLive", {"TableName": name})
    ttl = answer["TimeToLiveDescription"]
    return ttl.get("TimeToLiveStatus") in ("ENABLED", "ENABLING") and ttl.get("AttributeName") == TTL


async def _is_active(wire: Wire, name: str) -> bool:
    table = await describe(wire, name)
    return table is not None and _active(table)


def _active(table: dict[str, Any]) -> bool:
    indexes = table.get("GlobalSecondaryIndexes") or []
    return table["TableStatus"] == "ACTIVE" and all(each.get("IndexStatus", "ACTIVE") == "ACTIVE" for each in indexes)


def _index_names(table: dict[str, Any]) -> set[str]:
    return {each["IndexName"] for each in table.get("GlobalSecondaryIndexes") or []}


def create_payload(name: str, indexes: dict[str, TableIndex], warm: WarmThroughput | None = None) -> dict[str, Any]:
    """What makes a table, as CreateTable takes it. The template under deploy/aws has the same."""
    payload: dict[str, Any] = {
        "TableName": name,
        "BillingMode": "PAY_PER_REQUEST",
        "AttributeDefinitions": _attributes(indexes, with_key=True),
        "KeySchema": _key_schema("pk", "sk"),
    }
    if warm is not None:
        payload["WarmThroughput"] = _units(warm)
    if indexes:
        payload["GlobalSecondaryIndexes"] = [_index_payload(index, shape, warm) for index, shape in indexes.items()]
    return payload


def _attributes(indexes: dict[str, TableIndex], with_key: bool) -> list[dict[str, str]]:
    kinds = {"pk": "S", "sk": "S"} if with_key else {}
    for shape in indexes.values():
        kinds |= {shape.pk: "S", shape.sk: shape.kind}
    return [{"AttributeName": name, "AttributeType": kind} for name, kind in kinds.items()]


def _index_payload(index: str, shape: TableIndex, warm: WarmThroughput | None) -> dict[str, Any]:
    projection: dict[str, Any] = {"ProjectionType": "ALL"}
    if shape.copied is not None:
        projection = {"ProjectionType": "INCLUDE", "NonKeyAttributes": list(shape.copied)}
    payload = {"IndexName": index, "KeySchema": _key_schema(shape.pk, shape.sk), "Projection": projection}
    return payload if warm is None else {**payload, "WarmThroughput": _units(warm)}


def _key_schema(pk: str, sk: str) -> list[dict[str, str]]:
    return [{"AttributeName": pk, "KeyType": "HASH"}, {"AttributeName": sk, "KeyType": "RANGE"}]


async def _until(done: Callable[[], Awaitable[bool]], complaint: str) -> None:
    for _ in range(_POLLS):
        if await done():
            return
        await asyncio.sleep(_POLL_SECONDS)
    raise EngineFailed(complaint)


async def _tolerate(wire: Wire, action: str, payload: dict[str, Any], *names: str) -> None:
    """Ignore the conflict with a concurrent migration."""
    try:
        await wire.call(action, payload)
    except EngineFailed as failure:
        if not _is(failure, *names):
            raise


def _is(failure: EngineFailed, *names: str) -> bool:
    cause = failure.__cause__
    return isinstance(cause, AIODynamoError) and type(cause).__name__ in names
