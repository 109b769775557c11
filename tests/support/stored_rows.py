"""What an embedded system has stored."""

from typing import Any

from conveyor.system import System


async def rows(system: System) -> dict[str, int]:
    """Rows of every table that has any, but for the API keys, live workers, the id of the task engine, the trusted
    time, the load over time, and the state of the schema."""
    database: Any = system.records.jobs._database  # type: ignore[attr-defined]
    tables = await database.rows("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'", {})
    assert len(tables) >= 14
    counts = {name: (await database.row(f'SELECT count(*) FROM "{name}"', {}))[0] for (name,) in tables}
    kinds = "'announced_worker', 'task_store', 'clock', 'load'"
    (ids,) = await database.row(f"SELECT count(*) FROM documents WHERE kind IN ({kinds})", {})
    counts["documents"] -= ids
    return {name: count for name, count in counts.items() if count and name not in ("keys", "expansions")}
