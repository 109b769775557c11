"""Reads about single runs, which workers and roles make for many runs at once: those of one turn of the event loop are
one round trip (joint_calls.py)."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from conveyor.engines.postgres.database import PostgresDatabase
from conveyor.engines.postgres.joint_calls import JointCalls
from conveyor.engines.postgres.queries import made_for, named_texts
from conveyor.model import Counts, RunId, RunKey, TenantId

SQL = named_texts("tasks.sql")


class RunReads:
    """Of runs by their numbers, in the shared tables."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database
        self._finds = JointCalls(self._find_all)
        self._guards = JointCalls(self._all_unfinished)
        self._counters = JointCalls(self._all_counts)

    async def find(self, run: RunKey) -> Any:
        """The number of the run, whether it has tables of its own, and whether it is a rerun; None if it is unknown."""
        return await self._finds.call((run.tenant, run.run_id))

    async def unfinished(self, number: int, indexes: list[int]) -> frozenset[int]:
        """Which of these tasks exist and are not finished."""
        return await self._guards.call((number, indexes))

    async def counts(self, number: int) -> Counts:
        """The stored counts of the run."""
        return await self._counters.call(number)

    async def _find_all(self, runs: Sequence[tuple[TenantId, RunId]]) -> list[Any]:
        # No id contains NUL, and Postgres refuses it.
        values = {"run_ids": [run_id for _, run_id in runs if "\0" not in run_id]}
        rows = await self._database.rows(made_for(SQL["run_numbers"], ""), values)
        known = {(row["tenant"], row["run_id"]): row for row in rows}
        return [known.get(run) for run in runs]

    async def _all_unfinished(self, wanted: Sequence[tuple[int, list[int]]]) -> list[frozenset[int]]:
        values = {
            "numbers": [number for number, indexes in wanted for _ in indexes],
            "indexes": [index for _, indexes in wanted for index in indexes],
        }
        pending: dict[int, frozenset[int]] = defaultdict(frozenset)
        for number, indexes in await self._database.rows(made_for(SQL["unfinished_of_runs"], ""), values):
            pending[number] = frozenset(indexes)
        return [pending[number].intersection(indexes) for number, indexes in wanted]

    async def _all_counts(self, numbers: Sequence[int]) -> list[Counts]:
        rows = await self._database.rows(made_for(SQL["counts"], ""), {"numbers": list(numbers)})
        counts = {number: Counts(*each) for number, *each in rows}
        return [counts[number] for number in numbers]
