"""Bodies for exports. Gets tasks in the order of the list, reads the bodies of a window of them, and hands on both.

Neighbours in the list ran at about the same time, so their bodies are close together in a few segments. The reader
sorts a window's bodies by object and offset, reads near ones together, and some ranges concurrently. Memory holds two
windows, whatever the size of the job.
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

# A longer body is streamed, never held in memory.
LARGE = 8 * 1024 * 1024

_WINDOW_BYTES = 16 * 1024 * 1024
_RANGE_BYTES = 4 * 1024 * 1024
# Reading over a gap is cheaper than another request.
_GAP_BYTES = 64 * 1024
_READS_AT_ONCE = 16

Body = bytes | memoryview


class Window(NamedTuple):
    """Tasks in the order of the list, each with its body. The body is None if it is large or was not requested."""

    tasks: list[Task]
    bodies: list[Body | None]
    # Where a walk resumes after them.
    position: Position
    # Rows read since the window before.
    read: int


async def windows(
    blobs: Blobs, batches: AsyncGenerator[TaskBatch, None], with_bodies: bool
) -> AsyncGenerator[Window, None]:
    """The tasks of these batches with their bodies, prefetched by one window. A batch without tasks makes an empty
    window, for its position."""

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

    async with aclosing(batches), aclosing(prefetch(read())) as stream:
        async for window in stream:
            yield window


def checked(ref: BodyRef, body: Body) -> Body:
    """The body, checked against its reference. Raises EngineFailed."""
    check_body(ref, len(body), sha256(body).hexdigest())
    return body


class _Range(NamedTuple):
    """Bytes of one object for a single read, and the positions of the tasks whose bodies they contain. A start of -1 is
    the whole object."""

    key: str
    start: int
    length: int
    places: list[int]


def _split(tasks: Sequence[Task]) -> Iterator[list[Task]]:
    """Tasks whose bodies are read together, bounded in bytes. A task with a large body is alone."""
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
    """The ranges with the bodies of these tasks, except large ones, by object and offset."""
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


async def _read_bodies(blobs: Blobs, tasks: Sequence[Task], bodies: list[Body | None]) -> None:
    """Fill in the body of each task, as stored: not yet checked."""
    ranges = list(_ranges(tasks))
    todo = iter(ranges)

    async def reader() -> None:
        for range_ in todo:
            data = await _read(blobs, range_, tasks)
            view = memoryview(data)
            for place in range_.places:
                ref = tasks[place].detail.body
                assert ref is not None
                start = ref.offset - range_.start
                bodies[place] = data if ref.offset < 0 else view[start : start + ref.length]

    await asyncio.gather(*(reader() for _ in range(min(_READS_AT_ONCE, len(ranges)))))


async def _read(blobs: Blobs, range_: _Range, tasks: Sequence[Task]) -> bytes:
    first = tasks[range_.places[0]].detail.body
    assert first is not None
    if first.piece:
        return b"".join([part async for part in stream_body(blobs, first)])
    # One byte more detects an object that is too long.
    start, length = (0, range_.length + 1) if range_.start < 0 else (range_.start, range_.length)
    data = await blobs.get(range_.key, start, length)
    if data is None:
        raise missing_body(first)
    return data
