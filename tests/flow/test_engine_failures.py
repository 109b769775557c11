"""Engines that fail: before or after they have done their part, nothing is lost; and bodies in both layouts."""

import asyncio
import dataclasses
import operator
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conveyor.errors import EngineFailed
from conveyor.model import (
    Backoff,
    Counts,
    Job,
    Outcome,
    ResultLayout,
    TaskRef,
)
from conveyor.states import TaskStatus
from tests.support.make_jobs import ACME
from tests.support.small_fleet import Fleet, failure, open_fleet, success

STEADY = Backoff(base=10.0, rate=2.0, cap=300.0, jitter=False)
LEASE = 30.0


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with open_fleet(lease_seconds=LEASE) as opened:
        yield opened


class TestBodies:
    @pytest.mark.parametrize("layout", ResultLayout)
    async def test_both_layouts_keep_bodies_whole(self, fleet: Fleet, layout: ResultLayout) -> None:
        def body_of(index: int) -> bytes | None:
            if index % 10 == 3:
                return None
            if index % 10 == 4:
                return b""
            if index in (5, 25):
                return bytes([index]) * (1024 * 1024 + 1 + index)
            return f"{index} ".encode() * (index * 7)

        async def bodies(job: Job, ref: TaskRef) -> Outcome:
            return success(body_of(ref.index))

        fleet.executor.act = bodies
        job = await fleet.submit(300, result_layout=layout)
        fleet.start(fleet.worker())
        await fleet.ended(job)
        tasks = await fleet.check(job)
        for index, task in tasks.items():
            expected = body_of(index)
            if expected is None:
                assert task.detail.body is None
            else:
                assert await fleet.body(task) == expected
        objects = [info async for info in fleet.system.blobs.listing("results")]
        refs = [task.detail.body for task in tasks.values() if task.detail.body is not None]
        assert {info.key for info in objects} == {ref.key for ref in refs if ref.inline is None}
        if layout is ResultLayout.OBJECT:
            assert len(objects) == len(refs) == 270
        else:
            assert len(objects) < 100
            inline = [ref for ref in refs if ref.inline is not None]
            assert max(ref.length for ref in inline) <= fleet.system.tasks.inline_bytes
            assert min(ref.length for ref in refs if ref.inline is None) > 512
            alone = [ref for ref in refs if ref.offset == -1 and ref.inline is None]
            assert sorted(ref.length for ref in alone) == [1024 * 1024 + 6, 1024 * 1024 + 26]
        prefix = f"results/{ACME}/{job.job_id}/{job.run.run_id}/"
        assert all(info.key.startswith(prefix) for info in objects)


class Failing:
    """Stands before an engine and fails some calls of one method, before or after the engine has done its part."""

    def __init__(self, engine: Any, method: str, times: int, error: Exception, *, after: bool = False) -> None:
        self._engine = engine
        self._method = method
        self._left = times
        self._error = error
        self._after = after
        self.failed = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        if name != self._method:
            return found

        async def call(*args: Any, **options: Any) -> Any:
            fails = self._left > 0
            self._left -= fails
            if fails and not self._after:
                self.failed += 1
                raise self._error
            result = await found(*args, **options)
            if fails:
                self.failed += 1
                raise self._error
            return result

        return call


class TestEngineFailures:
    @pytest.mark.parametrize("times", [1, 4, 30], ids=["once", "as often as is tried", "until the messages are let go"])
    async def test_bodies_that_can_not_be_written_lose_nothing(self, fleet: Fleet, times: int) -> None:
        async def large(job: Job, ref: TaskRef) -> Outcome:
            return success(b"x" * 3000)

        fleet.executor.act = large
        job = await fleet.submit(60, result_layout=ResultLayout.PACKED, chunk_size=10)
        failing = Failing(fleet.blobs, "put_all", times, OSError(28, "No space left on device"))
        fleet.blobs = failing  # type: ignore[assignment]
        fleet.start(fleet.worker())
        await fleet.ended(job, within=40 * LEASE)
        tasks = await fleet.check(job)
        assert failing.failed == times
        assert {task.status for task in tasks.values()} == {TaskStatus.SUCCEEDED}

    @pytest.mark.parametrize("after", [False, True], ids=["not done", "done and yet an error"])
    @pytest.mark.parametrize(
        ("seam", "method"),
        [
            ("atomic_flush", "record_flush"),
            ("tasks", "finish"),
            ("tasks", "note"),
            ("queue", "ack"),
            ("queue", "send"),
            ("records.jobs", "move_run"),
        ],
    )
    async def test_an_engine_that_fails_loses_nothing(self, fleet: Fleet, seam: str, method: str, after: bool) -> None:
        async def flaky(job: Job, ref: TaskRef) -> Outcome:
            return success(b"x") if ref.attempt == 2 or ref.index % 2 else failure()

        fleet.executor.act = flaky
        job = await fleet.submit(40, chunk_size=7, backoff=STEADY)
        engine = operator.attrgetter(seam)(fleet.system)
        failing: Any = Failing(engine, method, 3, EngineFailed("for a moment"), after=after)
        name, _, part = seam.partition(".")
        behind = dataclasses.replace(fleet.system.records, **{part: failing}) if part else failing
        # Without a flush of all runs, each is written by itself.
        alone: dict[str, Any] = {"atomic_flush": None, name: behind}
        system = dataclasses.replace(fleet.system, **alone)
        fleet.start(fleet.worker(system=system))
        fleet.start(fleet.sweeper)
        await fleet.ended(job, within=40 * LEASE)
        await fleet.check(job)
        assert failing.failed >= 1
        assert (await fleet.counts(job)).succeeded == 40

    async def test_an_error_that_nobody_foresaw_loses_nothing(self, fleet: Fleet) -> None:
        job = await fleet.submit(20, chunk_size=5)
        flush = Failing(fleet.system.atomic_flush, "record_flush", 1, TypeError("a mistake in the engine"))
        failing = Failing(fleet.system.tasks, "finish", 1, TypeError("a mistake in the engine"))
        mistaken = dataclasses.replace(fleet.system, tasks=failing, atomic_flush=flush)  # type: ignore[arg-type]
        fleet.start(fleet.worker(system=mistaken))
        await fleet.ended(job, within=40 * LEASE)
        await fleet.check(job)
        assert (flush.failed, failing.failed) == (1, 1)

    async def test_a_run_that_can_not_be_written_does_not_stop_the_others(self, fleet: Fleet) -> None:
        """What is written together fails together, and then each run is written by itself."""
        jobs = [await fleet.submit(20, chunk_size=5) for _ in range(3)]
        broken = jobs[1].run.run_id
        whole = fleet.system.atomic_flush
        assert whole is not None

        class Picky:
            failed = 0

            async def record_flush(self, runs: Any, acks: Any) -> Any:
                if any(run.job.run.run_id == broken for run in runs):
                    self.failed += 1
                    raise EngineFailed("one of them is wrong")
                return await whole.record_flush(runs, acks)

        picky = Picky()
        fleet.start(fleet.worker(system=dataclasses.replace(fleet.system, atomic_flush=picky)))
        await fleet.ended(*jobs, within=40 * LEASE)
        for job in jobs:
            await fleet.check(job)
        assert picky.failed >= 1

    async def test_a_failed_acknowledgement_never_takes_what_is_still_running(self, fleet: Fleet) -> None:
        """Two chunks in one flush, one of them done: the error of its acknowledgement must not count the other's
        outcome twice."""
        gate = asyncio.Event()

        async def last_one_waits(job: Job, ref: TaskRef) -> Outcome:
            if ref.index in (1, 2):
                await gate.wait()
            return success()

        fleet.executor.act = last_one_waits
        job = await fleet.submit(4, chunk_size=3)
        failing = Failing(fleet.system.queue, "ack", 2, EngineFailed("for a moment"))
        alone = dataclasses.replace(fleet.system, queue=failing, atomic_flush=None)  # type: ignore[arg-type]
        fleet.start(fleet.worker(system=alone))
        await fleet.until(lambda: failing.failed == 2)
        await fleet.passing(5)
        assert (await fleet.counts(job)).ended == 2
        depth = await fleet.depth(job)
        assert depth.ready + depth.held == 1, "the chunk of the tasks that still run"
        gate.set()
        await fleet.ended(job)
        await fleet.check(job)

    async def test_a_store_that_is_down_burns_no_starts(self, fleet: Fleet) -> None:
        """Messages are received and can not be looked up, again and again: that is no fault of their tasks."""
        job = await fleet.submit(100, chunk_size=10)
        failing = Failing(fleet.system.tasks, "unfinished", 12, EngineFailed("down"))
        fleet.start(fleet.worker(system=dataclasses.replace(fleet.system, tasks=failing)))  # type: ignore[arg-type]
        await fleet.ended(job, within=40 * LEASE)
        await fleet.check(job)
        assert failing.failed == 12
        assert await fleet.counts(job) == Counts(succeeded=100)
        assert (await fleet.system.queue.dead_letters(None, 10)).items == []
