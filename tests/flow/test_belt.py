"""The belt: workers, recorder, lifecycle and sweeper on a real SQLite system, with small executors."""

import asyncio
import dataclasses
import itertools
import operator
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from conveyor.engines.queue import Depth, Outgoing, run_queue
from conveyor.errors import EngineFailed
from conveyor.jobs.chunks import decode
from conveyor.model import (
    Backoff,
    Counts,
    FailureThreshold,
    Job,
    JobKind,
    Outcome,
    ResultLayout,
    TaskRef,
    TenantId,
)
from conveyor.recover.sweeper import Swept
from conveyor.states import RunState, TaskStatus
from tests.flow.belt import Belt, Recording, fail, failure, kill, open_belt, succeed, success
from tests.jobs import ACME, OTHER, end

STEADY = Backoff(base=10.0, rate=2.0, cap=300.0, jitter=False)
LEASE = 30.0


@pytest.fixture
async def belt() -> AsyncIterator[Belt]:
    async with open_belt(lease_seconds=LEASE) as opened:
        yield opened


async def move(belt: Belt, job: Job, target: RunState) -> None:
    moved = await belt.lifecycle.move(job, target, "by hand", await belt.counts(job))
    assert moved is target


class Listening:
    """Stands before an engine and writes down when a method is called."""

    def __init__(self, engine: Any, method: str, heard: list[str]) -> None:
        self._engine = engine
        self._method = method
        self._heard = heard

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            self._heard.append(name)
        return getattr(self._engine, name)


class TestRuns:
    async def test_every_task_runs_once_and_the_run_completes(self, belt: Belt) -> None:
        job = await belt.submit(250)
        belt.start(belt.worker())
        await belt.ended(job)
        tasks = await belt.check(job)
        assert {task.status for task in tasks.values()} == {TaskStatus.SUCCEEDED}
        assert belt.executor.count() == Counter(range(250))
        assert await belt.depth(job) == Depth(0, 0, 0)
        assert await belt.notices(job) == ["job.accepted", "run.completed"]
        assert [await belt.body(tasks[index]) for index in (0, 249)] == [b"body of 0", b"body of 249"]

    async def test_failed_tasks_do_not_fail_the_run(self, belt: Belt) -> None:
        async def odd_ones_fail(job: Job, ref: TaskRef) -> Outcome:
            return failure("result_not_json") if ref.index % 2 else success()

        belt.executor.act = odd_ones_fail
        job = await belt.submit(30)
        belt.start(belt.worker())
        await belt.ended(job)
        tasks = await belt.check(job)
        assert await belt.counts(job) == Counts(succeeded=15, failed=15)
        assert {task.attempts for task in tasks.values()} == {1}, "nothing to try again for"
        assert await belt.system.tasks.error_codes(job.key, 5) == [("result_not_json", 15)]
        assert tasks[1].detail.error is not None
        assert tasks[1].detail.error.message == "it went wrong"

    async def test_executors_that_take_many_at_once(self, belt: Belt) -> None:
        executor = Recording(belt.clock, grain=64)
        job = await belt.submit(1000, chunk_size=37)
        belt.start(belt.worker(executor))
        await belt.ended(job)
        await belt.check(job)
        assert executor.count() == Counter(range(1000))

    async def test_many_jobs_of_several_tenants(self, belt: Belt) -> None:
        jobs = [await belt.submit(7, tenant=TenantId(f"tenant-{number % 3}")) for number in range(12)]
        belt.start(belt.worker())
        await belt.ended(*jobs)
        for job in jobs:
            await belt.check(job)

    async def test_a_finished_chunk_that_comes_again_is_not_run(self, belt: Belt) -> None:
        job = await belt.submit(20)
        queue = run_queue(job.run.run_id)
        (delivery,) = await belt.system.queue.receive(queue, 10, 0.0)
        await belt.system.queue.send(queue, [Outgoing(delivery.body)])
        finished = await belt.system.tasks.finish(job.key, [end(index) for index in range(5)])
        assert len(finished.moved) == 5
        await belt.system.queue.ack(queue, [delivery.receipt])
        belt.start(belt.worker())
        await belt.ended(job)
        await belt.check(job)
        assert belt.executor.count() == Counter(range(5, 20))

    async def test_many_finished_chunks_are_passed_at_once(self, belt: Belt) -> None:
        """After a crash the queue may begin with what is done: nobody waits between one of them and the next."""
        job = await belt.submit(201, chunk_size=1)
        await belt.system.tasks.finish(job.key, [end(index) for index in range(200)])
        belt.start(belt.worker())
        await belt.until(lambda: belt.executor.starts, within=40)
        await belt.ended(job)
        await belt.check(job)

    async def test_a_message_that_is_no_chunk_holds_up_nobody(self, belt: Belt) -> None:
        job = await belt.submit(50, chunk_size=5)
        queue = run_queue(job.run.run_id)
        await belt.system.queue.send(queue, [Outgoing(b"\xff not a chunk")])
        belt.start(belt.worker())
        await belt.ended(job, within=60)
        await belt.check(job)
        (letter,) = (await belt.system.queue.dead_letters(None, 10)).items
        assert letter.body == b"\xff not a chunk"

    async def test_a_job_of_a_kind_that_nobody_here_runs_holds_up_nobody(self, belt: Belt) -> None:
        strange = await belt.submit(["http://a.example/"], kind=JobKind.FETCH, handler=None)
        job = await belt.submit(5)
        belt.start(belt.worker(kinds=[JobKind.PYTHON]))
        await belt.ended(job, within=60)
        assert (await belt.job(strange.job_id)).state is RunState.RUNNING
        assert (await belt.depth(strange)).ready == 1


class TestRetries:
    async def test_an_attempt_that_fails_is_made_again_after_its_delay(self, belt: Belt) -> None:
        async def third_time_lucky(job: Job, ref: TaskRef) -> Outcome:
            return success(b"at last") if ref.attempt == 3 or ref.index >= 5 else failure()

        belt.executor.act = third_time_lucky
        job = await belt.submit(50, attempts=4, backoff=STEADY)
        belt.start(belt.worker())
        await belt.ended(job)
        tasks = await belt.check(job)
        assert await belt.counts(job) == Counts(succeeded=50)
        assert [tasks[index].attempts for index in range(7)] == [3, 3, 3, 3, 3, 1, 1]
        for index in range(5):
            first, second, third = belt.executor.times(index)
            # A delay, and no more than the polls of an idle lane on top.
            assert 10 <= second - first <= 12.5
            assert 20 <= third - second <= 22.5
        assert len(belt.executor.starts) == 60

    async def test_attempts_are_counted_to_the_last(self, belt: Belt) -> None:
        belt.executor.act = fail
        job = await belt.submit(3, attempts=3, backoff=STEADY)
        belt.start(belt.worker())
        await belt.ended(job)
        tasks = await belt.check(job)
        assert await belt.counts(job) == Counts(failed=3)
        assert {(task.attempts, task.error_code) for task in tasks.values()} == {(3, "handler_raised")}
        assert belt.executor.count() == Counter({0: 3, 1: 3, 2: 3})

    async def test_the_wish_of_a_target_is_waited_for(self, belt: Belt) -> None:
        async def busy(job: Job, ref: TaskRef) -> Outcome:
            return success() if ref.attempt > 1 else msgspec.structs.replace(failure(), retry_after=100.0)

        belt.executor.act = busy
        job = await belt.submit(1, backoff=STEADY)
        belt.start(belt.worker())
        await belt.ended(job)
        first, second = belt.executor.times(0)
        assert 110 <= second - first <= 112.5

    async def test_what_happened_is_in_the_events(self, belt: Belt) -> None:
        async def one_of_each(job: Job, ref: TaskRef) -> Outcome:
            return success() if ref.index == 0 or (ref.attempt == 2 and ref.index == 1) else failure()

        belt.executor.act = one_of_each
        job = await belt.submit(3, attempts=2, backoff=STEADY)
        belt.start(belt.worker())
        await belt.ended(job)
        told = [(event.index, event.event, event.data["attempt"]) for event in await belt.events(job)]
        assert sorted(told[:2]) == [(1, "task.retried", 1), (2, "task.retried", 1)]
        assert told[2:] == [(2, "task.failed", 2)]
        retried = (await belt.events(job))[0]
        assert retried.data["retry_in"] == 10.0
        assert retried.data["error"] == {"code": "handler_raised", "message": "it went wrong"}

    async def test_retries_of_one_chunk_do_not_wait_for_each_other(self, belt: Belt) -> None:
        async def by_index(job: Job, ref: TaskRef) -> Outcome:
            if ref.attempt > 1:
                return success()
            return msgspec.structs.replace(failure(), retry_after=float(ref.index * 20))

        belt.executor.act = by_index
        job = await belt.submit(5, backoff=Backoff(base=0.0))
        belt.start(belt.worker())
        await belt.ended(job)
        await belt.check(job)
        for index in range(5):
            first, second = belt.executor.times(index)
            assert index * 20 <= second - first <= index * 20 + 2.5


class TestFailureThreshold:
    @pytest.mark.parametrize(
        "threshold", [FailureThreshold(failed=20), FailureThreshold(ratio=0.5, after=20)], ids=["failed", "ratio"]
    )
    async def test_it_stops_the_job_and_the_rest_is_cancelled(self, belt: Belt, threshold: FailureThreshold) -> None:
        async def slow_failure(job: Job, ref: TaskRef) -> Outcome:
            await belt.clock.sleep(0.5)
            return failure("result_not_json")

        belt.executor.act = slow_failure
        job = await belt.submit(2000, failure_threshold=threshold, concurrency=10)
        belt.start(belt.worker())
        belt.start(belt.sweeper)
        (ended,) = await belt.ended(job)
        assert ended.reason is not None
        assert "failure threshold" in ended.reason
        await belt.until(lambda: belt.system.records.jobs.unswept_jobs(1), within=60)

        async def swept() -> bool:
            return not await belt.system.records.jobs.unswept_jobs(1)

        await belt.until(swept)
        await belt.check(job, RunState.FAILED)
        counts = await belt.counts(job)
        assert 20 <= counts.failed < 200
        assert counts.cancelled == 2000 - counts.failed
        assert await belt.depth(job) == Depth(0, 0, 0)
        started = len(belt.executor.starts)
        await belt.passing(60)
        assert len(belt.executor.starts) == started, "nothing starts any more"

    async def test_below_it_the_job_completes(self, belt: Belt) -> None:
        async def few_fail(job: Job, ref: TaskRef) -> Outcome:
            return failure("result_not_json") if ref.index % 10 == 0 else success()

        belt.executor.act = few_fail
        job = await belt.submit(200, failure_threshold=FailureThreshold(failed=21, ratio=0.5))
        belt.start(belt.worker())
        await belt.ended(job)
        await belt.check(job)
        assert (await belt.counts(job)).failed == 20


class TestLostWorkers:
    async def test_an_abandoned_chunk_is_taken_up_where_it_was_left(self, belt: Belt) -> None:
        """A worker is gone in the middle of its chunk: when the hold lapses, another runs what has not ended."""

        async def half_hangs(job: Job, ref: TaskRef) -> Outcome:
            if ref.index % 2:
                await asyncio.Event().wait()
            return success()

        dying = Recording(belt.clock, half_hangs)
        job = await belt.submit(40)
        await belt.abandon(belt.worker(dying), lambda: len(dying.starts) == 40)
        assert (await belt.counts(job)).succeeded == 20
        belt.start(belt.worker())
        await belt.passing(LEASE / 3)
        assert belt.executor.starts == [], "the chunk is still held"
        await belt.ended(job, within=2 * LEASE)
        await belt.check(job)
        assert belt.executor.count() == Counter(range(1, 40, 2))

    async def test_a_zombie_that_wakes_late_changes_nothing(self, belt: Belt) -> None:
        late = asyncio.Event()

        async def sleeps_through(job: Job, ref: TaskRef) -> Outcome:
            await late.wait()
            return failure("result_not_json", "the zombie says so")

        job = await belt.submit(10)
        zombie = belt.worker(Recording(belt.clock, sleeps_through))
        await belt.abandon(zombie, lambda: any(lane.active == 10 for lane in zombie._lanes.values()))
        belt.start(belt.worker())
        await belt.ended(job)
        before = await belt.check(job)
        late.set()
        await belt.quiet()
        await zombie.tick()
        assert await belt.check(job) == before

    async def test_a_zombie_starts_nothing_more_of_what_it_lost(self, belt: Belt) -> None:
        late = asyncio.Event()

        async def sleeps_through(job: Job, ref: TaskRef) -> Outcome:
            await late.wait()
            return success()

        executor = Recording(belt.clock, sleeps_through)
        job = await belt.submit(50, concurrency=5)
        zombie = belt.worker(executor)
        await belt.abandon(zombie, lambda: len(executor.starts) == 5)
        queue = run_queue(job.run.run_id)
        belt.clock.advance(LEASE)
        (taken,) = await belt.system.queue.receive(queue, 10, 10 * LEASE)
        # Its next tick is a heartbeat, which finds the chunk gone, before any of its runners goes on.
        await zombie.tick()
        late.set()
        await belt.quiet()
        await zombie.tick()
        await belt.quiet()
        assert len(executor.starts) == 5
        assert len(decode(taken.body).refs) == 50

    async def test_heartbeats_keep_a_long_task(self, belt: Belt) -> None:
        async def long(job: Job, ref: TaskRef) -> Outcome:
            await belt.clock.sleep(LEASE * 6)
            return success()

        belt.executor.act = long
        job = await belt.submit(10)
        belt.start(belt.worker())
        belt.start(belt.worker())
        await belt.ended(job, within=LEASE * 8)
        await belt.check(job)
        assert belt.executor.count() == Counter(range(10))

    async def test_a_worker_that_closes_gives_everything_back_uncounted(
        self, belt: Belt, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("conveyor.process.worker._DRAIN_SECONDS", 0.01)

        async def hangs(job: Job, ref: TaskRef) -> Outcome:
            await asyncio.Event().wait()
            return success()

        hanging = Recording(belt.clock, hangs)
        job = await belt.submit(30, chunk_size=10)
        service = belt.start(belt.worker(hanging))
        await belt.until(lambda: len(hanging.starts) == 30)
        before = belt.clock.now()
        await belt.stop(service)
        depth = await belt.depth(job)
        assert depth == Depth(3, 0, 0)
        queue = run_queue(job.run.run_id)
        deliveries = await belt.system.queue.receive(queue, 10, LEASE)
        assert {delivery.receives for delivery in deliveries} == {1}
        await belt.system.queue.release(queue, [delivery.receipt for delivery in deliveries], 0.0)
        belt.start(belt.worker())
        await belt.ended(job, within=LEASE / 2)
        await belt.check(job)
        assert belt.clock.now() - before < LEASE

    async def test_a_worker_that_closes_records_what_was_done(
        self, belt: Belt, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Outcomes that wait for a flush are durable before their message goes back, so nobody repeats them."""
        monkeypatch.setattr("conveyor.process.worker._DRAIN_SECONDS", 0.01)

        async def one_hangs(job: Job, ref: TaskRef) -> Outcome:
            if ref.index == 7:
                await asyncio.Event().wait()
            return success()

        executor = Recording(belt.clock, one_hangs)
        order: list[str] = []
        system = dataclasses.replace(
            belt.system,
            tasks=Listening(belt.system.tasks, "finish", order),  # type: ignore[arg-type]
            queue=Listening(belt.system.queue, "release", order),  # type: ignore[arg-type]
        )
        job = await belt.submit(30)
        service = belt.start(belt.worker(executor, system, flush_seconds=60.0))
        await belt.until(lambda: len(executor.starts) == 30)
        assert order == []
        await belt.stop(service)
        assert order == ["finish", "release"]
        assert (await belt.counts(job)).succeeded == 29
        belt.start(belt.worker())
        await belt.ended(job, within=LEASE / 2)
        await belt.check(job)
        assert belt.executor.count() == Counter({7: 1})


async def lose_starts(belt: Belt, job: Job, times: int) -> None:
    """Take the run's messages, begin, and be gone, so many times."""
    queue = run_queue(job.run.run_id)
    for lost in range(times):
        deliveries = await belt.system.queue.receive(queue, 10, LEASE)
        assert {delivery.lost_starts for delivery in deliveries} == {lost}
        await belt.system.queue.mark_started(queue, [delivery.receipt for delivery in deliveries])
        belt.clock.advance(LEASE)


class TestPoison:
    async def test_a_chunk_that_outlives_its_workers_goes_on_one_by_one(self, belt: Belt) -> None:
        """Three starts are lost with their workers; then each task stands alone, and only the one that kills is given
        up, after three more."""
        job = await belt.submit(5)
        queue = run_queue(job.run.run_id)
        await lose_starts(belt, job, 3)

        async def kills(job: Job, ref: TaskRef) -> Outcome:
            if ref.index == 3:
                await asyncio.Event().wait()
            return success()

        for _ in range(3):
            executor = Recording(belt.clock, kills)
            await belt.abandon(belt.worker(executor), lambda e=executor: 3 in e.count())
            await belt.quiet()
            belt.clock.advance(LEASE)
        assert (await belt.counts(job)) == Counts(succeeded=4)
        belt.start(belt.worker())
        await belt.ended(job, within=LEASE)
        tasks = await belt.check(job)
        assert belt.executor.starts == [], "it is given up without another start"
        assert await belt.counts(job) == Counts(succeeded=4, failed=1)
        assert (tasks[3].status, tasks[3].error_code) == (TaskStatus.FAILED, "worker_lost")
        assert tasks[3].detail.error is not None
        assert "3 times" in tasks[3].detail.error.message
        (letter,) = (await belt.system.queue.dead_letters(None, 10)).items
        assert letter.queue == queue
        assert [ref.index for ref in decode(letter.body).refs] == [3]
        assert "3 times" in letter.reason
        assert [(event.index, event.event) for event in await belt.events(job)] == [(3, "task.dead_lettered")]

    async def test_a_chunk_of_which_one_is_left_is_given_up_without_a_detour(self, belt: Belt) -> None:
        job = await belt.submit(5)
        await belt.system.tasks.finish(job.key, [end(index) for index in range(4)])
        await lose_starts(belt, job, 3)
        belt.start(belt.worker())
        await belt.ended(job, within=LEASE)
        tasks = await belt.check(job)
        assert tasks[4].error_code == "worker_lost"

    async def test_what_never_started_is_not_lost_at_work(self, belt: Belt) -> None:
        """Its workers died of something else, before they came to it."""
        job = await belt.submit(5)
        for _ in range(20):
            await belt.system.queue.receive(run_queue(job.run.run_id), 10, LEASE)
            belt.clock.advance(LEASE)
        belt.start(belt.worker())
        await belt.ended(job, within=LEASE)
        await belt.check(job)
        assert await belt.counts(job) == Counts(succeeded=5)

    async def test_a_worker_that_closes_loses_no_starts(self, belt: Belt, monkeypatch: pytest.MonkeyPatch) -> None:
        """However often: a long task that is given back at every deploy is no poison."""
        monkeypatch.setattr("conveyor.process.worker._DRAIN_SECONDS", 0.01)

        async def hangs(job: Job, ref: TaskRef) -> Outcome:
            await asyncio.Event().wait()
            return success()

        job = await belt.submit(3)
        await lose_starts(belt, job, 1)
        for _ in range(6):
            hanging = Recording(belt.clock, hangs)
            service = belt.start(belt.worker(hanging))
            await belt.until(lambda e=hanging: len(e.starts) == 3)
            await belt.stop(service)
        belt.start(belt.worker())
        await belt.ended(job, within=LEASE)
        await belt.check(job)
        assert await belt.counts(job) == Counts(succeeded=3)

    @pytest.mark.parametrize("chunk_size", [1, 4])
    async def test_a_task_that_kills_its_worker_takes_no_other_with_it(self, belt: Belt, chunk_size: int) -> None:
        """It kills before anything beside it can end. Each worker dies of it until it is given up; what was held by
        the same workers was lost as often, and is innocent."""
        job = await belt.submit(12, chunk_size=chunk_size)
        dead = asyncio.Event()

        async def kills(job: Job, ref: TaskRef) -> Outcome:
            if ref.index == 6:
                dead.set()
            else:
                await belt.clock.sleep(1.0)
            if dead.is_set():
                await asyncio.Event().wait()
            return success()

        workers = 0
        while (await belt.job(job.job_id)).state is RunState.RUNNING:
            dead.clear()
            workers += 1
            worker = belt.worker(Recording(belt.clock, kills))

            async def ended() -> bool:
                return (await belt.job(job.job_id)).state is RunState.COMPLETED

            for _ in range(2000):
                await worker.tick()
                await belt.breathe()
                if dead.is_set() or await ended():
                    break
                belt.clock.advance(0.1)
            await kill(worker)
            belt.clock.advance(LEASE)
            assert workers < 20
        tasks = await belt.check(job)
        failed = {index: task.error_code for index, task in tasks.items() if task.status is TaskStatus.FAILED}
        assert failed == {6: "worker_lost"}
        # Nobody marks the first delivery of a message: it costs a write, and most come once.
        assert workers == (5 if chunk_size == 1 else 8)

    async def test_an_executor_that_raises_does_not_hang_the_job(self, belt: Belt) -> None:
        """It breaks its promise; its tasks count as lost starts, the others go on."""

        async def breaks(job: Job, ref: TaskRef) -> Outcome:
            if ref.index == 2:
                raise RuntimeError("a bug in the executor")
            return success()

        belt.executor.act = breaks
        job = await belt.submit(20, chunk_size=4)
        belt.start(belt.worker())
        await belt.ended(job, within=20 * LEASE)
        tasks = await belt.check(job)
        assert tasks[2].error_code == "worker_lost"
        assert (await belt.counts(job)).succeeded == 19


class TestSharing:
    async def test_two_workers_share_a_run_within_its_concurrency(self, belt: Belt) -> None:
        async def slow(job: Job, ref: TaskRef) -> Outcome:
            await belt.clock.sleep(0.4)
            return success()

        both = Recording(belt.clock, slow)
        ran: Counter[str] = Counter()

        def counting(name: str) -> Recording:
            async def act(job: Job, ref: TaskRef) -> Outcome:
                ran[name] += 1
                return (await both.attempt(job, [ref]))[0]

            return Recording(belt.clock, act)

        job = await belt.submit(600, concurrency=12, chunk_size=10)
        belt.start(belt.worker(counting("one")))
        belt.start(belt.worker(counting("two")))
        await belt.ended(job)
        await belt.check(job)
        assert both.most[job.run.run_id] == 12
        assert sum(ran.values()) == 600

    async def test_concurrency_holds_while_other_runs_come_and_go(self, belt: Belt) -> None:
        """When a worker's slots are dealt anew, what it still runs counts against the run."""

        async def slow(job: Job, ref: TaskRef) -> Outcome:
            await belt.clock.sleep(2.0)
            return success()

        belt.executor.act = slow
        job = await belt.submit(400, concurrency=20, chunk_size=5)
        for _ in range(2):
            belt.start(belt.worker(worker_concurrency=24))
        others = []
        for number in range(6):
            await belt.passing(1.5)
            others.append(await belt.submit(15, tenant=TenantId(f"t{number}"), chunk_size=5))
        await belt.ended(job, *others)
        await belt.check(job)
        assert belt.executor.most[job.run.run_id] <= 20

    async def test_a_worker_keeps_within_its_slots(self, belt: Belt) -> None:
        async def slow(job: Job, ref: TaskRef) -> Outcome:
            await belt.clock.sleep(0.4)
            return success()

        belt.executor.act = slow
        jobs = [await belt.submit(60, tenant=TenantId(f"t{number}"), chunk_size=7) for number in range(4)]
        belt.start(belt.worker(worker_concurrency=16))
        await belt.ended(*jobs)
        assert belt.executor.most["all"] <= 16 + 4, "those over the deal end with what they are doing"

    @pytest.mark.parametrize("tenant", [ACME, OTHER], ids=["same tenant", "another tenant"])
    async def test_a_small_job_is_done_long_before_a_huge_one(self, belt: Belt, tenant: TenantId) -> None:
        async def slow(job: Job, ref: TaskRef) -> Outcome:
            await belt.clock.sleep(0.2)
            return success()

        belt.executor.act = slow
        huge = await belt.submit(50_000, concurrency=1000)
        belt.start(belt.worker())
        await belt.until(lambda: len(belt.executor.starts) > 500)
        before = belt.clock.now()
        small = await belt.submit(10, tenant=tenant)
        await belt.ended(small, within=5)
        assert belt.clock.now() - before < 2.0
        assert (await belt.counts(huge)).ended < 5000

    async def test_more_runs_than_slots_all_get_there(self, belt: Belt) -> None:
        async def slow(job: Job, ref: TaskRef) -> Outcome:
            await belt.clock.sleep(0.3)
            return success()

        belt.executor.act = slow
        jobs = [await belt.submit(6, tenant=TenantId(f"t{number % 2}"), chunk_size=2) for number in range(8)]
        belt.start(belt.worker(worker_concurrency=2))
        await belt.ended(*jobs)
        for job in jobs:
            await belt.check(job)

    async def test_a_higher_priority_goes_first(self, belt: Belt) -> None:
        async def slow(job: Job, ref: TaskRef) -> Outcome:
            await belt.clock.sleep(0.2)
            return success()

        belt.executor.act = slow
        low = await belt.submit(400, priority=0, chunk_size=10)
        high = await belt.submit(400, priority=5, chunk_size=10)
        belt.start(belt.worker(worker_concurrency=10))
        await belt.ended(high)
        assert (await belt.counts(low)).ended < 100


class TestTargets:
    async def test_requests_to_a_host_come_at_its_rate(self, belt: Belt) -> None:
        executor = Recording(belt.clock, succeed, target=lambda ref: f"host{ref.index % 2}")
        job = await belt.submit(60, rate_per_host=5.0)
        started = belt.clock.now()
        belt.start(belt.worker(executor))
        belt.start(belt.worker(executor))
        await belt.ended(job)
        await belt.check(job)
        took = belt.clock.now() - started
        assert 29 / 5.0 <= took <= 29 / 5.0 + 2.0
        for host in ("host0", "host1"):
            at = [start.at for start in executor.starts if start.target == host]
            assert len(at) == 30
            for first, last in itertools.combinations(range(30), 2):
                # A pass may be used a little after it was due, when the next is due already.
                assert last - first <= (at[last] - at[first] + 1.0) * 5.0

    async def test_a_rate_is_of_one_job(self, belt: Belt) -> None:
        executor = Recording(belt.clock, succeed, target=lambda ref: "host")
        jobs = [await belt.submit(10, rate_per_host=1.0, tenant=tenant) for tenant in (ACME, OTHER)]
        started = belt.clock.now()
        belt.start(belt.worker(executor))
        await belt.ended(*jobs)
        assert belt.clock.now() - started < 12

    async def test_no_more_at_once_than_a_host_may_get(self, belt: Belt) -> None:
        async def slow(job: Job, ref: TaskRef) -> Outcome:
            await belt.clock.sleep(0.5)
            return success()

        executor = Recording(belt.clock, slow, target=lambda ref: f"host{ref.index % 2}")
        job = await belt.submit(60, concurrency_per_host=3)
        for _ in range(2):
            belt.start(belt.worker(executor))
        await belt.ended(job)
        await belt.check(job)
        assert (executor.most["host0"], executor.most["host1"]) == (3, 3)

    async def test_a_slow_host_does_not_hold_up_another(self, belt: Belt) -> None:
        executor = Recording(belt.clock, succeed, target=lambda ref: "slow" if ref.index < 50 else f"host{ref.index}")
        job = await belt.submit(100, rate_per_host=0.5)
        belt.start(belt.worker(executor))
        await belt.passing(3)
        assert sum(start.target != "slow" for start in executor.starts) == 50
        assert sum(start.target == "slow" for start in executor.starts) <= 2
        await belt.ended(job)

    async def test_what_waits_for_a_slow_host_is_bounded(self, belt: Belt) -> None:
        executor = Recording(belt.clock, succeed, target=lambda ref: "slow")
        job = await belt.submit(12_000, rate_per_host=1.0)
        worker = belt.worker(executor)
        belt.start(worker)
        await belt.passing(45)
        (lane,) = worker._lanes.values()
        assert len(lane._targets) + len(lane._waiting) <= 5500
        assert (await belt.depth(job)).ready * 100 > 5000


class TestMoves:
    async def test_a_paused_run_rests_and_goes_on(self, belt: Belt) -> None:
        async def slow(job: Job, ref: TaskRef) -> Outcome:
            await belt.clock.sleep(0.3)
            return success()

        belt.executor.act = slow
        job = await belt.submit(200, concurrency=10, chunk_size=10)
        belt.start(belt.worker())
        belt.start(belt.sweeper)
        await belt.until(lambda: len(belt.executor.starts) > 40)
        await move(belt, job, RunState.PAUSED)
        await belt.passing(1)
        counts, started = await belt.counts(job), len(belt.executor.starts)
        assert (await belt.depth(job)).held == 0
        await belt.passing(3 * LEASE)
        assert (await belt.counts(job), len(belt.executor.starts)) == (counts, started)
        await move(belt, job, RunState.RUNNING)
        await belt.ended(job)
        tasks = await belt.check(job)
        assert {task.status for task in tasks.values()} == {TaskStatus.SUCCEEDED}

    async def test_a_cancelled_run_stops_and_is_cleared(self, belt: Belt) -> None:
        async def slow(job: Job, ref: TaskRef) -> Outcome:
            await belt.clock.sleep(0.3)
            return success()

        belt.executor.act = slow
        job = await belt.submit(12_000, concurrency=10)
        belt.start(belt.worker())
        belt.start(belt.sweeper)
        await belt.until(lambda: len(belt.executor.starts) > 40)
        await move(belt, job, RunState.CANCELLED)
        await belt.passing(20)
        await belt.check(job, RunState.CANCELLED)
        assert await belt.system.records.jobs.unswept_jobs(10) == []
        assert await belt.depth(job) == Depth(0, 0, 0)


class TestSweeper:
    async def test_lost_references_are_sent_again(self, belt: Belt) -> None:
        job = await belt.submit(250)
        await belt.system.tasks.finish(job.key, [end(index) for index in range(50)])
        await belt.system.queue.drop(run_queue(job.run.run_id))
        assert await belt.sweeper.run_once() == Swept(checked=1, requeued=200)
        assert (await belt.depth(job)).ready == 2
        assert await belt.sweeper.run_once() == Swept(checked=1), "once is enough"
        belt.start(belt.worker())
        await belt.ended(job)
        await belt.check(job)
        assert belt.executor.count() == Counter(range(50, 250))

    async def test_lost_references_of_a_running_job(self, belt: Belt) -> None:
        async def slow(job: Job, ref: TaskRef) -> Outcome:
            await belt.clock.sleep(0.3)
            return success()

        belt.executor.act = slow
        job = await belt.submit(500, concurrency=20)
        belt.start(belt.worker())
        belt.start(belt.sweeper)
        await belt.until(lambda: len(belt.executor.starts) > 50)
        await belt.system.queue.drop(run_queue(job.run.run_id))
        await belt.ended(job)
        await belt.check(job)

    async def test_a_missed_completion_is_made_up_for(self, belt: Belt) -> None:
        job = await belt.submit(5)
        await belt.system.tasks.finish(job.key, [end(index) for index in range(5)])
        await belt.system.queue.drop(run_queue(job.run.run_id))
        assert await belt.sweeper.run_once() == Swept(checked=1, completed=1, cleared=1)
        await belt.check(job)
        assert await belt.sweeper.run_once() == Swept()

    async def test_drifted_counts_are_repaired(self, belt: Belt) -> None:
        job = await belt.submit(20)
        await belt.system.tasks.finish(job.key, [end(index) for index in range(20)])
        await belt.system.queue.drop(run_queue(job.run.run_id))
        database: Any = belt.system.tasks._database  # type: ignore[attr-defined]
        await database.change(
            "UPDATE task_runs SET succeeded = 13, failed = 2 WHERE run_id = :r", {"r": job.run.run_id}
        )
        assert (await belt.counts(job)).ended == 15
        swept = await belt.sweeper.run_once()
        assert (swept.completed, swept.requeued) == (1, 0)
        await belt.check(job)
        assert await belt.counts(job) == Counts(succeeded=20)

    async def test_drifted_counts_of_a_run_that_goes_on(self, belt: Belt) -> None:
        job = await belt.submit(20)
        await belt.system.tasks.finish(job.key, [end(index) for index in range(10)])
        await belt.system.queue.drop(run_queue(job.run.run_id))
        database: Any = belt.system.tasks._database  # type: ignore[attr-defined]
        await database.change("UPDATE task_runs SET succeeded = 3 WHERE run_id = :r", {"r": job.run.run_id})
        assert await belt.sweeper.run_once() == Swept(checked=1, requeued=10)
        assert await belt.counts(job) == Counts(succeeded=10)
        belt.start(belt.worker())
        await belt.ended(job)
        await belt.check(job)

    async def test_it_leaves_alone_what_is_under_way(self, belt: Belt) -> None:
        async def slow(job: Job, ref: TaskRef) -> Outcome:
            await belt.clock.sleep(20)
            return success() if ref.attempt == 2 else failure()

        belt.executor.act = slow
        job = await belt.submit(10, backoff=STEADY)
        belt.start(belt.worker())
        swept: list[Swept] = []
        while (await belt.job(job.job_id)).state is RunState.RUNNING:
            swept.append(await belt.sweeper.run_once())
            await belt.passing(0.5)
        assert sum(each.requeued for each in swept) == 0
        assert belt.executor.count() == Counter(dict.fromkeys(range(10), 2))

    async def test_what_is_sent_back_late_is_cleared_too(self, belt: Belt) -> None:
        """A failed attempt waits to be written while its run ends; then its task is sent back, to be tried again."""
        belt.executor.act = fail
        job = await belt.submit(10, concurrency=1, backoff=STEADY)
        worker = belt.worker(flush_seconds=600.0)
        while not belt.executor.starts:
            await worker.tick()
            await belt.breathe()
        await move(belt, job, RunState.CANCELLED)
        belt.clock.advance(1.0)
        await worker.tick()
        assert worker._lanes == {}
        assert (await belt.sweeper.run_once()).cancelled == 10
        assert (await belt.sweeper.run_once()).cleared == 0, "somebody may still send to its queues"
        await worker.close()
        assert (await belt.depth(job)).total > 1, "the message, and what was sent back of it"
        assert (await belt.sweeper.run_once()).cleared == 1
        await belt.check(job, RunState.CANCELLED)
        assert await belt.depth(job) == Depth(0, 0, 0)

    async def test_a_large_run_is_cleared_in_steps(self, belt: Belt) -> None:
        job = await belt.submit(12_000)
        await move(belt, job, RunState.CANCELLED)
        steps = []
        while True:
            swept = await belt.sweeper.run_once()
            if swept == Swept():
                break
            steps.append(swept.cancelled)
        assert sum(steps) == 12_000
        assert max(steps) <= 5000
        await belt.check(job, RunState.CANCELLED)


class TestBodies:
    @pytest.mark.parametrize("layout", ResultLayout)
    async def test_both_layouts_keep_bodies_whole(self, belt: Belt, layout: ResultLayout) -> None:
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

        belt.executor.act = bodies
        job = await belt.submit(300, result_layout=layout)
        belt.start(belt.worker())
        await belt.ended(job)
        tasks = await belt.check(job)
        for index, task in tasks.items():
            expected = body_of(index)
            if expected is None:
                assert task.detail.body is None
            else:
                assert await belt.body(task) == expected
        objects = [info async for info in belt.system.blobs.listing("results")]
        refs = [task.detail.body for task in tasks.values() if task.detail.body is not None]
        assert {info.key for info in objects} == {ref.key for ref in refs}
        if layout is ResultLayout.OBJECT:
            assert len(objects) == len(refs) == 270
        else:
            assert len(objects) < 100
            alone = [ref for ref in refs if ref.offset == -1]
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
    async def test_bodies_that_can_not_be_written_lose_nothing(self, belt: Belt, times: int) -> None:
        job = await belt.submit(60, result_layout=ResultLayout.PACKED, chunk_size=10)
        failing = Failing(belt.blobs, "put", times, OSError(28, "No space left on device"))
        belt.blobs = failing  # type: ignore[assignment]
        belt.start(belt.worker())
        await belt.ended(job, within=40 * LEASE)
        tasks = await belt.check(job)
        assert failing.failed == times
        assert {task.status for task in tasks.values()} == {TaskStatus.SUCCEEDED}

    @pytest.mark.parametrize("after", [False, True], ids=["not done", "done and yet an error"])
    @pytest.mark.parametrize(
        ("seam", "method"),
        [("tasks", "finish"), ("tasks", "note"), ("queue", "ack"), ("queue", "send"), ("records.jobs", "move_run")],
    )
    async def test_an_engine_that_fails_loses_nothing(self, belt: Belt, seam: str, method: str, after: bool) -> None:
        async def flaky(job: Job, ref: TaskRef) -> Outcome:
            return success(b"x") if ref.attempt == 2 or ref.index % 2 else failure()

        belt.executor.act = flaky
        job = await belt.submit(40, chunk_size=7, backoff=STEADY)
        engine = operator.attrgetter(seam)(belt.system)
        failing: Any = Failing(engine, method, 3, EngineFailed("for a moment"), after=after)
        name, _, part = seam.partition(".")
        behind = dataclasses.replace(belt.system.records, **{part: failing}) if part else failing
        system = dataclasses.replace(belt.system, **{name: behind})
        belt.start(belt.worker(system=system))
        belt.start(belt.sweeper)
        await belt.ended(job, within=40 * LEASE)
        await belt.check(job)
        assert failing.failed >= 1
        assert (await belt.counts(job)).succeeded == 40

    async def test_an_error_that_nobody_foresaw_loses_nothing(self, belt: Belt) -> None:
        job = await belt.submit(20, chunk_size=5)
        failing = Failing(belt.system.tasks, "finish", 1, TypeError("a mistake in the engine"))
        belt.start(belt.worker(system=dataclasses.replace(belt.system, tasks=failing)))  # type: ignore[arg-type]
        await belt.ended(job, within=40 * LEASE)
        await belt.check(job)

    async def test_a_failed_acknowledgement_never_takes_what_is_still_running(self, belt: Belt) -> None:
        """Two chunks in one flush, one of them done: the error of its acknowledgement must not count the other's
        outcome twice."""
        gate = asyncio.Event()

        async def last_one_waits(job: Job, ref: TaskRef) -> Outcome:
            if ref.index in (1, 2):
                await gate.wait()
            return success()

        belt.executor.act = last_one_waits
        job = await belt.submit(4, chunk_size=3)
        failing = Failing(belt.system.queue, "ack", 2, EngineFailed("for a moment"))
        belt.start(belt.worker(system=dataclasses.replace(belt.system, queue=failing)))  # type: ignore[arg-type]
        await belt.until(lambda: failing.failed == 2)
        await belt.passing(5)
        assert (await belt.counts(job)).ended == 2
        depth = await belt.depth(job)
        assert depth.ready + depth.held == 1, "the chunk of the tasks that still run"
        gate.set()
        await belt.ended(job)
        await belt.check(job)

    async def test_a_store_that_is_down_burns_no_starts(self, belt: Belt) -> None:
        """Messages are received and can not be looked up, again and again: that is no fault of their tasks."""
        job = await belt.submit(100, chunk_size=10)
        failing = Failing(belt.system.tasks, "unfinished", 12, EngineFailed("down"))
        belt.start(belt.worker(system=dataclasses.replace(belt.system, tasks=failing)))  # type: ignore[arg-type]
        await belt.ended(job, within=40 * LEASE)
        await belt.check(job)
        assert failing.failed == 12
        assert await belt.counts(job) == Counts(succeeded=100)
        assert (await belt.system.queue.dead_letters(None, 10)).items == []


async def test_counts_and_rows_agree_at_every_moment(belt: Belt) -> None:
    """Readers never see a count that leads the rows."""

    async def slow(job: Job, ref: TaskRef) -> Outcome:
        await belt.clock.sleep(0.2)
        return success() if ref.index % 3 else failure("result_not_json")

    belt.executor.act = slow
    job = await belt.submit(400, concurrency=16)
    belt.start(belt.worker())
    while (await belt.job(job.job_id)).state is RunState.RUNNING:
        counts = await belt.counts(job)
        rows = Counter(task.status for task in (await belt.tasks(job)).values())
        assert counts.succeeded <= rows[TaskStatus.SUCCEEDED]
        assert counts.failed <= rows[TaskStatus.FAILED]
        await belt.passing(0.2)
    await belt.check(job)
