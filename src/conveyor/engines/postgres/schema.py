"""The schema and its migrations: numbered SQL files, each applied once, in order, by one process at a time."""

import re
from contextlib import suppress
from importlib import resources
from typing import Any

import asyncpg

from conveyor.engines.postgres.database import PostgresDatabase, connect
from conveyor.engines.postgres.queries import parse
from conveyor.engines.postgres.url import PostgresPlace, parse_url
from conveyor.errors import EngineFailed

_FILE = re.compile(r"(\d{4})_\w+\.sql")
_VERSION = parse("SELECT coalesce(max(version), 0) FROM migrations")
_THERE = parse("SELECT to_regclass(:name)::text")


def _migrations() -> list[str]:
    folder = resources.files(__package__).joinpath("migrations")
    names = sorted(entry.name for entry in folder.iterdir() if _FILE.fullmatch(entry.name))
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1)), names
    return [folder.joinpath(name).read_text() for name in names]


MIGRATIONS = _migrations()


async def migrate(url: str) -> list[int]:
    """Create or update the schema. Returns the versions that were applied."""
    place = parse_url(url)
    connection = await connect(place)
    try:
        return await _migrate(connection, place)
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise EngineFailed(f"Postgres at {place.shown} was not migrated: {error}") from error
    finally:
        with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            await connection.close(timeout=5.0)


async def _migrate(connection: Any, place: PostgresPlace) -> list[int]:
    # Concurrent migrations wait here, then find nothing to do.
    await connection.execute("SELECT pg_advisory_lock(hashtextextended($1, 0))", f"migrate {place.schema}")
    # Check first: the user may lack the right to create schemas and have been given one.
    if not await connection.fetchval("SELECT true FROM pg_namespace WHERE nspname = $1", place.schema):
        await connection.execute(f"CREATE SCHEMA {place.schema}")
    await connection.execute(
        "CREATE TABLE IF NOT EXISTS migrations (version integer PRIMARY KEY, applied_at timestamptz DEFAULT now())"
    )
    version: int = await connection.fetchval(_VERSION.text)
    if version > len(MIGRATIONS):
        raise _newer(version)
    applied = []
    for number, script in enumerate(MIGRATIONS[version:], start=version + 1):
        async with connection.transaction():
            await connection.execute(script)
            await connection.execute("INSERT INTO migrations (version) VALUES ($1)", number)
        applied.append(number)
    return applied


async def check_version(database: PostgresDatabase) -> None:
    """Raise EngineFailed unless the schema has the version that this Conveyor supports."""
    version = 0
    if await database.value(_THERE, {"name": "migrations"}) is not None:
        version = await database.value(_VERSION, {})
    if version > len(MIGRATIONS):
        raise _newer(version)
    if version == 0:
        raise EngineFailed("The Postgres schema has no tables of Conveyor. Run `conveyor migrate`.")
    if version < len(MIGRATIONS):
        raise EngineFailed(
            f"The Postgres schema has version {version}, older than this Conveyor needs ({len(MIGRATIONS)}). "
            "Run `conveyor migrate`."
        )


def _newer(version: int) -> EngineFailed:
    return EngineFailed(
        f"The Postgres schema has version {version}, newer than this Conveyor supports ({len(MIGRATIONS)}). "
        "Use the Conveyor version that wrote it, or a newer one, and run its `conveyor migrate`."
    )
