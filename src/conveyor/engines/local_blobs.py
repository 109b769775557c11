"""Blobs in a directory. An object is one file, named by its key. A put returns once the object is durable: temporary
file, fsync, rename, fsync of the directory and of its new parents.

File work runs in a thread pool of its own, so that an fsync blocks neither the event loop nor the shared threads. One
process owns the directory. An object and a directory cannot share a name: no key may be a parent path of another key.
"""

import asyncio
import fcntl
import itertools
import os
import stat
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from conveyor.engines.blob_keys import check_key, check_range, folder_of
from conveyor.engines.blobs import BlobInfo, Presigned
from conveyor.errors import EngineFailed, NotFound
from conveyor.faults import crashpoint

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

PIECE_BYTES = 256 * 1024

_THREADS = 8
_LIST_BATCH = 1000
_STREAM_BUFFER = 1024 * 1024
_SETTLED_LIMIT = 10_000
_PUBLISH_TRIES = 100
# One counter for all instances, so that two on the same directory never choose the same temporary name.
_drafts = itertools.count()


class LocalBlobs:
    """A prefix consists of whole segments: `a/b` and `a/b/` both match keys under `a/b/`, never `a/bc`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._drafts = root / ".tmp"
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="blobs")
        # Directories that are durable with all their parents: a put syncs only its own directory.
        self._settled: set[Path] = set()
        self._tree = threading.Lock()
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._drafts.mkdir(exist_ok=True, mode=0o700)
        _sync_directory(root)
        _sync_directory(root.parent)
        _sweep(self._drafts)

    async def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        await self._run(self._put, self._path(key), data)

    async def put_stream(self, key: str, chunks: AsyncIterator[bytes]) -> int:
        path = self._path(key)
        draft = _Draft(self._drafts)
        size = 0
        try:
            await self._run(draft.open)
            async for block in _blocks(chunks):
                await self._run(draft.write, block)
                size += len(block)
            await self._run(self._publish, draft, path)
        finally:
            await self._run(draft.close)
        return size

    async def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes | None:
        check_range(offset, length)
        return await self._run(_get, self._path(key), offset, length)

    async def stream(self, key: str, offset: int = 0) -> AsyncIterator[bytes]:
        check_range(offset)
        reader = _Reader(self._path(key))
        try:
            if await self._run(reader.open) is None:
                raise NotFound(f"Object not found: {key}.")
            while piece := await self._run(reader.read, offset, PIECE_BYTES):
                offset += len(piece)
                yield piece
        finally:
            await self._run(reader.close)

    async def size(self, key: str) -> int | None:
        return await self._run(_size, self._path(key))

    async def listing(self, prefix: str) -> AsyncIterator[BlobInfo]:
        stored = _infos(self._root, folder_of(prefix))
        while batch := await self._run(list, itertools.islice(stored, _LIST_BATCH)):
            for info in batch:
                yield info

    async def delete(self, keys: list[str]) -> None:
        await self._run(self._delete, [self._path(key) for key in keys])

    async def delete_prefix(self, prefix: str, limit: int) -> int:
        folder = folder_of(prefix)
        if not folder:
            raise ValueError("an empty prefix would delete everything")
        return await self._run(self._delete_prefix, folder, limit)

    async def presigned_put(self, key: str, size: int, sha256: str, seconds: float) -> Presigned | None:
        return None

    async def presigned_get(self, key: str, seconds: float, content_type: str, filename: str) -> Presigned | None:
        return None

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    async def _run(self, step: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run one step in a thread. A cancelled caller still waits for the step: closing a file during a write could
        hand its descriptor to another file."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, step, *args)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await _outlast(future)
            raise
        except OSError as error:
            raise EngineFailed(f"The blob directory failed: {error.strerror or error}.") from error

    def _put(self, path: Path, data: bytes | bytearray | memoryview) -> None:
        draft = _Draft(self._drafts)
        try:
            draft.open()
            draft.write(data)
            self._publish(draft, path)
        finally:
            draft.close()

    def _publish(self, draft: "_Draft", path: Path) -> None:
        crashpoint("blob.put.before")
        draft.sync()
        self._move(draft, path)
        # Only empty directories are removed: if it is missing, another caller has deleted the object.
        with suppress(FileNotFoundError):
            _sync_directory(path.parent)
        # A directory that was removed and created again since the check may not be durable yet.
        self._settle(path.parent)
        crashpoint("blob.put.after")

    def _move(self, draft: "_Draft", path: Path) -> None:
        for last in range(_PUBLISH_TRIES, 0, -1):
            try:
                self._settle(path.parent)
                draft.move(path)
                return
            except FileNotFoundError:
                # Another caller deleted the last object in the directory, and the directory with it.
                if last == 1:
                    raise
                with self._tree:
                    self._settled.clear()

    def _settle(self, directory: Path) -> None:
        """Create a directory and its parents durably: an fsync of a file does not cover them."""
        if directory in self._settled or directory == self._root:
            return
        with self._tree:
            new = list(itertools.takewhile(self._unsettled, (directory, *directory.parents)))
            for each in reversed(new):
                each.mkdir(exist_ok=True, mode=0o700)
                _sync_directory(each.parent)
            if len(self._settled) > _SETTLED_LIMIT:
                self._settled.clear()
            self._settled.update(new)

    def _unsettled(self, directory: Path) -> bool:
        return directory != self._root and directory not in self._settled

    def _prune(self, directory: Path) -> None:
        """Remove a directory if it is empty, then its empty parents."""
        with self._tree:
            while directory != self._root:
                try:
                    directory.rmdir()
                except FileNotFoundError:
                    pass
                except OSError:
                    return
                self._settled.discard(directory)
                directory = directory.parent

    def _delete(self, paths: list[Path]) -> None:
        for path in paths:
            _unlink(path)
        for directory in {path.parent for path in paths}:
            self._prune(directory)

    def _delete_prefix(self, folder: str, limit: int) -> int:
        removed = 0
        last: Path | None = None
        for key in itertools.islice(_walk(self._root, folder), limit):
            path = self._root / key
            if last is not None and path.parent != last:
                self._prune(last)
            last = path.parent
            removed += _unlink(path)
        if last is not None:
            self._prune(last)
        if removed < limit:
            # The rest are directories of puts that crashed before the rename.
            for directory, _, _ in os.walk(self._root / folder, topdown=False):
                self._prune(Path(directory))
        return removed


class _Draft:
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

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        while view:
            view = view[os.write(self._fd, view) :]

    def sync(self) -> None:
        _sync(self._fd)

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


class _Reader:
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
        """Read up to `length` bytes, fewer only at the end. One system call reads at most 2 GiB, hence the loop."""
        data = os.pread(self._fd, length, offset)
        if len(data) in {0, length}:
            return data
        parts = [data]
        got = len(data)
        while got < length and (data := os.pread(self._fd, length - got, offset + got)):
            parts.append(data)
            got += len(data)
        return b"".join(parts)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


async def _outlast(future: asyncio.Future[T]) -> None:
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            continue
    # Retrieve the exception, or asyncio would report it as lost; the caller raises its cancellation.
    future.exception()


async def _blocks(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes | bytearray]:
    """The same bytes in large blocks: a hop to a thread costs more than writing a small piece."""
    held = bytearray()
    async for chunk in chunks:
        held += chunk
        if len(held) >= _STREAM_BUFFER:
            yield held
            held = bytearray()
    yield held


def _get(path: Path, offset: int, length: int | None) -> bytes | None:
    reader = _Reader(path)
    try:
        size = reader.open()
        if size is None:
            return None
        left = max(size - offset, 0)
        return reader.read(offset, left if length is None else min(length, left))
    finally:
        reader.close()


def _size(path: Path) -> int | None:
    try:
        stored = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return stored.st_size if stat.S_ISREG(stored.st_mode) else None


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _infos(root: Path, folder: str) -> Iterator[BlobInfo]:
    for key in _walk(root, folder):
        size = _size(root / key)
        if size is not None:
            yield BlobInfo(key, size)


def _walk(root: Path, folder: str) -> Iterator[str]:
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


def _sweep(drafts: Path) -> None:
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


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _sync(fd)
    finally:
        os.close(fd)


def _sync(fd: int) -> None:
    if sys.platform == "darwin":
        # Here fsync reaches only the cache of the drive.
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fsync(fd)
