"""The recorder's VFS for SQLite: files of the database as they are, with each write, truncate, sync and delete in the
record. Only the index of the log passes it by, which is no matter of durability."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import apsw
import pytest

from conveyor.engines.sqlite import database
from tests.powerloss.disk import Sync, Truncate, Write
from tests.powerloss.recorder import Recorder

_NAME = "powerloss"
# The first sync of such a file syncs its directory, too: SQLite's unixSync.
_JOURNALS = apsw.SQLITE_OPEN_MAIN_JOURNAL | apsw.SQLITE_OPEN_SUPER_JOURNAL | apsw.SQLITE_OPEN_WAL


class RecordingVfs(apsw.VFS):
    """Files below the recorder's directory are recorded."""

    def __init__(self, record: Recorder) -> None:
        super().__init__(_NAME, "")
        self._record = record

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        if path is None or not self._record.holds(path):
            return apsw.VFSFile("", name, flags)
        return RecordedFile(self._record, path, name, flags)

    def xDelete(self, name: str, is_synced: bool) -> None:
        super().xDelete(name, is_synced)
        if self._record.holds(name):
            self._record.name(name, None)
            if is_synced:
                self._record.add(Sync(self._record.parent_of(name)))


class RecordedFile(apsw.VFSFile):
    """One open file."""

    def __init__(self, record: Recorder, path: str, name: Any, flags: list[int]) -> None:
        wanted = flags[0]
        known = record.inode_of(path)
        super().__init__("", name, flags)
        assert known is not None or wanted & apsw.SQLITE_OPEN_CREATE
        assert not wanted & apsw.SQLITE_OPEN_DELETEONCLOSE, "temporary files are in memory"
        self._record = record
        self._inode = record.create(path) if known is None else known
        self._parent = record.parent_of(path)
        self._syncs_directory = bool(wanted & apsw.SQLITE_OPEN_CREATE and wanted & _JOURNALS)

    def xWrite(self, data: bytes, offset: int) -> None:
        super().xWrite(data, offset)
        self._record.add(Write(self._inode, offset, bytes(data)))

    def xTruncate(self, size: int) -> None:
        super().xTruncate(size)
        self._record.add(Truncate(self._inode, size))

    def xSync(self, flags: int) -> None:
        super().xSync(flags)
        self._record.add(Sync(self._inode))
        if self._syncs_directory:
            self._syncs_directory = False
            self._record.add(Sync(self._parent))


@contextmanager
def recorded_databases(record: Recorder) -> Iterator[None]:
    """Databases that are opened meanwhile are recorded."""
    vfs = RecordingVfs(record)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database, "_URI", f"{database._URI}&vfs={_NAME}")
        yield
    vfs.unregister()
