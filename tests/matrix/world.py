"""A system with all its roles on a clock that the test moves, behind a real API, and a site that its jobs fetch from.

Time goes in small steps while something moves, and in ever larger ones while nothing does: a job that waits for a month
takes no longer than one that waits for a second.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from conveyor.api.server import serve
from conveyor.embedded import Embedded
from conveyor.model import Job, JobId, JobKind, Outcome, TaskRef
from conveyor.states import ENDED
from tests.support.api import Api, client, new_key
from tests.support.clocks import ManualClock
from tests.support.file_site import Behaviour, FileSite
from tests.support.make_jobs import ACME
from tests.support.small_fleet import Fleet, Recording, failure, open_fleet, success
from tests.support.target_site import PAGES, Seen, answer

INTAKE = "incoming"
_FIRST_STEP = 0.05
_GROWTH = 4.0
_LONGEST_STEP = 86_400.0
# Real seconds that a request of the site has before the clock moves.
_PATIENCE = 0.5
# Of the clock: longer than any option lets a job take.
_YEARS = 4 * 365 * 86_400.0

_BAD = ("error", "critical")
# A run that is past its deadline for good, or at its maximum lifetime, is an error to its operator.
_ASKED_FOR = ("overdue run failed", "run reached its maximum lifetime")


class MatrixSite(FileSite):
    """The pages of the common site, an export API that is done at once, and a file under every other path."""

    def __init__(self) -> None:
        super().__init__(Behaviour(2000))
        self.visits: Counter[str] = Counter()
        self.robots = (404, b"")
        self.busy = 0

    async def _answer(self, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        self.busy += 1
        try:
            return await self._answer_page(seen, writer)
        finally:
            self.busy -= 1

    async def _answer_page(self, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        name, *rest = seen.path.strip("/").split("/")
        if name == "exports":
            export = {"status": "done", "files": [{"href": self.url("/file.bin")}]}
            answer(writer, json.dumps({"export": export} if rest else {"data": {"id": "e1"}}).encode())
        elif name in PAGES:
            self.visits[seen.path] += 1
            await PAGES[name](self, seen, writer)  # type: ignore[arg-type]  # a page counts visits, and needs no more
        else:
            return await super()._answer(seen, writer)
        await writer.drain()
        return True


async def act(job: Job, ref: TaskRef) -> Outcome:
    """What the function of a task does, as its input says."""
    if ref.input == '"fails"' or (ref.input == '"flaky"' and ref.attempt == 1):
        return failure()
    return success(b"done")


class Busy:
    """An executor, with a count of the attempts that it makes just now."""

    def __init__(self, inner: Any) -> None:
        self.attempts = 0
        self.starts = 0
        self._attempt = inner.attempt_through
        # The executor makes its lanes itself, which call it.
        inner.attempt_through = self._counted

    async def _counted(self, gateway: int, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        self.attempts += 1
        self.starts += len(refs)
        try:
            outcomes: list[Outcome] = await self._attempt(gateway, job, refs)
            return outcomes
        finally:
            self.attempts -= 1


class World:
    """The fleet, its API and its site."""

    def __init__(self, fleet: Fleet, api: Api, site: MatrixSite, executors: Sequence[Busy]) -> None:
        self.fleet = fleet
        self.api = api
        self.site = site
        self._executors = executors
        self._step = _FIRST_STEP
        self._moved = 0

    @property
    def clock(self) -> ManualClock:
        return self.fleet.clock

    @property
    def address(self) -> str:
        return self.site.url("")

    async def step(self) -> None:
        """Let everybody act, then let time pass: little while something moves, much while all wait."""
        await self.fleet.breathe()
        waited = 0.0
        while waited < _PATIENCE and self.site.busy + sum(each.attempts for each in self._executors):
            await asyncio.sleep(0.001)
            waited += 0.001
            await self.fleet.breathe()
        moved = sum(each.starts for each in self._executors)
        self._step = _FIRST_STEP if moved != self._moved else min(self._step * _GROWTH, _LONGEST_STEP)
        self._moved = moved
        self.clock.advance(self._step)

    async def until_ended(self, job_ids: Sequence[str]) -> dict[str, Job | None]:
        """The jobs once they have ended; None for one that expired."""
        left, seen = set(job_ids), {}
        end = self.clock.now() + _YEARS
        while left:
            assert self.clock.now() < end, f"jobs that do not end: {sorted(left)}"
            await self.step()
            for job_id in sorted(left):
                job = await self.fleet.system.records.jobs.job(ACME, JobId(job_id))
                if job is None or job.state in ENDED:
                    seen[job_id] = job
                    left.discard(job_id)
        return seen

    def failures(self) -> list[str]:
        """Errors that were logged, but for those that options ask for."""
        return [str(line) for line in self.fleet.logs if line["log_level"] in _BAD and line["event"] not in _ASKED_FOR]


@asynccontextmanager
async def open_world() -> AsyncIterator[World]:
    settings = {
        "allow_private_targets": True,
        "allow_insecure": True,
        "fetchers": 0,
        "handler_processes": 0,
        "intake": INTAKE,
    }
    # As much as the largest bodies need that any job may have.
    settings = {"body_budget_bytes": 8 << 30, "intake_tenant": ACME, "sync_task_limit": 1000, **settings}
    async with open_fleet(**settings) as fleet, MatrixSite() as site:
        recording = Recording(fleet.clock, act, target=lambda ref: "somewhere")
        made = Embedded(fleet.system)._executors()
        real = {kind: recording if kind is JobKind.PYTHON else made[kind] for kind in JobKind}
        busy = [Busy(executor) for executor in real.values()]
        for roles in Embedded(fleet.system, real)._roles(real).values():
            for role in roles:
                fleet.start(role)
        stop = asyncio.Event()
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(serve(fleet.system, "127.0.0.1", 0, stop, url.set_result))
        await asyncio.wait({serving, url}, return_when=asyncio.FIRST_COMPLETED)
        try:
            async with client() as http:
                key = await new_key(fleet.system, ACME)
                yield World(fleet, Api(url.result(), fleet.system, key, http), site, busy)
        finally:
            stop.set()
            await serving
            for executor in made.values():
                await executor.close()
