"""Connections to Postgres: their settings and password, and whether a pooler shares server sessions among them.

Every statement uses an index. The server caches plans, some of them made while a table was empty, so all sessions
disable sequential scans and similar plans: a cached plan that reads a whole table would never get better.

A pooler such as PgBouncer refuses settings at startup. In session mode each connection has a server session of its own,
and sets them once. In transaction mode each transaction may run in another server session, which other clients use
too: settings hold for one transaction, statements have no names, and nothing can listen. Whatever works in transaction
mode works in session mode, so an unknown pooler is taken for one in transaction mode.
"""

from typing import Any

import asyncpg

from conveyor.engines.postgres.url import PostgresPlace
from conveyor.errors import EngineFailed, InvalidSetting

CONNECT_SECONDS = 10.0
_COMMAND_SECONDS = 60.0
_PROBES = 5

_SETTINGS = {
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_seqscan": "off",
    "enable_sort": "off",
    "idle_in_transaction_session_timeout": "60s",
    "jit": "off",
    "standard_conforming_strings": "on",
}


async def connect(place: PostgresPlace) -> Any:
    """A connection outside the pool, past the pooler if the URL says how, without settings. Raises EngineFailed."""
    try:
        return await asyncpg.connect(
            command_timeout=None, statement_cache_size=0, **_arguments(place, place.direct or place.dsn)
        )
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise unreachable(place, error) from error


def create_pool(place: PostgresPlace, shared: bool) -> Any:
    """A pool, to be awaited. `shared`: a pooler may run each transaction in another server session."""
    how = {"statement_cache_size": 0} if shared else {"init": lambda connection: _set_up(connection, place)}
    return asyncpg.create_pool(
        min_size=1,
        max_size=place.connections,
        command_timeout=_COMMAND_SECONDS,
        reset=_reset,
        **how,
        **_arguments(place, place.dsn),
    )


def local_settings(place: PostgresPlace) -> str:
    """A script that gives a transaction the settings of a session."""
    return _settings(place, "SET LOCAL")


async def may_share_sessions(place: PostgresPlace) -> bool:
    """Whether each transaction may run in another server session."""
    if place.pooler is not None:
        return place.pooler == "transaction"
    return await is_pooled(place)


async def is_pooled(place: PostgresPlace) -> bool:
    """Whether a pooler answers at the URL: it gives a client an id of its own, not that of the server process."""
    connection = await connect(place._replace(direct=None))
    try:
        answered = await connection.fetchval("SELECT pg_backend_pid()")
        return bool(connection.get_server_pid() != answered)
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise unreachable(place, error) from error
    finally:
        connection.terminate()


async def shares_a_session(place: PostgresPlace) -> bool:
    """Whether a second connection runs in the server session of the first: True is certain, False is likely."""
    first = await connect(place._replace(direct=None))
    try:
        for _ in range(_PROBES):
            second = await connect(place._replace(direct=None))
            try:
                pids = [await each.fetchval("SELECT pg_backend_pid()") for each in (first, second)]
            finally:
                second.terminate()
            if pids[0] == pids[1]:
                return True
        return False
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise unreachable(place, error) from error
    finally:
        first.terminate()


def unreachable(place: PostgresPlace, error: Exception) -> EngineFailed:
    return EngineFailed(f"Postgres at {place.shown} is unreachable: {said(error)}")


def said(error: Exception) -> str:
    return str(error) or type(error).__name__


def _arguments(place: PostgresPlace, dsn: str) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "dsn": dsn,
        "timeout": CONNECT_SECONDS,
        # The one setting of ours that a pooler takes at startup.
        "server_settings": {"application_name": "conveyor"},
    }
    if place.iam_region is not None:
        try:
            from conveyor.engines.postgres.iam import token_source  # noqa: PLC0415  (needs the extra aws)
        except ImportError as error:
            raise InvalidSetting(
                f"auth=iam needs the extra 'aws': pip install 'conveyor-jobs[aws,postgres]' ({error.name} is missing)"
            ) from None
        arguments["password"] = token_source(dsn, place.iam_region)
    return arguments


async def _set_up(connection: Any, place: PostgresPlace) -> None:
    isolation = "SET default_transaction_isolation = 'read committed'"
    await connection.execute(f"{isolation}; {_settings(place, 'SET')}")


def _settings(place: PostgresPlace, command: str) -> str:
    settings = {**_SETTINGS, "search_path": place.schema}
    return "; ".join(f"{command} {name} = '{value}'" for name, value in settings.items())


async def _reset(connection: Any) -> None:
    """No statement changes session state, so releasing a connection needs no round trip."""
    if connection.is_in_transaction():
        await connection.execute("ROLLBACK")
