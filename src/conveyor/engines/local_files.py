"""Files of the blob directory: the drafts of puts, open objects, and deletes that are durable."""

import fcntl
import itertools
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from conveyor.disk import sync, sync_directory
from conveyor.engines.blobs import BlobInfo

# One counter for all instances, so that two on the same directory never choose the same temporary name.
_drafts = itertools.count()


class Draft:
    """A temporary file of a put. Its writer locks it: an unlocked one was left by a crash."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path: Path | None = None
        self._fd = -1

    def open(self) -> None:
        while self._fd < 0:
            path = self._directory / f"{os.getpid()}-{next(_drafts)}"
            try:
                self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except FileExistsError:
                # A process with the same id crashed here; its unlocked file is not swept yet.
                continue
            self._path = path
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            if os.fstat(self._fd).st_nlink == 0:
                # Another process swept it before it was locked.
                self.close()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        while view:
            view = view[os.write(self._fd, view) :]

    def sync(self) -> None:
        sync(self._fd)

    def move(self, path: Path) -> None:
        assert self._path is not None
        self._path.rename(path)
        self._path = None

    def close(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Reader:
    """An open object: it stays readable to its end when another caller deletes or replaces it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def open(self) -> int | None:
        """The object's size; None if it does not exist."""
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        stored = os.fstat(self._fd)
        return stored.st_size if stat.S_ISREG(stored.st_mode) else None

    def read(self, offset: int, length: int) -> bytes:
        """Read up to `length` bytes, fewer only at the end."""
        return read_at(self._fd, offset, length)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_at(fd: int, offset: int, length: int) -> bytes:
    """Read up to `length` bytes, fewer only at the end. One system call reads at most 2 GiB, hence the loop."""
    data = os.pread(fd, length, offset)
    if len(data) in {0, length}:
        return data
    parts = [data]
    got = len(data)
    while got < length and (data := os.pread(fd, length - got, offset + got)):
        parts.append(data)
        got += len(data)
    return b"".join(parts)


def size_of(path: Path) -> int | None:
    try:
        stored = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return stored.st_size if stat.S_ISREG(stored.st_mode) else None


def unlink(path: Path) -> bool:
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def infos(root: Path, folder: str) -> Iterator[BlobInfo]:
    for key in walk(root, folder):
        size = size_of(root / key)
        if size is not None:
            yield BlobInfo(key, size)


def walk(root: Path, folder: str) -> Iterator[str]:
    """Keys in order. Keeps the names of one directory per level in memory, never the whole tree."""
    levels = [(folder, iter(_names(root / folder)))]
    while levels:
        above, names = levels[-1]
        for name in names:
            key = above + name
            if name.endswith("/"):
                levels.append((key, iter(_names(root / key))))
                break
            yield key
        else:
            levels.pop()


def _names(directory: Path) -> list[str]:
    """Sorted as if a directory's name ended with a slash: `a-b` comes before `a/b`, though `a` comes before `a-b`."""
    try:
        with os.scandir(directory) as entries:
            return sorted(
                f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name
                for entry in entries
                if not entry.name.startswith(".")
            )
    except (FileNotFoundError, NotADirectoryError):
        return []


def sweep(drafts: Path) -> None:
    """Remove the temporary files of dead processes. The kernel releases the lock of a dead writer."""
    for path in drafts.iterdir():
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            # Its writer is alive and has just renamed it.
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            pass
        finally:
            os.close(fd)


def sync_deletes(directories: Iterable[Path]) -> None:
    """Make deletes durable, or a power cut would bring back what no row names any more. A directory that is gone went
    with what was in it, and its parent is synced by whoever removed it."""
    for directory in directories:
        with suppress(FileNotFoundError, NotADirectoryError):
            sync_directory(directory)
