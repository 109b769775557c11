"""The checks of `conveyor doctor` for Postgres: the name of each check, and what to fix, or None."""

from collections.abc import Awaitable, Callable
from contextlib import suppress

from conveyor.clock import Clock
from conveyor.engines.postgres.access import SQL as ACCESS
from conveyor.engines.postgres.connections import is_pooled, shares_a_session
from conveyor.engines.postgres.database import PostgresDatabase, PostgresSession
from conveyor.engines.postgres.queries import parse
from conveyor.engines.postgres.schema import check_version
from conveyor.engines.postgres.url import PostgresPlace
from conveyor.errors import EngineFailed

Finding = tuple[str, str | None]

_OLDEST = 140_000
_MAX_SKEW = 1.0
_LONGEST_TRANSACTION = 600.0
_MAX_DEAD = 100_000

_VERSION = parse("SELECT current_setting('server_version_num')::integer, current_setting('server_version')")
_ENCODING = parse("SELECT current_setting('server_encoding')")
_SETTINGS = parse(
    "SELECT current_setting('fsync') = 'on' AND current_setting('full_page_writes') = 'on' "
    "AND current_setting('synchronous_commit') <> 'off', current_setting('autovacuum') = 'on'"
)
_MAY_CREATE = parse("SELECT has_schema_privilege(current_schema(), 'CREATE')")
_NOW = parse("SELECT extract(epoch FROM clock_timestamp())::double precision")
_OLD_SNAPSHOTS = parse(
    "SELECT coalesce(max(extract(epoch FROM now() - xact_start)), 0)::double precision FROM pg_stat_activity "
    "WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid() AND datname = current_database()"
)
_DEAD = parse("SELECT coalesce(pg_stat_get_dead_tuples(to_regclass('messages')), 0)")
_CONNECTIONS = parse(
    "SELECT count(*), current_setting('max_connections')::integer - current_setting('superuser_reserved_connections')"
    "::integer FROM pg_stat_activity WHERE backend_type = 'client backend'"
)


class _Undo(Exception):
    """Rolls a probe back."""


async def run_checks(database: PostgresDatabase, clock: Clock, place: PostgresPlace) -> list[Finding]:
    """Run the checks in order. A check that fails to run reports its error."""
    checks: list[tuple[str, Callable[[], Awaitable[str | None]]]] = [
        ("reachable", lambda: _reachable(database)),
        ("server version", lambda: _server_version(database)),
        ("schema version", lambda: _schema_version(database)),
        ("encoding", lambda: _encoding(database)),
        ("write and conditional write", lambda: _writes(database)),
        ("tables can be made", lambda: _may_create(database)),
        ("durable commits", lambda: _durable(database)),
        ("autovacuum", lambda: _autovacuum(database)),
        ("clock", lambda: _skew(database, clock)),
        ("pooler", lambda: _pooler(database, place)),
        ("connections", lambda: _connections(database, place)),
        ("old transactions", lambda: _old_transactions(database)),
        ("dead messages", lambda: _dead(database)),
    ]
    return [(name, await _tried(check)) for name, check in checks]


async def _tried(check: Callable[[], Awaitable[str | None]]) -> str | None:
    try:
        return await check()
    except EngineFailed as error:
        return error.message


async def _reachable(database: PostgresDatabase) -> str | None:
    await database.value(_NOW, {})
    return None


async def _server_version(database: PostgresDatabase) -> str | None:
    number, shown = await database.row(_VERSION, {})
    return None if number >= _OLDEST else f"Postgres {shown} is too old: use 14 or newer."


async def _schema_version(database: PostgresDatabase) -> str | None:
    await check_version(database)
    return None


async def _encoding(database: PostgresDatabase) -> str | None:
    encoding = await database.value(_ENCODING, {})
    return None if encoding == "UTF8" else f"The database has the encoding {encoding}. Create one with ENCODING 'UTF8'."


async def _writes(database: PostgresDatabase) -> str | None:
    """Write a row, then try an update whose condition holds, and one whose condition does not."""
    values = {
        "tenant": "",
        "route": "doctor",
        "key": "doctor",
        "fingerprint": "",
        "subject": "",
        "lease_until": 0.0,
        "expires_at": 0.0,
        "now": -1.0,
        "slack": 0.0,
        "status": 200,
        "body": b"",
    }
    changed: list[int] = []

    async def work(db: PostgresSession) -> None:
        changed[:] = [await db.change(ACCESS[query], values) for query in ("claim", "answer", "answer")]
        raise _Undo

    with suppress(_Undo):
        await database.write(work)
    return None if changed == [1, 1, 0] else f"A conditional write failed: {changed} rows instead of [1, 1, 0]."


async def _may_create(database: PostgresDatabase) -> str | None:
    if await database.value(_MAY_CREATE, {}):
        return None
    return "Large runs need tables of their own: GRANT CREATE ON SCHEMA … to the user of the URL."


async def _durable(database: PostgresDatabase) -> str | None:
    durable, _ = await database.row(_SETTINGS, {})
    return None if durable else "Committed data may be lost: turn on fsync, full_page_writes and synchronous_commit."


async def _autovacuum(database: PostgresDatabase) -> str | None:
    _, on = await database.row(_SETTINGS, {})
    return None if on else "Dead rows are never removed: turn on autovacuum."


async def _skew(database: PostgresDatabase, clock: Clock) -> str | None:
    before = clock.now()
    there = await database.value(_NOW, {})
    after = clock.now()
    skew = max(before - there, there - after, 0.0)
    if skew <= _MAX_SKEW:
        return None
    return f"The server's clock and this machine's are {skew:.1f} s apart: synchronize both with NTP."


async def _pooler(database: PostgresDatabase, place: PostgresPlace) -> str | None:
    if place.direct is not None and await is_pooled(place._replace(dsn=place.direct)):
        return "direct= in the URL leads to a pooler too: give the address of the server itself."
    if not database.shares_sessions:
        if place.pooler is not None and await shares_a_session(place):
            return (
                "The pooler is in transaction mode: use pooler=transaction in the URL, or set its pool_mode to session."
            )
        return None
    if place.pooler is not None or place.direct is not None:
        return None
    return (
        "A connection pooler in an unknown mode answers: statements take more round trips, and receivers poll for "
        "messages. Use pooler=session in the URL if it is in session mode, else direct=HOST:PORT of the server itself, "
        "or pooler=transaction."
    )


async def _connections(database: PostgresDatabase, place: PostgresPlace) -> str | None:
    if database.shares_sessions:
        # The pooler's own limit counts, and it does not say.
        return None
    used, allowed = await database.row(_CONNECTIONS, {})
    if allowed - used >= place.connections:
        return None
    return (
        f"{used} of {allowed} connections are in use and this process may open {place.connections}: raise "
        "max_connections, or lower connections= in the URL."
    )


async def _old_transactions(database: PostgresDatabase) -> str | None:
    seconds = await database.value(_OLD_SNAPSHOTS, {})
    if seconds <= _LONGEST_TRANSACTION:
        return None
    return (
        f"A transaction has been open for {seconds / 60:.0f} min and blocks vacuum: end it, and set "
        "idle_in_transaction_session_timeout."
    )


async def _dead(database: PostgresDatabase) -> str | None:
    dead = await database.value(_DEAD, {})
    if dead <= _MAX_DEAD:
        return None
    return f"{dead} dead rows in the table `messages`: check for old transactions, and that autovacuum keeps up."
