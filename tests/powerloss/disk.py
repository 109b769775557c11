"""The disk: what is on it when the power fails after the first so many operations of a record.

Files and directories are inodes. A sync of a file makes its bytes durable, and no name of it; a sync of a directory
makes the names in it durable, and nothing below them. All that was done to an inode since its last sync may or may not
be on the disk, and a `Survival` decides. POSIX promises no more than that; most file systems keep more.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

ROOT = 0

# Disks write whole sectors; the system's cache has whole pages.
_BLOCKS = (512, 4096)


class Write(NamedTuple):
    """Bytes of a file."""

    inode: int
    offset: int
    data: bytes


class Truncate(NamedTuple):
    """The size of a file."""

    inode: int
    size: int


class Punch(NamedTuple):
    """Bytes of a file become a hole."""

    inode: int
    offset: int
    length: int


class Names(NamedTuple):
    """Names of a directory, changed together: the inode of each, or None if it goes."""

    inode: int
    names: dict[str, int | None]


class Sync(NamedTuple):
    """A file or a directory is durable as it is now."""

    inode: int


Change = Write | Truncate | Punch | Names
Operation = Change | Sync
# What is on the disk of a file that had these bytes when it was synced, or of a directory that had these names.
FileSurvival = Callable[[bytearray, Sequence[Change]], None]


class Survival(NamedTuple):
    """Decides what of the changes since the last sync is on the disk: of files, and which names of directories."""

    of_file: FileSurvival
    of_names: Callable[[Sequence[Change]], Iterable[Change]]


class Disk:
    """Replays a record; cuts come in their order."""

    def __init__(self, operations: Sequence[Operation], directories: Iterable[int]) -> None:
        self._operations = operations
        self._files: dict[int, bytearray] = {}
        self._directories: dict[int, dict[str, int]] = {inode: {} for inode in directories}
        self._unsynced: dict[int, list[Change]] = {}
        self._cut = 0

    def advance(self, cut: int) -> None:
        """Replay up to a cut."""
        assert cut >= self._cut, "cuts come in their order"
        for operation in self._operations[self._cut : cut]:
            if isinstance(operation, Sync):
                self._make_durable(operation.inode)
            else:
                self._unsynced.setdefault(operation.inode, []).append(operation)
        self._cut = cut

    @property
    def unsynced(self) -> int:
        """How many changes may be lost."""
        return sum(map(len, self._unsynced.values()))

    def image(self, survival: Survival) -> "Image":
        """What is on the disk."""
        files: dict[Path, bytes] = {}
        directories: list[Path] = []
        self._visit(ROOT, Path(), survival, files, directories)
        return Image(files, directories)

    def _make_durable(self, inode: int) -> None:
        changes = self._unsynced.pop(inode, [])
        if inode in self._directories:
            rename(self._directories[inode], changes)
        else:
            keep_all(self._files.setdefault(inode, bytearray()), changes)

    def _visit(
        self, inode: int, path: Path, survival: Survival, files: dict[Path, bytes], directories: list[Path]
    ) -> None:
        names = dict(self._directories[inode])
        rename(names, survival.of_names(self._unsynced.get(inode, [])))
        # In the order in which they were made: some names are random, and chance is spent in this order.
        for name, child in sorted(names.items(), key=lambda item: item[1]):
            if child in self._directories:
                directories.append(path / name)
                self._visit(child, path / name, survival, files, directories)
            else:
                content = bytearray(self._files.get(child, b""))
                if changes := self._unsynced.get(child):
                    survival.of_file(content, changes)
                files[path / name] = bytes(content)


class Image(NamedTuple):
    """Files and directories, by their paths below the recorded one."""

    files: dict[Path, bytes]
    directories: list[Path]

    def digest(self) -> bytes:
        whole = sha256()
        for path, content in self.files.items():
            whole.update(f"{path}\0{len(content)}\0".encode())
            whole.update(content)
        whole.update("\0".join(map(str, self.directories)).encode())
        return whole.digest()

    def write(self, place: Path) -> None:
        for path in self.directories:
            (place / path).mkdir(mode=0o700)
        for path, content in self.files.items():
            (place / path).write_bytes(content)
            (place / path).chmod(0o600)


def rename(names: dict[str, int], changes: Iterable[Change]) -> None:
    """Apply changes to the names of a directory."""
    for change in changes:
        assert isinstance(change, Names)
        for name, inode in change.names.items():
            if inode is None:
                names.pop(name, None)
            else:
                names[name] = inode


def keep_all(content: bytearray, changes: Iterable[Change]) -> None:
    """All changes of a file are on the disk."""
    for change in changes:
        _apply(content, change)


def _apply(content: bytearray, change: Change) -> None:
    match change:
        case Write(_, offset, data):
            _extend(content, offset)
            content[offset : offset + len(data)] = data
        case Truncate(_, size):
            del content[size:]
            _extend(content, size)
        case Punch(_, offset, length):
            end = min(offset + length, len(content))
            if end > offset:
                content[offset:end] = bytes(end - offset)
        case Names():
            raise AssertionError("a file has no names")


def _extend(content: bytearray, size: int) -> None:
    if len(content) < size:
        content += bytes(size - len(content))


def keep_none(content: bytearray, changes: Sequence[Change]) -> None:
    """None of the changes of a file is on the disk."""


def keep_some(chance: random.Random) -> FileSurvival:
    """Some changes of a file are on the disk, in their order."""

    def survive(content: bytearray, changes: Sequence[Change]) -> None:
        keep_all(content, [change for change in changes if chance.random() < 0.5])

    return survive


def keep_torn(chance: random.Random) -> FileSurvival:
    """Each block of a file is as it was at the sync, or after any of the changes since, so a write may be there in
    part. The file is as long as the last block that is there, or, with zeros, as it would have been."""

    def survive(content: bytearray, changes: Sequence[Change]) -> None:
        block = chance.choice(_BLOCKS)
        whole = bytearray(len(content))
        kept: dict[int, int] = {}
        for number, change in enumerate(changes):
            if isinstance(change, Truncate):
                if number < chance.randint(0, len(changes)):
                    _apply(content, change)
                del whole[change.size :]
                continue
            for piece in _blocks(change, block):
                place = piece.offset // block
                if number < kept.setdefault(place, chance.randint(0, len(changes))):
                    _apply(content, piece)
                if isinstance(piece, Write):
                    _extend(whole, piece.offset + len(piece.data))
        if chance.random() < 0.5:
            _extend(content, len(whole))

    return survive


def _blocks(change: Change, block: int) -> Iterable[Write | Punch]:
    """A change as one for each block."""
    assert isinstance(change, (Write, Punch))
    length = len(change.data) if isinstance(change, Write) else change.length
    start, end = change.offset, change.offset + length
    while start < end:
        until = min(end, (start // block + 1) * block)
        if isinstance(change, Write):
            yield Write(change.inode, start, change.data[start - change.offset : until - change.offset])
        else:
            yield Punch(change.inode, start, until - start)
        start = until
