"""Executors: how a task of one kind is run. An executor makes attempts; it decides nothing about retries."""

from collections.abc import Sequence
from typing import Protocol

from conveyor.model import Job, Outcome, TaskRef

# The code of an outcome that says: the task takes every process along that runs it. It is dead-lettered.
WORKER_LOST = "worker_lost"


class Executor(Protocol):
    """One executor serves all runs of its kind in a worker. It is closed when the worker stops."""

    def grain(self, job: Job) -> int:
        """How many references a runner should hand over at once; more than 1 where an await each costs too much."""

    def target(self, ref: TaskRef) -> str | None:
        """The name under which limits per target are kept (for fetch, the host); None for no limit."""

    async def attempt(self, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        """Make one attempt at each reference, in order, and say what came of it. Never raises for what a task did:
        that is an Outcome with an error. An Outcome may carry `retry_after` as a wish of the target (Retry-After).
        Raises only Superseded (process/task_progress.py), for one reference, when another attempt has it now."""

    async def close(self) -> None:
        """Let go of connections and threads."""
