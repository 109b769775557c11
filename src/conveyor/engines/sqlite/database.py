"""One SQLite file with one owning process: one writer thread with group commit, and separate reader threads for
requests and for roles.

Writes that arrive during a commit share the next commit and its fsync. Each write has its own savepoint and fails
alone; writes of one kind may share their statements, too. Statements take a whole batch as one JSON value: one step per
row would hand over the interpreter lock per row, which under load costs a hundred times the insert.
"""

import asyncio
import fcntl
import os
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import apsw
import structlog

from conveyor.callers import is_in_role
from conveyor.disk import disk_problem, full, write_error
from conveyor.engines.sqlite.shrinking import (
    IDLE_SECONDS,
    PAUSE_SECONDS,
    is_shrinkable,
    make_shrinkable,
    make_shrinkable_if_small,
    shrink,
)
from conveyor.engines.sqlite.soundness import check_schema, damaged, open_error
from conveyor.errors import DatabaseUnusable, DataDirectoryInUse, EngineFailed, EngineRefused
from conveyor.faults import crashpoint

log = structlog.get_logger()

T = TypeVar("T")
V = TypeVar("V")
Work = Callable[[apsw.Connection], T]
# Does what several callers ask for, and returns the result of each.
JointWork = Callable[[apsw.Connection, list[V]], list[T]]

# The values are at fault: they would be refused again.
_REFUSALS = (apsw.ConstraintError, apsw.MismatchError, apsw.TooBigError)
_MAX_IN_ONE_COMMIT = 256
# Reader threads for requests; as many for roles.
_READERS = 2
_SAFE_SQLITE = (3, 51, 3)
NAME = "conveyor.db"
_LOCK = "owner.lock"
# SQLite makes the file with the mode of the lock, 0600, and its log and index with that of the file.
_URI = "file:{path}?modeof={lock}"
_FLAGS = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE | apsw.SQLITE_OPEN_URI

WRITER_PRAGMAS = (
    # Before anything is written: it is a property of the file.
    "PRAGMA auto_vacuum=INCREMENTAL",
    "PRAGMA journal_mode=WAL",
    "PRAGMA synchronous=FULL",
    # In pages: 64 MiB of log. An index page that changes with every batch is written back once per checkpoint.
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


# Entry N migrates a database from version N - 1 to N; the first creates the schema.
MIGRATIONS: tuple[str, ...] = (
    sql_file("schema.sql"),
    sql_file("migrations/0002_ingest_sums.sql"),
    sql_file("migrations/0003_run_numbers.sql"),
    sql_file("migrations/0004_upload_references.sql"),
    sql_file("migrations/0005_documents_and_outbox.sql"),
    sql_file("migrations/0006_run_codes.sql"),
    sql_file("migrations/0007_expiry_after_the_end.sql"),
    sql_file("migrations/0008_task_store.sql"),
    sql_file("migrations/0009_prior_outcomes.sql"),
    sql_file("migrations/0010_job_buckets.sql"),
    sql_file("migrations/0011_slabs.sql"),
)

# Entry N adds to the schema what older code neither needs nor minds: a table, an index, a column that may be null. It
# leaves the version as it is, so that the code before it runs on the result, and a rollback restores no data.
EXPANSIONS: tuple[str, ...] = (sql_file("expansions/0001_unchanged.sql"),)


class _Write:
    """A call in the writer's queue: a work, or an item of a joint work."""

    __slots__ = ("error", "future", "item", "joint", "result", "work")

    def __init__(
        self,
        future: "asyncio.Future[Any]",
        work: Work[Any] | None = None,
        joint: JointWork[Any, Any] | None = None,
        item: Any = None,
    ) -> None:
        self.work = work
        self.joint = joint
        self.item = item
        self.future = future
        self.result: Any = None
        self.error: BaseException | None = None


class SqliteDatabase:
    """Use `open_database` to create it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._uri = _URI.format(path=quote(str(path)), lock=quote(str(path.with_name(_LOCK))))
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._writer = self._connect(WRITER_PRAGMAS)
        self._thread = threading.Thread(target=self._write_loop, name="sqlite-writer", daemon=True)
        self._local = threading.local()
        # Separate pools, so that a long read of a request does not delay a role.
        self._request_readers = ThreadPoolExecutor(_READERS, thread_name_prefix="sqlite-reader")
        self._role_readers = ThreadPoolExecutor(_READERS, thread_name_prefix="sqlite-role-reader")
        self._closed = False
        # Whether there may be free pages to give back.
        self._shrinks = self._is_shrinkable = False

    def _connect(self, pragmas: tuple[str, ...]) -> apsw.Connection:
        connection = apsw.Connection(self._uri, flags=_FLAGS, statementcachesize=256)
        connection.set_busy_timeout(10_000)
        for pragma in pragmas:
            connection.execute(pragma)
        return connection

    def start(self) -> None:
        _migrate(self._writer)
        make_shrinkable_if_small(self._writer)
        self._shrinks = self._is_shrinkable = is_shrinkable(self._writer)
        self._thread.start()

    async def write(self, work: Work[T]) -> T:
        """Run `work` in a transaction; returns once it is durable."""
        if self._closed:
            raise EngineFailed("The database is closed.")
        entry = _Write(self._loop.create_future(), work)
        self._inbox.put(entry)
        return await entry.future  # type: ignore[no-any-return]  # one inbox carries results of every type

    async def write_jointly(self, joint: JointWork[V, T], item: V) -> T:
        """Run `joint` with this item and those of others that wait with the same function, in one transaction; returns
        the result for this item once it is durable. If it fails for several, it runs for each alone."""
        if self._closed:
            raise EngineFailed("The database is closed.")
        entry = _Write(self._loop.create_future(), joint=joint, item=item)
        self._inbox.put(entry)
        return await entry.future  # type: ignore[no-any-return]  # as above

    async def read(self, work: Work[T]) -> T:
        """Run `work` on a reader's connection, which sees every write that has returned."""
        if self._closed:
            raise EngineFailed("The database is closed.")
        readers = self._role_readers if is_in_role() else self._request_readers
        return await self._loop.run_in_executor(readers, self._read, work)

    async def rows(self, query: str, values: dict[str, Any]) -> list[Any]:
        """Read all rows of one query."""
        return await self.read(lambda db: db.execute(query, values).fetchall())

    async def row(self, query: str, values: dict[str, Any]) -> Any:
        """Read the first row of one query, or None."""
        return await self.read(lambda db: db.execute(query, values).fetchone())

    def read_one(self, query: str, values: dict[str, Any]) -> Any:
        """Read one row by its key, or None, synchronously on the event loop's own connection. It takes about twenty
        microseconds; in a busy process, a thread waits milliseconds for the interpreter lock. Only for point reads."""
        if self._closed:
            raise EngineFailed("The database is closed.")
        return self._read(lambda db: db.execute(query, values).fetchone())

    def read_few(self, query: str, values: dict[str, Any]) -> list[Any]:
        """Read a few neighbouring rows in the same way."""
        if self._closed:
            raise EngineFailed("The database is closed.")
        return self._read(lambda db: db.execute(query, values).fetchall())

    async def change(self, query: str, values: dict[str, Any]) -> int:
        """Run one writing statement. Returns how many rows it changed."""

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
            raise self._failed(error) from error

    def _write_loop(self) -> None:
        while self._write_next(self._next()):
            self._shrinks = self._is_shrinkable

    def _next(self) -> _Write | None:
        """The next write. While none comes, the file shrinks."""
        pause = IDLE_SECONDS
        while self._shrinks:
            try:
                return self._inbox.get(timeout=pause)
            except queue.Empty:
                pause = PAUSE_SECONDS
            try:
                self._shrinks = shrink(self._writer)
            except apsw.Error as error:
                # The next write tries again.
                self._shrinks = False
                log.warning("the database did not shrink", error=str(error))
        return self._inbox.get()

    def _write_next(self, first: _Write | None) -> bool:
        """Commit a write and those that have arrived meanwhile. False at the end. A method of its own, so that the
        thread keeps no batch alive, with all rows of it, while it waits for the next."""
        if first is None:
            return False
        batch, stop = self._gather(first)
        self._commit(batch)
        self._loop.call_soon_threadsafe(_resolve, batch)
        return not stop

    def _gather(self, first: _Write) -> tuple[list[_Write], bool]:
        batch = [first]
        while len(batch) < _MAX_IN_ONE_COMMIT:
            try:
                entry = self._inbox.get_nowait()
            except queue.Empty:
                break
            if entry is None:
                return batch, True
            batch.append(entry)
        return batch, False

    def _commit(self, batch: list[_Write]) -> None:
        units = _units(batch)
        try:
            self._writer.execute("BEGIN IMMEDIATE")
            if len(units) == 1:
                self._run_alone(units[0])
            else:
                for unit in units:
                    self._run(unit)
            crashpoint("sqlite.commit.before")
            self._writer.execute("COMMIT")
            crashpoint("sqlite.commit.after")
        except BaseException as error:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
            for entry in batch:
                entry.error = (
                    self._failed(error)
                    if isinstance(error, apsw.Error)
                    else EngineFailed(f"The database did not commit: {error}")
                )

    def _run_alone(self, unit: list[_Write]) -> None:
        """Run the only unit of a transaction without a savepoint, which would copy every page that changes."""
        try:
            _work_on(unit, self._writer)
        except BaseException as error:
            # SQLite has already rolled back after some errors.
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
            self._writer.execute("BEGIN IMMEDIATE")
            self._settle(unit, error)

    def _run(self, unit: list[_Write]) -> None:
        self._writer.execute("SAVEPOINT work")
        try:
            _work_on(unit, self._writer)
            self._writer.execute("RELEASE work")
        except BaseException as error:
            self._writer.execute("ROLLBACK TO work")
            self._writer.execute("RELEASE work")
            self._settle(unit, error)

    def _settle(self, unit: list[_Write], error: BaseException) -> None:
        """A unit failed, and nothing of it is left: it fails, or each of its calls runs by itself."""
        if len(unit) > 1:
            for entry in unit:
                self._run([entry])
        else:
            unit[0].error = self._failed(error) if isinstance(error, apsw.Error) else error

    def _failed(self, error: apsw.Error) -> EngineFailed:
        """The SQLite error as the retryable error that all engines raise. A disk that cannot be written is named."""
        directory = self._path.parent
        if isinstance(error, apsw.FullError):
            return full(directory)
        if isinstance(error, (apsw.CorruptError, apsw.NotADBError)):
            return damaged(self._path, error)
        if isinstance(error, (apsw.ReadOnlyError, apsw.IOError, apsw.CantOpenError)):
            problem = disk_problem(directory)
            if problem is not None:
                return problem
        failed = EngineRefused if isinstance(error, _REFUSALS) else EngineFailed
        return failed(f"The database failed: {error}")

    async def close(self) -> None:
        self._closed = True
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)
        for readers in (self._request_readers, self._role_readers):
            await asyncio.to_thread(readers.shutdown)
        try:
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._writer.close()
        except apsw.Error as error:
            # Nothing is lost: the next owner reads the log.
            log.warning("database not checkpointed at its end", error=str(error))


def _units(batch: list[_Write]) -> list[list[_Write]]:
    """The calls that run together, in the order of the first of each. They are concurrent, so that any order is
    right."""
    units: list[list[_Write]] = []
    joint: dict[JointWork[Any, Any], list[_Write]] = {}
    for entry in batch:
        if entry.joint is not None and entry.joint in joint:
            joint[entry.joint].append(entry)
            continue
        units.append([entry])
        if entry.joint is not None:
            joint[entry.joint] = units[-1]
    return units


def _work_on(unit: list[_Write], db: apsw.Connection) -> None:
    first = unit[0]
    if first.joint is None:
        assert first.work is not None
        first.result = first.work(db)
        return
    results = first.joint(db, [entry.item for entry in unit])
    for entry, result in zip(unit, results, strict=True):
        entry.result = result


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
    check_schema(connection, version)
    if version > len(MIGRATIONS):
        raise DatabaseUnusable(
            f"The database has schema version {version}, newer than this Conveyor supports ({len(MIGRATIONS)}). "
            "Use the Conveyor version that wrote it, or a newer one."
        )
    for number, script in enumerate(MIGRATIONS[version:], start=version + 1):
        with connection:
            connection.execute(script)
            connection.pragma("user_version", number)
    _expand(connection)


def _expand(connection: apsw.Connection) -> None:
    """Apply the expansions that are missing. Newer code may have applied more than this code knows."""
    if not EXPANSIONS:
        return
    with connection:
        connection.execute("CREATE TABLE IF NOT EXISTS expansions (number INTEGER PRIMARY KEY)")
        applied = {number for (number,) in connection.execute("SELECT number FROM expansions")}
        for number, script in enumerate(EXPANSIONS, start=1):
            if number not in applied:
                connection.execute(script)
                connection.execute("INSERT INTO expansions VALUES (?)", (number,))


def own(directory: Path) -> int:
    """Lock a file beside the database, never the database itself: opening it by path would drop SQLite's own locks."""
    try:
        descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if (problem := write_error(error, directory)) is not None:
            raise problem from error
        raise
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
    """Lock the directory, open its database and migrate it; close and unlock at the end."""
    version = tuple(int(part) for part in apsw.sqlite_lib_version().split("."))
    if version < _SAFE_SQLITE:
        log.warning("this SQLite can corrupt a database under load; install a newer apsw", version=version)
    owner = own(directory)
    try:
        path = directory / NAME
        try:
            database = SqliteDatabase(path)
            database.start()
        except apsw.Error as error:
            raise open_error(path, error) from None
        try:
            yield database
        finally:
            await database.close()
    finally:
        os.close(owner)


def rewrite_database(directory: Path) -> bool:
    """Rewrite a database of an earlier version, so that it shrinks after deletes. False if it needs none, or there is
    none. Needs as much disk space as the database has, and nobody else who uses the directory."""
    path = directory / NAME
    if not path.exists():
        return False
    with closing(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)) as connection:
        if is_shrinkable(connection):
            return False
    owner = own(directory)
    try:
        with closing(apsw.Connection(str(path))) as connection:
            return make_shrinkable(connection)
    finally:
        os.close(owner)
