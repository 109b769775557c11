"""The schema and its migrations: numbered SQL files, each applied once, in order. One process at a time applies all
that are missing, in one transaction.

A migration raises the version of the schema, and older code refuses it. An expansion adds what older code neither needs
nor minds: a table, an index, a column that may be null. It leaves the version as it is, so that the code before it runs
on the result, and a rollback restores no data.
"""

import re
from contextlib import suppress
from importlib import resources
from typing import Any

import asyncpg
import structlog

from conveyor.clock import Clock, SystemClock
from conveyor.engines.postgres.connections import connect, local_settings, said
from conveyor.engines.postgres.database import PostgresDatabase
from conveyor.engines.postgres.queries import parse
from conveyor.engines.postgres.url import PostgresPlace, parse_url
from conveyor.errors import EngineFailed

log = structlog.get_logger()

# How long others may wait behind a migration that waits for a lock, and how often it tries.
_LOCK_TIMEOUT = "2s"
_MAX_TRIES = 60
_PAUSE = 3.0

_FILE = re.compile(r"(\d{4})_\w+\.sql")
_VERSION = parse("SELECT coalesce(max(version), 0) FROM migrations")
_APPLIED = parse("SELECT coalesce(max(number), 0) FROM expansions")
_THERE = parse("SELECT to_regclass(:name)::text")


def _scripts(kind: str) -> list[str]:
    folder = resources.files(__package__).joinpath(kind)
    if not folder.is_dir():
        return []
    names = sorted(entry.name for entry in folder.iterdir() if _FILE.fullmatch(entry.name))
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1)), names
    return [folder.joinpath(name).read_text() for name in names]


MIGRATIONS = _scripts("migrations")
EXPANSIONS = _scripts("expansions")


async def migrate(url: str, clock: Clock | None = None) -> list[int]:
    """Create or update the schema. Returns the versions that were applied."""
    place = parse_url(url)
    connection = await connect(place)
    try:
        return await _persistently(connection, place, clock or SystemClock())
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise EngineFailed(f"Postgres at {place.shown} was not migrated: {said(error)}") from error
    finally:
        with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            await connection.close(timeout=5.0)


async def _persistently(connection: Any, place: PostgresPlace, clock: Clock) -> list[int]:
    """Retry while others lock a table: waiting for them would keep everybody else from it."""
    for _ in range(_MAX_TRIES - 1):
        try:
            return await _migrate(connection, place)
        except asyncpg.LockNotAvailableError:
            log.warning("a long transaction holds up the migration; retrying")
            await clock.sleep(_PAUSE)
    return await _migrate(connection, place)


async def _migrate(connection: Any, place: PostgresPlace) -> list[int]:
    """Apply what is missing in one transaction: behind a pooler, locks and settings last no longer than that."""
    async with connection.transaction():
        await connection.execute(local_settings(place))
        # Concurrent migrations wait here, then find nothing to do.
        await connection.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", f"migrate {place.schema}")
        await connection.execute(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT}'")
        # Check first: the user may lack the right to create schemas and have been given one.
        if not await connection.fetchval("SELECT true FROM pg_namespace WHERE nspname = $1", place.schema):
            await connection.execute(f"CREATE SCHEMA {place.schema}")
        await connection.execute(
            "CREATE TABLE IF NOT EXISTS migrations (version integer PRIMARY KEY, applied_at timestamptz DEFAULT now())"
        )
        version: int = await connection.fetchval(_VERSION.text)
        if version > len(MIGRATIONS):
            raise _newer(version)
        missing = range(version + 1, len(MIGRATIONS) + 1)
        for number in missing:
            await connection.execute(MIGRATIONS[number - 1])
            await connection.execute("INSERT INTO migrations (version) VALUES ($1)", number)
        await _expand(connection)
        return list(missing)


async def _expand(connection: Any) -> None:
    """Apply the expansions that are missing. Newer code may have applied more than this code knows."""
    if not EXPANSIONS:
        return
    await connection.execute("CREATE TABLE IF NOT EXISTS expansions (number integer PRIMARY KEY)")
    applied = {row["number"] for row in await connection.fetch("SELECT number FROM expansions")}
    for number, script in enumerate(EXPANSIONS, start=1):
        if number not in applied:
            await connection.execute(script)
            await connection.execute("INSERT INTO expansions (number) VALUES ($1)", number)


async def check_version(database: PostgresDatabase) -> None:
    """Raise EngineFailed unless the schema has the version that this Conveyor supports."""
    version = 0
    if await database.value(_THERE, {"name": "migrations"}) is not None:
        version = await database.value(_VERSION, {})
    if version > len(MIGRATIONS):
        raise _newer(version)
    if version == 0:
        raise EngineFailed("The Postgres schema has no tables of Conveyor. Run `conveyor migrate`.")
    if await _lacks_expansions(database):
        raise EngineFailed("The Postgres schema lacks what this Conveyor adds to it. Run `conveyor migrate`.")
    if version < len(MIGRATIONS):
        raise EngineFailed(
            f"The Postgres schema has version {version}, older than this Conveyor needs ({len(MIGRATIONS)}). "
            "Run `conveyor migrate`."
        )


async def _lacks_expansions(database: PostgresDatabase) -> bool:
    if not EXPANSIONS:
        return False
    if await database.value(_THERE, {"name": "expansions"}) is None:
        return True
    return bool(await database.value(_APPLIED, {}) < len(EXPANSIONS))


def _newer(version: int) -> EngineFailed:
    return EngineFailed(
        f"The Postgres schema has version {version}, newer than this Conveyor supports ({len(MIGRATIONS)}). "
        "Use the Conveyor version that wrote it, or a newer one, and run its `conveyor migrate`."
    )
