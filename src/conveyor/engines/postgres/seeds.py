"""Turns task seeds into rows and inserts them by COPY.

A run may have millions, so each seed costs one hash and one tuple.
"""

from bisect import bisect_left
from collections.abc import Sequence
from hashlib import sha256
from operator import attrgetter, itemgetter
from typing import Any

import msgspec

from conveyor.engines.postgres.database import PostgresSession
from conveyor.engines.postgres.queries import made_for, named_texts
from conveyor.engines.postgres.tables import Numbered
from conveyor.model import RunKey, TaskId, TaskSeed, shard_of

SQL = named_texts("tasks.sql")

_COLUMNS = ("run_no", "idx", "shard", "sort_key", "tag", "input", "prior")
SeedRow = tuple[int, int, int, int, str | None, str, str | None]

# A signed 64-bit integer holds at most 60 bits of a hash, or 15 hexadecimal digits.
_SORT_DIGITS = 15

_index = attrgetter("index")


class _Tagged(msgspec.Struct):
    tag: Any = None


_tagged = msgspec.json.Decoder(_Tagged)


def sort_key(task: TaskId) -> int:
    """The first 60 bits of a task_id."""
    return int(task[:_SORT_DIGITS], 16)


async def copy_tasks(db: PostgresSession, run: RunKey, home: Numbered, seeds: Sequence[TaskSeed]) -> None:
    """Part of a transaction, or statements of their own: insert new tasks. Fails if a task already exists."""
    for suffix, rows in _parts(run, home, seeds):
        await db.copy(f"tasks{suffix}", _COLUMNS, rows)


async def insert_tasks(db: PostgresSession, run: RunKey, home: Numbered, seeds: Sequence[TaskSeed]) -> None:
    """Part of a transaction: insert tasks of which some may already exist."""
    for suffix, rows in _parts(run, home, seeds):
        await db.change(made_for(SQL["put"], suffix), {"run_no": home.number, **_columns(rows)})


def seed_columns(run: RunKey, seeds: Sequence[TaskSeed]) -> dict[str, list[Any]]:
    """The values of tasks by column, for a statement that knows the number of the run."""
    return _columns(_rows(run, 0, seeds))


def _columns(rows: Sequence[SeedRow]) -> dict[str, list[Any]]:
    names = ("numbers", "indexes", "shards", "sort_keys", "tags", "inputs", "priors")
    columns: list[list[Any]] = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in names]
    return dict(zip(names, columns, strict=True))


def highest(seeds: Sequence[TaskSeed]) -> int:
    """The highest index; -1 without seeds."""
    return max(map(_index, seeds), default=-1)


def _parts(run: RunKey, home: Numbered, seeds: Sequence[TaskSeed]) -> list[tuple[str, list[SeedRow]]]:
    """Rows by table, in order of index: concurrent writers of the same tasks do not deadlock."""
    rows = _rows(run, home.number, seeds)
    rows.sort(key=itemgetter(1))
    cut = bisect_left(rows, home.own_from, key=itemgetter(1)) if home.own else len(rows)
    return [(suffix, part) for suffix, part in (("", rows[:cut]), (home.suffix, rows[cut:])) if part]


def _rows(run: RunKey, number: int, seeds: Sequence[TaskSeed]) -> list[SeedRow]:
    prefix, shards = f"{run.run_id}:", run.shard_count
    rows: list[SeedRow] = []
    for seed in seeds:
        index, text = seed.index, seed.input
        # Must equal model.task_id.
        name = sha256(f"{prefix}{index}".encode()).hexdigest()
        shard = shard_of(TaskId(name), shards) if shards > 1 else 0
        tag = _tag(text) if text[:1] == "{" else None
        rows.append((number, index, shard, int(name[:_SORT_DIGITS], 16), tag, text, seed.prior))
    return rows


def _tag(text: str) -> str | None:
    """The tag of an input that is an object. An input without a tag is not decoded."""
    if '"tag"' not in text:
        return None
    tag = _tagged.decode(text).tag
    return tag.replace("\0", "\ufffd") if isinstance(tag, str) else None
