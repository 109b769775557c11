"""Tasks on DynamoDB.

A task is one item: the seed, which never changes, and for a finished task the map `ended`. PartiQL statements write
both, 25 to a BatchExecuteStatement, each with a condition of its own: INSERT is refused if the task exists, UPDATE if
it is missing or finished. The cost per task, compared with the alternatives:

| | calls | write units | |
|---|---|---|---|
| statements | 2/25 | 2 | this engine |
| BatchWriteItem | 1/25 | 1 | has no conditions: a second put would undo the outcome of a task |
| seed and end as two items | 2/25 | 3 | a put may repeat, but reads and deletes cost twice |
| TransactWriteItems | 2/100 | 4 | one refused condition undoes a hundred writes |
| PutItem, UpdateItem | 2 | 2 | a call per task |

The outcome carries the name of the call that wrote it: a call that is retried after a lost answer recognizes its own
writes, and counts them. Counts are separate items (counters.py).
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from aiodynamo.expressions import Condition, F, HashKey, ProjectionExpression, RangeKey
from aiodynamo.operations import Put

from conveyor.clock import Clock
from conveyor.engines.dynamodb.announcements import Announcement
from conveyor.engines.dynamodb.counters import Counters, Tally, tally_of
from conveyor.engines.dynamodb.items import readable
from conveyor.engines.dynamodb.late_counts import LateCounts
from conveyor.engines.dynamodb.layout import (
    first_key,
    home,
    key_at,
    partition,
    prefix,
    shards,
    task_in,
    task_key,
    task_prefix,
)
from conveyor.engines.dynamodb.lifetimes import while_in_use
from conveyor.engines.dynamodb.statements import Ender, Insertion, TaskFinish, insert, task_item, task_of
from conveyor.engines.dynamodb.table import Key, Table, query_payload
from conveyor.engines.dynamodb.trail import Trail
from conveyor.engines.dynamodb.wire import DynamoRefused
from conveyor.engines.tasks import MAX_CODES, MAX_SCANNED, Finished, Scanned, SettledCounts, TaskEvent, TaskFilter
from conveyor.faults import crashpoint
from conveyor.model import (
    Counts,
    EventRecord,
    Page,
    Replaced,
    RunKey,
    Task,
    TaskEnd,
    TaskId,
    TaskSeed,
    is_task_id,
    shard_of,
)
from conveyor.states import TaskStatus

_MAX_KNOWN_RUNS = 10_000
# Items that a filtered query reads per page, and on its first one.
_FILTERED_PAGE = 1000
_FIRST_FILTERED_PAGE = 50
# Items that a scan may read in a shard, however many shards there are.
_LEAST_SCANNED = 500
# DynamoDB ends a page at one megabyte anyway.
_LARGEST_PAGE = 20_000
_RECOUNTS = 5

Raw = dict[str, Any]


class _WalkedShard(NamedTuple):
    """The number of items that were read of a shard, and the last of them; None if no item follows."""

    read: int
    last: TaskId | None


class DynamoTasks:
    """Tasks, their counts and their events."""

    # With what else a row holds, it stays within one write unit.
    inline_bytes = 512

    def __init__(self, table: Table, clock: Clock) -> None:
        self._table = table
        self._clock = clock
        writer = clock.new_id("w")[-12:]
        self._counters = Counters(table, clock, writer)
        self._ender = Ender(table)
        self._late = LateCounts(table, clock)
        self._trail = Trail(table, clock)
        # Runs whose first item exists, and whether they are reruns.
        self._begun: dict[tuple[str, str], bool] = {}
        # Where the search for pending tasks stopped in each shard.
        self._looked: dict[tuple[str, str, int], str] = {}

    async def put(self, run: RunKey, seeds: Sequence[TaskSeed]) -> None:
        if not seeds:
            return
        crashpoint("tasks.put.before")
        await self._begin(run, any(seed.prior for seed in seeds))
        lanes: dict[str, dict[int, Insertion]] = {}
        ttl = while_in_use(self._clock.now())
        for seed in seeds:
            item = task_item(run, seed, ttl)
            lanes.setdefault(item.pk, {}).setdefault(seed.index, item)
        await insert(self._table, [list(lane.values()) for lane in lanes.values()])
        crashpoint("tasks.put.after")

    async def unfinished(self, run: RunKey, indexes: Sequence[int]) -> frozenset[int]:
        items = await self._at(run, indexes, F("index") & F("ended", "status"))
        return frozenset(int(item["index"]["N"]) for item in items if "ended" not in item)

    async def finish(self, run: RunKey, ends: Sequence[TaskEnd]) -> Finished:
        if not ends:
            return Finished(frozenset(), await self.counts(run))
        # If a batch finishes a task twice, the first outcome counts.
        first = {end.index: TaskFinish(key_at(run, end.index), end) for end in reversed(ends)}
        crashpoint("tasks.finish.before")
        moved = await self._move(run, list(first.values()))
        crashpoint("tasks.finish.after")
        return Finished(frozenset(end.index for end in moved), await self.counts(run))

    async def cancel_pending(self, run: RunKey, limit: int, at: float) -> int:
        while True:
            pending = await self._pending(run, limit)
            ends = [TaskEnd(index, TaskStatus.CANCELLED, 0, None, None, "{}", at) for index in pending]
            moved = await self._move(run, [TaskFinish(key_at(run, end.index), end) for end in ends])
            # Other processes may have finished all of these; there may be more.
            if moved or not pending:
                return len(moved)

    async def counts(self, run: RunKey) -> Counts:
        return (await self._counters.read(run)).counts

    async def settle_counts(self, run: RunKey) -> SettledCounts:
        return await self._late.settle(run)

    async def recount(self, run: RunKey) -> Counts:
        for _ in range(_RECOUNTS):
            before = await self._counters.standing(run)
            truth = await self._truth(run)
            if await self._counters.mend(run, before, truth):
                break
        return truth.counts

    async def replaced(self, run: RunKey) -> Replaced:
        replaced = (await self._counters.read(run)).replaced
        return Replaced(replaced.counts, dict(Counter(replaced.codes).most_common(MAX_CODES)))

    async def error_codes(self, run: RunKey, limit: int) -> list[tuple[str, int]]:
        codes = (await self._counters.read(run)).codes
        return sorted(codes.items(), key=lambda entry: (-entry[1], entry[0]))[:limit]

    async def task(self, run: RunKey, task_id: TaskId) -> Task | None:
        if not is_task_id(task_id):
            return None
        items = await self._table.read_raw([task_key(run, task_id)])
        return task_of(items[0]) if items else None

    async def at(self, run: RunKey, indexes: Sequence[int]) -> list[Task]:
        items = await self._at(run, indexes)
        return sorted(map(task_of, items), key=lambda task: task.index)

    async def page(self, run: RunKey, shard: int, after: TaskId | None, limit: int, where: TaskFilter) -> list[Task]:
        items: list[Raw] = []
        if shard in shards(run):
            await self._walk(run, shard, after or "", _matching(where), items.extend, lambda: limit - len(items))
        return [task_of(item) for item in items[:limit]]

    async def scan(self, run: RunKey, shard: int, after: TaskId | None, limit: int, where: TaskFilter) -> Scanned:
        if shard not in shards(run):
            return Scanned([], None, 0)
        items: list[Raw] = []
        rows = max(_LEAST_SCANNED, MAX_SCANNED // len(shards(run)))
        walked = await self._walk(
            run, shard, after or "", _matching(where), items.extend, lambda: limit - len(items), rows
        )
        found = items[:limit]
        # A newer Conveyor may have written some: the others are listed.
        tasks = readable(found, task_of)
        if len(found) == limit:
            return Scanned(tasks, task_in(found[-1]["sk"]["S"]), walked.read)
        return Scanned(tasks, walked.last, walked.read)

    async def note(self, run: RunKey, events: Sequence[TaskEvent]) -> None:
        await self._trail.note(run, events)

    async def events(self, run: RunKey, task_id: TaskId | None, cursor: str | None, limit: int) -> Page[EventRecord]:
        if task_id is None:
            return await self._trail.page(run, shards(run), None, cursor, limit)
        task = await self.task(run, task_id)
        index = -1 if task is None else task.index
        return await self._trail.page(run, [shard_of(task_id, run.shard_count)], index, cursor, limit)

    async def delete(self, run: RunKey, limit: int) -> int:
        partitions = list(dict.fromkeys([*(partition(run, shard) for shard in shards(run)), home(run)]))
        share = -(-limit // len(partitions))
        parts = await asyncio.gather(*(self._keys(run, pk, share) for pk in partitions))
        keys = [key for part in parts for key in part][:limit]
        if not keys:
            self._counters.forget(run)
            self._begun.pop((run.tenant, run.run_id), None)
        await self._table.delete(keys)
        return len(keys)

    async def _begin(self, run: RunKey, is_rerun: bool) -> None:
        """Write the first item of a run: without it, the run accepts no events."""
        if (run.tenant, run.run_id) in self._begun:
            return
        item = {**first_key(run)._asdict(), "v": 1, "events": 0, "ttl": while_in_use(self._clock.now())}
        if is_rerun:
            item["rerun"] = True
        put = Put(self._table.name, item, F("pk").does_not_exist())
        with suppress(DynamoRefused):
            await self._table.wire.call("PutItem", put.to_request_payload()["Put"])
        self._learn(run, is_rerun)

    def _learn(self, run: RunKey, is_rerun: bool) -> None:
        if len(self._begun) >= _MAX_KNOWN_RUNS:
            self._begun.clear()
        self._begun[run.tenant, run.run_id] = is_rerun

    async def _priors(self, run: RunKey, ends: Sequence[TaskFinish]) -> dict[int, str | None]:
        """The earlier outcomes of these tasks: those of a rerun have them, and they never change."""
        if (run.tenant, run.run_id) not in self._begun:
            item = await self._table.get(first_key(run))
            if item is not None:
                self._learn(run, "rerun" in item)
        if not self._begun.get((run.tenant, run.run_id)):
            return {}
        items = await self._at(run, [finish.end.index for finish in ends], F("index") & F("prior"))
        return {int(item["index"]["N"]): _prior(item) for item in items}

    async def _move(self, run: RunKey, ends: list[TaskFinish]) -> list[TaskEnd]:
        """Finish tasks and count those that moved, even if the call fails midway."""
        if not ends:
            return []
        epoch, priors = await asyncio.gather(self._counters.epoch(run), self._priors(run, ends))
        announcement = await self._counters.announce(run, epoch, (finish.end.index for finish in ends))
        moved: list[TaskEnd] = []
        is_known = False
        try:
            await self._ender.end(ends, announcement.by, moved)
            is_known = True
        finally:
            if moved:
                await self._count(run, announcement, moved, priors)
            elif is_known:
                # Nothing may be left of a run that is purged.
                await self._counters.withdraw(run, announcement)
            # If it failed before it knew of any, the sweeper finds out.
            if moved or is_known:
                self._counters.close(run, announcement)
        return moved

    async def _count(
        self, run: RunKey, announcement: Announcement, moved: list[TaskEnd], priors: Mapping[int, str | None]
    ) -> None:
        """Count what an announced call has moved. Another process may have counted a part of it, if this one was slow:
        then the rest is left."""
        added = await self._counters.add(run, announcement, _tally(moved, priors))
        if not added.done and added.counted is not None:
            rest = [end for end in moved if end.index not in added.counted]
            if not rest:
                return
            added = await self._counters.add_rest(run, announcement, _tally(rest, priors))
        if not added.done:
            await self.recount(run)

    async def _pending(self, run: RunKey, limit: int) -> list[int]:
        """Up to `limit` pending tasks. Each call resumes where the last one stopped, and searches all of a shard before
        it returns none."""
        share = -(-limit // len(shards(run)))

        async def of(shard: int) -> list[int]:
            place = (run.tenant, run.run_id, shard)
            items: list[Raw] = []
            for start in dict.fromkeys([self._looked.pop(place, ""), ""]):
                await self._walk(
                    run, shard, start, F("ended").does_not_exist(), items.extend, lambda: share - len(items)
                )
                if items:
                    self._looked[place] = task_in(items[:share][-1]["sk"]["S"])
                    break
            return [int(item["index"]["N"]) for item in items[:share]]

        items = await asyncio.gather(*map(of, shards(run)))
        return [index for part in items for index in part][:limit]

    async def _truth(self, run: RunKey) -> Tally:
        """Count the tasks."""
        ends: Counter[tuple[TaskStatus, str | None, str | None]] = Counter()

        def count(items: list[Raw]) -> None:
            for item in items:
                ended = item["ended"]["M"]
                code = ended["error_code"]["S"] if "error_code" in ended else None
                ends[TaskStatus(int(ended["status"]["N"])), code, _prior(item)] += 1

        everything = F("ended").exists()
        walks = [self._walk(run, shard, "", everything, count, lambda: _LARGEST_PAGE) for shard in shards(run)]
        await asyncio.gather(*walks)
        return tally_of(ends.elements())

    async def _walk(
        self,
        run: RunKey,
        shard: int,
        after: str,
        keep: Condition | None,
        take: Callable[[list[Raw]], None],
        wanted: Callable[[], int],
        rows: int | None = None,
    ) -> "_WalkedShard":
        """Hand the matching tasks of a shard to `take`, in order of task_id, while more are wanted and at most `rows`
        were read."""
        first = task_prefix(run)
        low, high = f"{first}{after}\0" if after else first, f"{first}~"
        if low > high:
            return _WalkedShard(0, None)
        where = HashKey("pk", partition(run, shard)) & RangeKey("sk").between(low, high)
        start: Raw | None = None
        read, filtered = 0, _FIRST_FILTERED_PAGE
        while (more := wanted()) > 0 and (rows is None or read < rows):
            limit = more if keep is None else max(more, filtered)
            limit = min(limit, _LARGEST_PAGE if rows is None else rows - read)
            # Few match, if it comes to another page.
            filtered = min(_FILTERED_PAGE, filtered * 4)
            payload = query_payload(self._table.name, where, keep=keep, limit=limit, start=start)
            answer = await self._table.wire.call("Query", payload)
            take(answer["Items"])
            read += answer["ScannedCount"]
            start = answer.get("LastEvaluatedKey")
            if start is None:
                return _WalkedShard(read, None)
        return _WalkedShard(read, None if start is None else task_in(start["sk"]["S"]))

    async def _at(self, run: RunKey, indexes: Sequence[int], only: ProjectionExpression | None = None) -> list[Raw]:
        return await self._table.read_raw([key_at(run, index) for index in dict.fromkeys(indexes)], only)

    async def _keys(self, run: RunKey, pk: str, limit: int) -> list[Key]:
        where = HashKey("pk", pk) & RangeKey("sk").begins_with(prefix(run))
        items = await self._table.query(where, limit=limit, only=F("pk") & F("sk"))
        return [Key(item["pk"], item["sk"]) for item in items]


def _matching(where: TaskFilter) -> Condition | None:
    conditions: list[Condition] = []
    if where.status is TaskStatus.PENDING:
        conditions.append(F("ended").does_not_exist())
    elif where.status is not None:
        conditions.append(F("ended", "status").equals(int(where.status)))
    if where.error_code is not None:
        conditions.append(F("ended", "error_code").equals(where.error_code))
    if where.http_status is not None:
        conditions.append(F("ended", "http_status").equals(where.http_status))
    if where.tag is not None:
        conditions.append(F("tag").equals(where.tag))
    matching: Condition | None = None
    for condition in conditions:
        matching = condition if matching is None else matching & condition
    return matching


def _prior(item: Raw) -> str | None:
    return item["prior"]["S"] if "prior" in item else None


def _tally(moved: Sequence[TaskEnd], priors: Mapping[int, str | None]) -> Tally:
    return tally_of((TaskStatus(end.status), end.error_code, priors.get(end.index)) for end in moved)
