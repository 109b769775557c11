"""Late counts: counts the tasks that a process has finished, and not counted before it died.

A look at a run reads its counts and announcements together. An announcement that two looks find open, some seconds
apart, is settled: of the tasks that it names, those that its call has finished are added to the counts, once. It does
not matter whether the process is dead or only slow: the addition takes the number of its call, so that its own is
refused, and the announcement then tells it which tasks are counted.
"""

import msgspec
from aiodynamo.expressions import F, HashKey, RangeKey
from aiodynamo.operations import Delete, Update

from conveyor.clock import Clock
from conveyor.engines.dynamodb.announcements import KEPT, SLOTS, Announcement, announcement_of, packed
from conveyor.engines.dynamodb.counters import Tally, addition, code_names, sum_of, tally_of
from conveyor.engines.dynamodb.layout import (
    announcement_key,
    announcement_prefix,
    count_key,
    count_prefix,
    home,
    key_at,
)
from conveyor.engines.dynamodb.table import Item, Table
from conveyor.engines.dynamodb.wire import DynamoRefused
from conveyor.engines.tasks import SettledCounts
from conveyor.faults import crashpoint
from conveyor.model import RunId, RunKey
from conveyor.states import TaskStatus

# Seconds between the looks that have to find an announcement open. A call takes far less than that.
_OPEN_SECONDS = 3.0

_FIELDS = F("index") & F("prior") & F("ended", "by") & F("ended", "status") & F("ended", "error_code")


class _Sighting(msgspec.Struct, frozen=True):
    """The number of an announcement that was open, and when that was seen first, on the monotonic clock: no wall clock
    of another machine matters."""

    number: int
    since: float


class LateCounts:
    """Looks at runs. It remembers open announcements, and nothing of runs without any."""

    def __init__(self, table: Table, clock: Clock) -> None:
        self._table = table
        self._clock = clock
        self._seen: dict[RunId, dict[str, _Sighting]] = {}

    async def settle(self, run: RunKey) -> SettledCounts:
        slots, announcements = await self._read(run)
        open_now = [each for each in announcements if each.is_open(slots.get(each.slot, {}))]
        due = self._overdue(run, open_now)
        settled = 0
        for announcement in due:
            settled += await self._count(run, announcement, code_names(slots.get(announcement.slot, {})))
        await self._remove_old(run, [each for each in announcements if each not in open_now])
        if due:
            slots, _ = await self._read(run)
        return SettledCounts(sum_of(slots.values()).counts, settled, pending=bool(open_now))

    async def _read(self, run: RunKey) -> tuple[dict[int, Item], list[Announcement]]:
        """The count items by slot, and the announcements: one query, which reads little more than the counts alone."""
        where = HashKey("pk", home(run)) & RangeKey("sk").begins_with(count_prefix(run))
        items = {item["sk"]: item for item in await self._table.query(where)}
        keys = {slot: count_key(run, slot).sk for slot in range(SLOTS)}
        first = announcement_prefix(run)
        announcements = [announcement_of(item) for sk, item in items.items() if sk.startswith(first)]
        return {slot: items[sk] for slot, sk in keys.items() if sk in items}, announcements

    def _overdue(self, run: RunKey, open_now: list[Announcement]) -> list[Announcement]:
        """Those that have been open since an earlier look."""
        now, before = self._clock.monotonic(), self._seen.pop(run.run_id, {})
        seen: dict[str, _Sighting] = {}
        for each in open_now:
            sighting = before.get(each.attribute)
            is_same = sighting is not None and sighting.number == each.number
            seen[each.attribute] = sighting if is_same and sighting is not None else _Sighting(each.number, now)
        if seen:
            self._seen[run.run_id] = seen
        return [each for each in open_now if now - seen[each.attribute].since >= _OPEN_SECONDS]

    async def _count(self, run: RunKey, announcement: Announcement, codes: set[str]) -> int:
        """Add what the call has finished. Both items change, or none: the counts, and the note of what was counted."""
        keys = [key_at(run, index) for index in announcement.indexes]
        own = [item for item in await self._table.read_raw(keys, _FIELDS) if _by(item) == announcement.by]
        counted = packed(int(item["index"]["N"]) for item in own)
        key = announcement_key(run, announcement.writer, announcement.lane)
        same = F("number").equals(announcement.number) & F("counted").does_not_exist()
        note = Update(self._table.name, key._asdict(), F("counted").set(counted), same)
        counts = addition(self._table.name, run, announcement, _tally(own), codes, self._clock.now())
        crashpoint("tasks.settle.before")
        try:
            await self._table.write([counts, note])
        except DynamoRefused:
            # Its process, or another sweeper, was first.
            return 0
        crashpoint("tasks.settle.after")
        return len(own)

    async def _remove_old(self, run: RunKey, closed: list[Announcement]) -> None:
        """Remove announcements of processes that are long gone: a long run has many."""
        for each in closed:
            if abs(self._clock.now() - each.at) > KEPT:
                key = announcement_key(run, each.writer, each.lane)
                same = F("number").equals(each.number)
                try:
                    await self._table.write([Delete(self._table.name, key._asdict(), same)])
                except DynamoRefused:
                    continue


def _by(item: Item) -> str | None:
    by: str | None = item.get("ended", {}).get("M", {}).get("by", {}).get("S")
    return by


def _tally(items: list[Item]) -> Tally:
    return tally_of(_end(item) for item in items)


def _end(item: Item) -> tuple[TaskStatus, str | None, str | None]:
    ended = item["ended"]["M"]
    code = ended["error_code"]["S"] if "error_code" in ended else None
    return TaskStatus(int(ended["status"]["N"])), code, item["prior"]["S"] if "prior" in item else None
