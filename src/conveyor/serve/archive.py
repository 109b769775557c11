"""A ZIP writer that streams. Gets entries one after the other, hands back the bytes to emit, and keeps
nothing that grows: the central directory, about 100 bytes an entry, waits in a temporary file for the
end.

That file is why this is no library. `zipfile`, and stream-zip and zipstream-ng from PyPI, keep objects for
every entry until the end, which is hundreds of megabytes for a million bodies.

A body in memory goes out with its size and CRC in front of it, so that it needs no data descriptor. A body
that is longer than memory is not known before it has passed: its entry is zip64 from the start, its size and
CRC follow it, and it is deflated always, at level 0 if nothing is to be compressed, since only then can a
reader that takes the archive in one pass tell where it ends. All else is zip64 when a number does not fit,
and only then.
"""

import re
import struct
import tempfile
import zlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

STORED = 0
DEFLATED = 8

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_DESCRIPTOR64 = struct.Struct("<4sLQQ")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")

_MAX16 = 0xFFFF
_MAX32 = 0xFFFFFFFF
_UTF8 = 0x800
_DESCRIPTOR_FOLLOWS = 0x08
_VERSION = 20
_VERSION64 = 45
# Made on Unix, so that the mode below is read: a plain file, rw-r--r--, never a link.
_MADE_BY = 3 << 8 | _VERSION64
_MODE = 0o100644 << 16
_SPOOL_IN_MEMORY = 1024 * 1024
_PIECE_BYTES = 256 * 1024

# What some system reads as a path that leaves the archive's folder, or can not hold as a name.
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\\:]|^$|^/|//|/$|[. ](?:/|$)")


class _Entry(NamedTuple):
    """What the central directory says of an entry."""

    name: bytes
    flags: int
    method: int
    crc: int
    packed: int
    size: int
    offset: int


class ZipWriter:
    """Feed it with `add` and `add_stream`, emit what they return, then what `finish` yields. Names must
    differ; it does not check, since that would keep them all. Not for two threads at once."""

    def __init__(self, *, modified: datetime, level: int = 0, spool_dir: Path | None = None, offset: int = 0) -> None:
        """Every entry is dated `modified`. Level 0 stores; 1 to 9 deflates what gets smaller by it.
        `offset`: bytes that stand before the archive in the same file."""
        self._level = level
        self._offset = offset
        self._time, self._date = _dos_time(modified)
        self._count = 0
        self._open: ZipEntry | None = None
        self._finished = False
        where = None if spool_dir is None else str(spool_dir)
        self._directory = tempfile.SpooledTemporaryFile(_SPOOL_IN_MEMORY, dir=where)  # noqa: SIM115  (see close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def offset(self) -> int:
        """Bytes handed out so far, and those that stood before."""
        return self._offset

    def add(self, name: str, data: bytes | bytearray | memoryview) -> bytes:
        """An entry whose body is in memory."""
        self._check_idle()
        body, method = self._packed(data)
        entry = _Entry(_checked(name), _UTF8, method, zlib.crc32(data), len(body), len(data), self._offset)
        emitted = b"".join((self._header(entry), body))
        self._record(entry)
        self._offset += len(emitted)
        return emitted

    def add_stream(self, name: str, *, level: int | None = None) -> "ZipEntry":
        """An entry whose body comes in pieces. Emit its `header`, what `feed` returns, and what `end`
        returns."""
        self._check_idle()
        entry = _Entry(_checked(name), _UTF8 | _DESCRIPTOR_FOLLOWS, DEFLATED, 0, 0, 0, self._offset)
        header = self._header(entry)
        self._offset += len(header)
        self._open = ZipEntry(self, entry, header, self._level if level is None else level)
        return self._open

    def finish(self) -> Iterator[bytes]:
        """The central directory and the end of the archive."""
        self._check_idle()
        self._finished = True
        size = self._directory.tell()
        self._directory.seek(0)
        while piece := self._directory.read(_PIECE_BYTES):
            yield piece
        yield _end(self._count, size, self._offset)

    def close(self) -> None:
        self._directory.close()

    def _check_idle(self) -> None:
        if self._open is not None:
            raise RuntimeError("an entry is open: end it first")
        if self._finished:
            raise RuntimeError("the archive is finished")

    def _packed(self, data: bytes | bytearray | memoryview) -> tuple[bytes | bytearray | memoryview, int]:
        if self._level:
            packer = zlib.compressobj(self._level, zlib.DEFLATED, -zlib.MAX_WBITS)
            body = packer.compress(data) + packer.flush()
            if len(body) < len(data):
                return body, DEFLATED
        return data, STORED

    def _header(self, entry: _Entry) -> bytes:
        streamed = entry.flags & _DESCRIPTOR_FOLLOWS
        large = streamed or entry.size >= _MAX32 or entry.packed >= _MAX32
        extra = struct.pack("<2H2Q", 1, 16, entry.size, entry.packed) if large else b""
        packed, size = (_MAX32, _MAX32) if large else (entry.packed, entry.size)
        return (
            _LOCAL.pack(
                b"PK\3\4",
                _VERSION64 if large else _VERSION,
                entry.flags,
                entry.method,
                self._time,
                self._date,
                entry.crc,
                packed,
                size,
                len(entry.name),
                len(extra),
            )
            + entry.name
            + extra
        )

    def _record(self, entry: _Entry) -> None:
        wide = [number for number in (entry.size, entry.packed, entry.offset) if number >= _MAX32]
        extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
        self._directory.write(
            _CENTRAL.pack(
                b"PK\1\2",
                _MADE_BY,
                _VERSION64 if wide or entry.flags & _DESCRIPTOR_FOLLOWS else _VERSION,
                entry.flags,
                entry.method,
                self._time,
                self._date,
                entry.crc,
                min(entry.packed, _MAX32),
                min(entry.size, _MAX32),
                len(entry.name),
                len(extra),
                0,
                0,
                0,
                _MODE,
                min(entry.offset, _MAX32),
            )
            + entry.name
            + extra
        )
        self._count += 1

    def _ended(self, entry: _Entry, descriptor: int) -> None:
        self._open = None
        self._offset += entry.packed + descriptor
        self._record(entry)


class ZipEntry:
    """An entry that is being written."""

    def __init__(self, archive: ZipWriter, entry: _Entry, header: bytes, level: int) -> None:
        self.header = header
        self._archive = archive
        self._entry = entry
        self._packer = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._crc = 0
        self._size = 0
        self._sent = 0

    def feed(self, data: bytes) -> bytes:
        """May return nothing yet."""
        self._crc = zlib.crc32(data, self._crc)
        self._size += len(data)
        return self._emit(self._packer.compress(data))

    def end(self) -> bytes:
        """The rest of the body, and the descriptor."""
        rest = self._emit(self._packer.flush())
        descriptor = _DESCRIPTOR64.pack(b"PK\7\x08", self._crc, self._sent, self._size)
        self._archive._ended(self._entry._replace(crc=self._crc, packed=self._sent, size=self._size), len(descriptor))
        return rest + descriptor

    def _emit(self, packed: bytes) -> bytes:
        self._sent += len(packed)
        return packed


def _checked(name: str) -> bytes:
    raw = name.encode()
    if len(raw) > _MAX16 or _UNSAFE.search(name):
        raise ValueError(f"not a safe name for an entry: {name[:80]!r}")
    return raw


def _dos_time(moment: datetime) -> tuple[int, int]:
    """The format counts from 1980 in steps of two seconds, in seven bits of years."""
    if moment.year < 1980:
        return 0, 1 << 5 | 1
    year = min(moment.year - 1980, 127)
    return (
        moment.hour << 11 | moment.minute << 5 | moment.second // 2,
        year << 9 | moment.month << 5 | moment.day,
    )


def _end(count: int, size: int, offset: int) -> bytes:
    large = count >= _MAX16 or size >= _MAX32 or offset >= _MAX32
    wide = _wide_end(count, size, offset) if large else b""
    short = min(count, _MAX16)
    return wide + _END.pack(b"PK\5\6", 0, 0, short, short, min(size, _MAX32), min(offset, _MAX32), 0)


def _wide_end(count: int, size: int, offset: int) -> bytes:
    # The record's own size leaves out its first 12 bytes.
    record = _END64.pack(b"PK\6\6", _END64.size - 12, _MADE_BY, _VERSION64, 0, 0, count, count, size, offset)
    return record + _LOCATOR64.pack(b"PK\6\7", 0, offset + size, 1)
