"""Whether a database file is one that Conveyor can use. Each problem has an error that says what to do: a new, empty
installation in the place of a damaged one would hide the loss."""

from pathlib import Path

import apsw

from conveyor.disk import disk_problem
from conveyor.errors import DatabaseUnusable, EngineFailed

# Tables that every version of the schema has.
_OWN_TABLES = frozenset({"jobs", "runs", "tasks", "messages"})
_RESTORE = "Restore the data directory from a backup, or move it away to begin anew."


def check_present(path: Path, blobs: Path) -> None:
    """Raise DatabaseUnusable if the database is missing or empty and there are blobs: their rows are lost."""
    if path.exists() and path.stat().st_size > 0:
        return
    if any(file.is_file() for folder in ("results", "uploads", ".logs") for file in (blobs / folder).rglob("*")):
        state = "empty" if path.exists() else "missing"
        raise DatabaseUnusable(f"{path} is {state}, but {blobs} holds lists or results. {_RESTORE}")


def check_schema(connection: apsw.Connection, version: int) -> None:
    """Raise DatabaseUnusable for the database of another program."""
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if tables and (version == 0 or not tables >= _OWN_TABLES):
        raise DatabaseUnusable(
            f"{connection.filename} is not a database of Conveyor. Choose another directory with --data. {_RESTORE}"
        )


def damaged(path: Path, error: apsw.Error) -> DatabaseUnusable:
    """The error for a file with damaged pages."""
    return DatabaseUnusable(f"{path} is damaged: {error}. {_RESTORE}")


def open_error(path: Path, error: apsw.Error) -> Exception:
    """The error for a database that cannot be opened. One that is not the file's fault stays what it is."""
    if isinstance(error, (apsw.NotADBError, apsw.CorruptError)):
        return damaged(path, error)
    if isinstance(error, (apsw.CantOpenError, apsw.ReadOnlyError, apsw.IOError, apsw.FullError)):
        problem = disk_problem(path.parent)
        return problem or EngineFailed(f"{path} cannot be opened: {error}. Check its owner and permissions.")
    return error
