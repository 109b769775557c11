"""Slabs: the order of task_id in a run. Each slab of 32,768 neighbouring indexes has an order of its own, which fits
into the writer's cache; a reader merges them. Task ids are hashes, spread evenly, so that the next tasks of all slabs
lie in a narrow range of sort keys, and a page reads few more keys than it returns.
"""

import struct
from collections.abc import Iterable
from hashlib import sha256
from typing import Any

import apsw
import msgspec

from conveyor.engines.sqlite.database import named_queries
from conveyor.model import RunId, RunKey, TaskId, task_id

SQL = named_queries("slabs.sql")

# A signed 64-bit integer holds at most 15 hexadecimal digits.
_SORT_DIGITS = 15
# Above every sort key.
_END = 1 << 60
_SLAB_BITS = 15
# By how much the range of sort keys grows if it had too few tasks: the indexes of a rerun have gaps.
_GROWTH = 8

# The first 64 bits of a digest.
_HEAD = struct.Struct(">Q24x")

_keys = msgspec.json.Decoder(list[tuple[int, int]])

# A sort key and an index: the place of a task in the order.
Key = tuple[int, int]


def sort_key(task: TaskId) -> int:
    return int(task[:_SORT_DIGITS], 16)


def sort_keys(run_id: RunId, indexes: Iterable[int]) -> list[int]:
    """The sort keys of many tasks, without making their ids."""
    start = f"{run_id}:".encode()
    digests = b"".join([sha256(b"%b%d" % (start, index)).digest() for index in indexes])
    return [head >> 4 for (head,) in _HEAD.iter_unpack(digests)]


def next_keys(db: apsw.Connection, run: RunKey, number: int, shard: int, after: TaskId | None, limit: int) -> list[Key]:
    """The next tasks of a shard, in order; fewer than `limit` only at the end."""
    values, tasks = _slabs(db, run, number, shard)
    # The task of the cursor is read, too.
    last: Key = (-1, _END) if after is None else (sort_key(after), -1)
    # A quarter more than expected, so that one read is usually enough.
    width = _END * min(tasks, limit + limit // 4 + 16) // max(1, tasks) + 1
    found: list[Key] = []
    passed = False
    while tasks and last[0] < _END and len(found) < limit:
        rows, end = limit - len(found) + 1, last[0] + width
        keys = _between(db, values, last, end, rows)
        last = keys[-1] if len(keys) == rows else (end, _END)
        width *= _GROWTH
        if after is not None and not passed:
            keys, passed = _behind(keys, run, after)
        found += keys
    return found[:limit]


def index_of(db: apsw.Connection, run: RunKey, number: int, shard: int, task: TaskId) -> int | None:
    """The index of a task; None if there is none of this id."""
    values, tasks = _slabs(db, run, number, shard)
    key = sort_key(task)
    keys = _between(db, values, (key, -1), key, -1) if tasks else []
    return next((index for _, index in keys if task_id(run.run_id, index) == task), None)


def _slabs(db: apsw.Connection, run: RunKey, number: int, shard: int) -> tuple[dict[str, int], int]:
    """Where the slabs of a shard are, and about how many tasks they have; 0: none."""
    bounds: Any = db.execute(SQL["bounds"], {"run_no": number}).fetchone()
    first, last = bounds
    if first is None:
        return {}, 0
    values = {"run_no": number, "shard": shard, "first_slab": first >> _SLAB_BITS, "last_slab": last >> _SLAB_BITS}
    return values, (last - first) // max(1, run.shard_count) + 1


def _between(db: apsw.Connection, values: dict[str, int], after: Key, end: int, rows: int) -> list[Key]:
    """At most `rows` tasks after a place, up to a sort key, in order."""
    more = {"after_key": after[0], "after_idx": after[1], "last_key": end, "rows": rows}
    found: Any = db.execute(SQL["keys"], {**values, **more}).fetchone()
    return _keys.decode(found[0])


def _behind(keys: list[Key], run: RunKey, after: TaskId) -> tuple[list[Key], bool]:
    """The keys without those up to the cursor's task, and whether that was among them. Several tasks may share a sort
    key, though that is rare; a deleted task counts as the last of them."""
    same = sort_key(after)
    ties = [index for key, index in keys if key == same]
    own = next((place for place, index in enumerate(ties) if task_id(run.run_id, index) == after), None)
    return keys[len(ties) if own is None else own + 1 :], own is not None
