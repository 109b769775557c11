"""A working system for tests: every role, with an executor that does what a test says, and ways to wait."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from conveyor.embedded import Embedded
from conveyor.model import Job, JobKind, Outcome, RunId, TaskError, TaskRef
from conveyor.process.executors import LocalExecutor
from conveyor.states import ENDED, TaskStatus
from conveyor.system import System
from tests.support.api import Api

T = TypeVar("T")

PATIENCE = 30.0
_LOOK_SECONDS = 0.02


class Echo(LocalExecutor):
    """Every task succeeds and its body is its input; what was run is counted. A closed gate holds all attempts."""

    def __init__(self) -> None:
        self.ran: Counter[tuple[RunId, int]] = Counter()
        self.gate = asyncio.Event()
        self.gate.set()

    def grain(self, job: Job) -> int:
        return 50

    def target(self, ref: TaskRef) -> str | None:
        return None

    async def attempt(self, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        await self.gate.wait()
        for ref in refs:
            self.ran[job.run.run_id, ref.index] += 1
        return [Outcome(TaskStatus.SUCCEEDED, http_status=200, body=ref.input.encode()) for ref in refs]

    async def close(self) -> None:
        """Nothing is held."""


class Flaky(Echo):
    """As Echo, but for tasks that `fails` names an HTTP status or an error code for."""

    def __init__(self, fails: Callable[[Job, int], int | str | None]) -> None:
        super().__init__()
        self.fails = fails

    async def attempt(self, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        outcomes = await super().attempt(job, refs)
        return [self._outcome(job, ref, outcome) for ref, outcome in zip(refs, outcomes, strict=True)]

    def _outcome(self, job: Job, ref: TaskRef, outcome: Outcome) -> Outcome:
        wrong = self.fails(job, ref.index)
        if wrong is None:
            return outcome
        code, status = (wrong, None) if isinstance(wrong, str) else (f"http_{wrong}", wrong)
        return Outcome(TaskStatus.FAILED, http_status=status, error=TaskError(code, "as it was told"), elapsed=0.25)


@asynccontextmanager
async def working(system: System, executor: Echo | None = None) -> AsyncIterator[Echo]:
    """Ingest, workers, sweeper and retention, all running."""
    echo = executor or Echo()
    async with Embedded(system, dict.fromkeys(JobKind, echo)).running():
        yield echo


async def until(look: Callable[[], Awaitable[T]], right: Callable[[T], object] = bool) -> T:
    """Look until it is right; what was seen then."""
    last: Any = None
    try:
        async with asyncio.timeout(PATIENCE):
            while not right(last := await look()):  # noqa: ASYNC110  (seen from outside)
                await asyncio.sleep(_LOOK_SECONDS)
    except TimeoutError:
        raise AssertionError(f"it did not come to that; last seen: {last}") from None
    return last  # type: ignore[no-any-return]


async def ended(api: Api, job_id: str) -> dict[str, Any]:
    """The job, once its run has ended."""

    async def look() -> dict[str, Any]:
        shown: dict[str, Any] = (await api.get(f"/v1/jobs/{job_id}")).json
        return shown

    return await until(look, lambda job: job["state"] in ENDED)


async def all_items(api: Api, path: str, limit: int = 1000) -> list[dict[str, Any]]:
    """Every item of a listing, page by page."""
    items: list[dict[str, Any]] = []
    mark = "&" if "?" in path else "?"
    cursor = ""
    while True:
        page = (await api.get(f"{path}{mark}limit={limit}{cursor}")).json
        assert len(page["items"]) <= limit
        items += page["items"]
        if page["next_cursor"] is None:
            return items
        cursor = f"&cursor={page['next_cursor']}"
