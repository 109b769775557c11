"""Bodies for exports. Gets tasks in the order of the list, reads the bodies of a window of them, and hands on both.

Neighbours in the list ran at about the same time, so that their bodies lie side by side in a few segments: a window's
bodies are read by object and offset, near ones at once, some at the same time. No body goes on that differs from its
sha256. Memory holds two windows, whatever the size of the job.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from hashlib import sha256
from typing import NamedTuple

from conveyor.engines.blobs import Blobs
from conveyor.model import BodyRef, Task
from conveyor.read.prefetch import prefetch
from conveyor.read.results import check_body, missing_body, stream_body
from conveyor.read.walk import Position, TaskBatch

# A longer body is never whole in memory.
LARGE = 8 * 1024 * 1024

_WINDOW_BYTES = 16 * 1024 * 1024
_RANGE_BYTES = 4 * 1024 * 1024
# Reading over a gap is cheaper than asking again.
_GAP_BYTES = 64 * 1024
_READS_AT_ONCE = 16

Body = bytes | memoryview


class Window(NamedTuple):
    """Tasks in the order of the list, each with its body. A task whose body is large, or not wanted, has None."""

    tasks: list[Task]
    bodies: list[Body | None]
    # From where a walk goes on after them.
    position: Position
    # Rows that were read for it, and that no window before has told of.
    read: int


async def windows(
    blobs: Blobs, batches: AsyncGenerator[TaskBatch, None], with_bodies: bool
) -> AsyncGenerator[Window, None]:
    """The tasks of these batches with their bodies; the next window is read while one is worked on. A batch of no
    tasks makes an empty window: it says how far the walk is."""

    async def read() -> AsyncGenerator[Window, None]:
        async for batch in batches:
            left, read = len(batch.tasks), batch.read
            for tasks in _split(batch.tasks) if with_bodies else [batch.tasks]:
                bodies: list[Body | None] = [None] * len(tasks)
                if with_bodies:
                    await _read_bodies(blobs, tasks, bodies)
                left -= len(tasks)
                after = tasks[-1].index if left else batch.last
                yield Window(tasks, bodies, Position(after, batch.position.offsets), read)
                read = 0

    async with aclosing(batches), aclosing(prefetch(read())) as found:
        async for window in found:
            yield window


def checked(ref: BodyRef, body: Body) -> Body:
    """The body, if it is the one that was stored."""
    check_body(ref, len(body), sha256(body).hexdigest())
    return body


class _Range(NamedTuple):
    """Bytes of one object that are read at once, and which bodies lie in them, by their places among the tasks. A start
    of -1 is a whole object."""

    key: str
    start: int
    length: int
    places: list[int]


def _split(tasks: Sequence[Task]) -> Iterator[list[Task]]:
    """Tasks whose bodies are read together: bounded in bytes, one with a large body alone."""
    window: list[Task] = []
    size = 0
    for task in tasks:
        ref = task.detail.body
        length = ref.length if ref is not None else 0
        if window and (size + length > _WINDOW_BYTES or length > LARGE):
            yield window
            window, size = [], 0
        window.append(task)
        size += length
        if length > LARGE:
            yield window
            window, size = [], 0
    if window or not tasks:
        yield window


def _ranges(tasks: Sequence[Task]) -> Iterator[_Range]:
    """The ranges in which the bodies of these tasks lie, but for large ones; by object, front to back."""
    refs = [
        (ref.key, ref.offset, ref.length, place)
        for place, ref in enumerate(task.detail.body for task in tasks)
        if ref is not None and ref.length <= LARGE
    ]
    refs.sort()
    places: list[int] = []
    within, start, end = "", -1, 0
    for key, offset, length, place in refs:
        near = offset <= end + _GAP_BYTES and offset + length <= start + _RANGE_BYTES
        if places and start >= 0 and key == within and near:
            end = max(end, offset + length)
        else:
            if places:
                yield _Range(within, start, end - max(start, 0), places)
            within, start, end, places = key, offset, max(offset, 0) + length, []
        places.append(place)
    if places:
        yield _Range(within, start, end - max(start, 0), places)


async def _read_bodies(blobs: Blobs, tasks: Sequence[Task], found: list[Body | None]) -> None:
    """Put the body of each task in its place, as it is stored: not yet checked."""
    ranges = list(_ranges(tasks))
    todo = iter(ranges)

    async def reader() -> None:
        for each in todo:
            data = await _read(blobs, each, tasks)
            view = memoryview(data)
            for place in each.places:
                ref = tasks[place].detail.body
                assert ref is not None
                start = ref.offset - each.start
                found[place] = data if ref.offset < 0 else view[start : start + ref.length]

    await asyncio.gather(*(reader() for _ in range(min(_READS_AT_ONCE, len(ranges)))))


async def _read(blobs: Blobs, each: _Range, tasks: Sequence[Task]) -> bytes:
    first = tasks[each.places[0]].detail.body
    assert first is not None
    if first.piece:
        return b"".join([part async for part in stream_body(blobs, first)])
    # An object that is longer than it should be is caught by the one byte more.
    start, length = (0, each.length + 1) if each.start < 0 else (each.start, each.length)
    data = await blobs.get(each.key, start, length)
    if data is None:
        raise missing_body(first)
    return data
