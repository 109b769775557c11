"""Tables of their own for large runs: removing one is then dropping three tables, whatever its size.

The tasks of a run below OWN_FROM stand in the tables that all runs share, the rest in `tasks_<n>`, `ends_<n>` and
`events_<n>`, n being the run's number; these are made when the first such task is put. Which table a task is in follows
from its index alone, so that writing it again finds it; a small run has no tables, and of a large one only the first
OWN_FROM rows are removed one by one. The number is part of the layout: a schema that holds tasks keeps it.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from conveyor.engines.postgres.database import PostgresSession
from conveyor.engines.postgres.queries import made_for, named_texts

OWN_FROM = 10_000

# Whoever reads a table has to be done with it first; nobody is made to wait behind us for longer.
_LOCK_TIMEOUT = "500ms"

SQL = named_texts("tasks.sql")

T = TypeVar("T")


class Numbered(NamedTuple):
    """A run's number, and whether it has tables of its own, for tasks from which index on."""

    number: int
    own: bool
    own_from: int = OWN_FROM

    @property
    def suffix(self) -> str:
        return f"_{self.number}"

    @property
    def suffixes(self) -> list[str]:
        """Of all tables that hold rows of the run."""
        return ["", self.suffix] if self.own else [""]


def split(run: Numbered, indexes: Sequence[int], items: Sequence[T]) -> list[tuple[str, list[T]]]:
    """Items by the table that their index is in, shared first; tables without any are left out."""
    if not run.own:
        return [("", list(items))] if items else []
    pairs = list(zip(indexes, items, strict=True))
    shared = [item for index, item in pairs if index < run.own_from]
    own = [item for index, item in pairs if index >= run.own_from]
    return [(suffix, part) for suffix, part in (("", shared), (run.suffix, own)) if part]


async def make_own(db: PostgresSession, number: int) -> None:
    """Part of a transaction: the tables of a run, if it has none yet."""
    values = {"run_no": number, "own": True}
    await db.value(made_for(SQL["lock_own"], ""), values)
    await db.run(made_for(SQL["own_tables"], f"_{number}").text)
    await db.change(made_for(SQL["mark_own"], ""), values)


async def drop_own(db: PostgresSession, number: int) -> None:
    """Part of a transaction. Fails if somebody holds one of them."""
    await db.run(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT}'")
    await db.run(made_for(SQL["drop_own_tables"], f"_{number}").text)
    await db.change(made_for(SQL["mark_own"], ""), {"run_no": number, "own": False})
