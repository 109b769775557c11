"""The disk of the data directory: whether it can be written, and if not, why; and what makes files durable on it."""

import ctypes
import errno
import fcntl
import os
import sys
from pathlib import Path

from conveyor.errors import DiskFull, DiskReadOnly, DiskUnwritable

# With less than this, SQLite cannot grow its log.
_LEAST_BYTES = 1 << 20


def disk_problem(directory: Path) -> DiskUnwritable | None:
    """Why nothing can be written there; None if it can."""
    try:
        disk = os.statvfs(directory)
    except OSError as error:
        return DiskUnwritable(f"The disk of {directory} cannot be read: {error.strerror}.")
    if disk.f_flag & os.ST_RDONLY:
        return read_only(directory)
    # Some filesystems report no size at all.
    if disk.f_blocks and disk.f_bavail * disk.f_frsize < _LEAST_BYTES:
        return full(directory)
    return _refusal(directory)


def _refusal(directory: Path) -> DiskUnwritable | None:
    """Why the disk refuses a change that changes nothing: after an error of the disk, Linux may write nothing more to
    it, and still call it writable."""
    try:
        now = directory.stat()
        os.utime(directory, ns=(now.st_atime_ns, now.st_mtime_ns))
    except OSError as error:
        if error.errno == errno.EIO:
            return DiskUnwritable(f"The disk of {directory} cannot be written: {error.strerror}.")
        # Of a directory of somebody else's nothing is known.
        return write_error(error, directory)
    return None


def write_error(error: OSError, directory: Path) -> DiskUnwritable | None:
    """The error for a write that the disk refused; None if it failed for another reason."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return full(directory)
    return read_only(directory) if error.errno == errno.EROFS else None


def full(directory: Path) -> DiskFull:
    """The error of a full disk, or of a quota that is used up."""
    return DiskFull(f"The disk of {directory} is full. Free some space; the server resumes by itself.")


def read_only(directory: Path) -> DiskReadOnly:
    """The error of a disk that is mounted read-only, as many are after an error."""
    return DiskReadOnly(f"The disk of {directory} is read-only. Make it writable; the server resumes by itself.")


def sync(fd: int) -> None:
    """Make the bytes of a file durable, or the names of a directory."""
    if sys.platform == "darwin":
        # Here fsync reaches only the cache of the drive.
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fsync(fd)


def sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(fd)
    finally:
        os.close(fd)


def sync_file_system(place: Path) -> None:
    """Make everything on the file system of a directory durable."""
    sync_all = getattr(ctypes.CDLL(None), "syncfs", None)
    if sync_all is None:
        os.sync()
        return
    directory = os.open(place, os.O_RDONLY)
    try:
        if sync_all(directory) != 0:
            raise OSError(f"The files of {place} could not be written to the disk.")
    finally:
        os.close(directory)
