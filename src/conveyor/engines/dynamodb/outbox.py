"""The outbox on DynamoDB. It is also the audit trail of a job; events are numbered per job."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
from aiodynamo.expressions import F, HashKey, RangeKey
from aiodynamo.operations import Operation, Update

from conveyor.clock import Clock
from conveyor.engines.dynamodb.events import after
from conveyor.engines.dynamodb.items import job_partition, notice_item, notice_key, notice_of, readable
from conveyor.engines.dynamodb.lifetimes import while_in_use
from conveyor.engines.dynamodb.schema import DUE
from conveyor.engines.dynamodb.spread import spread
from conveyor.engines.dynamodb.table import Item, Key, ReadItem, Table
from conveyor.engines.dynamodb.wire import DynamoRefused
from conveyor.model import EventRecord, JobId, OutboxEvent, Page, TenantId

_MAX_REMEMBERED = 10_000
_WRITES_AT_ONCE = 20


class DynamoOutbox:
    """OutboxRecords."""

    def __init__(self, table: Table, clock: Clock) -> None:
        self._table = table
        self._clock = clock
        # The keys of recently read undispatched events: an event's id does not contain its key.
        self._places: OrderedDict[str, Key] = OrderedDict()

    async def events(self, tenant: TenantId, job_id: JobId, cursor: str | None, limit: int) -> Page[EventRecord]:
        first, last = notice_key(tenant, job_id, after(cursor) + 1), f"{tenant}#notice#~"
        where = HashKey("pk", first.pk) & RangeKey("sk").between(first.sk, last)
        items_read = await self._table.query(where, limit=limit + 1)
        items = readable(items_read[:limit], lambda item: _event(item["seq"], notice_of(item)))
        return Page(items, str(items_read[limit - 1]["seq"]) if len(items_read) > limit else None)

    async def undispatched(self, limit: int) -> list[OutboxEvent]:
        items_read = _in_order_of_jobs(await spread(self._table, "dp", "Untold", index=DUE, limit=limit))
        for item in items_read:
            self._places[item["notice_id"]] = Key(item["pk"], item["sk"])
            self._places.move_to_end(item["notice_id"])
        while len(self._places) > _MAX_REMEMBERED:
            self._places.popitem(last=False)
        return readable(items_read, notice_of)

    async def mark_dispatched(self, notices: Sequence[OutboxEvent]) -> None:
        told = list({notice.notice_id: notice for notice in notices}.values())
        for start in range(0, len(told), _WRITES_AT_ONCE):
            await asyncio.gather(*map(self._mark, told[start : start + _WRITES_AT_ONCE]))

    async def _mark(self, notice: OutboxEvent) -> None:
        key = self._places.get(notice.notice_id) or await self._find(notice)
        if key is None:
            return
        # Only an existing item: the update must not recreate a purged event.
        update = Update(self._table.name, key._asdict(), F("dp").remove() & F("ds").remove(), F("pk").exists())
        try:
            await self._table.wire.call("UpdateItem", update.to_request_payload()["Update"])
        except DynamoRefused:
            return

    async def _find(self, notice: OutboxEvent) -> Key | None:
        where = HashKey("pk", job_partition(notice.job_id)) & RangeKey("sk").begins_with(f"{notice.tenant}#notice#")
        items_read = await self._table.query(where, keep=F("notice_id").equals(notice.notice_id))
        return next((Key(item["pk"], item["sk"]) for item in items_read), None)


def notice_writes(table: Table, counter: ReadItem, notice: OutboxEvent | None) -> list[Operation]:
    """Part of a transaction: append an event under the next number of its job."""
    if notice is None:
        return []
    seq = 1 if counter.item is None else counter.item["count"] + 1
    there = ReadItem(notice_key(notice.tenant, notice.job_id, seq), None)
    return [
        table.save(counter, {"count": seq, "ttl": while_in_use(notice.at)}),
        table.save(there, notice_item(notice, seq)),
    ]


def _in_order_of_jobs(items: Sequence[Item]) -> list[Item]:
    """The index has them by their times, and the clocks of their writers may differ: those of one job take the places
    that they have together by their numbers."""
    by_job: dict[str, list[Item]] = {}
    for item in items:
        by_job.setdefault(item["pk"], []).append(item)
    numbered = {pk: iter(sorted(own, key=lambda item: int(item.get("seq", 0)))) for pk, own in by_job.items()}
    return [next(numbered[item["pk"]]) for item in items]


def _event(seq: int, notice: OutboxEvent) -> EventRecord:
    data: dict[str, object] = notice.data
    return EventRecord(seq, notice.at, notice.event, notice.run_id, None, msgspec.to_builtins(data), notice.notice_id)
