"""The disk of the data directory: whether it can be written, and if not, why."""

import errno
import os
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
