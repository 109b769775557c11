"""The connection pool: it retries transactions and translates the driver's errors.

A transaction that fails for a transient reason, such as a deadlock or a server restart, is retried from its start. If
the connection is lost during the commit, the outcome is unknown: the next attempt sees `again`, and recognizes the
changes of the lost attempt as its own.

Behind a pooler in transaction mode (connections.py), every statement is in a transaction that begins with the settings.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any, NoReturn, TypeVar

import asyncpg
import structlog

from conveyor.callers import is_in_role
from conveyor.clock import Clock
from conveyor.engines.postgres.connections import (
    CONNECT_SECONDS,
    create_pool,
    local_settings,
    may_share_sessions,
    said,
    unreachable,
)
from conveyor.engines.postgres.queries import Query
from conveyor.engines.postgres.url import PostgresPlace
from conveyor.errors import EngineFailed, EngineRefused
from conveyor.faults import crashpoint

log = structlog.get_logger()

T = TypeVar("T")

_ACQUIRE_SECONDS = 70.0
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 2.0
# How long a server may be unreachable before calls fail.
_PATIENCE = 30.0
_MAX_COLLISIONS = 50
# Roles get one connection in this many.
_LEFT_TO_ROLES = 4

# Two transactions conflicted, or a table was recreated: nothing was changed.
_COLLISIONS = (
    asyncpg.SerializationError,
    asyncpg.DeadlockDetectedError,
    asyncpg.InvalidCachedStatementError,
    asyncpg.OutdatedSchemaCacheError,
)
# The server stops, starts, fails over, or does not answer. TimeoutError is an OSError.
_AWAY = (
    OSError,
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    asyncpg.TooManyConnectionsError,
    asyncpg.ReadOnlySQLTransactionError,
)
# The values are at fault: they would be refused again. The driver's own errors of this kind are ValueErrors.
_REFUSALS = (
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.ProgramLimitExceededError,
    ValueError,
)


class _Away(Exception):
    """The connection was lost; `unsure` if the transaction may have been committed."""

    def __init__(self, cause: Exception, unsure: bool) -> None:
        self.cause = cause
        self.unsure = unsure


class PostgresSession:
    """A connection, by default inside a transaction."""

    def __init__(self, connection: Any, again: bool) -> None:
        self._connection = connection
        # An earlier attempt may have been committed.
        self.again = again

    async def rows(self, query: Query, values: Mapping[str, Any]) -> list[Any]:
        rows: list[Any] = await self.call("fetch", query, values)
        return rows

    async def row(self, query: Query, values: Mapping[str, Any]) -> Any:
        return await self.call("fetchrow", query, values)

    async def value(self, query: Query, values: Mapping[str, Any]) -> Any:
        return await self.call("fetchval", query, values)

    async def change(self, query: Query, values: Mapping[str, Any]) -> int:
        """Run a statement. Returns how many rows it changed."""
        return _changed(await self.call("execute", query, values))

    async def call(self, how: str, query: Query, values: Mapping[str, Any]) -> Any:
        return await getattr(self._connection, how)(query.text, *query.arguments(values))

    async def run(self, script: str) -> None:
        """Run statements without parameters."""
        await self._connection.execute(script)

    async def copy(self, table: str, columns: Sequence[str], records: Iterable[Sequence[Any]]) -> None:
        """Insert rows by COPY, the fastest way. An error inserts nothing."""
        await self._connection.copy_records_to_table(table, columns=columns, records=records)


Work = Callable[[PostgresSession], Awaitable[T]]


class PostgresDatabase:
    """Use `open_database` to create it."""

    def __init__(self, pool: Any, clock: Clock, place: PostgresPlace, shared: bool) -> None:
        self._pool = pool
        self._clock = clock
        # Whether each transaction may run in another server session.
        self.shares_sessions = shared
        self._begin = f"BEGIN ISOLATION LEVEL READ COMMITTED; {local_settings(place)}" if shared else "BEGIN"
        connections = place.connections
        # Some connections are reserved for roles, so that requests cannot starve them.
        self._for_requests = asyncio.Semaphore(max(1, connections - max(1, connections // _LEFT_TO_ROLES)))

    async def write(self, work: Work[T]) -> T:
        """Run `work` in a transaction. Returns once it is committed."""
        return await self._tried(lambda again: self._transaction(work, again))

    async def step(self, work: Work[T]) -> T:
        """Run `work`, which is one statement or several independent ones, without the round trips of a transaction. If
        the connection is lost, a statement may have been committed."""
        once = self._transaction if self.shares_sessions else self._alone
        return await self._tried(lambda again: once(work, again))

    async def change(self, query: Query, values: Mapping[str, Any]) -> int:
        """Run one idempotent statement. Returns how many rows it changed."""
        return _changed(await self._single("execute", query, values))

    async def rows(self, query: Query, values: Mapping[str, Any]) -> list[Any]:
        rows: list[Any] = await self._single("fetch", query, values)
        return rows

    async def row(self, query: Query, values: Mapping[str, Any]) -> Any:
        return await self._single("fetchrow", query, values)

    async def value(self, query: Query, values: Mapping[str, Any]) -> Any:
        return await self._single("fetchval", query, values)

    async def _single(self, how: str, query: Query, values: Mapping[str, Any]) -> Any:
        if self.shares_sessions:
            return await self.write(lambda db: db.call(how, query, values))
        arguments = query.arguments(values)

        async def once(_: bool) -> Any:
            async with self._connection() as connection:
                try:
                    return await getattr(connection, how)(query.text, *arguments)
                except Exception as error:
                    _raise(error, connection, False)

        return await self._tried(once)

    async def _alone(self, work: Work[T], again: bool) -> T:
        async with self._connection() as connection:
            try:
                crashpoint("postgres.commit.before")
                result = await work(PostgresSession(connection, again))
                crashpoint("postgres.commit.after")
            except Exception as error:
                _raise(error, connection, True)
            return result

    async def _transaction(self, work: Work[T], again: bool) -> T:
        async with self._connection() as connection:
            committing = False
            try:
                await connection.execute(self._begin)
                try:
                    result = await work(PostgresSession(connection, again))
                except BaseException:
                    with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                        await connection.execute("ROLLBACK")
                    raise
                crashpoint("postgres.commit.before")
                committing = True
                await connection.execute("COMMIT")
                crashpoint("postgres.commit.after")
            except Exception as error:
                _raise(error, connection, committing)
            return result

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        async with nullcontext() if is_in_role() else self._for_requests, self._acquired() as connection:
            yield connection

    @asynccontextmanager
    async def _acquired(self) -> AsyncIterator[Any]:
        try:
            connection = await self._pool.acquire(timeout=_ACQUIRE_SECONDS)
        except Exception as error:
            _raise(error, None, False)
        try:
            yield connection
        finally:
            # Discard the broken connection without hiding the error that broke it.
            with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                await self._pool.release(connection)

    async def _tried(self, once: Callable[[bool], Awaitable[T]]) -> T:
        again = False
        collisions = 0
        pause = _FIRST_PAUSE
        since: float | None = None
        while True:
            try:
                return await once(again)
            except _COLLISIONS as error:
                collisions += 1
                if collisions > _MAX_COLLISIONS:
                    raise _failed(error) from error
                await asyncio.sleep(0)
            except _Away as away:
                again = again or away.unsure
                now = self._clock.monotonic()
                since = now if since is None else since
                if now - since > _PATIENCE:
                    raise EngineFailed(f"Postgres does not answer: {said(away.cause)}") from away.cause
                log.warning("Postgres connection lost; retrying", error=said(away.cause), pause=pause)
                await self._clock.sleep(pause * (0.5 + self._clock.jitter() / 2))
                pause = min(pause * 2, _LONGEST_PAUSE)


def _raise(error: Exception, connection: Any, committing: bool) -> NoReturn:
    if isinstance(error, _COLLISIONS):
        raise error
    told = _told(error, connection, committing)
    if told is error:
        raise error
    raise told from error


def _told(error: Exception, connection: Any, committing: bool) -> Exception:
    """Translate the driver's errors for `_tried` and for the callers of the engine."""
    if isinstance(error, asyncpg.ReadOnlySQLTransactionError) and connection is not None:
        # A demoted server keeps its connections.
        connection.terminate()
    lost = isinstance(error, asyncpg.InterfaceError) and connection is not None and connection.is_closed()
    if isinstance(error, _AWAY) or (lost and not isinstance(error, asyncpg.DataError)):
        return _Away(error, committing)
    if isinstance(error, asyncpg.PostgresError | asyncpg.InterfaceError):
        return _failed(error)
    return error


def table_gone(error: EngineFailed) -> bool:
    """Whether a table is missing; another process may have dropped it just now."""
    return isinstance(error.__cause__, asyncpg.UndefinedTableError)


def already_there(error: EngineFailed) -> bool:
    """Whether a row with the same key already exists."""
    return isinstance(error.__cause__, asyncpg.UniqueViolationError)


def _failed(error: Exception) -> EngineFailed:
    failed = EngineRefused if isinstance(error, _REFUSALS) else EngineFailed
    return failed(f"Postgres failed: {said(error)}")


def _changed(status: str) -> int:
    """The count in a command status such as UPDATE 3."""
    return int(status.rpartition(" ")[2])


@asynccontextmanager
async def open_database(place: PostgresPlace, clock: Clock) -> AsyncIterator[PostgresDatabase]:
    """A pool of connections, closed at the end."""
    shared = await may_share_sessions(place)
    pool = create_pool(place, shared)
    try:
        await pool
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise unreachable(place, error) from error
    try:
        yield PostgresDatabase(pool, clock, place, shared)
    finally:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await pool.close()
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            pool.terminate()
