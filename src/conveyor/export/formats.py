"""Parts: the files of an export. Each format gets tasks with their bodies and returns the bytes of one file. Its memory
does not grow with the file.

After a `flush`, another process can resume a part from its `checkpoint`, a few numbers, and from its sidecars, of which
the end of the file is made.
"""

import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import NamedTuple, Protocol

import msgspec
from isal import isal_zlib

from conveyor.export import zip_writer as archive
from conveyor.export.archive_names import ArchiveNames
from conveyor.export.lines import damaged_line, manifest_line
from conveyor.export.zip_writer import Deflate, EntryState, ZipEntry, ZipState, ZipWriter, deflated_bound
from conveyor.jobs.body_coding import GZIP_HEADER, GZIP_TRAILER_BYTES, gzip_trailer
from conveyor.model import BodyRef, Compression, Task, TaskError
from conveyor.read.body_reader import Body

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MANIFEST = "manifest.jsonl"

_ZSTD_LEVEL = 3
_DIRECTORY_LENGTH = struct.Struct("<Q")
# A part is full when less than 1/64 of its size is left.
_SLACK = 64


class PackedTasks(NamedTuple):
    """Bytes of the file, and how many of the tasks are in it. If not all are, the part is full."""

    data: bytes
    taken: int


class FlushedPart(NamedTuple):
    """The last bytes of the file before a checkpoint, and a sidecar for the end of the file."""

    data: bytes
    sidecar: bytes


# One step at the end of a file: the numbers of the sidecars that it needs, and what makes bytes of them.
Step = tuple[Sequence[int], Callable[[Sequence[bytes]], bytes]]


class Part(Protocol):
    """One file. Not thread-safe."""

    # Tasks in the file.
    tasks: int

    @property
    def buffered(self) -> int:
        """Bytes in memory that the next flush will return."""

    def pack(self, tasks: Sequence[Task], bodies: Sequence[Body | None]) -> PackedTasks:
        """Add the next tasks. A part takes at least one task, whatever its size."""

    def flush(self) -> FlushedPart:
        """Return all buffered bytes."""

    def checkpoint(self) -> msgspec.Raw:
        """What another process needs to resume, as JSON. Only after a flush."""

    def end(self, sidecars: int) -> Iterator[Step]:
        """The steps that write the end of the file, in the same order for every process. `sidecars` is how many there
        are. Only after a flush."""

    def close(self) -> None:
        """Release what the part holds outside of memory."""


class OpenBody(msgspec.Struct, frozen=True):
    """A large body that is partly written to an archive."""

    entry: EntryState
    ref: BodyRef
    index: int
    line: str


class ManifestLines(NamedTuple):
    """Lines of a manifest, deflated up to a byte boundary, with the CRC-32 and the size of the lines themselves."""

    data: bytes
    crc: int
    size: int


class _ZipPartState(msgspec.Struct, frozen=True, omit_defaults=True):
    archive: ZipState
    tasks: int = 0
    crc: int = 0
    size: int = 0
    packed: int = 0
    large: OpenBody | None = None


class ZipPart:
    """Each body as an entry, then manifest.jsonl. A sidecar holds records of the central directory, and deflated lines
    of the manifest."""

    def __init__(
        self,
        modified: datetime,
        level: int,
        limit: int | None,
        names: ArchiveNames,
        stored: msgspec.Raw | None = None,
    ) -> None:
        state = msgspec.json.decode(stored, type=_ZipPartState) if stored else _ZipPartState(ZipState())
        self._archive = ZipWriter(modified=modified, level=level, state=state.archive)
        # Whether bodies that are stored deflated are to come so.
        self.copies = level > 0
        self._limit = limit
        self._names = names
        self._lines: list[bytes] = []
        self._line_bytes = 0
        self._buffered = 0
        # Lines of the manifest since the last flush.
        self._deflated: list[bytes] = []
        self._crc, self._size, self._packed = state.crc, state.size, state.packed
        self.tasks = state.tasks
        self.large = state.large
        self._entry: ZipEntry | None = None if state.large is None else self._archive.resume_entry(state.large.entry)

    @property
    def buffered(self) -> int:
        return self._buffered

    def pack(self, tasks: Sequence[Task], bodies: Sequence[Body | None]) -> PackedTasks:
        emitted: list[Body] = []
        for position, (task, body) in enumerate(zip(tasks, bodies, strict=True)):
            ref = task.detail.body
            name = None if body is None else self._names.name(task)
            line = manifest_line(task, name)
            if self._limit is not None and not self._fits(name, len(body or b""), line):
                return PackedTasks(b"".join(emitted), position)
            if body is not None and ref is not None and name is not None:
                # The CRC-32 of a body that is stored deflated is known, and the reader has checked it.
                if ref.stored is None:
                    emitted.append(self._archive.add(name, body))
                elif self.copies:
                    header = self._archive.add_deflated(name, ref.stored.crc, ref.stored.length, ref.length)
                    emitted += (header, body)
                else:
                    emitted += (self._archive.add_stored(name, ref.stored.crc, ref.length), body)
                self._buffered += archive.ENTRY_BYTES + len(name)
            self._add_line(line)
        return PackedTasks(b"".join(emitted), len(tasks))

    def begin_large(self, task: Task, ref: BodyRef) -> bytes | None:
        """Begin an entry for a body in pieces. None: the part is full."""
        name = self._names.name(task)
        line = manifest_line(task, name)
        if not self._fits(name, deflated_bound(ref.length), line):
            return None
        self._entry = self._archive.add_stream(name)
        self.large = OpenBody(self._entry.state, ref, task.index, line.decode())
        return self._entry.header

    def feed_large(self, data: bytes) -> bytes:
        """Add a piece of the body."""
        assert self._entry is not None
        return self._entry.feed(data)

    def end_large(self, damage: TaskError | None = None) -> bytes:
        """End the entry. If the body turned out to be damaged, the manifest says so; the entry has its beginning."""
        assert self._entry is not None and self.large is not None
        data = self._entry.end()
        self._buffered += archive.ENTRY_BYTES
        line = self.large.line.encode()
        self._add_line(line if damage is None else damaged_line(line, damage))
        self._entry = self.large = None
        return data

    def flush(self) -> FlushedPart:
        data = b""
        if self._entry is not None and self.large is not None:
            data = self._entry.flush()
            self.large = msgspec.structs.replace(self.large, entry=self._entry.state)
        self._deflate_lines()
        directory, lines = self._archive.drain(), b"".join(self._deflated)
        self._deflated, self._buffered = [], 0
        return FlushedPart(data, _DIRECTORY_LENGTH.pack(len(directory)) + directory + lines)

    def checkpoint(self) -> msgspec.Raw:
        state = _ZipPartState(self._archive.state, self.tasks, self._crc, self._size, self._packed, self.large)
        return msgspec.Raw(msgspec.json.encode(state))

    def end(self, sidecars: int) -> Iterator[Step]:
        # Made before the steps: a process that resumes in the middle needs it too.
        header = self._archive.add_deflated(MANIFEST, self._crc, self._packed + len(archive.LAST_BLOCK), self._size)
        last = self._archive.drain() + self._archive.end()
        yield (), lambda _: header
        for number in range(sidecars):
            yield [number], _lines_of
        yield (), lambda _: archive.LAST_BLOCK
        for number in range(sidecars):
            yield [number], _directory_of
        yield (), lambda _: last

    def take_lines(self) -> "ManifestLines":
        """The manifest's lines since the last call, for a caller that puts them in order itself and ends the archive
        by `end_with`."""
        self._deflate_lines()
        taken = ManifestLines(b"".join(self._deflated), self._crc, self._size)
        self._deflated, self._crc, self._size, self._packed = [], 0, 0, 0
        return taken

    def take_directory(self) -> bytes:
        """The records of the central directory since the last call."""
        self._buffered = 0
        return self._archive.drain()

    def end_with(self, packed: int, crc: int, size: int) -> tuple[bytes, bytes, bytes]:
        """The header of a manifest whose lines the caller has, what follows these `packed` bytes, and what follows the
        records of the directory that were taken."""
        header = self._archive.add_deflated(MANIFEST, crc, packed + len(archive.LAST_BLOCK), size)
        return header, archive.LAST_BLOCK, self._archive.drain() + self._archive.end()

    def close(self) -> None:
        """It holds nothing outside of memory."""

    def _add_line(self, line: bytes) -> None:
        self._lines.append(line)
        self._line_bytes += len(line)
        self._buffered += len(line)
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


class _LinesPartState(msgspec.Struct, frozen=True, omit_defaults=True):
    tasks: int = 0
    sent: int = 0
    crc: int = 0
    size: int = 0


class LinesPart:
    """A line per task, plain or compressed. It has no sidecars."""

    def __init__(
        self,
        line: Callable[[Task, Body | None], bytes],
        compression: Compression,
        limit: int | None,
        head: bytes = b"",
        stored: msgspec.Raw | None = None,
    ) -> None:
        """`head` comes before the first line."""
        state = msgspec.json.decode(stored, type=_LinesPartState) if stored else _LinesPartState()
        self._line = line
        self._limit = limit
        self._packer = _PACKERS[compression]()
        self._packed = compression is not Compression.NONE
        self._gzip = compression is Compression.GZIP
        self._head = head
        self._begun = stored is not None
        self._sent, self._crc, self._size = state.sent, state.crc, state.size
        # Bytes fed to the packer since its last flush.
        self._unflushed = 0
        self.tasks = state.tasks

    @property
    def buffered(self) -> int:
        return self._unflushed if self._packed else 0

    def pack(self, tasks: Sequence[Task], bodies: Sequence[Body | None]) -> PackedTasks:
        emitted = [self._begin()]
        for position, (task, body) in enumerate(zip(tasks, bodies, strict=True)):
            line = self._line(task, body)
            if not self._fits(line, emitted):
                return PackedTasks(b"".join(emitted), position)
            emitted.append(self._take(line))
            self.tasks += 1
        return PackedTasks(b"".join(emitted), len(tasks))

    def flush(self) -> FlushedPart:
        return FlushedPart(self._begin() + self._flush(), b"")

    def checkpoint(self) -> msgspec.Raw:
        return msgspec.Raw(msgspec.json.encode(_LinesPartState(self.tasks, self._sent, self._crc, self._size)))

    def end(self, sidecars: int) -> Iterator[Step]:
        trailer = b""
        if self._gzip:
            trailer = archive.LAST_BLOCK + gzip_trailer(self._crc, self._size)
        yield (), lambda _: trailer

    def close(self) -> None:
        """It holds nothing outside of memory."""

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        header = GZIP_HEADER if self._gzip else b""
        self._sent += len(header)
        return header + self._take(self._head)

    def _fits(self, line: bytes, emitted: list[bytes]) -> bool:
        if self._limit is None or self.tasks == 0:
            return True
        room = self._limit - GZIP_TRAILER_BYTES - len(archive.LAST_BLOCK)
        if not self._packed:
            return self._sent + len(line) <= room
        if self._sent + deflated_bound(self._unflushed + len(line)) <= room:
            return True
        emitted.append(self._flush())
        return self._sent + deflated_bound(len(line)) + self._limit // _SLACK <= room

    def _take(self, line: bytes) -> bytes:
        self._crc = isal_zlib.crc32(line, self._crc)
        self._size += len(line)
        self._unflushed += len(line)
        data = self._packer.feed(line)
        self._sent += len(data)
        return data

    def _flush(self) -> bytes:
        data = self._packer.flush()
        self._sent += len(data)
        self._unflushed = 0
        return data


class _Plain:
    """No compression."""

    def feed(self, data: bytes) -> bytes:
        return data

    def flush(self) -> bytes:
        return b""


class _ZstdEncoder:
    """zstd frames; any number of them make one file."""

    def __init__(self) -> None:
        self._packer: zstd.ZstdCompressor | None = None

    def feed(self, data: bytes) -> bytes:
        if self._packer is None:
            self._packer = zstd.ZstdCompressor(_ZSTD_LEVEL)
        packed: bytes = self._packer.compress(data)
        return packed

    def flush(self) -> bytes:
        if self._packer is None:
            return b""
        data: bytes = self._packer.flush()
        self._packer = None
        return data


_PACKERS: dict[Compression, Callable[[], _Plain | _ZstdEncoder | Deflate]] = {
    Compression.NONE: _Plain,
    Compression.GZIP: lambda: Deflate(archive.LEVEL),
    Compression.ZSTD: _ZstdEncoder,
}


def _directory_of(sidecars: Sequence[bytes]) -> bytes:
    (sidecar,) = sidecars
    (length,) = _DIRECTORY_LENGTH.unpack_from(sidecar)
    return sidecar[_DIRECTORY_LENGTH.size : _DIRECTORY_LENGTH.size + length]


def _lines_of(sidecars: Sequence[bytes]) -> bytes:
    (sidecar,) = sidecars
    (length,) = _DIRECTORY_LENGTH.unpack_from(sidecar)
    return sidecar[_DIRECTORY_LENGTH.size + length :]
