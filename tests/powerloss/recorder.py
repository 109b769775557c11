"""The recorder: keeps what this process does to the files below one directory, in order.

It takes the place of functions of `os`, and of `io.open`, in tests only: production code has no seam for it. What goes
past them (a file that is opened by the builtin `open`, say) would be missing from the record, so `check_complete`
compares the replay of everything with the directory itself, byte for byte.
"""

import io
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from conveyor.engines import local_log_entries
from conveyor.export import growing_directory
from tests.powerloss.disk import ROOT, Disk, Image, Names, Operation, Punch, Survival, Sync, Truncate, Write, keep_all

# SQLite's index of its log: made anew by whoever opens the database first.
_NOT_DURABLE = "-shm"


class _Open:
    """An open file: its inode, and where the next write goes."""

    def __init__(self, inode: int) -> None:
        self.inode = inode
        self.offset = 0


class Recorder:
    """`operations` is the record, `times` has the clock's time of each operation."""

    def __init__(self, root: Path, now: Callable[[], float] = lambda: 0.0) -> None:
        self.root = root
        self.operations: list[Operation] = []
        self.times: list[float] = []
        self.recorded_since = 0
        # Of each directory what its names stand for now, in the system's cache.
        self.directories: dict[int, dict[str, int]] = {ROOT: {}}
        self._now = now
        self._inodes = 0
        self._open: dict[int, _Open] = {}
        self._lock = threading.RLock()

    @property
    def position(self) -> int:
        return len(self.operations)

    def adopt(self, image: Image) -> None:
        """Have all of an image, which is in the directory already, on the disk before anything is recorded."""
        for path in image.directories:
            self.create(self.root / path, is_directory=True)
        for path, content in image.files.items():
            self.add(Write(self.create(self.root / path), 0, content))
        for inode in range(self._inodes + 1):
            self.add(Sync(inode))
        self.recorded_since = self.position

    def check_complete(self) -> None:
        """Raise AssertionError if the replay of all is not what is in the directory."""
        disk = Disk(self.operations, self.directories)
        disk.advance(self.position)
        image = disk.image(Survival(keep_all, lambda changes: changes))
        there = {path.relative_to(self.root): path for path in self.root.rglob("*") if not _is_passing(path)}
        assert set(image.directories) == {name for name, path in there.items() if path.is_dir()}
        files = {name: path.read_bytes() for name, path in there.items() if not path.is_dir()}
        assert set(image.files) == set(files)
        wrong = [str(name) for name, content in files.items() if image.files[name] != content]
        assert not wrong, f"what was done to {wrong} is not in the record"

    # What is done, by path or by inode.

    def holds(self, path: Any) -> bool:
        """Whether a path is below the directory, and durable at all."""
        if isinstance(path, int):
            return False
        full = Path(os.path.abspath(os.fspath(path)))  # noqa: PTH100  (a Path resolves links, which costs a call each)
        return full.is_relative_to(self.root) and full != self.root and not _is_passing(full)

    def add(self, operation: Operation) -> None:
        with self._lock:
            self.operations.append(operation)
            self.times.append(self._now())

    def inode_of(self, path: Any) -> int | None:
        """The inode of a path, if there is one."""
        inode: int | None = ROOT
        for part in Path(os.path.abspath(os.fspath(path))).relative_to(self.root).parts:  # noqa: PTH100  (as above)
            if inode is None:
                return None
            inode = self.directories[inode].get(part)
        return inode

    def inode_in(self, descriptor: int, name: Any) -> int | None:
        """The inode of a name in an open directory."""
        return self.directories[self._open[descriptor].inode].get(os.fspath(name))

    def create(self, path: Any, *, is_directory: bool = False) -> int:
        self._inodes += 1
        if is_directory:
            self.directories[self._inodes] = {}
        self.name(path, self._inodes)
        return self._inodes

    def name(self, path: Any, inode: int | None) -> None:
        """Have a name stand for an inode, or for nothing."""
        parent = self.parent_of(path)
        self._rename(parent, {Path(path).name: inode})

    def parent_of(self, path: Any) -> int:
        parent = self.inode_of(Path(path).parent)
        assert parent is not None
        return parent

    def move(self, source: Any, target: Any) -> None:
        """In one directory both names change together; else the file may be under both names, or lose none."""
        inode = self.inode_of(source)
        old, new = self.parent_of(source), self.parent_of(target)
        if old == new:
            self._rename(old, {Path(source).name: None, Path(target).name: inode})
        else:
            self._rename(new, {Path(target).name: inode})
            self._rename(old, {Path(source).name: None})

    def _rename(self, directory: int, names: dict[str, int | None]) -> None:
        for name, inode in names.items():
            if inode is None:
                self.directories[directory].pop(name, None)
            else:
                self.directories[directory][name] = inode
        self.add(Names(directory, names))

    # What is done with a descriptor.

    def opened(self, descriptor: int, path: Any, flags: int, *, is_new: bool) -> None:
        inode = self.create(path) if is_new else self.inode_of(path)
        if inode is not None:
            self.opened_inode(descriptor, inode, flags, is_new=is_new)

    def opened_inode(self, descriptor: int, inode: int, flags: int, *, is_new: bool = False) -> None:
        self._open[descriptor] = _Open(inode)
        assert not flags & os.O_APPEND, "nobody appends by a flag"
        if flags & os.O_TRUNC and not is_new:
            self.add(Truncate(inode, 0))

    def opened_again(self, descriptor: int, copy: int) -> None:
        if descriptor in self._open:
            self._open[copy] = self._open[descriptor]

    def closed(self, descriptor: int) -> None:
        self._open.pop(descriptor, None)

    def written(self, descriptor: int, data: bytes, offset: int | None = None) -> None:
        file = self._open.get(descriptor)
        if file is None or not data:
            return
        self.add(Write(file.inode, file.offset if offset is None else offset, data))
        if offset is None:
            file.offset += len(data)

    def truncated(self, descriptor: int, size: int) -> None:
        if (file := self._open.get(descriptor)) is not None:
            self.add(Truncate(file.inode, size))

    def punched(self, descriptor: int, offset: int, length: int) -> None:
        if (file := self._open.get(descriptor)) is not None:
            self.add(Punch(file.inode, offset, length))

    def synced(self, descriptor: int) -> None:
        if (file := self._open.get(descriptor)) is not None:
            self.add(Sync(file.inode))

    def synced_all(self) -> None:
        """The whole file system."""
        with self._lock:
            for inode in range(self._inodes + 1):
                self.add(Sync(inode))

    def removed_in(self, descriptor: int, name: Any) -> None:
        """A name in an open directory."""
        self._rename(self._open[descriptor].inode, {os.fspath(name): None})

    def is_open(self, descriptor: int) -> bool:
        return descriptor in self._open

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what is done meanwhile."""
        with pytest.MonkeyPatch.context() as patch:
            for name, function in _wrapped(self, self._lock).items():
                patch.setattr(os, name, function)
            if (fallocate := local_log_entries._fallocate) is not None:
                patch.setattr(local_log_entries, "_fallocate", _punching(self, fallocate))
            patch.setattr(io, "open", _opening(self))
            # The real one would wait for all disks of this machine.
            patch.setattr(growing_directory, "sync_file_system", lambda place: self.synced_all())
            yield


def _is_passing(path: Path) -> bool:
    return path.name.endswith(_NOT_DURABLE)


def _wrapped(record: Recorder, lock: "threading.RLock") -> dict[str, Callable[..., Any]]:
    """Functions of `os` that do what they do and write it down, one at a time."""
    real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in _NAMES}

    def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is not None and record.is_open(dir_fd):
            assert not flags & os.O_CREAT, "nobody makes a file beside a descriptor"
            with lock:
                inode = record.inode_in(dir_fd, path)
                descriptor = real["open"](path, flags, mode, dir_fd=dir_fd)
                if inode is not None:
                    record.opened_inode(descriptor, inode, flags)
                return descriptor
        # A file without a name is gone with its process.
        is_nameless = flags & os.O_TMPFILE == os.O_TMPFILE
        if dir_fd is not None or is_nameless or not (record.holds(path) or _is_root(record, path)):
            return real["open"](path, flags, mode, dir_fd=dir_fd)
        with lock:
            is_new = bool(flags & os.O_CREAT) and record.inode_of(path) is None
            descriptor = real["open"](path, flags, mode)
            record.opened(descriptor, path, flags, is_new=is_new)
            return descriptor

    def close(descriptor: int) -> None:
        with lock:
            record.closed(descriptor)
            real["close"](descriptor)

    def dup(descriptor: int) -> int:
        with lock:
            copy = real["dup"](descriptor)
            record.opened_again(descriptor, copy)
            return copy

    def write(descriptor: int, data: Any) -> int:
        with lock:
            count = real["write"](descriptor, data)
            record.written(descriptor, bytes(memoryview(data).cast("B")[:count]))
            return count

    def writev(descriptor: int, parts: Sequence[Any]) -> int:
        with lock:
            count = real["writev"](descriptor, parts)
            record.written(descriptor, b"".join(parts)[:count])
            return count

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        with lock:
            count = real["pwrite"](descriptor, data, offset)
            record.written(descriptor, bytes(data)[:count], offset)
            return count

    def ftruncate(descriptor: int, size: int) -> None:
        with lock:
            real["ftruncate"](descriptor, size)
            record.truncated(descriptor, size)

    def fsync(descriptor: int) -> None:
        # What is written during a sync may not be part of it.
        with lock:
            real["fsync"](descriptor)
            record.synced(descriptor)

    def fdopen(descriptor: int, mode: str = "r", *args: Any, **options: Any) -> Any:
        if not record.is_open(descriptor):
            return real["fdopen"](descriptor, mode, *args, **options)
        assert mode == "w", "nobody opens a recorded file in another way"
        return io.TextIOWrapper(io.BufferedWriter(_RawFile(descriptor)), **options)

    def move(name: str) -> Callable[..., None]:
        def renamed(source: Any, target: Any) -> None:
            with lock:
                real[name](source, target)
                if record.holds(source):
                    record.move(source, target)

        return renamed

    def remove(name: str) -> Callable[..., None]:
        def removed(path: Any, *, dir_fd: int | None = None) -> None:
            with lock:
                real[name](path, dir_fd=dir_fd)
                if dir_fd is not None and record.is_open(dir_fd):
                    record.removed_in(dir_fd, path)
                elif dir_fd is None and record.holds(path):
                    record.name(path, None)

        return removed

    def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        with lock:
            real["mkdir"](path, mode, dir_fd=dir_fd)
            if dir_fd is None and record.holds(path):
                record.create(path, is_directory=True)

    return {
        "open": open_,
        "close": close,
        "dup": dup,
        "write": write,
        "writev": writev,
        "pwrite": pwrite,
        "ftruncate": ftruncate,
        "fsync": fsync,
        "fdatasync": fsync,
        "fdopen": fdopen,
        "rename": move("rename"),
        "replace": move("replace"),
        "unlink": remove("unlink"),
        "remove": remove("remove"),
        "rmdir": remove("rmdir"),
        "mkdir": mkdir,
    }


_NAMES = (
    *("open", "close", "dup", "write", "writev", "pwrite", "ftruncate", "fsync", "fdatasync", "fdopen"),
    *("rename", "replace", "unlink", "remove", "rmdir", "mkdir"),
)


def _is_root(record: Recorder, path: Any) -> bool:
    return not isinstance(path, int) and os.path.abspath(os.fspath(path)) == str(record.root)  # noqa: PTH100  (as above)


def _opening(record: Recorder) -> Callable[..., Any]:
    """`io.open`, which is `Path.open`: files that are written are recorded."""
    real = io.open

    def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if options.get("opener") is not None or "r" in mode or not record.holds(file):
            return real(file, mode, *args, **options)
        assert mode == "wb", "nobody opens a recorded file in another way"
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        return io.BufferedWriter(_RawFile(descriptor))

    return opened


class _RawFile(io.RawIOBase):
    """A file object over the recorded functions: those of C would pass them by."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert (offset, whence) == (0, io.SEEK_CUR), "a recorded file is written from its beginning to its end"
        return os.lseek(self._descriptor, 0, io.SEEK_CUR)

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Any) -> int:
        return os.write(self._descriptor, data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._descriptor)


def _punching(record: Recorder, fallocate: Callable[[int, int, int, int], int]) -> Callable[[int, int, int, int], int]:
    def punch(descriptor: int, mode: int, offset: int, length: int) -> int:
        with record._lock:
            failed = fallocate(descriptor, mode, offset, length)
            if not failed:
                record.punched(descriptor, offset, length)
            return failed

    return punch
