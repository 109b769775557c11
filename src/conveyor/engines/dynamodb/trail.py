"""The events of a run's tasks, in the partitions of the tasks, numbered over the run."""

import asyncio
import heapq
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from aiodynamo.expressions import F, HashKey, RangeKey
from aiodynamo.operations import Update

from conveyor.engines.dynamodb.events import DIGITS, after
from conveyor.engines.dynamodb.layout import event_key, event_prefix, first_key, partition
from conveyor.engines.dynamodb.table import Item, Table
from conveyor.engines.dynamodb.wire import DynamoRefused
from conveyor.engines.tasks import TaskEvent
from conveyor.model import EventRecord, Page, RunKey


class Trail:
    """Events of tasks."""

    def __init__(self, table: Table) -> None:
        self._table = table

    async def note(self, run: RunKey, events: Sequence[TaskEvent]) -> None:
        if not events:
            return
        last = await self._take_numbers(run, len(events))
        if last is None:
            return
        first = last - len(events) + 1
        await self._table.put_new([_item(run, first + offset, event) for offset, event in enumerate(events)])

    async def page(
        self, run: RunKey, shards: Iterable[int], index: int | None, cursor: str | None, limit: int
    ) -> Page[EventRecord]:
        """Events of these shards, for all tasks or for one."""
        prefix = event_prefix(run)
        within = RangeKey("sk").between(f"{prefix}{after(cursor) + 1:0{DIGITS}d}", f"{prefix}~")
        keep = None if index is None else F("index").equals(index)
        parts = await asyncio.gather(
            *(
                self._table.query(HashKey("pk", partition(run, shard)) & within, limit=limit + 1, keep=keep)
                for shard in shards
            )
        )
        merged = list(heapq.merge(*parts, key=lambda item: item["sk"]))
        items = [_event(run, item) for item in merged[:limit]]
        return Page(items, str(items[-1].seq) if len(merged) > limit else None)

    async def _take_numbers(self, run: RunKey, count: int) -> int | None:
        """Reserve numbers, and return the last of them; None for a run without tasks. A retried call leaves a gap."""
        update = Update(self._table.name, first_key(run)._asdict(), F("events").add(count), F("pk").exists())
        payload: dict[str, Any] = {**update.to_request_payload()["Update"], "ReturnValues": "UPDATED_NEW"}
        try:
            answer = await self._table.wire.call("UpdateItem", payload)
        except DynamoRefused:
            return None
        return int(answer["Attributes"]["events"]["N"])


def _item(run: RunKey, seq: int, event: TaskEvent) -> Item:
    return {
        **event_key(run, event.index, seq)._asdict(),
        "v": 1,
        "index": event.index,
        "at": event.at,
        "event": event.event,
        "data": event.data,
    }


def _event(run: RunKey, item: Item) -> EventRecord:
    seq = int(item["sk"].rpartition("#")[2])
    return EventRecord(
        seq, float(item["at"]), item["event"], run.run_id, item["index"], msgspec.json.decode(item["data"])
    )
