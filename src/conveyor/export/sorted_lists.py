"""Sorted lists of an export: lines of tasks in order of index, in one or several objects. Gets the keys of the objects,
and yields the tasks, or the lines of several lists in order."""

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator, Sequence
from operator import itemgetter
from typing import NamedTuple

import msgspec

from conveyor.engines.blobs import Blobs
from conveyor.errors import EngineFailed
from conveyor.model import Task
from conveyor.read.walk import END, Position

# The index of a task, and its line.
IndexedLine = tuple[int, bytes]

# A place in a list is the number of its object, and the bytes before it in that.
_OBJECT_BITS = 40


class _Numbered(msgspec.Struct):
    """The part of a task that its place in a list depends on."""

    index: int


_decode = msgspec.json.Decoder(Task).decode
_decode_index = msgspec.json.Decoder(_Numbered).decode
_index_of = itemgetter(0)


class LineBatch(NamedTuple):
    """Lines in order of index. Reading from `position` yields them again."""

    data: bytes
    position: Position


class _ListReader:
    """Reads whole lines of a list, some kilobytes at a time."""

    def __init__(self, blobs: Blobs, keys: Sequence[str], offset: int, read_bytes: int) -> None:
        self._blobs = blobs
        self._keys = keys
        self._read_bytes = read_bytes
        self._object, self._at = offset >> _OBJECT_BITS, offset & ((1 << _OBJECT_BITS) - 1)

    @property
    def place(self) -> int:
        return self._object << _OBJECT_BITS | self._at

    @property
    def is_at_end(self) -> bool:
        return self._object >= len(self._keys)

    async def read(self) -> bytes:
        """The next lines; none only at the end."""
        while not self.is_at_end:
            data = await self._read_object(self._keys[self._object])
            if data:
                return data
        return b""

    async def _read_object(self, key: str) -> bytes:
        length = self._read_bytes
        while True:
            data = await self._blobs.get(key, self._at, length)
            if data is None:
                raise EngineFailed("A sorted list of an export is missing.", key=key)
            ended = len(data) < length
            cut = len(data) if ended else data.rfind(b"\n") + 1
            if cut or ended:
                break
            length *= 2
        self._object, self._at = (self._object + 1, 0) if ended else (self._object, self._at + cut)
        return data[:cut]


class SortedStream:
    """A sorted list, as a stream of the walk. Its rows were counted when they were sorted."""

    def __init__(self, blobs: Blobs, keys: Sequence[str], after: int, offset: int, read_bytes: int) -> None:
        self._reader = _ListReader(blobs, keys, offset, read_bytes)
        self.tasks: list[Task] = []
        self.known = after
        self.read = 0
        self.offset = offset

    async def more(self) -> None:
        self.offset = self._reader.place
        data = await self._reader.read()
        self.tasks = await asyncio.to_thread(_tasks, data)
        self.known = END if self._reader.is_at_end else self.tasks[-1].index


class LineStream:
    """A sorted list, as lines that are merged with those of others."""

    def __init__(self, blobs: Blobs, keys: Sequence[str], after: int, offset: int, read_bytes: int) -> None:
        self._reader = _ListReader(blobs, keys, offset, read_bytes)
        self.lines: list[IndexedLine] = []
        self.known = after
        self.offset = offset

    async def more(self) -> None:
        self.offset = self._reader.place
        data = await self._reader.read()
        self.lines = await asyncio.to_thread(_indexed, data)
        self.known = END if self._reader.is_at_end else self.lines[-1][0]


async def lines_in_order(streams: Sequence[LineStream], after: int) -> AsyncGenerator[LineBatch, None]:
    """The lines after the index `after` of several lists, in order."""
    done = after
    while done < END:
        while behind := [stream for stream in streams if stream.known <= done]:
            await asyncio.gather(*(stream.more() for stream in behind))
        known = min(stream.known for stream in streams)
        position = Position(done, [stream.offset for stream in streams])
        yield LineBatch(await asyncio.to_thread(_taken, streams, done, known), position)
        done = known


def _taken(streams: Sequence[LineStream], done: int, known: int) -> bytes:
    """Remove the lines after `done` up to `known`, and join them, each index once."""
    lines: dict[int, bytes] = {}
    for stream in streams:
        cut = bisect_right(stream.lines, known, key=_index_of)
        lines.update(line for line in stream.lines[:cut] if line[0] > done)
        stream.lines = stream.lines[cut:]
    return b"".join([lines[index] for index in sorted(lines)])


def _tasks(data: bytes) -> list[Task]:
    return [_decode(line) for line in data.split(b"\n") if line]


def _indexed(data: bytes) -> list[IndexedLine]:
    return [(_decode_index(line).index, line + b"\n") for line in data.split(b"\n") if line]
