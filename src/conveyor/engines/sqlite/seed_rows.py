"""Rows of new tasks. Gets seeds and returns the parameters of the statement that inserts them, made before a
transaction needs them."""

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import apsw
import msgspec

from conveyor.engines.sqlite.slabs import sort_keys
from conveyor.model import RunKey, TaskSeed, shard_of, task_id


class SeedPart(NamedTuple):
    """Some tasks of a run: a statement, and its parameters besides the number of the run."""

    query: str
    values: dict[str, Any]
    is_rerun: bool


def seed_part(run: RunKey, seeds: Sequence[TaskSeed]) -> SeedPart:
    """The statement for these tasks. Neighbours of a first run, as nearly all tasks are, go to SQLite as an array of
    their inputs, which takes two thirds of the time that JSON takes."""
    is_rerun = not {seed.prior for seed in seeds} <= {None}
    first = seeds[0].index
    indexes = [seed.index for seed in seeds]
    if is_rerun or run.shard_count > 1 or indexes != list(range(first, first + len(seeds))):
        return SeedPart("put", {"seeds": seed_rows(run, seeds)}, is_rerun)
    keys = b"".join([b"%019d" % key for key in sort_keys(run.run_id, indexes)])
    inputs = apsw.carray(tuple([seed.input for seed in seeds]))
    return SeedPart("put_neighbours", {"first": first, "keys": keys, "inputs": inputs}, is_rerun)


def seed_rows(run: RunKey, seeds: Sequence[TaskSeed]) -> str:
    """The rows of these tasks as JSON."""
    indexes = [seed.index for seed in seeds]
    keys = sort_keys(run.run_id, indexes)
    shards: Iterable[int] = repeat(0, len(seeds))
    if run.shard_count > 1:
        shards = [shard_of(task_id(run.run_id, index), run.shard_count) for index in indexes]
    rows = zip(indexes, shards, keys, [seed.input for seed in seeds], [seed.prior for seed in seeds], strict=True)
    return msgspec.json.encode(list(rows)).decode()
