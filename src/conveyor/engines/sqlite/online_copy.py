"""A copy of the database as it is at one moment, while a server goes on writing to it.

The copy is made in another process than the server's, through SQLite's own locks: the server sees one more reader. It
never checkpoints, and holds its snapshot only as long as the copy takes.
"""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import apsw

from conveyor.engines.sqlite.database import NAME, own
from conveyor.engines.sqlite.soundness import open_error
from conveyor.errors import DataDirectoryInUse

_READER = ("PRAGMA query_only=1", "PRAGMA wal_autocheckpoint=0")
_EXISTING = apsw.SQLITE_OPEN_READWRITE


@contextmanager
def owned_if_free(directory: Path) -> Iterator[bool]:
    """Own the directory during the block, if no server does; whether a server does."""
    try:
        owner = own(directory)
    except DataDirectoryInUse:
        yield True
        return
    try:
        yield False
    finally:
        os.close(owner)


def snapshot(directory: Path, copy: Path) -> None:
    """Copy the database of a data directory to a file, which it replaces."""
    path = directory / NAME
    for old in (copy, copy.with_name(f"{copy.name}-wal"), copy.with_name(f"{copy.name}-shm")):
        old.unlink(missing_ok=True)
    # Readable by its owner only from the first byte.
    os.close(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        with closing(apsw.Connection(str(path), flags=_EXISTING)) as source:
            source.set_busy_timeout(10_000)
            for pragma in _READER:
                source.execute(pragma)
            with closing(apsw.Connection(str(copy))) as target:
                target.execute("PRAGMA journal_mode=OFF")
                # In one step: between two of them, the server could write, and the copy would begin again.
                with target.backup("main", source, "main") as backup:
                    backup.step(-1)
    except apsw.Error as error:
        with suppress(OSError):
            copy.unlink()
        raise open_error(path, error) from None
