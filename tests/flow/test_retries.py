"""Retries: delays, the last attempt, and the failure threshold that stops a job."""

from collections import Counter
from collections.abc import AsyncIterator

import msgspec
import pytest

from conveyor.engines.queue import Depth
from conveyor.model import (
    Backoff,
    Counts,
    FailureThreshold,
    Job,
    Outcome,
    TaskRef,
)
from conveyor.states import RunState
from tests.support.small_fleet import Fleet, fail, failure, open_fleet, success

STEADY = Backoff(base=10.0, rate=2.0, cap=300.0, jitter=False)
LEASE = 30.0


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with open_fleet(lease_seconds=LEASE) as opened:
        yield opened


class TestRetries:
    async def test_an_attempt_that_fails_is_made_again_after_its_delay(self, fleet: Fleet) -> None:
        async def third_time_lucky(job: Job, ref: TaskRef) -> Outcome:
            return success(b"at last") if ref.attempt == 3 or ref.index >= 5 else failure()

        fleet.executor.act = third_time_lucky
        job = await fleet.submit(50, attempts=4, backoff=STEADY)
        fleet.start(fleet.worker())
        await fleet.ended(job)
        tasks = await fleet.check(job)
        assert await fleet.counts(job) == Counts(succeeded=50)
        assert [tasks[index].attempts for index in range(7)] == [3, 3, 3, 3, 3, 1, 1]
        for index in range(5):
            first, second, third = fleet.executor.times(index)
            # A delay, and no more than the polls of an idle lane on top.
            assert 10 <= second - first <= 12.5
            assert 20 <= third - second <= 22.5
        assert len(fleet.executor.starts) == 60

    async def test_attempts_are_counted_to_the_last(self, fleet: Fleet) -> None:
        fleet.executor.act = fail
        job = await fleet.submit(3, attempts=3, backoff=STEADY)
        fleet.start(fleet.worker())
        await fleet.ended(job)
        tasks = await fleet.check(job)
        assert await fleet.counts(job) == Counts(failed=3)
        assert {(task.attempts, task.error_code) for task in tasks.values()} == {(3, "handler_raised")}
        assert fleet.executor.count() == Counter({0: 3, 1: 3, 2: 3})

    async def test_the_wish_of_a_target_is_waited_for(self, fleet: Fleet) -> None:
        async def busy(job: Job, ref: TaskRef) -> Outcome:
            return success() if ref.attempt > 1 else msgspec.structs.replace(failure(), retry_after=100.0)

        fleet.executor.act = busy
        job = await fleet.submit(1, backoff=STEADY)
        fleet.start(fleet.worker())
        await fleet.ended(job)
        first, second = fleet.executor.times(0)
        assert 110 <= second - first <= 112.5

    async def test_what_happened_is_in_the_events(self, fleet: Fleet) -> None:
        async def one_of_each(job: Job, ref: TaskRef) -> Outcome:
            return success() if ref.index == 0 or (ref.attempt == 2 and ref.index == 1) else failure()

        fleet.executor.act = one_of_each
        job = await fleet.submit(3, attempts=2, backoff=STEADY)
        fleet.start(fleet.worker())
        await fleet.ended(job)
        told = [(event.index, event.event, event.data["attempt"]) for event in await fleet.events(job)]
        assert sorted(told[:2]) == [(1, "task.retried", 1), (2, "task.retried", 1)]
        assert told[2:] == [(2, "task.failed", 2)]
        retried = (await fleet.events(job))[0]
        assert retried.data["retry_in"] == 10.0
        assert retried.data["error"] == {"code": "handler_raised", "message": "it went wrong"}
        assert (retried.data["elapsed"], retried.data["worker"][:7]) == (0.0, "worker_")

    async def test_retries_of_one_chunk_do_not_wait_for_each_other(self, fleet: Fleet) -> None:
        async def by_index(job: Job, ref: TaskRef) -> Outcome:
            if ref.attempt > 1:
                return success()
            return msgspec.structs.replace(failure(), retry_after=float(ref.index * 20))

        fleet.executor.act = by_index
        job = await fleet.submit(5, backoff=Backoff(base=0.0))
        fleet.start(fleet.worker())
        await fleet.ended(job)
        await fleet.check(job)
        for index in range(5):
            first, second = fleet.executor.times(index)
            assert index * 20 <= second - first <= index * 20 + 2.5


class TestFailureThreshold:
    @pytest.mark.parametrize(
        "threshold", [FailureThreshold(failed=20), FailureThreshold(ratio=0.5, after=20)], ids=["failed", "ratio"]
    )
    async def test_it_stops_the_job_and_the_rest_is_cancelled(self, fleet: Fleet, threshold: FailureThreshold) -> None:
        async def slow_failure(job: Job, ref: TaskRef) -> Outcome:
            await fleet.clock.sleep(0.5)
            return failure("result_not_json")

        fleet.executor.act = slow_failure
        job = await fleet.submit(2000, failure_threshold=threshold, concurrency=10)
        fleet.start(fleet.worker())
        fleet.start(fleet.sweeper)
        (ended,) = await fleet.ended(job)
        assert ended.reason is not None
        assert "failure threshold" in ended.reason
        await fleet.until(lambda: fleet.system.records.jobs.unswept_jobs(1), within=60)

        async def swept() -> bool:
            return not await fleet.system.records.jobs.unswept_jobs(1)

        await fleet.until(swept)
        await fleet.check(job, RunState.FAILED)
        counts = await fleet.counts(job)
        assert 20 <= counts.failed < 200
        assert counts.cancelled == 2000 - counts.failed
        assert await fleet.depth(job) == Depth(0, 0, 0)
        started = len(fleet.executor.starts)
        await fleet.passing(60)
        assert len(fleet.executor.starts) == started, "nothing starts any more"

    async def test_below_it_the_job_completes(self, fleet: Fleet) -> None:
        async def few_fail(job: Job, ref: TaskRef) -> Outcome:
            return failure("result_not_json") if ref.index % 10 == 0 else success()

        fleet.executor.act = few_fail
        job = await fleet.submit(200, failure_threshold=FailureThreshold(failed=21, ratio=0.5))
        fleet.start(fleet.worker())
        await fleet.ended(job)
        await fleet.check(job)
        assert (await fleet.counts(job)).failed == 20
