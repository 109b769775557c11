"""Bodies of many tasks. Gets tasks in the order of the list, reads the bodies of a window of them, and hands on both:
for exports, for listings of what was extracted, and for those who check bodies or extract from them again.

Neighbours in the list ran at about the same time, so their bodies are close together in a few segments. The reader
sorts a window's bodies by object and offset, reads near ones together, and some ranges concurrently. Memory holds two
windows, whatever the size of the job.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, suppress
from hashlib import sha256
from typing import NamedTuple

import msgspec
import structlog

from conveyor.engines.blobs import Blobs
from conveyor.errors import BodyDamaged
from conveyor.jobs.body_coding import check_deflated, inflate, inflate_all, missing_body
from conveyor.model import BodyRef, ResultDetail, Task, TaskError
from conveyor.read.prefetch import prefetch
from conveyor.read.results import check_body, stream_body
from conveyor.read.walk import Position, TaskBatch

log = structlog.get_logger()

# A longer body is streamed, never held in memory.
LARGE = 8 * 1024 * 1024

# Bytes of what was extracted for one task that listings and exports show.
MAX_EXTRACTED = 64 * 1024
# How much more a table takes than what was extracted: it repeats the columns of the result for each object.
_ROWS_FACTOR = 16
_JSON = "application/json"
_WINDOW_BYTES = 16 * 1024 * 1024
_RANGE_BYTES = 4 * 1024 * 1024
# Reading over a gap is cheaper than another request.
_GAP_BYTES = 64 * 1024
_READS_AT_ONCE = 16
# Of the bodies that are inflated together.
_INFLATED_BYTES = 1024 * 1024

Body = bytes | memoryview


class Window(NamedTuple):
    """Tasks in the order of the list, each with its body, which is checked. The body is None if it is large or was not
    requested, or if it is damaged: the task then has that as its error (`is_damaged`)."""

    tasks: list[Task]
    bodies: list[Body | None]
    # Where a walk resumes after them.
    position: Position
    # Rows read since the window before.
    read: int


async def windows(
    blobs: Blobs,
    batches: AsyncGenerator[TaskBatch, None],
    with_bodies: bool,
    deflated: bool = False,
    with_extracted: bool = False,
) -> AsyncGenerator[Window, None]:
    """The tasks of these batches with their bodies, prefetched by one window. A batch without tasks makes an empty
    window, for its position. With `deflated`, bodies that are stored deflated stay so; with `with_extracted`, tasks
    have what was extracted in them."""

    async def read() -> AsyncGenerator[Window, None]:
        async for batch in batches:
            left, read = len(batch.tasks), batch.read
            for tasks in _split(batch.tasks, with_bodies):
                if with_extracted:
                    tasks[:] = await inline_extracted(blobs, tasks)
                bodies: list[Body | None] = [None] * len(tasks)
                if with_bodies:
                    damaged = await _read_bodies(blobs, tasks, bodies)
                    # Here, and not where they are packed: the other core inflates and hashes them meanwhile.
                    damaged |= await asyncio.to_thread(_check_all, tasks, bodies, deflated)
                    _mark_damaged(tasks, bodies, damaged)
                left -= len(tasks)
                after = tasks[-1].index if left else batch.last
                yield Window(tasks, bodies, Position(after, batch.position.offsets), read)
                read = 0

    async with aclosing(batches), aclosing(prefetch(read())) as stream:
        async for window in stream:
            yield window


async def read_all(blobs: Blobs, tasks: Sequence[Task]) -> tuple[list[Body | None], dict[int, BodyDamaged]]:
    """The bodies of these tasks, checked; None for one that is large or damaged. The damaged ones by their places."""
    bodies: list[Body | None] = [None] * len(tasks)
    if not any(task.detail.body is not None for task in tasks):
        return bodies, {}
    damaged = await _read_bodies(blobs, tasks, bodies)
    damaged |= await asyncio.to_thread(_check_all, tasks, bodies, False)
    for place in damaged:
        bodies[place] = None
    return bodies, damaged


async def read_extracted(blobs: Blobs, tasks: Sequence[Task], limit: int = LARGE) -> list[Body | None]:
    """What was extracted for each of these tasks, as JSON; None for nothing, and for more bytes than `limit`. Damage is
    logged: one result that cannot be read must not hide the others."""
    found = [task.detail.extracted for task in tasks]
    if all(ref is None or ref.inline is not None for ref in found):
        return [None if ref is None else ref.inline for ref in found]
    bodies: list[Body | None] = []
    for window in _split([as_extracted(task, limit) for task in tasks]):
        some, damaged = await read_all(blobs, window)
        for place, error in damaged.items():
            log.warning("an extracted result is damaged", task=window[place].task_id, error=error.message)
        bodies += some
    return bodies


async def inline_extracted(blobs: Blobs, tasks: Sequence[Task]) -> list[Task]:
    """The tasks with what was extracted in them, wherever it is stored; without it, if it is longer than 64 KiB or
    damaged."""
    if all(task.detail.extracted is None or task.detail.extracted.inline is not None for task in tasks):
        return list(tasks)
    found = await read_extracted(blobs, tasks, MAX_EXTRACTED)
    return [_with_inline(task, value) for task, value in zip(tasks, found, strict=True)]


async def extracted_slices(blobs: Blobs, tasks: Sequence[Task]) -> AsyncGenerator[list[Task], None]:
    """The tasks with what was extracted in them, a bounded number of bytes at a time."""
    for window in _split(tasks, with_bodies=False):
        yield await inline_extracted(blobs, window)


def _with_inline(task: Task, value: Body | None) -> Task:
    ref = task.detail.extracted
    if ref is None or ref.inline is not None:
        return task
    inline = None if value is None else BodyRef("", ref.length, ref.sha256, inline=bytes(value))
    return msgspec.structs.replace(task, detail=msgspec.structs.replace(task.detail, extracted=inline))


def as_extracted(task: Task, limit: int | None = None) -> Task:
    """The task with what was extracted, if it has at most so many bytes, in the place of its body."""
    ref = task.detail.extracted
    fits = ref is None or limit is None or ref.length <= limit
    return msgspec.structs.replace(task, detail=ResultDetail(content_type=_JSON, body=ref if fits else None))


def is_damaged(task: Task) -> bool:
    """Whether the body of this task of a window is damaged or missing."""
    error = task.detail.error
    return task.detail.body is not None and error is not None and error.code == BodyDamaged.code


def damage_of(error: BodyDamaged) -> TaskError:
    """The error of a task whose body is damaged, in a manifest."""
    return TaskError(BodyDamaged.code, error.message)


def _mark_damaged(tasks: list[Task], bodies: list[Body | None], damaged: dict[int, BodyDamaged]) -> None:
    """One damaged body must not cost the export of all others: its task goes on without it."""
    for place, error in damaged.items():
        task = tasks[place]
        log.warning("a stored body is damaged", task=task.task_id, index=task.index, error=error.message)
        detail = msgspec.structs.replace(task.detail, error=damage_of(error))
        tasks[place], bodies[place] = msgspec.structs.replace(task, detail=detail), None


def _check_all(tasks: Sequence[Task], bodies: list[Body | None], deflated: bool) -> dict[int, BodyDamaged]:
    """Check bodies as they are stored, and replace them by what they are, except for deflated ones that are to stay so.
    These are checked by the CRC-32 of their stored bytes, those that are inflated by that of the body too, all others
    by their sha256. Returns the damaged ones by their places."""
    damaged: dict[int, BodyDamaged] = {}
    inflating: list[int] = []
    for place, (task, body) in enumerate(zip(tasks, bodies, strict=True)):
        ref = task.detail.body
        if body is None or ref is None:
            continue
        try:
            if ref.stored is None:
                check_body(ref, len(body), sha256(body).hexdigest())
            elif deflated:
                check_deflated(ref, body)
            else:
                inflating.append(place)
        except BodyDamaged as error:
            damaged[place] = error
    if inflating:
        damaged |= _inflate_all(tasks, bodies, inflating)
    return damaged


def _inflate_all(tasks: Sequence[Task], bodies: list[Body | None], places: Sequence[int]) -> dict[int, BodyDamaged]:
    """Replace deflated bodies by what they are. Returns the damaged ones by their places."""
    damaged: dict[int, BodyDamaged] = {}
    batch: dict[int, tuple[BodyRef, Body]] = {}
    size = 0
    for place in places:
        ref, body = tasks[place].detail.body, bodies[place]
        assert ref is not None and body is not None
        batch[place] = ref, body
        size += ref.length
        if size >= _INFLATED_BYTES or place == places[-1]:
            damaged |= _inflate_batch(batch, bodies)
            batch, size = {}, 0
    return damaged


def _inflate_batch(batch: dict[int, tuple[BodyRef, Body]], bodies: list[Body | None]) -> dict[int, BodyDamaged]:
    with suppress(BodyDamaged):
        for place, inflated in zip(batch, inflate_all(list(batch.values())), strict=True):
            bodies[place] = inflated
        return {}
    # One by one, to find which.
    damaged: dict[int, BodyDamaged] = {}
    for place, (ref, body) in batch.items():
        try:
            bodies[place] = inflate(ref, body)
        except BodyDamaged as error:
            damaged[place] = error
    return damaged


class _Range(NamedTuple):
    """Bytes of one object for a single read, and the positions of the tasks whose bodies they contain. A start of -1 is
    the whole object."""

    key: str
    start: int
    length: int
    places: list[int]


def _split(tasks: Sequence[Task], with_bodies: bool = True) -> Iterator[list[Task]]:
    """Tasks whose bodies, and what was extracted from them, are read together, bounded in bytes. A task with a large
    body is alone."""
    window: list[Task] = []
    size = 0
    for task in tasks:
        ref, extracted = task.detail.body, task.detail.extracted
        length = ref.length if with_bodies and ref is not None else 0
        if extracted is not None:
            length += _ROWS_FACTOR * min(extracted.length, MAX_EXTRACTED)
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
        (ref.key, ref.offset, ref.stored_length, place)
        for place, ref in enumerate(task.detail.body for task in tasks)
        if ref is not None and ref.length <= LARGE and ref.inline is None
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


async def _read_bodies(blobs: Blobs, tasks: Sequence[Task], bodies: list[Body | None]) -> dict[int, BodyDamaged]:
    """Fill in the body of each task, as stored and unchecked. Returns the missing ones by their places."""
    missing: dict[int, BodyDamaged] = {}
    for place, task in enumerate(tasks):
        if task.detail.body is not None and task.detail.body.inline is not None:
            bodies[place] = task.detail.body.inline
    ranges = list(_ranges(tasks))
    todo = iter(ranges)

    async def reader() -> None:
        for range_ in todo:
            try:
                data = await _read(blobs, range_, tasks)
            except BodyDamaged as error:
                missing.update(dict.fromkeys(range_.places, error))
                continue
            view = memoryview(data)
            for place in range_.places:
                ref = tasks[place].detail.body
                assert ref is not None
                start = ref.offset - range_.start
                bodies[place] = data if ref.offset < 0 else view[start : start + ref.stored_length]

    await asyncio.gather(*(reader() for _ in range(min(_READS_AT_ONCE, len(ranges)))))
    return missing


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
