"""The events of a run's tasks, in the partitions of the tasks, numbered over the run."""

import asyncio
import heapq
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from aiodynamo.expressions import F, HashKey, RangeKey
from aiodynamo.operations import Update

from conveyor.clock import Clock
from conveyor.engines.dynamodb.events import DIGITS, after
from conveyor.engines.dynamodb.layout import event_key, event_prefix, first_key, partition
from conveyor.engines.dynamodb.lifetimes import while_in_use
from conveyor.engines.dynamodb.table import Item, Table
from conveyor.engines.dynamodb.wire import DynamoRefused
from conveyor.engines.tasks import MAX_SCANNED, TaskEvent
from conveyor.model import EventRecord, Page, RunKey


class Trail:
    """Events of tasks."""

    def __init__(self, table: Table, clock: Clock) -> None:
        self._table = table
        self._clock = clock

    async def note(self, run: RunKey, events: Sequence[TaskEvent]) -> None:
        if not events:
            return
        last = await self._take_numbers(run, len(events))
        if last is None:
            return
        first = last - len(events) + 1
        ttl = while_in_use(self._clock.now())
        await self._table.put_new([_item(run, first + offset, event, ttl) for offset, event in enumerate(events)])

    async def page(
        self, run: RunKey, shards: Iterable[int], index: int | None, cursor: str | None, limit: int
    ) -> Page[EventRecord]:
        """Events of these shards, for all tasks or for one. Those of one task are found among the others of its shard:
        a page reads a bounded number of them, so it may be short before the last."""
        prefix = event_prefix(run)
        within = RangeKey("sk").between(f"{prefix}{after(cursor) + 1:0{DIGITS}d}", f"{prefix}~")
        keep = None if index is None else F("index").equals(index)
        parts = await asyncio.gather(
            *(
                self._table.query_some(
                    HashKey("pk", partition(run, shard)) & within,
                    rows=None if index is None else MAX_SCANNED,
                    limit=limit + 1,
                    keep=keep,
                )
                for shard in shards
            )
        )
        merged = list(heapq.merge(*(part.items for part in parts), key=lambda item: item["sk"]))
        unread = [part.last["sk"] for part in parts if part.last is not None]
        last = merged[limit - 1]["sk"] if len(merged) > limit else min(unread, default=None)
        return Page([_event(run, item) for item in merged[:limit]], None if last is None else str(_number(last)))

    async def _take_numbers(self, run: RunKey, count: int) -> int | None:
        """Reserve numbers, and return the last of them; None for a run without tasks. A retried call leaves a gap."""
        more = F("events").add(count) & F("ttl").set(while_in_use(self._clock.now()))
        update = Update(self._table.name, first_key(run)._asdict(), more, F("pk").exists())
        payload: dict[str, Any] = {**update.to_request_payload()["Update"], "ReturnValues": "UPDATED_NEW"}
        try:
            answer = await self._table.wire.call("UpdateItem", payload)
        except DynamoRefused:
            return None
        return int(answer["Attributes"]["events"]["N"])


def _item(run: RunKey, seq: int, event: TaskEvent, ttl: int) -> Item:
    return {
        **event_key(run, event.index, seq)._asdict(),
        "v": 1,
        "index": event.index,
        "at": event.at,
        "event": event.event,
        "data": event.data,
        "ttl": ttl,
    }


def _number(sort_key: str) -> int:
    return int(sort_key.rpartition("#")[2])


def _event(run: RunKey, item: Item) -> EventRecord:
    return EventRecord(
        _number(item["sk"]),
        float(item["at"]),
        item["event"],
        run.run_id,
        item["index"],
        msgspec.json.decode(item["data"]),
    )
