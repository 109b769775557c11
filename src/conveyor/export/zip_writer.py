"""A streaming ZIP writer that another process can resume. Gets entries one after the other and returns the bytes to
emit. Its memory does not grow: it also returns the records of the central directory (`drain`), about 100 bytes per
entry, which the caller stores until the end.

This is why it is not a library: `zipfile`, and stream-zip and zipstream-ng from PyPI, keep objects for every entry
until the end, hundreds of megabytes for a million bodies, and none of them can resume what another process began.

A body in memory has its size and CRC in the local header, and needs no data descriptor. The size and CRC of a larger
body are known only at its end: its entry is zip64 from the start, a data descriptor follows it, and it is always
deflated, in stored blocks if it is not to be compressed, since only then can a one-pass reader find its end. Other
entries are zip64 only when a number does not fit.
"""

import re
import struct
from datetime import datetime

import msgspec
from isal import isal_zlib

STORED = 0
DEFLATED = 8

# The best trade of size for time among the library's levels, 1 to 3.
LEVEL = 2
# Ends a deflate stream whose blocks so far end on a byte boundary.
LAST_BLOCK = b"\x03\x00"

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_DESCRIPTOR64 = struct.Struct("<4sLQQ")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
_BLOCK = struct.Struct("<BHH")

_MAX16 = 0xFFFF
_MAX32 = 0xFFFFFFFF
_UTF8 = 0x800
_DESCRIPTOR_FOLLOWS = 0x08
_VERSION = 20
_VERSION64 = 45
# Made on Unix, so that the mode below is read: a plain file, rw-r--r--, never a link.
_MADE_BY = 3 << 8 | _VERSION64
_MODE = 0o100644 << 16
# The maximum size of the end of an archive, in bytes.
LONGEST_END = _END64.size + _LOCATOR64.size + _END.size
# The maximum size of an entry besides its name and body, in the archive and in the directory.
ENTRY_BYTES = _LOCAL.size + _CENTRAL.size + 20 + 28 + _DESCRIPTOR64.size

# What some system takes for a path out of the archive's folder, or cannot store as a name.
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\\:]|^$|^/|//|/$|[. ](?:/|$)")
# Names that are safe by one match.
_PLAIN = re.compile(r"[\w-]+(?:[./][\w-]+)*", re.ASCII)


class ZipState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The checkpoint of an archive: bytes emitted, entries, and bytes of the directory."""

    offset: int = 0
    count: int = 0
    directory: int = 0


class EntryState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The checkpoint of an entry: its offset, and CRC and sizes so far."""

    name: str
    offset: int
    crc: int = 0
    packed: int = 0
    size: int = 0


class ZipWriter:
    """Call `add` and `add_stream` and emit what they return, then all drained records, then `end`. Names must differ;
    the writer does not check that, since it would have to keep them all. Not thread-safe."""

    def __init__(self, *, modified: datetime, level: int = 0, state: ZipState | None = None) -> None:
        """Every entry is dated `modified`. Level 0 stores; 1 to 3 deflates what gets smaller by it. `state` resumes an
        archive that another writer began."""
        state = state or ZipState()
        self._level = level
        self._offset = state.offset
        self._count = state.count
        self._size = state.directory
        self._records: list[bytes] = []
        self._time, self._date = _dos_time(modified)
        self._open: ZipEntry | None = None

    @property
    def offset(self) -> int:
        """Bytes emitted so far."""
        return self._offset

    @property
    def directory(self) -> int:
        """Bytes of the central directory so far."""
        return self._size

    @property
    def state(self) -> ZipState:
        """What another writer needs to resume, besides the drained records and the state of an open entry."""
        return ZipState(self._offset, self._count, self._size)

    def add(self, name: str, data: bytes | bytearray | memoryview) -> bytes:
        """Add an entry whose body is in memory."""
        self._check_idle()
        raw = _checked(name)
        body, method = self._packed(data)
        crc = isal_zlib.crc32(data)
        header = self._header(raw, 0, method, crc, len(body), len(data))
        emitted = b"".join((header, body))
        self._record(raw, 0, method, crc, len(body), len(data), self._offset)
        self._offset += len(emitted)
        return emitted

    def add_deflated(self, name: str, crc: int, packed: int, size: int) -> bytes:
        """The header of an entry with known sizes and CRC: emit it, then `packed` bytes of deflate."""
        return self._add_known(name, DEFLATED, crc, packed, size)

    def add_stored(self, name: str, crc: int, size: int) -> bytes:
        """The header of an entry with a known CRC that is not compressed: emit it, then the body."""
        return self._add_known(name, STORED, crc, size, size)

    def _add_known(self, name: str, method: int, crc: int, packed: int, size: int) -> bytes:
        self._check_idle()
        raw = _checked(name)
        header = self._header(raw, 0, method, crc, packed, size)
        self._record(raw, 0, method, crc, packed, size, self._offset)
        self._offset += len(header) + packed
        return header

    def add_stream(self, name: str) -> "ZipEntry":
        """Begin an entry whose body comes in pieces. Emit its `header`, what `feed` returns, and what `end` returns."""
        self._check_idle()
        header = self._header(_checked(name), _DESCRIPTOR_FOLLOWS, DEFLATED, 0, 0, 0)
        self._open = ZipEntry(self, EntryState(name, self._offset), header, self._level)
        self._offset += len(header)
        return self._open

    def resume_entry(self, state: EntryState) -> "ZipEntry":
        """Resume an entry that another writer began. Its header was emitted."""
        self._check_idle()
        self._open = ZipEntry(self, state, b"", self._level)
        return self._open

    def drain(self) -> bytes:
        """The directory records of the entries since the last call. Emit all of them after the last entry."""
        drained = b"".join(self._records)
        self._records = []
        return drained

    def end(self) -> bytes:
        """The end of the archive, which follows the central directory."""
        self._check_idle()
        return _end(self._count, self._size, self._offset)

    def _check_idle(self) -> None:
        if self._open is not None:
            raise RuntimeError("an entry is open: end it first")

    def _packed(self, data: bytes | bytearray | memoryview) -> tuple[bytes | bytearray | memoryview, int]:
        if self._level and data:
            body = isal_zlib.compress(data, self._level, -isal_zlib.MAX_WBITS)
            if len(body) < len(data):
                return body, DEFLATED
        return data, STORED

    def _header(self, name: bytes, flags: int, method: int, crc: int, packed: int, size: int) -> bytes:
        large = flags or size >= _MAX32 or packed >= _MAX32
        extra = struct.pack("<2H2Q", 1, 16, size, packed) if large else b""
        fields = _LOCAL.pack(
            b"PK\3\4",
            _VERSION64 if large else _VERSION,
            flags | _UTF8,
            method,
            self._time,
            self._date,
            crc,
            _MAX32 if large else packed,
            _MAX32 if large else size,
            len(name),
            len(extra),
        )
        return fields + name + extra

    def _record(self, name: bytes, flags: int, method: int, crc: int, packed: int, size: int, offset: int) -> None:
        extra = b""
        if size >= _MAX32 or packed >= _MAX32 or offset >= _MAX32:
            wide = [number for number in (size, packed, offset) if number >= _MAX32]
            extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide)
            size, packed, offset = min(size, _MAX32), min(packed, _MAX32), min(offset, _MAX32)
        record = (
            _CENTRAL.pack(
                b"PK\1\2",
                _MADE_BY,
                _VERSION64 if extra or flags else _VERSION,
                flags | _UTF8,
                method,
                self._time,
                self._date,
                crc,
                packed,
                size,
                len(name),
                len(extra),
                0,
                0,
                0,
                _MODE,
                offset,
            )
            + name
            + extra
        )
        self._records.append(record)
        self._size += len(record)
        self._count += 1

    def _passed(self, size: int) -> None:
        self._offset += size

    def _ended(self, state: EntryState) -> None:
        self._open = None
        self._record(
            _checked(state.name), _DESCRIPTOR_FOLLOWS, DEFLATED, state.crc, state.packed, state.size, state.offset
        )


class ZipEntry:
    """An open entry. Between a `flush` and the next `feed`, another writer can resume from `state`."""

    def __init__(self, archive: ZipWriter, state: EntryState, header: bytes, level: int) -> None:
        self.header = header
        self._archive = archive
        self._name = state.name
        self._offset = state.offset
        self._crc = state.crc
        self._size = state.size
        self._sent = state.packed
        self._deflate = Deflate(level)

    @property
    def state(self) -> EntryState:
        return EntryState(self._name, self._offset, self._crc, self._sent, self._size)

    def feed(self, data: bytes) -> bytes:
        """Add data. It may return nothing yet."""
        self._crc = isal_zlib.crc32(data, self._crc)
        self._size += len(data)
        return self._emit(self._deflate.feed(data))

    def flush(self) -> bytes:
        """The buffered rest of what was fed."""
        return self._emit(self._deflate.flush())

    def end(self) -> bytes:
        """The rest of the body, and the descriptor."""
        rest = self._emit(self._deflate.flush() + LAST_BLOCK)
        descriptor = _DESCRIPTOR64.pack(b"PK\7\x08", self._crc, self._sent, self._size)
        self._archive._passed(len(descriptor))
        self._archive._ended(self.state)
        return rest + descriptor

    def _emit(self, packed: bytes) -> bytes:
        self._sent += len(packed)
        self._archive._passed(len(packed))
        return packed


class Deflate:
    """Deflate blocks. After a `flush`, the next block does not depend on those before, so that any process can make it.
    LAST_BLOCK ends the stream. Level 0 makes stored blocks."""

    def __init__(self, level: int) -> None:
        self._level = level
        self._packer: isal_zlib.Compress | None = None

    def feed(self, data: bytes) -> bytes:
        """Add data. It may return nothing yet."""
        if not self._level:
            return _stored_blocks(data)
        if self._packer is None:
            self._packer = isal_zlib.compressobj(self._level, isal_zlib.DEFLATED, -isal_zlib.MAX_WBITS)
        return self._packer.compress(data)

    def flush(self) -> bytes:
        """The buffered rest of what was fed, up to a byte boundary."""
        if self._packer is None:
            return b""
        rest = self._packer.flush(isal_zlib.Z_FULL_FLUSH)
        self._packer = None
        return rest


def deflated_bound(size: int) -> int:
    """The maximum deflated size of `size` bytes, in any number of feeds of some kilobytes or more, with one flush."""
    return size + size // 1000 + 128


def _stored_blocks(data: bytes) -> bytes:
    blocks: list[bytes | memoryview] = []
    view = memoryview(data)
    for start in range(0, len(data), _MAX16):
        block = view[start : start + _MAX16]
        blocks += (_BLOCK.pack(0, len(block), len(block) ^ _MAX16), block)
    return b"".join(blocks)


def _checked(name: str) -> bytes:
    raw = name.encode()
    if len(raw) > _MAX16 or (not _PLAIN.fullmatch(name) and _UNSAFE.search(name)):
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
    # The record's own size does not include its first 12 bytes.
    record = _END64.pack(b"PK\6\6", _END64.size - 12, _MADE_BY, _VERSION64, 0, 0, count, count, size, offset)
    return record + _LOCATOR64.pack(b"PK\6\7", 0, offset + size, 1)
