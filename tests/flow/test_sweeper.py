"""The sweeper: lost chunks, missed completions, counts that drifted, and runs that are cleared."""

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conveyor.engines.queue import Depth, run_queue
from conveyor.model import (
    Backoff,
    Counts,
    Job,
    Outcome,
    TaskRef,
)
from conveyor.recover.sweeper import Swept
from conveyor.states import RunState
from tests.support.engine_switch import Switch
from tests.support.make_jobs import end
from tests.support.small_fleet import Fleet, fail, failure, open_fleet, success

STEADY = Backoff(base=10.0, rate=2.0, cap=300.0, jitter=False)
LEASE = 30.0


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with open_fleet(lease_seconds=LEASE) as opened:
        yield opened


class TestSweeper:
    async def test_lost_references_are_sent_again(self, fleet: Fleet) -> None:
        job = await fleet.submit(250)
        await fleet.system.tasks.finish(job.key, [end(index) for index in range(50)])
        await fleet.system.queue.drop(run_queue(job.run.run_id))
        assert await fleet.sweeper.run_once() == Swept(checked=1, requeued=200)
        assert (await fleet.depth(job)).ready == 2
        assert await fleet.sweeper.run_once() == Swept(checked=1), "once is enough"
        fleet.start(fleet.worker())
        await fleet.ended(job)
        await fleet.check(job)
        assert fleet.executor.count() == Counter(range(50, 250))

    async def test_lost_references_of_a_running_job(self, fleet: Fleet) -> None:
        async def slow(job: Job, ref: TaskRef) -> Outcome:
            await fleet.clock.sleep(0.3)
            return success()

        fleet.executor.act = slow
        job = await fleet.submit(500, concurrency=20)
        fleet.start(fleet.worker())
        fleet.start(fleet.sweeper)
        await fleet.until(lambda: len(fleet.executor.starts) > 50)
        await fleet.system.queue.drop(run_queue(job.run.run_id))
        await fleet.ended(job)
        await fleet.check(job)

    async def test_a_missed_completion_is_made_up_for(self, fleet: Fleet) -> None:
        job = await fleet.submit(5)
        await fleet.system.tasks.finish(job.key, [end(index) for index in range(5)])
        await fleet.system.queue.drop(run_queue(job.run.run_id))
        assert await fleet.sweeper.run_once() == Swept(checked=1, completed=1, cleared=1)
        await fleet.check(job)
        assert await fleet.sweeper.run_once() == Swept()

    async def test_drifted_counts_are_repaired(self, fleet: Fleet) -> None:
        job = await fleet.submit(20)
        await fleet.system.tasks.finish(job.key, [end(index) for index in range(20)])
        await fleet.system.queue.drop(run_queue(job.run.run_id))
        database: Any = fleet.system.tasks._database  # type: ignore[attr-defined]
        await database.change(
            "UPDATE task_runs SET succeeded = 13, failed = 2 WHERE run_id = :r", {"r": job.run.run_id}
        )
        assert (await fleet.counts(job)).ended == 15
        swept = await fleet.sweeper.run_once()
        assert (swept.completed, swept.requeued) == (1, 0)
        await fleet.check(job)
        assert await fleet.counts(job) == Counts(succeeded=20)

    async def test_drifted_counts_of_a_run_that_goes_on(self, fleet: Fleet) -> None:
        job = await fleet.submit(20)
        await fleet.system.tasks.finish(job.key, [end(index) for index in range(10)])
        await fleet.system.queue.drop(run_queue(job.run.run_id))
        database: Any = fleet.system.tasks._database  # type: ignore[attr-defined]
        await database.change("UPDATE task_runs SET succeeded = 3 WHERE run_id = :r", {"r": job.run.run_id})
        assert await fleet.sweeper.run_once() == Swept(checked=1, requeued=10)
        assert await fleet.counts(job) == Counts(succeeded=10)
        fleet.start(fleet.worker())
        await fleet.ended(job)
        await fleet.check(job)

    async def test_it_leaves_alone_what_is_under_way(self, fleet: Fleet) -> None:
        async def slow(job: Job, ref: TaskRef) -> Outcome:
            await fleet.clock.sleep(20)
            return success() if ref.attempt == 2 else failure()

        fleet.executor.act = slow
        job = await fleet.submit(10, backoff=STEADY)
        fleet.start(fleet.worker())
        swept: list[Swept] = []
        while (await fleet.job(job.job_id)).state is RunState.RUNNING:
            swept.append(await fleet.sweeper.run_once())
            await fleet.passing(0.5)
        assert sum(each.requeued for each in swept) == 0
        assert fleet.executor.count() == Counter(dict.fromkeys(range(10), 2))

    async def test_what_is_sent_back_late_is_cleared_too(self, fleet: Fleet) -> None:
        """A failed attempt waits to be written while its run ends; then its task is sent back, to be tried again."""
        fleet.executor.act = fail
        job = await fleet.submit(10, concurrency=1, backoff=STEADY)
        switch = Switch()
        switch.mode = "hang"
        worker = fleet.worker(system=switch.system(fleet.system, "atomic_flush"))
        while not fleet.executor.starts:
            await worker.tick()
            await fleet.breathe()
        await fleet.move(job, RunState.CANCELLED)
        fleet.clock.advance(1.0)
        await fleet.breathe()
        await worker.tick()
        assert worker._lanes == {}
        assert (await fleet.sweeper.run_once()).cancelled == 10
        assert (await fleet.sweeper.run_once()).cleared == 0, "somebody may still send to its queues"
        switch.answers.set()
        await worker.close()
        assert (await fleet.depth(job)).total > 1, "the message, and what was sent back of it"
        assert (await fleet.sweeper.run_once()).cleared == 1
        await fleet.check(job, RunState.CANCELLED)
        assert await fleet.depth(job) == Depth(0, 0, 0)

    async def test_a_large_run_is_cleared_in_steps(self, fleet: Fleet) -> None:
        job = await fleet.submit(12_000)
        await fleet.move(job, RunState.CANCELLED)
        steps = []
        while True:
            swept = await fleet.sweeper.run_once()
            if swept == Swept():
                break
            steps.append(swept.cancelled)
        assert sum(steps) == 12_000
        assert max(steps) <= 5000
        await fleet.check(job, RunState.CANCELLED)
