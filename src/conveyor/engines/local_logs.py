"""Logs of the blob directory: files that hold many objects each, so that one sync makes all objects of a batch durable.

The objects of `put_all` are appended to a log: one log for each tenant, a new one for each process and after
LOG_BYTES. A process may leave the sync of what it appends to another one. The key of such an object ends with its
place: `<key>=<log>=<offset>`, so that reading one takes no index. Only a new log needs a sync of its directory.

A delete marks the entry as dead and punches its data out of the file, where the system can; a log of which no entry is
alive is removed. What was appended when the process died is either whole, because no row points to an entry before the
sync has returned, or the torn end of a log that nobody appends to any more.
"""

import fcntl
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from conveyor.disk import sync, sync_directory
from conveyor.engines.blobs import BlobInfo
from conveyor.engines.local_files import read_at
from conveyor.engines.local_log_entries import ALIVE, STATE_AT, Entry, entry_at, entry_head, punch, remove_log
from conveyor.errors import NotFound
from conveyor.faults import crashpoint

LOG_BYTES = 64 * 1024 * 1024

_PLACE = re.compile(r"(.+)=([0-9a-f]{16})=([0-9a-f]+)")
_SUFFIX = ".log"
_MAX_PARTS = 512
# Directories of logs that are kept in memory.
_KNOWN = 256

Data = bytes | bytearray | memoryview


class _Directory(NamedTuple):
    """The live entries of a log up to `end`."""

    entries: list[Entry]
    end: int


class LocalLogs:
    """All methods block: they run in threads."""

    def __init__(self, root: Path, settle: Callable[[Path], None]) -> None:
        self._root = root
        self._settle = settle
        self._open: dict[str, _Log] = {}
        self._lock = threading.Lock()
        self._known: dict[Path, _Directory] = {}
        # Of the directories: a delete reads one, changes it, and may remove the log.
        self._reading = threading.Lock()

    def append(self, group: str, objects: Sequence[tuple[str, Data]], *, is_durable: bool = True) -> list[str]:
        """Append objects of one group, durably unless told otherwise. Returns their keys."""
        places: list[int] | None = None
        while places is None:
            log = self._log(group)
            try:
                places = log.append(objects, is_durable=is_durable)
            except BaseException:
                # What was written of it is unknown: nothing more may follow it.
                self._retire(group, log)
                raise
            if places is None or log.size >= LOG_BYTES:
                self._retire(group, log)
        return [f"{key}={log.path.stem}={offset:x}" for (key, _), offset in zip(objects, places, strict=True)]

    def sync(self, keys: Iterable[str]) -> None:
        """Make appended objects durable, whichever process appended them: one sync for each log."""
        places = [(group_of(key), place[1]) for key in keys if (place := placed(key)) is not None]
        for group, name in sorted(set(places)):
            crashpoint("blob.sync.before")
            try:
                fd = os.open(self._root / group / f"{name}{_SUFFIX}", os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                # All its objects were deleted.
                continue
            try:
                sync(fd)
            finally:
                os.close(fd)
            crashpoint("blob.sync.after")

    def _log(self, group: str) -> "_Log":
        with self._lock:
            log = self._open.get(group)
            if log is None:
                directory = self._root / group
                self._settle(directory)
                log = self._open[group] = _Log(directory / f"{secrets.token_hex(8)}{_SUFFIX}")
            return log

    def _retire(self, group: str, log: "_Log") -> None:
        with self._lock:
            if self._open.get(group) is log:
                del self._open[group]
        log.close()

    def close(self) -> None:
        with self._lock:
            logs, self._open = list(self._open.values()), {}
        for log in logs:
            log.close()

    def find(self, key: str) -> tuple[Path, Entry] | None:
        """Where a live object is."""
        place = placed(key)
        if place is None:
            return None
        path = self._root / group_of(key) / f"{place[1]}{_SUFFIX}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            found = entry_at(fd, place[2])
        finally:
            os.close(fd)
        return None if found is None or not found[1] or found[0].key != place[0] else (path, found[0])

    def reader(self, key: str) -> "LogReader | None":
        """A reader of a live object; None if no log holds it."""
        found = self.find(key)
        return None if found is None else LogReader(*found)

    def infos(self, folder: str) -> Iterator[BlobInfo]:
        """The live objects under a folder, in order of key."""
        with self._reading:
            found = [
                BlobInfo(_full_key(entry, path), entry.length)
                for path in self._paths(folder)
                for entry in self._directory(path).entries
            ]
        return iter(sorted((info for info in found if info.key.startswith(folder)), key=lambda info: info.key))

    def delete(self, key: str) -> bool:
        """Delete one object. False if it does not exist."""
        with self._reading:
            found = self.find(key)
            if found is None:
                return False
            self._kill(found[0], [found[1]])
        return True

    def delete_folder(self, folder: str, limit: int) -> int:
        """Delete up to `limit` objects under a folder. Returns how many."""
        removed = 0
        with self._reading:
            for path in self._paths(folder):
                theirs = [entry for entry in self._directory(path).entries if _full_key(entry, path).startswith(folder)]
                theirs = theirs[: limit - removed]
                # Without any, too: a log whose last entry died while it was written to is removed later.
                self._kill(path, theirs)
                removed += len(theirs)
        return removed

    def _kill(self, path: Path, entries: Sequence[Entry]) -> None:
        if entries:
            punch(path, entries)
        dead = {entry.offset for entry in entries}
        directory = self._directory(path)
        left = _Directory([entry for entry in directory.entries if entry.offset not in dead], directory.end)
        self._known[path] = left
        if not left.entries and self._close(path, left.end):
            self._known.pop(path, None)
            remove_log(path, left.end)

    def _close(self, path: Path, size: int) -> bool:
        """Close a log of this process that has this size; False if more was appended meanwhile."""
        with self._lock:
            log = next((log for log in self._open.values() if log.path == path), None)
        return log is None or log.close(size)

    def _paths(self, folder: str) -> list[Path]:
        """The logs that may hold objects under a folder."""
        group = group_of(f"{folder}x")
        place = self._root / group
        if group.count("/") + 1 < _GROUP_SEGMENTS:
            return sorted(place.rglob(f"*{_SUFFIX}")) if place.is_dir() else []
        return sorted(place.glob(f"*{_SUFFIX}"))

    def _directory(self, path: Path) -> _Directory:
        """The live entries of a log: only what was appended since the last call is read."""
        known = self._known.get(path) or _Directory([], 0)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return _Directory([], 0)
        try:
            entries, end = list(known.entries), known.end
            while (found := entry_at(fd, end)) is not None:
                entry, is_alive = found
                if is_alive:
                    entries.append(entry)
                end = entry.start + entry.length
        finally:
            os.close(fd)
        directory = _Directory(entries, end)
        while len(self._known) >= _KNOWN:
            del self._known[next(iter(self._known))]
        self._known[path] = directory
        return directory


class LogReader:
    """An open object in a log."""

    def __init__(self, path: Path, entry: Entry) -> None:
        self._path = path
        self._entry = entry
        self._fd = -1

    def open(self) -> int | None:
        """The object's size; None if it does not exist."""
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        return self._entry.length

    def read(self, offset: int, length: int) -> bytes:
        """Read up to `length` bytes, fewer only at the end. Raises NotFound if it was deleted: a delete marks an entry
        before it punches the data."""
        entry = self._entry
        data = read_at(self._fd, entry.start + offset, max(0, min(length, entry.length - offset)))
        if os.pread(self._fd, 1, entry.offset + STATE_AT) != ALIVE:
            raise NotFound(f"Object not found: {entry.key}.")
        return data

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Log:
    """A log that this process appends to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        # Nobody removes a log that is locked: several processes may share the directory.
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        sync_directory(path.parent)

    def append(self, objects: Sequence[tuple[str, Data]], *, is_durable: bool) -> list[int] | None:
        """Append objects and sync them. Returns the offsets of their entries; None if the log is closed."""
        places: list[int] = []
        parts: list[Data] = []
        with self._lock:
            if self._fd < 0:
                return None
            crashpoint("blob.append.before")
            end = self.size
            for key, data in objects:
                head = entry_head(key, len(data))
                parts += [head, data]
                places.append(end)
                end += len(head) + len(data)
            _write_all(self._fd, parts)
            self.size = end
            if not is_durable:
                crashpoint("blob.append.unsynced")
                return places
            # A copy: the log may be closed before this sync has returned.
            fd = os.dup(self._fd)
        try:
            crashpoint("blob.append.between")
            sync(fd)
        finally:
            os.close(fd)
        crashpoint("blob.append.after")
        return places

    def close(self, size: int | None = None) -> bool:
        """Append nothing more; given a size, only if the log still has it. Returns whether it is closed."""
        with self._lock:
            if size is not None and size != self.size:
                return False
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
            return True


_GROUP_SEGMENTS = 2


def group_of(key: str) -> str:
    """The group of a key, whose objects share logs: its first segments, which name the tenant."""
    return "/".join(key.split("/")[:-1][:_GROUP_SEGMENTS])


def placed(key: str) -> tuple[str, str, int] | None:
    """The key, the log and the offset that a key of an object in a log consists of; None for other keys."""
    match = _PLACE.fullmatch(key)
    return None if match is None else (match[1], match[2], int(match[3], 16))


def _full_key(entry: Entry, path: Path) -> str:
    return f"{entry.key}={path.stem}={entry.offset:x}"


def _write_all(fd: int, parts: Sequence[Data]) -> None:
    for first in range(0, len(parts), _MAX_PARTS):
        views = [memoryview(part).cast("B") for part in parts[first : first + _MAX_PARTS]]
        while views:
            written = os.writev(fd, views)
            while views and written >= len(views[0]):
                written -= len(views.pop(0))
            if views:
                views[0] = views[0][written:]
