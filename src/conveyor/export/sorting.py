"""Sorting for exports, on engines that store tasks only by id, which is a hash. Reads tasks shard by shard and page by
page, and writes them to objects of some megabytes, each in order of index, which the walk then merges.

An object is durable before the row mentions it, so that another process can resume after the last one.
"""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from conveyor.engines.blobs import Blobs
from conveyor.engines.tasks import TaskFilter, Tasks
from conveyor.errors import EngineFailed
from conveyor.faults import crashpoint
from conveyor.model import RunKey, Task, TaskId
from conveyor.read.walk import END

PAGE = 1000

# Bytes that are sorted in memory, and bytes of one read.
_SPOOL_BYTES = 16 * 1024 * 1024
_READ_BYTES = 256 * 1024

_decode = msgspec.json.Decoder(Task).decode


class Sorting(msgspec.Struct, frozen=True, omit_defaults=True):
    """The checkpoint of the sorting: the run, its shard, and the last task; and for each object its run and the attempt
    that wrote it."""

    run: int = 0
    shard: int = 0
    after: TaskId | None = None
    objects: Sequence[tuple[int, int]] = ()


async def sort_some(
    tasks: Tasks,
    blobs: Blobs,
    runs: Sequence[RunKey],
    where: TaskFilter,
    state: Sorting,
    attempt: int,
    key: Callable[[int, int], str],
) -> tuple[Sorting, int]:
    """Sort the next megabytes of rows into one object. Returns the new checkpoint and how many rows were read. `key`
    makes the name of an object of its number and attempt."""
    run = runs[state.run]
    lines: list[tuple[int, bytes]] = []
    size = read = 0
    shard, after = state.shard, state.after
    while size < _SPOOL_BYTES and shard < max(run.shard_count, 1):
        page = await tasks.page(run, shard, after, PAGE, where)
        fresh = await asyncio.to_thread(_lines, page)
        lines += fresh
        size += sum(len(line) for _, line in fresh)
        read += len(page)
        shard, after = (shard, page[-1].task_id) if page else (shard + 1, None)
    objects = list(state.objects)
    if lines:
        data = await asyncio.to_thread(_sorted, lines)
        crashpoint("exports.sort.before")
        await blobs.put(key(len(objects), attempt), data)
        crashpoint("exports.sort.after")
        objects.append((state.run, attempt))
    if shard == max(run.shard_count, 1):
        return Sorting(state.run + 1, 0, None, objects), read
    return Sorting(state.run, shard, after, objects), read


class SortedStream:
    """One sorted object, as a stream of the walk. Its rows were counted when they were sorted."""

    def __init__(self, blobs: Blobs, key: str, after: int, offset: int) -> None:
        self._blobs = blobs
        self._key = key
        self._next = offset
        self.tasks: list[Task] = []
        self.known = after
        self.read = 0
        self.offset = offset

    async def more(self) -> None:
        length = _READ_BYTES
        while True:
            data = await self._blobs.get(self._key, self._next, length)
            if data is None:
                raise EngineFailed("A sorted list of an export is missing.", key=self._key)
            ended = len(data) < length
            cut = len(data) if ended else data.rfind(b"\n") + 1
            if cut or ended:
                break
            length *= 2
        fresh = await asyncio.to_thread(_tasks, data[:cut])
        self.offset = self._next
        self._next += cut
        self.tasks = fresh
        self.known = END if ended else fresh[-1].index


def _lines(page: Sequence[Task]) -> list[tuple[int, bytes]]:
    """A newline in an input is whitespace between JSON tokens: inside a string it would be escaped."""
    return [(task.index, msgspec.json.encode(task).replace(b"\n", b" ") + b"\n") for task in page]


def _sorted(lines: list[tuple[int, bytes]]) -> bytes:
    lines.sort()
    return b"".join([line for _, line in lines])


def _tasks(data: bytes) -> list[Task]:
    return [_decode(line) for line in data.split(b"\n") if line]
