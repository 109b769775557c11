"""Entries of logs: how an object stands in a log, how it is found, and how it is deleted.

An entry is a header (state, length of the key, length of the data, checksum), the key, and the data.
"""

import ctypes
import fcntl
import os
import secrets
import struct
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from conveyor.disk import sync
from conveyor.engines.local_files import unlink
from conveyor.faults import crashpoint

ALIVE = b"\x01"
DEAD = b"\x00"
# Where the state is in a header.
STATE_AT = 4

_HEADER = struct.Struct("<4scxHQI")
_MAGIC = b"CVLG"
# A header with its key is read at once: no key is longer than the rest of it.
_HEAD_BYTES = 2048
_KEEP_SIZE_AND_PUNCH = 0x01 | 0x02


class Entry(NamedTuple):
    """One object in a log: where its header and its data begin."""

    key: str
    offset: int
    start: int
    length: int


def entry_head(key: str, length: int) -> bytes:
    """What stands before the data of a live entry."""
    name = key.encode()
    return _HEADER.pack(_MAGIC, ALIVE, len(name), length, _checksum(name, length)) + name


def _checksum(name: bytes, length: int) -> int:
    return zlib.crc32(name, length & 0xFFFFFFFF)


def entry_at(fd: int, offset: int) -> tuple[Entry, bool] | None:
    """The entry at an offset, and whether it is alive; None at the end of a log, and at a torn one."""
    head = os.pread(fd, _HEAD_BYTES, offset)
    if len(head) < _HEADER.size:
        return None
    magic, state, name_length, length, checksum = _HEADER.unpack_from(head)
    name = head[_HEADER.size : _HEADER.size + name_length]
    if magic != _MAGIC or len(name) < name_length or checksum != _checksum(name, length):
        return None
    start = offset + _HEADER.size + name_length
    if os.fstat(fd).st_size < start + length:
        return None
    return Entry(name.decode(), offset, start, length), state == ALIVE


def punch(path: Path, entries: Sequence[Entry]) -> None:
    """Mark entries as dead, and give their space back."""
    crashpoint("blob.punch.before")
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        for entry in entries:
            os.pwrite(fd, DEAD, entry.offset + STATE_AT)
        sync(fd)
        crashpoint("blob.punch.between")
        # Without a sync: a power cut may keep any part of the data, but the entries are dead. What stays of it takes
        # space until the log is removed.
        for entry in entries:
            _punch_hole(fd, entry.start, entry.length)
    finally:
        os.close(fd)
    crashpoint("blob.punch.after")


def remove_log(path: Path, end: int) -> None:
    """Remove a log without live entries before `end`, unless a process appends to it, or has since they were read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The writer that closed it, because it was full, may not have been the last one.
        if entry_at(fd, end) is not None:
            return
        crashpoint("blob.remove_log.before")
        unlink(path)
    except BlockingIOError:
        return
    finally:
        os.close(fd)


def _punch_hole(fd: int, offset: int, length: int) -> None:
    """Give the space of a range back to the file system. One that cannot keeps it until the log is removed."""
    if _fallocate is not None and length:
        _fallocate(fd, _KEEP_SIZE_AND_PUNCH, offset, length)


def can_punch(directory: Path) -> bool:
    """Whether this system gives the space of a deleted object back before its log is removed."""
    probe = directory / f".{secrets.token_hex(8)}"
    fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, bytes(2), 0)
        return _fallocate is not None and _fallocate(fd, _KEEP_SIZE_AND_PUNCH, 0, 1) == 0
    finally:
        os.close(fd)
        probe.unlink()


def _linux_fallocate() -> Callable[[int, int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    try:
        call = ctypes.CDLL(None, use_errno=True).fallocate64
    except (AttributeError, OSError):
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return call


_fallocate = _linux_fallocate()
