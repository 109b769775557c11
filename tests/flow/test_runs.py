"""Runs: every task once, counts that agree with the stored tasks, and runs that are paused and cancelled."""

from collections import Counter
from collections.abc import AsyncIterator

import pytest

from conveyor.engines.queue import Depth, Outgoing, run_queue
from conveyor.model import (
    Counts,
    Job,
    JobKind,
    Outcome,
    TaskRef,
    TenantId,
)
from conveyor.states import RunState, TaskStatus
from tests.support.make_jobs import end
from tests.support.small_fleet import Fleet, Recording, failure, open_fleet, success

LEASE = 30.0


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with open_fleet(lease_seconds=LEASE) as opened:
        yield opened


class TestRuns:
    async def test_every_task_runs_once_and_the_run_completes(self, fleet: Fleet) -> None:
        job = await fleet.submit(250)
        fleet.start(fleet.worker())
        await fleet.ended(job)
        tasks = await fleet.check(job)
        assert {task.status for task in tasks.values()} == {TaskStatus.SUCCEEDED}
        assert fleet.executor.count() == Counter(range(250))
        assert await fleet.depth(job) == Depth(0, 0, 0)
        assert await fleet.notices(job) == ["job.accepted", "run.completed"]
        assert [await fleet.body(tasks[index]) for index in (0, 249)] == [b"body of 0", b"body of 249"]

    async def test_failed_tasks_do_not_fail_the_run(self, fleet: Fleet) -> None:
        async def odd_ones_fail(job: Job, ref: TaskRef) -> Outcome:
            return failure("result_not_json") if ref.index % 2 else success()

        fleet.executor.act = odd_ones_fail
        job = await fleet.submit(30)
        fleet.start(fleet.worker())
        await fleet.ended(job)
        tasks = await fleet.check(job)
        assert await fleet.counts(job) == Counts(succeeded=15, failed=15)
        assert {task.attempts for task in tasks.values()} == {1}, "nothing to try again for"
        assert await fleet.system.tasks.error_codes(job.key, 5) == [("result_not_json", 15)]
        assert tasks[1].detail.error is not None
        assert tasks[1].detail.error.message == "it went wrong"

    async def test_executors_that_take_many_at_once(self, fleet: Fleet) -> None:
        executor = Recording(fleet.clock, grain=64)
        job = await fleet.submit(1000, chunk_size=37)
        fleet.start(fleet.worker(executor))
        await fleet.ended(job)
        await fleet.check(job)
        assert executor.count() == Counter(range(1000))

    async def test_many_jobs_of_several_tenants(self, fleet: Fleet) -> None:
        jobs = [await fleet.submit(7, tenant=TenantId(f"tenant-{number % 3}")) for number in range(12)]
        fleet.start(fleet.worker())
        await fleet.ended(*jobs)
        for job in jobs:
            await fleet.check(job)

    async def test_a_finished_chunk_that_comes_again_is_not_run(self, fleet: Fleet) -> None:
        job = await fleet.submit(20)
        queue = run_queue(job.run.run_id)
        (delivery,) = await fleet.system.queue.receive(queue, 10, 0.0)
        await fleet.system.queue.send(queue, [Outgoing(delivery.body)])
        finished = await fleet.system.tasks.finish(job.key, [end(index) for index in range(5)])
        assert len(finished.moved) == 5
        await fleet.system.queue.ack(queue, [delivery.receipt])
        fleet.start(fleet.worker())
        await fleet.ended(job)
        await fleet.check(job)
        assert fleet.executor.count() == Counter(range(5, 20))

    async def test_many_finished_chunks_are_passed_at_once(self, fleet: Fleet) -> None:
        """After a crash the queue may begin with what is done: nobody waits between one of them and the next."""
        job = await fleet.submit(201, chunk_size=1)
        await fleet.system.tasks.finish(job.key, [end(index) for index in range(200)])
        fleet.start(fleet.worker())
        await fleet.until(lambda: fleet.executor.starts, within=40)
        await fleet.ended(job)
        await fleet.check(job)

    async def test_a_message_that_is_no_chunk_holds_up_nobody(self, fleet: Fleet) -> None:
        job = await fleet.submit(50, chunk_size=5)
        queue = run_queue(job.run.run_id)
        await fleet.system.queue.send(queue, [Outgoing(b"\xff not a chunk")])
        fleet.start(fleet.worker())
        await fleet.ended(job, within=60)
        await fleet.check(job)
        (letter,) = (await fleet.system.queue.dead_letters(None, 10)).items
        assert letter.body == b"\xff not a chunk"

    async def test_a_job_of_a_kind_that_nobody_here_runs_holds_up_nobody(self, fleet: Fleet) -> None:
        strange = await fleet.submit(["http://a.example/"], kind=JobKind.FETCH, handler=None)
        job = await fleet.submit(5)
        fleet.start(fleet.worker(kinds=[JobKind.PYTHON]))
        await fleet.ended(job, within=60)
        assert (await fleet.job(strange.job_id)).state is RunState.RUNNING
        assert (await fleet.depth(strange)).ready == 1


class TestMoves:
    async def test_a_paused_run_rests_and_goes_on(self, fleet: Fleet) -> None:
        async def slow(job: Job, ref: TaskRef) -> Outcome:
            await fleet.clock.sleep(0.3)
            return success()

        fleet.executor.act = slow
        job = await fleet.submit(200, concurrency=10, chunk_size=10)
        fleet.start(fleet.worker())
        fleet.start(fleet.sweeper)
        await fleet.until(lambda: len(fleet.executor.starts) > 40)
        await fleet.move(job, RunState.PAUSED)
        await fleet.passing(1)
        counts, started = await fleet.counts(job), len(fleet.executor.starts)
        assert (await fleet.depth(job)).held == 0
        await fleet.passing(3 * LEASE)
        assert (await fleet.counts(job), len(fleet.executor.starts)) == (counts, started)
        await fleet.move(job, RunState.RUNNING)
        await fleet.ended(job)
        tasks = await fleet.check(job)
        assert {task.status for task in tasks.values()} == {TaskStatus.SUCCEEDED}

    async def test_a_cancelled_run_stops_and_is_cleared(self, fleet: Fleet) -> None:
        async def slow(job: Job, ref: TaskRef) -> Outcome:
            await fleet.clock.sleep(0.3)
            return success()

        fleet.executor.act = slow
        job = await fleet.submit(12_000, concurrency=10)
        fleet.start(fleet.worker())
        fleet.start(fleet.sweeper)
        await fleet.until(lambda: len(fleet.executor.starts) > 40)
        await fleet.move(job, RunState.CANCELLED)
        await fleet.passing(20)
        await fleet.check(job, RunState.CANCELLED)
        assert await fleet.system.records.jobs.unswept_jobs(10) == []
        assert await fleet.depth(job) == Depth(0, 0, 0)


async def test_counts_and_rows_agree_at_every_moment(fleet: Fleet) -> None:
    """Readers never see a count that leads the rows."""

    async def slow(job: Job, ref: TaskRef) -> Outcome:
        await fleet.clock.sleep(0.2)
        return success() if ref.index % 3 else failure("result_not_json")

    fleet.executor.act = slow
    job = await fleet.submit(400, concurrency=16)
    fleet.start(fleet.worker())
    while (await fleet.job(job.job_id)).state is RunState.RUNNING:
        counts = await fleet.counts(job)
        rows = Counter(task.status for task in (await fleet.tasks(job)).values())
        assert counts.succeeded <= rows[TaskStatus.SUCCEEDED]
        assert counts.failed <= rows[TaskStatus.FAILED]
        await fleet.passing(0.2)
    await fleet.check(job)
