"""Merge: one ordered listing over the shards of a run that reads little more than it returns.

Each shard is a stream in order of task_id. The merge reads about a shard's share of the page, and a little more only if
the shard runs out before the page is full. Reading a full page from each of N shards would read N rows per result.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Sequence

import msgspec

from conveyor.engines.tasks import MAX_SCANNED, TaskFilter, Tasks
from conveyor.model import RunKey, Task, TaskId

# Fractions of a shard's share of the page: the first read, and each further read.
_FIRST = 0.85
_MORE = 0.1
# Fewer rows than these cost no less: DynamoDB counts what it reads in steps of 4 KiB, and each read is a round trip.
_LEAST = 4

Position = TaskId | None


class Merged(msgspec.Struct, frozen=True):
    """A page of the merged listing. `positions` is the last task taken from each shard; None at the end."""

    items: list[Task]
    positions: list[Position] | None
    rows_read: int


class _Stream:
    """One shard: the rows that are read but not yet taken, and whether there are more."""

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
    def is_dry(self) -> bool:
        return not self.rows and not self.ended

    async def read(self, count: int) -> None:
        scanned = await self._tasks.scan(self._run, self._shard, self._read_to, count, self._where)
        self.rows.extend(scanned.tasks)
        self.rows_read += scanned.rows_read
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
    """The next `limit` tasks after `positions`, in order of task_id over all shards. The page is shorter, or empty, if
    a scan of a shard found no match within its bound, or the page has read its share: the next task is unknown then."""
    streams = [_Stream(tasks, run, shard, position, where) for shard, position in enumerate(positions)]
    share = limit / len(streams)
    first, more = max(_LEAST, round(share * _FIRST)), max(_LEAST, round(share * _MORE))
    await asyncio.gather(*(stream.read(first) for stream in streams))
    heads = [(stream.rows[0].task_id, shard) for shard, stream in enumerate(streams) if stream.rows]
    heapq.heapify(heads)
    items: list[Task] = []
    # Whether a scan of some shard found nothing, and the shard may have more.
    unknown = any(stream.is_dry for stream in streams)
    while heads and len(items) < limit and not unknown:
        _, shard = heads[0]
        stream = streams[shard]
        items.append(stream.take())
        # To choose the next task, the first row of every shard must be known.
        if stream.is_dry:
            if sum(each.rows_read for each in streams) < MAX_SCANNED:
                await stream.read(more)
            unknown = stream.is_dry
        if stream.rows:
            heapq.heapreplace(heads, (stream.rows[0].task_id, shard))
        else:
            heapq.heappop(heads)
    left = [stream.position for stream in streams] if heads or unknown else None
    return Merged(items, left, sum(stream.rows_read for stream in streams))
