"""One SQLite file: one writer thread with group commit, a few short readers for requests and for roles, and an owner.

Writes that arrive while a commit is under way share the next one, so that one fsync serves them all; each stands in
a savepoint of its own and fails alone. Statements take a whole batch as one JSON value: a step per row would hand
the interpreter lock back and forth per row, which under load costs a hundred times the insert.
"""

import asyncio
import fcntl
import os
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import apsw
import structlog

from conveyor.callers import in_role
from conveyor.errors import DataDirectoryInUse, EngineFailed
from conveyor.faults import crashpoint

log = structlog.get_logger()

T = TypeVar("T")
Work = Callable[[apsw.Connection], T]

_MOST_IN_ONE_COMMIT = 256
# For requests, and as many for roles.
_READERS = 2
_SAFE_SQLITE = (3, 51, 3)

WRITER_PRAGMAS = (
    "PRAGMA journal_mode=WAL",
    "PRAGMA synchronous=FULL",
    # In pages: 64 MiB of log, in which a page of an index that changes with every batch is written back once.
    "PRAGMA wal_autocheckpoint=16000",
    "PRAGMA journal_size_limit=67108864",
    "PRAGMA cache_size=-2560",
    "PRAGMA temp_store=MEMORY",
)
# Only the writer may checkpoint.
_READER_PRAGMAS = ("PRAGMA query_only=1", "PRAGMA wal_autocheckpoint=0", "PRAGMA cache_size=-1024")


def sql_file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text()


def named_queries(name: str) -> dict[str, str]:
    """The statements of a .sql file, by the name in the `-- name:` line above each."""
    queries: dict[str, str] = {}
    for part in sql_file(name).split("-- name:")[1:]:
        title, _, text = part.partition("\n")
        queries[title.strip()] = text.strip().rstrip(";")
    return queries


# Each entry brings a database of the version before it up by one; the first makes it from nothing.
MIGRATIONS: tuple[str, ...] = (
    sql_file("schema.sql"),
    sql_file("migrations/0002_ingest_sums.sql"),
    sql_file("migrations/0003_run_numbers.sql"),
    sql_file("migrations/0004_upload_references.sql"),
    sql_file("migrations/0005_documents_and_outbox.sql"),
    sql_file("migrations/0006_run_codes.sql"),
)


class _Write:
    """A unit of work on its way through the writer."""

    __slots__ = ("error", "future", "result", "work")

    def __init__(self, work: Work[Any], future: "asyncio.Future[Any]") -> None:
        self.work = work
        self.future = future
        self.result: Any = None
        self.error: BaseException | None = None


class SqliteDatabase:
    """Made by `open_database`."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._writer = self._connect(WRITER_PRAGMAS)
        self._thread = threading.Thread(target=self._write_loop, name="sqlite-writer", daemon=True)
        self._local = threading.local()
        # Apart, so that no request, however long it reads, has a role wait.
        self._request_readers = ThreadPoolExecutor(_READERS, thread_name_prefix="sqlite-reader")
        self._role_readers = ThreadPoolExecutor(_READERS, thread_name_prefix="sqlite-role-reader")
        self._closed = False

    def _connect(self, pragmas: tuple[str, ...]) -> apsw.Connection:
        connection = apsw.Connection(self._path, statementcachesize=256)
        connection.set_busy_timeout(10_000)
        for pragma in pragmas:
            connection.execute(pragma)
        return connection

    def start(self) -> None:
        _migrate(self._writer)
        self._thread.start()

    async def write(self, work: Work[T]) -> T:
        """Run `work` in a transaction; returns once it is durable."""
        if self._closed:
            raise EngineFailed("The database is closed.")
        entry = _Write(work, self._loop.create_future())
        self._inbox.put(entry)
        return await entry.future  # type: ignore[no-any-return]  # one inbox carries results of every type

    async def read(self, work: Work[T]) -> T:
        """Run `work` on a reader's connection, which sees every write that has returned."""
        if self._closed:
            raise EngineFailed("The database is closed.")
        readers = self._role_readers if in_role() else self._request_readers
        return await self._loop.run_in_executor(readers, self._read, work)

    async def rows(self, query: str, values: dict[str, Any]) -> list[Any]:
        """Read all rows of one query."""
        return await self.read(lambda db: db.execute(query, values).fetchall())

    async def row(self, query: str, values: dict[str, Any]) -> Any:
        """Read the first row of one query, or None."""
        return await self.read(lambda db: db.execute(query, values).fetchone())

    def glance(self, query: str, values: dict[str, Any]) -> Any:
        """Read one row by its key, or None, at once and on the loop's own connection: it takes some twenty
        microseconds, where a thread that wants the interpreter lock of a busy process waits for milliseconds. Not for
        a query that has to look at more."""
        if self._closed:
            raise EngineFailed("The database is closed.")
        return self._read(lambda db: db.execute(query, values).fetchone())

    async def change(self, query: str, values: dict[str, Any]) -> int:
        """Run one statement that writes; returns how many rows it changed."""

        def work(db: apsw.Connection) -> int:
            db.execute(query, values)
            return int(db.changes())

        return await self.write(work)

    def _read(self, work: Work[T]) -> T:
        connection: apsw.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._connect(_READER_PRAGMAS)
        try:
            return work(connection)
        except apsw.Error as error:
            raise _failed(error) from error

    def _write_loop(self) -> None:
        while True:
            first = self._inbox.get()
            if first is None:
                return
            batch, stop = self._gather(first)
            self._commit(batch)
            self._loop.call_soon_threadsafe(_resolve, batch)
            if stop:
                return

    def _gather(self, first: _Write) -> tuple[list[_Write], bool]:
        batch = [first]
        while len(batch) < _MOST_IN_ONE_COMMIT:
            try:
                entry = self._inbox.get_nowait()
            except queue.Empty:
                break
            if entry is None:
                return batch, True
            batch.append(entry)
        return batch, False

    def _commit(self, batch: list[_Write]) -> None:
        try:
            self._writer.execute("BEGIN IMMEDIATE")
            if len(batch) == 1:
                self._run_alone(batch[0])
            else:
                for entry in batch:
                    self._run(entry)
            crashpoint("sqlite.commit.before")
            self._writer.execute("COMMIT")
            crashpoint("sqlite.commit.after")
        except BaseException as error:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
            for entry in batch:
                entry.error = EngineFailed(f"The database did not commit: {error}")

    def _run_alone(self, entry: _Write) -> None:
        """Without a savepoint, which keeps a copy of every page that changes: nobody else is in the transaction."""
        try:
            entry.result = entry.work(self._writer)
        except BaseException as error:
            entry.error = _failed(error) if isinstance(error, apsw.Error) else error
            # Some failures have rolled it back already.
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
            self._writer.execute("BEGIN IMMEDIATE")

    def _run(self, entry: _Write) -> None:
        self._writer.execute("SAVEPOINT work")
        try:
            entry.result = entry.work(self._writer)
            self._writer.execute("RELEASE work")
        except BaseException as error:
            entry.error = _failed(error) if isinstance(error, apsw.Error) else error
            self._writer.execute("ROLLBACK TO work")
            self._writer.execute("RELEASE work")

    async def close(self) -> None:
        self._closed = True
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)
        for readers in (self._request_readers, self._role_readers):
            await asyncio.to_thread(readers.shutdown)
        self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._writer.close()


def _failed(error: apsw.Error) -> EngineFailed:
    """What SQLite says, as the error that callers of every engine know and try again after."""
    return EngineFailed(f"The database failed: {error}")


def _resolve(batch: list[_Write]) -> None:
    for entry in batch:
        if entry.future.cancelled():
            continue
        if entry.error is not None:
            entry.future.set_exception(entry.error)
        else:
            entry.future.set_result(entry.result)


def _migrate(connection: apsw.Connection) -> None:
    version = connection.pragma("user_version")
    if version > len(MIGRATIONS):
        raise EngineFailed(
            f"The database is of version {version}, newer than this Conveyor knows ({len(MIGRATIONS)}). "
            "Use the Conveyor that made it, or a newer one."
        )
    for number, script in enumerate(MIGRATIONS[version:], start=version + 1):
        with connection:
            connection.execute(script)
            connection.pragma("user_version", number)


def _own(directory: Path) -> int:
    """Lock a file beside the database, never the database: opening that by path would drop SQLite's own locks."""
    descriptor = os.open(directory / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise DataDirectoryInUse(
            f"Another Conveyor process owns {directory}. Stop it, or choose another directory with --data."
        ) from None
    return descriptor


@asynccontextmanager
async def open_database(directory: Path) -> AsyncIterator[SqliteDatabase]:
    """Own the directory, open its database and bring it up to date; closed and disowned at the end."""
    version = tuple(int(part) for part in apsw.sqlite_lib_version().split("."))
    if version < _SAFE_SQLITE:
        log.warning("this SQLite can corrupt a database under load; install a newer apsw", version=version)
    owner = _own(directory)
    try:
        database = SqliteDatabase(directory / "conveyor.db")
        database.start()
        try:
            yield database
        finally:
            await database.close()
    finally:
        os.close(owner)
