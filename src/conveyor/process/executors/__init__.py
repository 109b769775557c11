"""Executors: how tasks of one kind run. An executor makes the lanes of its kind; it decides nothing about retries.

Fetcher and handler processes import this package too, so it imports no lane before a worker asks for one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from conveyor.model import Job, Outcome, RunId, TaskRef

if TYPE_CHECKING:
    from conveyor.process.lane import Lane, LaneTools


class Executor(ABC):
    """Serves all runs of its kind, for all workers of this process."""

    @abstractmethod
    def target(self, ref: TaskRef) -> str | None:
        """Return the target whose limits apply to the task (for a fetch, its host), or None."""

    def origin(self, ref: TaskRef) -> str | None:
        """Return the target whose breaker applies to the task: for a fetch, the scheme, host and port of its URL."""
        return self.target(ref)

    def targets(self, job: Job) -> Callable[[TaskRef], str | None]:
        """Return what names the target of each of the job's tasks. An executor whose targets are in the job, and not in
        the input of the task, has its own."""
        return self.target

    def origins(self, job: Job) -> Callable[[TaskRef], str | None]:
        """Return what names the origin of each of the job's tasks, likewise."""
        return self.origin

    @abstractmethod
    def lane(self, job: Job, tools: "LaneTools") -> "Lane":
        """Make a lane that runs the job's tasks for one worker."""

    def open(self) -> None:
        """Start the processes that the executor needs, without waiting for them."""
        return

    async def until_ready(self) -> None:
        """Wait until attempts can start at once."""
        return

    def watch(self) -> None:
        """Replace processes that hang. Each worker calls this several times a second."""
        return

    def lingering(self, run_id: RunId) -> int:
        """Return how many calls of a run go on although their attempts were cancelled: a function cannot be
        interrupted."""
        return 0

    async def close(self) -> None:
        """Close connections, threads and processes. Called once, after the workers have stopped."""
        return


class LocalExecutor(Executor):
    """An executor whose attempts a lane of this process awaits."""

    def grain(self, job: Job) -> int:
        """Return how many references to attempt in one call: more than 1 where an await for each costs too much."""
        return 1

    @abstractmethod
    async def attempt(self, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        """Make one attempt at each reference and return the outcomes in the same order: of all of them, or of the
        first ones, at least one; then the others were not attempted.

        A task that fails is an Outcome with an error, not an exception. `Outcome.retry_after` carries the target's
        Retry-After. Raises only Superseded (task_progress.py), for a single reference, when a newer attempt owns the
        task.
        """

    async def attempt_through(self, gateway: int, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        """Make the attempts through one gateway of the job's pool. An executor that goes through gateways has its
        own."""
        return await self.attempt(job, refs)

    def lane(self, job: Job, tools: "LaneTools") -> "Lane":
        from conveyor.process.local_lane import LocalLane  # noqa: PLC0415  (child processes have no lanes)

        return LocalLane(job, self, tools)
