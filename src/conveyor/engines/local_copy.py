"""A copy of the blob directory, while a server goes on writing to it and deleting from it.

An object in a file of its own never changes: it is copied once. A log grows, and a delete marks an entry as dead before
it punches the data out: a log is copied again if an entry that is alive in the copy has died meanwhile. Objects that
were deleted before they were copied are missing in the copy; the caller finds out by the rows that refer to them.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from conveyor.disk import sync, sync_directory
from conveyor.engines.local_log_entries import ALIVE, STATE_AT, entry_at

_LOGS = ".logs"
_DRAFTS = ".tmp"
_PIECE = 256 * 1024
_TRIES = 10


class CopyFigures(NamedTuple):
    """What a copy holds."""

    files: int
    bytes: int


def copy_blobs(root: Path, copy: Path) -> CopyFigures:
    """Make the copy hold what the directory holds. What an earlier call has copied is not copied again."""
    copy.mkdir(mode=0o700, exist_ok=True)
    files = size = 0
    kept: set[Path] = set()
    for path in _files(root):
        name = path.relative_to(root)
        target = copy / name
        _make_folder(target.parent)
        copied = _copy_log(path, target) if name.parts[0] == _LOGS else _copy_object(path, target)
        if copied is not None:
            kept.add(target)
            files, size = files + 1, size + copied
    for path in list(_files(copy)):
        if path not in kept:
            path.unlink()
    for folder, _, _ in os.walk(copy, topdown=False):
        sync_directory(Path(folder))
    return CopyFigures(files, size)


def _make_folder(folder: Path) -> None:
    """With its parents, each for its owner alone."""
    for each in reversed([folder, *folder.parents]):
        if not each.exists():
            each.mkdir(mode=0o700)


def _files(root: Path) -> Iterator[Path]:
    """All objects and logs, but no drafts: nothing refers to them yet."""
    for folder, folders, names in os.walk(root):
        if Path(folder) == root and _DRAFTS in folders:
            folders.remove(_DRAFTS)
        for name in names:
            yield Path(folder) / name


def _copy_object(path: Path, target: Path) -> int | None:
    """The size of the object; None if it was deleted."""
    try:
        with path.open("rb") as source:
            stored = os.fstat(source.fileno())
            size, written_at = stored.st_size, (stored.st_atime_ns, stored.st_mtime_ns)
            if target.exists() and (target.stat().st_size, target.stat().st_mtime_ns) == (size, stored.st_mtime_ns):
                return size
            with _private(target) as sink:
                shutil.copyfileobj(source, sink, _PIECE)
                sink.flush()
                os.utime(target, ns=written_at)
                sync(sink.fileno())
            return size
    except FileNotFoundError:
        return None


def _copy_log(path: Path, target: Path) -> int | None:
    """The size of the log; None if it was removed."""
    try:
        with path.open("rb") as source:
            for _ in range(_TRIES):
                with _private(target) as sink:
                    size = _copy_sparse(source.fileno(), sink.fileno())
                    if not _has_died(source.fileno(), sink.fileno()):
                        sync(sink.fileno())
                        return size
            raise OSError(f"{path} changes faster than it is copied")
    except FileNotFoundError:
        return None


def _copy_sparse(source: int, sink: int) -> int:
    """Copy a file up to the size that it has now. Where nothing is, the copy has a hole, too."""
    size, done = os.fstat(source).st_size, 0
    while done < size:
        piece = os.pread(source, min(_PIECE, size - done), done)
        if not piece:
            break
        if piece.count(0) != len(piece):
            os.pwrite(sink, piece, done)
        done += len(piece)
    os.ftruncate(sink, done)
    return done


def _has_died(source: int, sink: int) -> bool:
    """Whether an entry that is alive in the copy is dead in the log: its data may have been punched out while it was
    copied."""
    offset = 0
    while (found := entry_at(sink, offset)) is not None:
        entry, is_alive = found
        if is_alive and os.pread(source, 1, entry.offset + STATE_AT) != ALIVE:
            return True
        offset = entry.start + entry.length
    return False


def _private(path: Path) -> BinaryIO:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "r+b")
