"""Merge: one ordered listing out of the shards of a run, reading little more than it returns.

Each shard is a stream in order of task_id. It is asked for about its share of the page, and again, for a little, only
when it runs dry while the page is not full: a full page from each of N shards would read N rows for each returned.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Sequence

import msgspec

from conveyor.engines.tasks import TaskFilter, Tasks
from conveyor.model import RunKey, Task, TaskId

# Of a shard's share of the page: how much is asked for at first, and how much more each time.
_FIRST = 0.85
_MORE = 0.1

Position = TaskId | None


class Merged(msgspec.Struct, frozen=True):
    """A page of the merged listing. `positions` says what was consumed of each shard; None when nothing is left."""

    items: list[Task]
    positions: list[Position] | None
    rows_read: int


class _Stream:
    """What is known of one shard: rows read and not yet returned, and whether there are more."""

    def __init__(self, tasks: Tasks, run: RunKey, shard: int, position: Position, where: TaskFilter) -> None:
        self._tasks = tasks
        self._run = run
        self._shard = shard
        self._where = where
        self._read_to = position
        self.position = position
        self.rows: deque[Task] = deque()
        self.ended = False
        self.rows_read = 0

    @property
    def dry(self) -> bool:
        return not self.rows and not self.ended

    async def read(self, count: int) -> None:
        scanned = await self._tasks.scan(self._run, self._shard, self._read_to, count, self._where)
        self.rows.extend(scanned.tasks)
        self.rows_read += len(scanned.tasks)
        self.ended = scanned.last is None
        self._read_to = scanned.last or (scanned.tasks[-1].task_id if scanned.tasks else self._read_to)
        if not self.rows:
            self.position = self._read_to

    def take(self) -> Task:
        task = self.rows.popleft()
        self.position = task.task_id
        return task


async def merged_page(
    tasks: Tasks, run: RunKey, where: TaskFilter, limit: int, positions: Sequence[Position]
) -> Merged:
    """The next `limit` tasks after `positions`, in lexicographic order of task_id over all shards. Fewer, or none,
    where a scan of a shard shows no head and not its end either: what comes next is not known then."""
    streams = [_Stream(tasks, run, shard, position, where) for shard, position in enumerate(positions)]
    share = limit / len(streams)
    more = max(1, round(share * _MORE))
    await asyncio.gather(*(stream.read(max(1, round(share * _FIRST))) for stream in streams))
    heads = [(stream.rows[0].task_id, shard) for shard, stream in enumerate(streams) if stream.rows]
    heapq.heapify(heads)
    items: list[Task] = []
    # A shard that was looked through as far as one scan goes, and may have more.
    unknown = any(stream.dry for stream in streams)
    while heads and len(items) < limit and not unknown:
        _, shard = heads[0]
        stream = streams[shard]
        items.append(stream.take())
        # Before the next one is chosen, every shard that may have more must show its head.
        if stream.dry:
            await stream.read(more)
            unknown = stream.dry
        if stream.rows:
            heapq.heapreplace(heads, (stream.rows[0].task_id, shard))
        else:
            heapq.heappop(heads)
    left = [stream.position for stream in streams] if heads or unknown else None
    return Merged(items, left, sum(stream.rows_read for stream in streams))
