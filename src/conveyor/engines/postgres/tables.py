"""Large runs get tables of their own, so that deleting a run drops three tables, whatever its size.

Tasks with an index below OWN_FROM are in the shared tables, all others in `tasks_<n>`, `ends_<n>` and `events_<n>`,
where n is the run's number; the first such task creates these tables. The index alone determines the table of a task,
so a repeated write finds it. A small run has no tables of its own, and of a large run only the first OWN_FROM rows are
deleted one by one. OWN_FROM is part of the layout: it cannot change for a schema that holds tasks.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import asyncpg

from conveyor.engines.postgres.database import PostgresSession
from conveyor.engines.postgres.queries import made_for, named_texts
from conveyor.errors import TasksInUse

OWN_FROM = 10_000

SQL = named_texts("tasks.sql")

T = TypeVar("T")


class Numbered(NamedTuple):
    """A run's number, whether it has tables of its own, and the first index that they hold; and whether it is a rerun,
    whose tasks have earlier outcomes."""

    number: int
    own: bool
    own_from: int = OWN_FROM
    rerun: bool = False

    @property
    def suffix(self) -> str:
        return f"_{self.number}"

    @property
    def suffixes(self) -> list[str]:
        """The suffixes of all tables that hold rows of the run."""
        return ["", self.suffix] if self.own else [""]


def split(run: Numbered, indexes: Sequence[int], items: Sequence[T]) -> list[tuple[str, list[T]]]:
    """Group items by the table of their index, the shared table first."""
    if not run.own:
        return [("", list(items))] if items else []
    pairs = list(zip(indexes, items, strict=True))
    shared = [item for index, item in pairs if index < run.own_from]
    own = [item for index, item in pairs if index >= run.own_from]
    return [(suffix, part) for suffix, part in (("", shared), (run.suffix, own)) if part]


async def make_own(db: PostgresSession, number: int) -> None:
    """Part of a transaction: create the tables of a run if it has none."""
    values = {"run_no": number, "own": True}
    await db.value(made_for(SQL["lock_own"], ""), values)
    await db.run(made_for(SQL["own_tables"], f"_{number}").text)
    await db.change(made_for(SQL["mark_own"], ""), values)


async def drop_own(db: PostgresSession, number: int) -> None:
    """Part of a transaction: drop the tables of a run. Raises TasksInUse if another transaction has locked one of them:
    a drop that waited for a long reader would keep all later readers waiting."""
    try:
        await db.run(made_for(SQL["lock_own_tables"], f"_{number}").text)
    except asyncpg.LockNotAvailableError:
        raise TasksInUse from None
    await db.run(made_for(SQL["drop_own_tables"], f"_{number}").text)
    await db.change(made_for(SQL["mark_own"], ""), {"run_no": number, "own": False})
