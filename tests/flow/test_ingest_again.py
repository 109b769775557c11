"""What is done again in an ingest changes nothing, and what was accepted is never left out."""

import asyncio
import dataclasses
import json
from collections.abc import Awaitable
from typing import Any

import apsw
import msgspec
import pytest

from conveyor import faults
from conveyor.accept.add_tasks import AddTasks
from conveyor.accept.spec import TasksSpec
from conveyor.engines.queue import CONTROL
from conveyor.errors import EngineFailed, JobClosed
from conveyor.model import Job, Mode, Source
from conveyor.read.invalid_lines import invalid_lines, invalid_page
from conveyor.recover.sweeper import Sweeper
from conveyor.states import RunState
from tests.support.small_fleet import Fleet, open_fleet

LINES = 8000


class Failing:
    """IngestRecords whose n-th checkpoint fails before it is written, for some n."""

    def __init__(self, ingests: Any, *fails: int) -> None:
        self._ingests = ingests
        self._fails = fails
        self.checkpoints = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ingests, name)

    async def checkpoint(self, *given: Any) -> bool:
        self.checkpoints += 1
        if self.checkpoints in self._fails:
            raise EngineFailed
        written: bool = await self._ingests.checkpoint(*given)
        return written


async def wait_for_latch(fleet: Fleet, job: Job) -> None:
    async def is_latched() -> bool:
        return (await fleet.job(job.job_id)).run.last_batch

    await fleet.until(is_latched)


async def all_invalid(fleet: Fleet, job: Job) -> list[int]:
    found, cursor = [], None
    while True:
        page = await invalid_page(fleet.blobs, job, 77, cursor)
        found += [line.line for line in page.items]
        cursor = page.next_cursor
        if cursor is None:
            return found


async def test_invalid_lines_are_listed_once_after_checkpoints_that_failed() -> None:
    """The batches of the second try begin at the last checkpoint, in the middle of what was a piece of the list."""
    async with open_fleet() as fleet:
        good, bad = json.dumps("x" * 100), "{" + "x" * 100
        data = "".join(f"{bad if number % 10 == 0 else good}\n" for number in range(LINES)).encode()
        job = await fleet.stage_bytes(data)
        ingester = fleet.ingester()
        records = fleet.system.records
        failing = Failing(records.ingests, 2, 4)
        object.__setattr__(ingester._ingest, "records", dataclasses.replace(records, ingests=failing))
        fleet.start(ingester)

        await wait_for_latch(fleet, job)
        assert failing.checkpoints > 4
        run = (await fleet.job(job.job_id)).run
        assert (run.total, run.invalid) == (LINES * 9 // 10, LINES // 10)
        wrong = [number + 1 for number in range(0, LINES, 10)]
        assert await all_invalid(fleet, job) == wrong
        kept = b"".join([part async for part in invalid_lines(fleet.blobs, job)])
        assert [json.loads(line)["line"] for line in kept.splitlines()] == wrong


async def an_engine_that_is_away_fails_no_ingest() -> None:
    async with open_fleet() as fleet:
        job = await fleet.stage_bytes(b"1\n" * LINES)
        ingester = fleet.ingester()
        records = fleet.system.records
        failing = Failing(records.ingests, *range(1, 12))
        object.__setattr__(ingester._ingest, "records", dataclasses.replace(records, ingests=failing))
        fleet.start(ingester)
        await wait_for_latch(fleet, job)
        assert failing.checkpoints > 11
        assert (await fleet.system.queue.dead_letters(None, 10)).items == []


async def test_an_engine_that_is_away_fails_no_ingest() -> None:
    await an_engine_that_is_away_fails_no_ingest()


async def a_message_that_came_often_has_not_failed_often() -> None:
    """Its ingesters were slow, and lost it each time. Then it fails once."""
    async with open_fleet() as fleet:
        job = await fleet.stage_bytes(b"1\n2\n")
        # The list is split, and the message of its range is next.
        await fleet.ingester().tick()
        for _ in range(6):
            assert await fleet.system.queue.receive(CONTROL, 1, 10.0)
            fleet.clock.advance(11.0)
        ingester = fleet.ingester()
        put, left = ingester._ingest.tasks.put, 1

        async def fails(*given: Any) -> None:
            nonlocal left
            left -= 1
            if left >= 0:
                raise RuntimeError("once")
            await put(*given)

        ingester._ingest.tasks.put = fails  # type: ignore[method-assign]
        fleet.start(ingester)
        await wait_for_latch(fleet, job)
        assert left < 0


async def test_a_message_that_came_often_has_not_failed_often() -> None:
    await a_message_that_came_often_has_not_failed_often()


class Stale:
    """JobRecords whose active jobs are as they were when somebody last looked: others have acted since."""

    def __init__(self, jobs: Any, active: list[Job]) -> None:
        self._jobs = jobs
        self._active = active

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jobs, name)

    async def active_jobs(self) -> list[Job]:
        return self._active


async def add(fleet: Fleet, job: Job, *values: Any, last: bool = False) -> None:
    tasks = [msgspec.Raw(json.dumps(value).encode()) for value in values]
    await AddTasks(fleet.system).add(await fleet.job(job.job_id), TasksSpec(tasks, last))


def sweeper_with(fleet: Fleet, records: Any) -> Sweeper:
    return Sweeper(records, fleet.system.tasks, fleet.system.queue, fleet.lifecycle, fleet.clock)


async def test_a_batch_that_is_accepted_meanwhile_keeps_the_job_open() -> None:
    """The sweeper has seen an idle job; a batch comes before it closes it."""
    async with open_fleet() as fleet:
        job = await fleet.submit([], mode=Mode.OPEN, idle_timeout=60.0)
        fleet.clock.advance(61)
        seen = await fleet.system.records.jobs.active_jobs()
        await add(fleet, job, 1, 2, 3)
        swept = await sweeper_with(
            fleet, dataclasses.replace(fleet.system.records, jobs=Stale(fleet.system.records.jobs, seen))
        ).run_once()
        assert swept.closed == 0
        found = await fleet.job(job.job_id)
        assert (found.run.sealed, found.reason) == (False, None)
        for role in (fleet.ingester(), fleet.worker(), fleet.sweeper):
            fleet.start(role)
        await add(fleet, job, 4, 5)
        (ended,) = await fleet.ended(job, within=120)
        assert (ended.state, ended.run.total) == (RunState.COMPLETED, 5)
        assert "nothing was added for 60 s" in (ended.reason or "")
        await fleet.check(job)


class Crash(BaseException):
    """Nothing in the product catches it."""


@pytest.mark.parametrize("point", ["sweeper.seal.before", "sweeper.seal.after"])
async def test_a_sweeper_that_dies_at_an_idle_close(point: str) -> None:
    async with open_fleet() as fleet:
        job = await fleet.submit([], mode=Mode.OPEN, idle_timeout=60.0)
        await add(fleet, job, 1, 2, 3)
        fleet.clock.advance(61)

        def die(passed: str) -> None:
            if passed == point:
                raise Crash

        faults.arm(die)
        try:
            with pytest.raises(Crash):
                await fleet.sweeper.run_once()
        finally:
            faults.arm(None)
        for role in (fleet.ingester(), fleet.worker(), sweeper_with(fleet, fleet.system.records)):
            fleet.start(role)
        (ended,) = await fleet.ended(job, within=120)
        assert (ended.state, ended.run.total) == (RunState.COMPLETED, 3)
        assert "nothing was added for 60 s" in (ended.reason or "")
        await fleet.check(job)


async def test_batches_and_idle_closes_in_any_order_lose_none() -> None:
    """Each batch that was answered as accepted is ingested and counted."""
    async with open_fleet() as fleet:
        accepted: dict[str, int] = {}
        jobs = [await fleet.submit([], mode=Mode.OPEN, idle_timeout=1.0) for _ in range(20)]

        async def feed(job: Job) -> None:
            for _ in range(3):
                try:
                    await add(fleet, job, 1, 2)
                except JobClosed:
                    return
                accepted[job.job_id] = accepted.get(job.job_id, 0) + 2
                await fleet.clock.sleep(1.0)

        for role in (fleet.ingester("one"), fleet.ingester("two"), fleet.worker(), fleet.sweeper):
            fleet.start(role)
        fleet.clock.advance(1.0)
        feeding = [asyncio.create_task(feed(job)) for job in jobs]
        for job in await fleet.ended(*jobs, within=120):
            assert job.run.total == accepted.get(job.job_id, 0)
        await asyncio.gather(*feeding)


class Steps:
    """Counts the steps of SQLite's virtual machine, of every connection that is opened meanwhile: what a statement
    looks at, and not how long that takes."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> "Steps":
        apsw.connection_hooks.append(self._watch)
        return self

    def __exit__(self, *_: object) -> None:
        apsw.connection_hooks.remove(self._watch)

    def _watch(self, connection: apsw.Connection) -> None:
        connection.set_progress_handler(self._step, 1)

    def _step(self) -> bool:
        self.count += 1
        return False

    async def of(self, work: Awaitable[object]) -> int:
        before = self.count
        await work
        return self.count - before


async def test_a_batch_costs_the_same_whatever_was_added_before() -> None:
    """A checkpoint, the status of the ingest, and a further batch, with 10 batches and with 1,000."""
    with Steps() as steps:
        async with open_fleet() as fleet:
            records, source = fleet.system.records, Source("lists/acme/one", 100, "0" * 64)
            job = await fleet.submit([], mode=Mode.OPEN)
            where = (job.job_id, job.run.run_id)
            costs = []
            for count in (10, 1000):
                have = (await records.ingests.ingested(job.run.run_id)).ranges
                await asyncio.gather(
                    *(records.ingests.append_range(*where, source, 1, None, False) for _ in range(count - have))
                )
                one = await records.ingests.range(job.run.run_id, count - 5)
                assert one is not None
                done = msgspec.structs.replace(one, tasks=1, offset=100, done=True)
                costs.append(
                    [
                        await steps.of(records.ingests.checkpoint(job.run.run_id, done, 1)),
                        await steps.of(records.ingests.ingested(job.run.run_id)),
                        await steps.of(records.ingests.append_range(*where, source, 1, None, False)),
                    ]
                )
            few, many = costs
            assert all(later <= 2 * sooner for sooner, later in zip(few, many, strict=True)), costs
