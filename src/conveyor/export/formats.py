"""Parts: the files of an export. Each format gets tasks with their bodies, hands out the bytes of one file, and keeps
nothing that grows with it.

A part can be put down after a `flush` and taken up again by another process: from `kept`, a few numbers, and from what
was flushed beside the file, which the end of it is made of.
"""

import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import NamedTuple, Protocol

import msgspec
from isal import isal_zlib

from conveyor.export import zip_writer as archive
from conveyor.export.body_reader import Body, checked
from conveyor.export.lines import manifest_line
from conveyor.export.zip_writer import Deflate, EntryState, ZipEntry, ZipState, ZipWriter, deflated_bound
from conveyor.model import BodyRef, Compression, Task
from conveyor.read.body_names import body_name

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MANIFEST = "manifest.jsonl"

# Made anew for each part, with nothing of a date or a name in it: the same tasks make the same bytes.
_GZIP_HEADER = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
_GZIP_TRAILER = struct.Struct("<LL")
_ZSTD_LEVEL = 3
_DIRECTORY_LENGTH = struct.Struct("<Q")
# A part that has room for less than this share of its size is full.
_SLACK = 64


class PackedTasks(NamedTuple):
    """Bytes of the file, and how many of the tasks are in it. Fewer than were given: the part is full."""

    data: bytes
    taken: int


class FlushedPart(NamedTuple):
    """The last bytes of the file before it can be put down, and what is to be kept beside it."""

    data: bytes
    beside: bytes


# One step at the end of a file: which of the things kept beside it are needed, and what is emitted then.
Step = tuple[Sequence[int], Callable[[Sequence[bytes]], bytes]]


class Part(Protocol):
    """One file. Not for two threads at once."""

    # Tasks in it.
    tasks: int

    @property
    def held(self) -> int:
        """Bytes in memory that wait for a flush."""

    def pack(self, tasks: Sequence[Task], bodies: Sequence[Body | None]) -> PackedTasks:
        """The next tasks. A part takes one task at least, whatever its size."""

    def flush(self) -> FlushedPart:
        """Hand out what is held."""

    def kept(self) -> msgspec.Raw:
        """What another process needs to go on, as JSON. Only after a flush."""

    def end(self, beside: int) -> Iterator[Step]:
        """The steps to the end of the file, the same ones in the same order for whoever takes them; `beside` is how
        many things were flushed beside it. After a flush."""

    def close(self) -> None:
        """Let go of what is held outside of memory."""


class OpenBody(msgspec.Struct, frozen=True):
    """A large body on its way into an archive."""

    entry: EntryState
    ref: BodyRef
    index: int
    line: str


class _ZipKept(msgspec.Struct, frozen=True, omit_defaults=True):
    archive: ZipState
    tasks: int = 0
    crc: int = 0
    size: int = 0
    packed: int = 0
    large: OpenBody | None = None


class ZipPart:
    """Bodies as files of their own, then manifest.jsonl. Kept beside it are the central directory and the lines of the
    manifest, deflated."""

    def __init__(self, modified: datetime, level: int, limit: int | None, kept: msgspec.Raw | None = None) -> None:
        state = msgspec.json.decode(kept, type=_ZipKept) if kept else _ZipKept(ZipState())
        self._archive = ZipWriter(modified=modified, level=level, state=state.archive)
        self._limit = limit
        self._lines: list[bytes] = []
        self._line_bytes = 0
        self._held = 0
        # Of the manifest as far as it was flushed.
        self._deflated: list[bytes] = []
        self._crc, self._size, self._packed = state.crc, state.size, state.packed
        self.tasks = state.tasks
        self.large = state.large
        self._entry: ZipEntry | None = None if state.large is None else self._archive.go_on(state.large.entry)

    @property
    def held(self) -> int:
        return self._held

    def pack(self, tasks: Sequence[Task], bodies: Sequence[Body | None]) -> PackedTasks:
        emitted: list[bytes] = []
        for position, (task, body) in enumerate(zip(tasks, bodies, strict=True)):
            ref = task.detail.body
            name = None if body is None else body_name(task)
            line = manifest_line(task, name)
            if not self._fits(name, len(body or b""), line):
                return PackedTasks(b"".join(emitted), position)
            if body is not None and ref is not None and name is not None:
                emitted.append(self._archive.add(name, checked(ref, body)))
                self._held += archive.ENTRY_BYTES + len(name)
            self._add_line(line)
        return PackedTasks(b"".join(emitted), len(tasks))

    def begin_large(self, task: Task, ref: BodyRef) -> bytes | None:
        """Begin an entry for a body that comes in pieces. None: the part is full."""
        name = body_name(task)
        line = manifest_line(task, name)
        if not self._fits(name, deflated_bound(ref.length), line):
            return None
        self._entry = self._archive.add_stream(name)
        self.large = OpenBody(self._entry.state, ref, task.index, line.decode())
        return self._entry.header

    def feed_large(self, data: bytes) -> bytes:
        """The next piece of the body."""
        assert self._entry is not None
        return self._entry.feed(data)

    def end_large(self) -> bytes:
        """The body has passed."""
        assert self._entry is not None and self.large is not None
        data = self._entry.end()
        self._held += archive.ENTRY_BYTES
        self._add_line(self.large.line.encode())
        self._entry = self.large = None
        return data

    def flush(self) -> FlushedPart:
        data = b""
        if self._entry is not None and self.large is not None:
            data = self._entry.flush()
            self.large = msgspec.structs.replace(self.large, entry=self._entry.state)
        self._deflate_lines()
        directory, lines = self._archive.drain(), b"".join(self._deflated)
        self._deflated, self._held = [], 0
        return FlushedPart(data, _DIRECTORY_LENGTH.pack(len(directory)) + directory + lines)

    def kept(self) -> msgspec.Raw:
        state = _ZipKept(self._archive.state, self.tasks, self._crc, self._size, self._packed, self.large)
        return msgspec.Raw(msgspec.json.encode(state))

    def end(self, beside: int) -> Iterator[Step]:
        # Made here, and not in the steps: who begins in the middle needs it too.
        header = self._archive.add_deflated(MANIFEST, self._crc, self._packed + len(archive.LAST_BLOCK), self._size)
        last = self._archive.drain() + self._archive.end()
        yield (), lambda _: header
        for number in range(beside):
            yield [number], _lines_of
        yield (), lambda _: archive.LAST_BLOCK
        for number in range(beside):
            yield [number], _directory_of
        yield (), lambda _: last

    def close(self) -> None:
        """Nothing is."""

    def _add_line(self, line: bytes) -> None:
        self._lines.append(line)
        self._line_bytes += len(line)
        self._held += len(line)
        self.tasks += 1

    def _fits(self, name: str | None, size: int, line: bytes) -> bool:
        if self._limit is None or self.tasks == 0:
            return True
        entry = 0 if name is None else archive.ENTRY_BYTES + 2 * len(name) + size
        room = self._limit - self._archive.offset - self._archive.directory - archive.LONGEST_END - archive.ENTRY_BYTES
        wanted = entry + len(line)
        if self._packed + deflated_bound(self._line_bytes) + wanted <= room:
            return True
        self._deflate_lines()
        return self._packed + wanted + self._limit // _SLACK <= room

    def _deflate_lines(self) -> None:
        if not self._lines:
            return
        lines = b"".join(self._lines)
        deflate = Deflate(archive.LEVEL)
        data = deflate.feed(lines) + deflate.flush()
        self._crc = isal_zlib.crc32(lines, self._crc)
        self._size += len(lines)
        self._packed += len(data)
        self._deflated.append(data)
        self._lines, self._line_bytes = [], 0


class _LinesKept(msgspec.Struct, frozen=True, omit_defaults=True):
    tasks: int = 0
    sent: int = 0
    crc: int = 0
    size: int = 0


class LinesPart:
    """A line for each task, plain or compressed. Nothing is kept beside it."""

    def __init__(
        self,
        line: Callable[[Task, Body | None], bytes],
        compression: Compression,
        limit: int | None,
        head: bytes = b"",
        kept: msgspec.Raw | None = None,
    ) -> None:
        """`head` stands before the first line."""
        state = msgspec.json.decode(kept, type=_LinesKept) if kept else _LinesKept()
        self._line = line
        self._limit = limit
        self._packer = _PACKERS[compression]()
        self._packed = compression is not Compression.NONE
        self._gzip = compression is Compression.GZIP
        self._head = head
        self._begun = kept is not None
        self._sent, self._crc, self._size = state.sent, state.crc, state.size
        # Bytes that the packer was given since its last flush.
        self._given = 0
        self.tasks = state.tasks

    @property
    def held(self) -> int:
        return self._given if self._packed else 0

    def pack(self, tasks: Sequence[Task], bodies: Sequence[Body | None]) -> PackedTasks:
        emitted = [self._begin()]
        for position, (task, body) in enumerate(zip(tasks, bodies, strict=True)):
            ref = task.detail.body
            line = self._line(task, None if body is None or ref is None else checked(ref, body))
            if not self._fits(line, emitted):
                return PackedTasks(b"".join(emitted), position)
            emitted.append(self._take(line))
            self.tasks += 1
        return PackedTasks(b"".join(emitted), len(tasks))

    def flush(self) -> FlushedPart:
        return FlushedPart(self._begin() + self._flush(), b"")

    def kept(self) -> msgspec.Raw:
        return msgspec.Raw(msgspec.json.encode(_LinesKept(self.tasks, self._sent, self._crc, self._size)))

    def end(self, beside: int) -> Iterator[Step]:
        trailer = b""
        if self._gzip:
            trailer = archive.LAST_BLOCK + _GZIP_TRAILER.pack(self._crc, self._size & 0xFFFFFFFF)
        yield (), lambda _: trailer

    def close(self) -> None:
        """Nothing is."""

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        header = _GZIP_HEADER if self._gzip else b""
        self._sent += len(header)
        return header + self._take(self._head)

    def _fits(self, line: bytes, emitted: list[bytes]) -> bool:
        if self._limit is None or self.tasks == 0:
            return True
        room = self._limit - _GZIP_TRAILER.size - len(archive.LAST_BLOCK)
        if not self._packed:
            return self._sent + len(line) <= room
        if self._sent + deflated_bound(self._given + len(line)) <= room:
            return True
        emitted.append(self._flush())
        return self._sent + deflated_bound(len(line)) + self._limit // _SLACK <= room

    def _take(self, line: bytes) -> bytes:
        self._crc = isal_zlib.crc32(line, self._crc)
        self._size += len(line)
        self._given += len(line)
        data = self._packer.feed(line)
        self._sent += len(data)
        return data

    def _flush(self) -> bytes:
        data = self._packer.flush()
        self._sent += len(data)
        self._given = 0
        return data


class _Plain:
    """Lines as they are."""

    def feed(self, data: bytes) -> bytes:
        return data

    def flush(self) -> bytes:
        return b""


class _ZstdEncoder:
    """Frames, of which any number make one file."""

    def __init__(self) -> None:
        self._packer: zstd.ZstdCompressor | None = None

    def feed(self, data: bytes) -> bytes:
        if self._packer is None:
            self._packer = zstd.ZstdCompressor(_ZSTD_LEVEL)
        return self._packer.compress(data)

    def flush(self) -> bytes:
        if self._packer is None:
            return b""
        data = self._packer.flush()
        self._packer = None
        return data


_PACKERS: dict[Compression, Callable[[], _Plain | _ZstdEncoder | Deflate]] = {
    Compression.NONE: _Plain,
    Compression.GZIP: lambda: Deflate(archive.LEVEL),
    Compression.ZSTD: _ZstdEncoder,
}


def _directory_of(kept: Sequence[bytes]) -> bytes:
    (beside,) = kept
    (length,) = _DIRECTORY_LENGTH.unpack_from(beside)
    return beside[_DIRECTORY_LENGTH.size : _DIRECTORY_LENGTH.size + length]


def _lines_of(kept: Sequence[bytes]) -> bytes:
    (beside,) = kept
    (length,) = _DIRECTORY_LENGTH.unpack_from(beside)
    return beside[_DIRECTORY_LENGTH.size + length :]
