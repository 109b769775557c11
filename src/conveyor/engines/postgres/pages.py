"""Listings over the shared tables, and over a run's own tables if it has any."""

from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from conveyor.engines.postgres.database import PostgresDatabase
from conveyor.engines.postgres.queries import Query, made_for

# The shared tables hold few rows of a large run: ask them for a small part of a page first.
_SHARED_PART = 16


@lru_cache(maxsize=1024)
def united(text: str, suffixes: tuple[str, ...], tail: str = "") -> Query:
    """One query over all tables of a run."""
    parts = " UNION ALL ".join(f"({text.replace('{own}', suffix)})" for suffix in suffixes)
    return made_for(f"SELECT * FROM ({parts}) AS found {tail}", "")  # noqa: S608  (made of our own texts)


class RowStream:
    """The rows of one table in order of (sort_key, idx), fetched on demand."""

    def __init__(self, database: PostgresDatabase, query: Query, values: Mapping[str, Any]) -> None:
        self._database = database
        self._query = query
        self._values = dict(values)
        self.rows: deque[Any] = deque()
        self.ended = False

    async def fill(self, count: int) -> None:
        rows = await self._database.rows(self._query, {**self._values, "limit": count})
        self.rows.extend(rows)
        self.ended = len(rows) < count
        if rows:
            self._values |= {"after_key": rows[-1]["sort_key"], "after_idx": rows[-1]["idx"]}


async def merged(streams: list[RowStream], limit: int) -> list[Any]:
    """Merge the first `limit` rows of all tables. The server would read every table to its end and sort."""
    for stream in streams[:-1]:
        await stream.fill(limit // _SHARED_PART + 1)
    await streams[-1].fill(limit)
    collected: list[Any] = []
    while len(collected) < limit:
        for stream in streams:
            if not stream.rows and not stream.ended:
                await stream.fill(limit - len(collected))
        heads = [stream.rows for stream in streams if stream.rows]
        if not heads:
            break
        collected.append(min(heads, key=lambda rows: (rows[0]["sort_key"], rows[0]["idx"])).popleft())
    return collected
