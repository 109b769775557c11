"""What the benches run as tasks: functions of kind python, and executors in the place of fetches."""

import asyncio
import random
from collections.abc import Sequence

from conveyor.handlers import task
from conveyor.model import Job, Outcome, TaskRef
from conveyor.process.executors import LocalExecutor
from conveyor.states import TaskStatus

_TEXT = (
    "the belt carries one page after other and each has some words of its own so that it shrinks to a third as texts "
    "do while every number names another page with a title <p> </p> <a href='/page'> </a> <li> </li> that nobody reads"
)


@task("bench.noop")
def noop(_: object) -> None:
    """Nothing: what is left is the cost of a task."""


@task("bench.page")
def page(number: int) -> str:
    """A page of about 2.7 KB, another one for each number. It is too large for a row, and shrinks as texts do."""
    words = random.Random(number).choices(_TEXT.split(), k=700)
    return f"page {number}\n{' '.join(words)}"[:2700]


@task("bench.uneven")
def uneven(number: int) -> int:
    """One in ten fails."""
    if number % 10 == 7:
        raise ValueError(number)
    return number


class NothingExecutor(LocalExecutor):
    """Fetches nothing and succeeds: what is left is the belt."""

    def grain(self, job: Job) -> int:
        return 64

    def target(self, ref: TaskRef) -> str | None:
        return None

    async def attempt(self, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        return [Outcome(TaskStatus.SUCCEEDED) for _ in refs]

    async def close(self) -> None:
        pass


class PausingExecutor(NothingExecutor):
    """Takes so many seconds for each task, and nothing else."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def grain(self, job: Job) -> int:
        return 1

    async def attempt(self, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        await asyncio.sleep(self._seconds)
        return [Outcome(TaskStatus.SUCCEEDED, http_status=200, elapsed=self._seconds) for _ in refs]
