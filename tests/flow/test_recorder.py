"""The recorder: outcomes wait for others that are on their way, and for nothing else."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from conveyor.model import Counts, Job, Outcome, TaskRef
from tests.support.small_fleet import Fleet, Recording, open_fleet, success

# No test waits so long: what is recorded was not held back.
FOR_EVER = 600.0


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with open_fleet() as fleet:
        yield fleet


async def test_the_only_outcome_is_recorded_at_once(fleet: Fleet) -> None:
    job = await fleet.submit(1)
    fleet.start(fleet.worker(flush_seconds=FOR_EVER))
    await fleet.ended(job)
    await fleet.check(job)


async def test_outcomes_wait_while_another_attempt_runs(fleet: Fleet) -> None:
    last = asyncio.Event()

    async def one_takes_long(job: Job, ref: TaskRef) -> Outcome:
        if ref.index == 7:
            await last.wait()
        return success()

    executor = Recording(fleet.clock, one_takes_long)
    job = await fleet.submit(30)
    fleet.start(fleet.worker(executor, flush_seconds=FOR_EVER))
    await fleet.until(lambda: len(executor.starts) == 30)
    await fleet.quiet()
    assert await fleet.counts(job) == Counts(), "they go together with the last one"
    last.set()
    await fleet.ended(job)
    await fleet.check(job)


async def test_outcomes_wait_while_tasks_of_another_run_do(fleet: Fleet) -> None:
    last = asyncio.Event()

    async def other_takes_long(job: Job, ref: TaskRef) -> Outcome:
        if job.name == "long":
            await last.wait()
        return success()

    executor = Recording(fleet.clock, other_takes_long)
    long = await fleet.submit(1, name="long")
    worker = fleet.worker(executor, flush_seconds=FOR_EVER)
    fleet.start(worker)
    await fleet.until(lambda: len(executor.starts) == 1)
    short = await fleet.submit(1)
    await fleet.until(lambda: len(executor.starts) == 2)
    await fleet.quiet()
    assert await fleet.counts(short) == Counts()
    last.set()
    await fleet.ended(long, short)
    await fleet.check(short)
