"""Two processes that do the housekeeping, on each stack that several can share: they split it, and one takes over."""

import asyncio
from typing import Any

import msgspec
import pytest

from conveyor.accept.spec import JobSpec
from conveyor.accept.submit import Submit
from conveyor.clock import SystemClock
from conveyor.coordination.buckets import COUNT, LeasedBuckets
from conveyor.embedded import Embedded
from conveyor.model import Job, JobKind
from conveyor.service import Service
from conveyor.settings import Settings
from conveyor.states import RunState
from conveyor.system import System, open_system
from tests.support.make_jobs import ACME, end
from tests.support.working import until

JOBS = 12
SPEC = JobSpec(kind=JobKind.FETCH, tasks=[msgspec.Raw(b'"http://example.com/"')])


@pytest.fixture(params=["aws", "postgres"])
def stack(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


class Process:
    """The roles of `conveyor sweep`."""

    def __init__(self, system: System) -> None:
        roles = Embedded(system).housekeepers()
        (self.buckets,) = (role for role in roles if isinstance(role, LeasedBuckets))
        self._tasks = [asyncio.create_task(Service(role, system.clock).run()) for role in roles]

    async def die(self) -> None:
        """Without a word to the coordinator."""
        self.buckets.close = _nothing  # type: ignore[method-assign]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _nothing() -> None:
    """As a process that was killed."""


async def _finish_unseen(system: System) -> list[Job]:
    """Jobs whose tasks have finished, and whose completion nobody has seen."""
    jobs = []
    for _ in range(JOBS):
        accepted = await Submit(system).submit(ACME, SPEC)
        job = await system.records.jobs.job(ACME, accepted.subject)  # type: ignore[arg-type]
        assert job is not None
        await system.tasks.finish(job.key, [end(0)])
        jobs.append(job)
    return jobs


async def _until_swept(system: System, jobs: list[Job]) -> None:
    async def states() -> set[RunState]:
        found = [await system.records.jobs.job(ACME, job.job_id) for job in jobs]
        return {job.state for job in found if job is not None}

    await until(states, lambda found: found == {RunState.COMPLETED})
    await until(lambda: system.records.outbox.undispatched(1), lambda events: not events)
    await until(lambda: system.records.jobs.unswept_jobs(1), lambda unswept: not unswept)


async def test_two_processes_split_the_work_and_one_takes_over(settings: Settings) -> None:
    async with open_system(settings, SystemClock()) as first, open_system(settings, SystemClock()) as second:
        one, two = Process(first), Process(second)

        async def held() -> list[int]:
            return [len(one.buckets._leases), len(two.buckets._leases)]

        split: Any = [COUNT // 2, COUNT // 2]
        await until(held, lambda shares: shares == split)
        await _until_swept(first, await _finish_unseen(first))
        await one.die()
        await until(held, lambda shares: shares[1] == COUNT)
        await _until_swept(second, await _finish_unseen(second))
        await two.die()
