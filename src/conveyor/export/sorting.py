"""Sorting for exports, on engines that store tasks only by id, which is a hash. Reads tasks shard by shard and page by
page, and writes them to objects of some megabytes, each in order of index. Many of them are merged, a few at a time,
into longer sorted lists, each of several objects; the walk then merges the few that are left. So memory holds the same,
whatever the number of tasks.

An object is durable before the row mentions it, so that another process can resume after the last one. Objects that
were merged stay until the export is ready.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from conveyor.engines.blobs import Blobs
from conveyor.engines.tasks import TaskFilter, Tasks
from conveyor.export.sorted_lists import IndexedLine, LineStream, SortedStream, lines_in_order
from conveyor.faults import crashpoint
from conveyor.model import RunKey, Task, TaskId
from conveyor.read.walk import Position

PAGE = 1000

# Sorted lists that are merged at once.
FAN_IN = 16

# Bytes that are sorted in memory, bytes of one read, and bytes that the reads of all lists have in memory.
_SPOOL_BYTES = 16 * 1024 * 1024
_READ_BYTES = 256 * 1024
_ALL_READ_BYTES = 4 * 1024 * 1024
_LEAST_READ_BYTES = 16 * 1024

# Makes the name of an object of its number and attempt.
ObjectKey = Callable[[int, int], str]


class Merging(msgspec.Struct, frozen=True, omit_defaults=True):
    """A merge in progress: the places of its lists, where it continues, and the numbers of its objects so far."""

    inputs: Sequence[int]
    position: Position = Position()
    written: Sequence[int] = ()


class Sorting(msgspec.Struct, frozen=True, omit_defaults=True):
    """The checkpoint of the sorting: the run, its shard, and the last task; for each object its run and the attempt
    that wrote it; and the sorted lists, each the numbers of its objects. Without lists, each object is one."""

    run: int = 0
    shard: int = 0
    after: TaskId | None = None
    objects: Sequence[tuple[int, int]] = ()
    lists: Sequence[Sequence[int]] = ()
    merging: Merging | None = None

    def sorted_lists(self) -> Sequence[Sequence[int]]:
        return self.lists or [[number] for number in range(len(self.objects))]

    def run_of(self, sorted_list: Sequence[int]) -> int:
        return self.objects[sorted_list[0]][0]


async def sort_some(
    tasks: Tasks,
    blobs: Blobs,
    runs: Sequence[RunKey],
    where: TaskFilter,
    state: Sorting,
    attempt: int,
    key: ObjectKey,
) -> tuple[Sorting, int]:
    """Sort the next megabytes of rows into one object. Returns the new checkpoint and how many rows were read."""
    run = runs[state.run]
    lines: list[IndexedLine] = []
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


async def merge_lists(blobs: Blobs, state: Sorting, attempt: int, key: ObjectKey) -> AsyncGenerator[Sorting, None]:
    """Merge sorted lists until few are left. Yields the checkpoint after each object."""
    while True:
        state = _next_merge(state)
        if state.merging is None:
            return
        async for checkpoint in _merge(blobs, state, state.merging, attempt, key):
            state = checkpoint
            yield checkpoint


def sorted_streams(blobs: Blobs, state: Sorting, position: Position, key: ObjectKey) -> list[SortedStream]:
    """The sorted lists as streams of the walk: the newest run first; the lists of one run have no task in common."""
    lists = sorted(state.sorted_lists(), key=state.run_of)
    offsets = position.offsets or [0] * len(lists)
    size = _read_bytes(len(lists))
    return [
        SortedStream(blobs, _keys(state, each, key), position.after, offset, size)
        for each, offset in zip(lists, offsets, strict=True)
    ]


def _next_merge(state: Sorting) -> Sorting:
    """Choose the lists to merge next: the first, which are the shortest, of the run that has the most. Lists of several
    runs are not merged here: the latest outcome of a task counts, which the walk decides."""
    lists = state.sorted_lists()
    if state.merging is not None or len(lists) <= FAN_IN:
        return state
    ((run, count),) = Counter(map(state.run_of, lists)).most_common(1)
    if count == 1:
        return state
    # No more than it takes: every merge writes its tasks again.
    size = max(2, min(FAN_IN, count, len(lists) - FAN_IN + 1))
    inputs = [place for place, each in enumerate(lists) if state.run_of(each) == run][:size]
    return msgspec.structs.replace(state, lists=lists, merging=Merging(inputs))


async def _merge(
    blobs: Blobs, state: Sorting, merging: Merging, attempt: int, key: ObjectKey
) -> AsyncGenerator[Sorting, None]:
    chosen = [state.lists[place] for place in merging.inputs]
    position, size = merging.position, _read_bytes(len(chosen))
    streams = [
        LineStream(blobs, _keys(state, each, key), position.after, offset, size)
        for each, offset in zip(chosen, position.offsets or [0] * len(chosen), strict=True)
    ]
    run, written, objects = state.run_of(chosen[0]), list(merging.written), list(state.objects)

    async def put(pieces: list[bytes]) -> None:
        data = await asyncio.to_thread(b"".join, pieces)
        crashpoint("exports.merge.before")
        await blobs.put(key(len(objects), attempt), data)
        crashpoint("exports.merge.after")
        written.append(len(objects))
        objects.append((run, attempt))

    pieces: list[bytes] = []
    held = 0
    async for batch in lines_in_order(streams, position.after):
        if held >= _SPOOL_BYTES:
            await put(pieces)
            pieces, held = [], 0
            going_on = Merging(merging.inputs, batch.position, tuple(written))
            yield msgspec.structs.replace(state, objects=tuple(objects), merging=going_on)
        pieces.append(batch.data)
        held += len(batch.data)
    await put(pieces)
    others = [each for place, each in enumerate(state.lists) if place not in merging.inputs]
    yield msgspec.structs.replace(state, objects=tuple(objects), lists=[*others, written], merging=None)


def _keys(state: Sorting, sorted_list: Sequence[int], key: ObjectKey) -> list[str]:
    return [key(number, state.objects[number][1]) for number in sorted_list]


def _read_bytes(lists: int) -> int:
    return max(min(_READ_BYTES, _LEAST_READ_BYTES), min(_READ_BYTES, _ALL_READ_BYTES // max(lists, 1)))


def _lines(page: Sequence[Task]) -> list[IndexedLine]:
    """A newline in an input is whitespace between JSON tokens: inside a string it would be escaped."""
    return [(task.index, msgspec.json.encode(task).replace(b"\n", b" ") + b"\n") for task in page]


def _sorted(lines: list[IndexedLine]) -> bytes:
    lines.sort()
    return b"".join([line for _, line in lines])
