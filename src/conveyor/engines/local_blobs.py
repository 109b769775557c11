"""Blobs in a directory. An object is one file, named by its key. A put returns once the object is durable: temporary
file, fsync, rename, fsync of the directory and of its new parents. A delete returns once it is durable, too. Objects
that are put together share a log (local_logs.py), and one fsync.

File work runs in a thread pool of its own, so that an fsync blocks neither the event loop nor the shared threads. One
process owns the directory. An object and a directory cannot share a name: no key may be a parent path of another key.
"""

import asyncio
import heapq
import itertools
import os
import threading
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from conveyor.disk import sync_directory, write_error
from conveyor.engines.blob_keys import check_key, check_range, folder_of
from conveyor.engines.blobs import BlobInfo, Presigned
from conveyor.engines.local_files import (
    Draft,
    Reader,
    infos,
    size_of,
    sweep,
    sync_deletes,
    unlink,
    walk,
)
from conveyor.engines.local_logs import LocalLogs, LogReader, group_of, placed
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


class LocalBlobs:
    """A prefix consists of whole segments: `a/b` and `a/b/` both match keys under `a/b/`, never `a/bc`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._drafts = root / ".tmp"
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="blobs")
        # Directories that are durable with all their parents: a put syncs only its own directory.
        self._settled: set[Path] = set()
        self._tree = threading.Lock()
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._drafts.mkdir(exist_ok=True, mode=0o700)
            sync_directory(root)
            sync_directory(root.parent)
            sweep(self._drafts)
        except OSError as error:
            if (problem := write_error(error, root)) is not None:
                raise problem from error
            raise
        self._logs = LocalLogs(root / ".logs", self._settle)

    async def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        await self._run(self._put, self._path(key), data)

    async def put_all(self, objects: Sequence[tuple[str, bytes | bytearray | memoryview]]) -> list[str]:
        groups: dict[str, list[int]] = {}
        for position, (key, _) in enumerate(objects):
            groups.setdefault(group_of(check_key(key)), []).append(position)
        keys = [key for key, _ in objects]

        async def append(group: str, positions: list[int]) -> None:
            theirs = [objects[position] for position in positions]
            if not group:
                await asyncio.gather(*(self.put(key, data) for key, data in theirs))
                return
            for position, key in zip(positions, await self._run(self._logs.append, group, theirs), strict=True):
                keys[position] = key

        await asyncio.gather(*(append(group, positions) for group, positions in groups.items()))
        return keys

    def append(self, objects: Sequence[tuple[str, bytes | bytearray | memoryview]]) -> list[str]:
        """See SharedLogs."""
        groups: dict[str, list[int]] = {}
        for position, (key, _) in enumerate(objects):
            groups.setdefault(group_of(check_key(key)), []).append(position)
        keys = [key for key, _ in objects]
        for group, positions in groups.items():
            theirs = [objects[position] for position in positions]
            for position, key in zip(positions, self._logs.append(group, theirs, is_durable=False), strict=True):
                keys[position] = key
        return keys

    async def make_durable(self, keys: Collection[str]) -> None:
        """See SyncsLogs."""
        await self._run(self._logs.sync, keys)

    async def put_stream(self, key: str, chunks: AsyncIterator[bytes]) -> int:
        path = self._path(key)
        draft = Draft(self._drafts)
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
        return await self._run(self._get, check_key(key), offset, length)

    async def stream(self, key: str, offset: int = 0) -> AsyncIterator[bytes]:
        check_range(offset)
        reader = await self._run(self._reader, check_key(key))
        try:
            if await self._run(reader.open) is None:
                raise NotFound(f"Object not found: {key}.")
            while piece := await self._run(reader.read, offset, PIECE_BYTES):
                offset += len(piece)
                yield piece
        finally:
            await self._run(reader.close)

    async def size(self, key: str) -> int | None:
        return await self._run(self._size, check_key(key))

    async def listing(self, prefix: str) -> AsyncIterator[BlobInfo]:
        folder = folder_of(prefix)
        in_logs = await self._run(self._logs.infos, folder)
        stored = heapq.merge(infos(self._root, folder), in_logs, key=lambda info: info.key)
        while batch := await self._run(list, itertools.islice(stored, _LIST_BATCH)):
            for info in batch:
                yield info

    async def delete(self, keys: list[str]) -> None:
        await self._run(self._delete, [check_key(key) for key in keys])

    async def delete_prefix(self, prefix: str, limit: int) -> int:
        folder = folder_of(prefix)
        if not folder:
            raise ValueError("an empty prefix would delete everything")
        return await self._run(self._delete_prefix, folder, limit)

    async def presigned_put(self, key: str, size: int, sha256: str, seconds: float) -> Presigned | None:
        return None

    async def presigned_get(self, key: str, seconds: float, content_type: str, filename: str) -> Presigned | None:
        return None

    def close(self) -> None:
        """Append nothing more to the logs of this process."""
        self._logs.close()

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
            failed = EngineFailed(f"The blob directory failed: {error.strerror or error}.")
            raise write_error(error, self._root) or failed from error

    def _put(self, path: Path, data: bytes | bytearray | memoryview) -> None:
        draft = Draft(self._drafts)
        try:
            draft.open()
            draft.write(data)
            self._publish(draft, path)
        finally:
            draft.close()

    def _publish(self, draft: Draft, path: Path) -> None:
        crashpoint("blob.put.before")
        draft.sync()
        self._move(draft, path)
        # Only empty directories are removed: if it is missing, another caller has deleted the object.
        with suppress(FileNotFoundError):
            sync_directory(path.parent)
        # A directory that was removed and created again since the check may not be durable yet.
        self._settle(path.parent)
        crashpoint("blob.put.after")

    def _move(self, draft: Draft, path: Path) -> None:
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
                sync_directory(each.parent)
            if len(self._settled) > _SETTLED_LIMIT:
                self._settled.clear()
            self._settled.update(new)

    def _unsettled(self, directory: Path) -> bool:
        return directory != self._root and directory not in self._settled

    def _prune(self, directory: Path) -> Path:
        """Remove a directory if it is empty, then its empty parents. Returns the one that stays."""
        with self._tree:
            while directory != self._root:
                try:
                    directory.rmdir()
                except FileNotFoundError:
                    pass
                except OSError:
                    return directory
                self._settled.discard(directory)
                directory = directory.parent
        return directory

    def _reader(self, key: str) -> Reader | LogReader:
        return (self._logs.reader(key) if placed(key) else None) or Reader(self._root / key)

    def _get(self, key: str, offset: int, length: int | None) -> bytes | None:
        reader = self._reader(key)
        try:
            size = reader.open()
            if size is None:
                return None
            left = max(size - offset, 0)
            return reader.read(offset, left if length is None else min(length, left))
        except NotFound:
            # Deleted since it was opened.
            return None
        finally:
            reader.close()

    def _size(self, key: str) -> int | None:
        found = self._logs.find(key)
        return size_of(self._root / key) if found is None else found[1].length

    def _delete(self, keys: list[str]) -> None:
        paths = [self._root / key for key in keys if not self._logs.delete(key)]
        for path in paths:
            unlink(path)
        sync_deletes({self._prune(directory) for directory in {path.parent for path in paths}})

    def _delete_prefix(self, folder: str, limit: int) -> int:
        removed = self._logs.delete_folder(folder, limit)
        last: Path | None = None
        pruned: set[Path] = set()
        for key in itertools.islice(walk(self._root, folder), limit - removed):
            path = self._root / key
            if last is not None and path.parent != last:
                pruned.add(self._prune(last))
            last = path.parent
            removed += unlink(path)
        if last is not None:
            pruned.add(self._prune(last))
        if removed < limit:
            # The rest are directories of puts that crashed before the rename.
            for directory, _, _ in os.walk(self._root / folder, topdown=False):
                pruned.add(self._prune(Path(directory)))
            # Also if nothing is there: a delete that crashed before its sync may have removed it.
            pruned.add(self._prune(self._root / folder))
        sync_deletes(pruned)
        return removed


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
