"""Workers that die, stall or close: others finish their chunks; a task that kills its workers is dead-lettered."""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from conveyor.engines.queue import Depth, run_queue
from conveyor.jobs.chunks import decode
from conveyor.model import (
    Counts,
    Job,
    Outcome,
    TaskRef,
)
from conveyor.states import RunState, TaskStatus
from tests.support.dead_letters import dead_letters
from tests.support.make_jobs import end
from tests.support.small_fleet import Fleet, Recording, failure, kill, open_fleet, success

LEASE = 30.0


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with open_fleet(lease_seconds=LEASE) as opened:
        yield opened


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


async def a_zombie_starts_nothing(limits: dict[str, Any]) -> None:
    """A worker loses a chunk, of which some tasks run and the others wait, for a slot or for their target."""
    async with open_fleet(lease_seconds=LEASE) as fleet:
        job = await fleet.submit(50, concurrency=5, **limits)
        async with zombie(fleet, job, success()) as executor:
            pass
        assert len(executor.starts) == 5


async def a_zombie_requeues_nothing() -> None:
    """Its message has the references that it would retry. The sweeper looks at the queues of a finished run once, when
    no message of it is in flight."""
    async with open_fleet(lease_seconds=LEASE) as fleet:
        job = await fleet.submit(50, concurrency=5)
        async with zombie(fleet, job, failure()):
            await fleet.system.queue.drop(run_queue(job.run.run_id))
        assert (await fleet.depth(job)).total == 0


@asynccontextmanager
async def zombie(fleet: Fleet, job: Job, outcome: Outcome) -> AsyncIterator[Recording]:
    """A worker stands still for longer than its lease, in the midst of five attempts. After the body it goes on, and
    they end like this."""
    late = asyncio.Event()

    async def sleeps_through(job: Job, ref: TaskRef) -> Outcome:
        await late.wait()
        return outcome

    executor = Recording(fleet.clock, sleeps_through, target=lambda ref: "host")
    worker = fleet.worker(executor)
    await fleet.abandon(worker, lambda: len(executor.starts) == 5)
    fleet.clock.advance(LEASE)
    (taken,) = await fleet.system.queue.receive(run_queue(job.run.run_id), 10, 10 * LEASE)
    # It renews its leases, and finds the chunk gone, before any of its runners goes on.
    await worker._renewal.renew()
    await worker.tick()
    yield executor
    late.set()
    await fleet.quiet()
    await worker.tick()
    await fleet.quiet()
    assert len(decode(taken.body).refs) == 50


class TestLostWorkers:
    async def test_an_abandoned_chunk_is_taken_up_where_it_was_left(self, fleet: Fleet) -> None:
        """A worker is gone in the middle of its chunk: when the hold lapses, another runs what has not ended."""

        async def half_hangs(job: Job, ref: TaskRef) -> Outcome:
            if ref.index % 2:
                await asyncio.Event().wait()
            return success()

        dying = Recording(fleet.clock, half_hangs)
        job = await fleet.submit(40)
        await fleet.abandon(fleet.worker(dying), lambda: len(dying.starts) == 40)
        assert (await fleet.counts(job)).succeeded == 20
        fleet.start(fleet.worker())
        await fleet.passing(LEASE / 3)
        assert fleet.executor.starts == [], "the chunk is still held"
        await fleet.ended(job, within=2 * LEASE)
        await fleet.check(job)
        assert fleet.executor.count() == Counter(range(1, 40, 2))

    async def test_a_zombie_that_wakes_late_changes_nothing(self, fleet: Fleet) -> None:
        late = asyncio.Event()

        async def sleeps_through(job: Job, ref: TaskRef) -> Outcome:
            await late.wait()
            return failure("result_not_json", "the zombie says so")

        job = await fleet.submit(10)
        zombie = fleet.worker(Recording(fleet.clock, sleeps_through))
        await fleet.abandon(zombie, lambda: any(lane.active == 10 for lane in zombie._lanes.values()))
        fleet.start(fleet.worker())
        await fleet.ended(job)
        before = await fleet.check(job)
        late.set()
        await fleet.quiet()
        await zombie.tick()
        assert await fleet.check(job) == before

    @pytest.mark.parametrize("limits", [{}, {"concurrency_per_host": 5}, {"rate_per_host": 1000}], ids=str)
    async def test_a_zombie_starts_nothing_more_of_what_it_lost(self, limits: dict[str, Any]) -> None:
        await a_zombie_starts_nothing(limits)

    async def test_a_zombie_requeues_nothing_of_what_it_lost(self) -> None:
        await a_zombie_requeues_nothing()

    async def test_outcomes_of_a_message_that_is_redelivered_soon(self, fleet: Fleet) -> None:
        """One of the two fetchers that have its references dies: those at the other one fail, and are not attempted
        both as retries and again with the message."""
        late = asyncio.Event()

        async def fails_at_first(job: Job, ref: TaskRef) -> Outcome:
            if late.is_set():
                return success()
            await late.wait()
            return failure()

        executor = Recording(fleet.clock, fails_at_first)
        job = await fleet.submit(5)
        worker = fleet.worker(executor)
        fleet.start(worker)
        await fleet.until(lambda: len(executor.starts) == 5)
        (chunk,) = [chunk for lane in worker._lanes.values() for chunk in lane.chunks.values()]
        chunk.lost = True
        worker.on_lost([chunk])
        late.set()
        await fleet.ended(job)
        await fleet.check(job)
        assert executor.count() == Counter(dict.fromkeys(range(5), 2))
        assert {start.attempt for start in executor.starts} == {1}, "the first ones count as lost starts"

    async def test_heartbeats_keep_a_long_task(self, fleet: Fleet) -> None:
        async def long(job: Job, ref: TaskRef) -> Outcome:
            await fleet.clock.sleep(LEASE * 6)
            return success()

        fleet.executor.act = long
        job = await fleet.submit(10)
        fleet.start(fleet.worker())
        fleet.start(fleet.worker())
        await fleet.ended(job, within=LEASE * 8)
        await fleet.check(job)
        assert fleet.executor.count() == Counter(range(10))

    async def test_a_worker_that_closes_gives_everything_back_uncounted(
        self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("conveyor.process.worker._DRAIN_SECONDS", 0.01)

        async def hangs(job: Job, ref: TaskRef) -> Outcome:
            await asyncio.Event().wait()
            return success()

        hanging = Recording(fleet.clock, hangs)
        job = await fleet.submit(30, chunk_size=10)
        service = fleet.start(fleet.worker(hanging))
        await fleet.until(lambda: len(hanging.starts) == 30)
        before = fleet.clock.now()
        await fleet.stop(service)
        depth = await fleet.depth(job)
        assert depth == Depth(3, 0, 0)
        queue = run_queue(job.run.run_id)
        deliveries = await fleet.system.queue.receive(queue, 10, LEASE)
        assert {delivery.receives for delivery in deliveries} == {1}
        await fleet.system.queue.release(queue, [delivery.receipt for delivery in deliveries], 0.0)
        fleet.start(fleet.worker())
        await fleet.ended(job, within=LEASE / 2)
        await fleet.check(job)
        assert fleet.clock.now() - before < LEASE

    async def test_a_worker_that_closes_records_what_was_done(
        self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Outcomes that wait for a flush are durable before their message goes back, so nobody repeats them."""
        monkeypatch.setattr("conveyor.process.worker._DRAIN_SECONDS", 0.01)

        async def one_hangs(job: Job, ref: TaskRef) -> Outcome:
            if ref.index == 7:
                await asyncio.Event().wait()
            return success()

        executor = Recording(fleet.clock, one_hangs)
        order: list[str] = []
        system = dataclasses.replace(
            fleet.system,
            atomic_flush=Listening(fleet.system.atomic_flush, "record_flush", order),  # type: ignore[arg-type]
            queue=Listening(fleet.system.queue, "release", order),  # type: ignore[arg-type]
        )
        job = await fleet.submit(30)
        service = fleet.start(fleet.worker(executor, system, flush_seconds=60.0))
        await fleet.until(lambda: len(executor.starts) == 30)
        assert order == []
        await fleet.stop(service)
        assert order == ["record_flush", "release"]
        assert (await fleet.counts(job)).succeeded == 29
        fleet.start(fleet.worker())
        await fleet.ended(job, within=LEASE / 2)
        await fleet.check(job)
        assert fleet.executor.count() == Counter({7: 1})


async def lose_starts(fleet: Fleet, job: Job, times: int) -> None:
    """Take the run's messages, begin, and be gone, so many times."""
    queue = run_queue(job.run.run_id)
    for lost in range(times):
        deliveries = await fleet.system.queue.receive(queue, 10, LEASE)
        assert {delivery.lost_starts for delivery in deliveries} == {lost}
        await fleet.system.queue.mark_started(queue, [delivery.receipt for delivery in deliveries])
        fleet.clock.advance(LEASE)


async def killed_workers_condemn_nobody(chunk_size: int) -> None:
    """Somebody kills the worker again and again, before any task finishes."""
    async with open_fleet(lease_seconds=LEASE) as fleet:
        job = await fleet.submit(8, chunk_size=chunk_size)
        for _ in range(10):
            killed_at = fleet.clock.now() + 1.0
            await fleet.abandon(fleet.worker(endless(fleet)), lambda at=killed_at: fleet.clock.now() >= at)
            fleet.clock.advance(LEASE)
        fleet.start(fleet.worker())
        await fleet.ended(job, within=20 * LEASE)
        await fleet.check(job)
        assert await fleet.counts(job) == Counts(succeeded=8)


def endless(fleet: Fleet) -> Recording:
    async def hangs(job: Job, ref: TaskRef) -> Outcome:
        await asyncio.Event().wait()
        return success()

    return Recording(fleet.clock, hangs)


class TestPoison:
    async def test_a_chunk_that_outlives_its_workers_goes_on_one_by_one(self, fleet: Fleet) -> None:
        """Three starts are lost with their workers; then each task stands alone, and only the one that kills is given
        up, after three more."""
        job = await fleet.submit(5)
        queue = run_queue(job.run.run_id)
        await lose_starts(fleet, job, 3)

        async def kills(job: Job, ref: TaskRef) -> Outcome:
            if ref.index == 3:
                await asyncio.Event().wait()
            return success()

        for _ in range(3):
            executor = Recording(fleet.clock, kills)
            await fleet.abandon(fleet.worker(executor), lambda e=executor: 3 in e.count())
            await fleet.quiet()
            fleet.clock.advance(LEASE)
        assert (await fleet.counts(job)) == Counts(succeeded=4)
        fleet.start(fleet.worker())
        await fleet.ended(job, within=LEASE)
        tasks = await fleet.check(job)
        assert fleet.executor.starts == [], "it is given up without another start"
        assert await fleet.counts(job) == Counts(succeeded=4, failed=1)
        assert (tasks[3].status, tasks[3].error_code) == (TaskStatus.FAILED, "worker_lost")
        assert tasks[3].detail.error is not None
        assert "3 times" in tasks[3].detail.error.message
        (letter,) = await dead_letters(fleet.system)
        assert (letter["index"], letter["error_code"], letter["queue"]) == (3, "worker_lost", "run")
        assert "3 times" in letter["reason"]
        assert (await fleet.system.queue.depth(queue)).total == 0
        assert [(event.index, event.event) for event in await fleet.events(job)] == [(3, "task.dead_lettered")]

    async def test_a_chunk_of_which_one_is_left_has_as_many_starts_as_any(self, fleet: Fleet) -> None:
        """It may have died with what ran beside it: retried tasks have messages of their own, too."""
        job = await fleet.submit(5)
        await fleet.system.tasks.finish(job.key, [end(index) for index in range(4)])
        await lose_starts(fleet, job, 3)
        fleet.start(fleet.worker())
        await fleet.ended(job, within=LEASE)
        await fleet.check(job)
        assert await fleet.counts(job) == Counts(succeeded=5)

    @pytest.mark.parametrize("chunk_size", [1, 4])
    async def test_tasks_that_only_ran_when_their_worker_was_killed_are_innocent(self, chunk_size: int) -> None:
        await killed_workers_condemn_nobody(chunk_size)

    async def test_what_never_started_is_not_lost_at_work(self, fleet: Fleet) -> None:
        """Its workers died of something else, before they came to it."""
        job = await fleet.submit(5)
        for _ in range(20):
            await fleet.system.queue.receive(run_queue(job.run.run_id), 10, LEASE)
            fleet.clock.advance(LEASE)
        fleet.start(fleet.worker())
        await fleet.ended(job, within=LEASE)
        await fleet.check(job)
        assert await fleet.counts(job) == Counts(succeeded=5)

    async def test_a_worker_that_closes_loses_no_starts(self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
        """However often: a long task that is given back at every deploy is no poison."""
        monkeypatch.setattr("conveyor.process.worker._DRAIN_SECONDS", 0.01)

        async def hangs(job: Job, ref: TaskRef) -> Outcome:
            await asyncio.Event().wait()
            return success()

        job = await fleet.submit(3)
        await lose_starts(fleet, job, 1)
        for _ in range(6):
            hanging = Recording(fleet.clock, hangs)
            service = fleet.start(fleet.worker(hanging))
            await fleet.until(lambda e=hanging: len(e.starts) == 3)
            await fleet.stop(service)
        fleet.start(fleet.worker())
        await fleet.ended(job, within=LEASE)
        await fleet.check(job)
        assert await fleet.counts(job) == Counts(succeeded=3)

    @pytest.mark.parametrize("chunk_size", [1, 4])
    async def test_a_task_that_kills_its_worker_takes_no_other_with_it(self, fleet: Fleet, chunk_size: int) -> None:
        """It kills before anything beside it can end. Each worker dies of it until it is given up; what was held by
        the same workers was lost as often, and is innocent."""
        job = await fleet.submit(12, chunk_size=chunk_size)
        dead = asyncio.Event()

        async def kills(job: Job, ref: TaskRef) -> Outcome:
            if ref.index == 6:
                dead.set()
            else:
                await fleet.clock.sleep(1.0)
            if dead.is_set():
                await asyncio.Event().wait()
            return success()

        workers = 0
        while (await fleet.job(job.job_id)).state is RunState.RUNNING:
            dead.clear()
            workers += 1
            worker = fleet.worker(Recording(fleet.clock, kills))

            async def ended() -> bool:
                return (await fleet.job(job.job_id)).state is RunState.COMPLETED

            for _ in range(2000):
                await worker.tick()
                await fleet.breathe()
                if dead.is_set() or await ended():
                    break
                fleet.clock.advance(0.1)
            await kill(worker)
            fleet.clock.advance(LEASE)
            assert workers < 20
        tasks = await fleet.check(job)
        failed = {index: task.error_code for index, task in tasks.items() if task.status is TaskStatus.FAILED}
        assert failed == {6: "worker_lost"}
        # Nobody marks the first delivery of a message: it costs a write, and most come once.
        assert workers == 8

    async def test_an_executor_that_raises_does_not_hang_the_job(self, fleet: Fleet) -> None:
        """It breaks its promise; its tasks count as lost starts, the others go on."""

        async def breaks(job: Job, ref: TaskRef) -> Outcome:
            if ref.index == 2:
                raise RuntimeError("a bug in the executor")
            return success()

        fleet.executor.act = breaks
        job = await fleet.submit(20, chunk_size=4)
        fleet.start(fleet.worker())
        await fleet.ended(job, within=20 * LEASE)
        tasks = await fleet.check(job)
        assert tasks[2].error_code == "worker_lost"
        assert (await fleet.counts(job)).succeeded == 19
