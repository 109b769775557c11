"""Workers and the ready index: who serves what, what a quiet run costs, and what goes on while an engine is away."""

import asyncio
import dataclasses
from typing import Any

import msgspec
import pytest

from conveyor.coordination.ready_marks import marking_jobs
from conveyor.engines.queue import run_queue
from conveyor.engines.sqlite.ready_index import MemoryReadyIndex
from conveyor.errors import EngineFailed
from conveyor.jobs.chunks import messages
from conveyor.model import Backoff, Job, JobKind, Mode, OutboxEvent, Outcome, TaskRef
from conveyor.process.worker import Worker
from conveyor.states import RunState
from tests.support.engine_switch import Switch
from tests.support.make_jobs import seeds
from tests.support.small_fleet import Fleet, Recording, failure, open_fleet, success

LEASE = 30.0


def lanes_of(worker: Worker) -> set[str]:
    return {str(run_id) for run_id in worker._lanes}


@pytest.mark.parametrize("seam", ["records", "coordinator"])
@pytest.mark.parametrize("mode", ["fail", "hang"])
async def test_leases_are_renewed_while_another_engine_is_away(seam: str, mode: str) -> None:
    async with open_fleet(lease_seconds=LEASE) as fleet:
        switch, go = Switch(), asyncio.Event()

        async def act(job: Job, ref: TaskRef) -> Outcome:
            await go.wait()
            return success()

        executor = Recording(fleet.clock, act)
        job = await fleet.submit(5, chunk_size=1)
        fleet.start(fleet.worker(executor, switch.system(fleet.system, seam)))
        await fleet.until(lambda: len(executor.starts) == 5)
        switch.mode = mode
        await fleet.passing(5 * LEASE)
        held = (await fleet.depth(job)).held
        switch.mode = "on"
        switch.answers.set()
        assert held == 5, "no message was redelivered"
        go.set()
        await fleet.ended(job)
        assert set(executor.count().values()) == {1}


async def test_work_goes_on_while_the_coordinator_is_away() -> None:
    """The lanes keep their widths and are fed; after a while the worker finds new runs too."""
    async with open_fleet(lease_seconds=LEASE) as fleet:
        switch = Switch()

        async def act(job: Job, ref: TaskRef) -> Outcome:
            await fleet.clock.sleep(1.0)
            return success()

        executor = Recording(fleet.clock, act)
        first = await fleet.submit(400, concurrency=20, chunk_size=10)
        fleet.start(fleet.worker(executor, switch.system(fleet.system, "coordinator")))
        await fleet.until(lambda: len(executor.starts) >= 100)
        switch.mode = "fail"
        await fleet.ended(first, within=60)
        second = await fleet.submit(3)
        await fleet.until(lambda: len(executor.starts) == 403 or None, within=60)
        switch.mode = "on"
        await fleet.ended(second)
        await fleet.passing(30)
        assert set(executor.count().values()) <= {1, 2}


async def test_a_quiet_run_is_left_and_costs_next_to_nothing() -> None:
    async with open_fleet(lease_seconds=LEASE) as fleet:
        switch = Switch()
        quiet = [await fleet.submit(0, mode=Mode.OPEN) for _ in range(20)]
        worker = fleet.worker(system=switch.system(fleet.system, "records", "queue"))
        fleet.start(worker)
        await fleet.passing(200)
        assert len(lanes_of(worker)) <= 2
        switch.calls.clear()
        await fleet.passing(60)
        assert switch.calls["records.jobs.active_jobs"] == 0
        assert switch.calls["records.jobs.jobs_of"] <= len(quiet) + 5
        assert switch.calls["queue.receive"] <= 2 * len(quiet) + 10


@pytest.mark.parametrize("is_together", [True, False])
async def test_a_run_that_the_worker_finishes_is_left_at_once(is_together: bool) -> None:
    """Without a poll, and without another read of its job; whether outcomes are written with those of others or not."""
    async with open_fleet(lease_seconds=LEASE) as fleet:
        switch = Switch()
        system = fleet.system if is_together else dataclasses.replace(fleet.system, atomic_flush=None)
        worker = fleet.worker(system=switch.system(system, "records", "queue"))
        fleet.system.ready_marks.listeners.append(worker.on_ready)
        fleet.start(worker)
        await fleet.passing(10)
        switch.calls.clear()
        jobs = [await fleet.submit(3) for _ in range(5)]
        await fleet.quiet()
        assert {(await fleet.job(job.job_id)).state for job in jobs} == {RunState.COMPLETED}
        assert lanes_of(worker) == set()
        assert switch.calls["queue.receive"] <= 2 * len(jobs)
        assert switch.calls["records.jobs.jobs_of"] <= len(jobs)
        await fleet.passing(10)
        assert len(worker._seats) == 0
        assert switch.calls["queue.receive"] <= 2 * len(jobs)


async def test_a_message_for_a_quiet_run_starts_at_once() -> None:
    async with open_fleet(lease_seconds=LEASE) as fleet:
        worker = fleet.worker()
        fleet.system.ready_marks.listeners.append(worker.on_ready)
        fleet.start(worker)
        await fleet.passing(10)
        now = fleet.clock.now()
        await fleet.submit(1)
        await fleet.quiet()
        assert [start.at for start in fleet.executor.starts] == [now]


@pytest.mark.parametrize("is_together", [True, False])
async def test_a_retry_of_a_run_that_nobody_serves_is_on_time(is_together: bool) -> None:
    """Whether it is requeued in the transaction of a flush, or by itself."""
    async with open_fleet(lease_seconds=LEASE) as fleet:
        attempts: list[float] = []

        async def act(job: Job, ref: TaskRef) -> Outcome:
            attempts.append(fleet.clock.now())
            return success() if len(attempts) == 2 else failure()

        backoff = Backoff(base=100.0, rate=1.0, cap=100.0, jitter=False)
        job = await fleet.submit(1, backoff=backoff, retry_errors=["handler_raised"])
        system = fleet.system if is_together else dataclasses.replace(fleet.system, atomic_flush=None)
        worker = fleet.worker(Recording(fleet.clock, act), system)
        fleet.start(worker)
        await fleet.until(lambda: len(attempts) == 1)
        await fleet.passing(20)
        assert lanes_of(worker) == set()
        await fleet.ended(job)
        assert 100.0 <= attempts[1] - attempts[0] <= 103.0


async def test_a_run_whose_mark_was_lost_is_found() -> None:
    """Its sender died between the message and the mark."""
    async with open_fleet(lease_seconds=LEASE) as fleet:
        job = await fleet.submit(0, mode=Mode.OPEN)
        fleet.start(fleet.worker())
        await fleet.passing(200)
        parts: Any = fleet.system.queue
        await fleet.system.tasks.put(job.key, seeds(3))
        await parts._inner.send(run_queue(job.run.run_id), messages(job.key, seeds(3), 10))
        await fleet.until(lambda: len(fleet.executor.starts) == 3, within=70)


@pytest.mark.parametrize("is_quiet", [True, False])
async def test_an_index_that_was_lost_is_rebuilt(is_quiet: bool) -> None:
    async with open_fleet(lease_seconds=LEASE) as fleet:

        async def act(job: Job, ref: TaskRef) -> Outcome:
            await fleet.clock.sleep(1.0)
            return success()

        fleet.executor.act = act
        jobs = [await fleet.submit(50, concurrency=2) for _ in range(3)]
        if is_quiet:
            _lose_index(fleet)
        fleet.start(fleet.worker())
        fleet.start(fleet.worker())
        await fleet.until(lambda: is_quiet or len(fleet.executor.starts) >= 20)
        _lose_index(fleet)
        await fleet.ended(*jobs, within=120)
        assert set(fleet.executor.count().values()) == {3}, "one start of each task of the three runs"


async def test_an_attempt_that_begins_after_the_seat_was_lost_is_not_cancelled() -> None:
    """A look finds that the seat is lost while the worker waits for messages, and then one arrives."""
    async with open_fleet(lease_seconds=LEASE) as fleet:
        switch, go = Switch(), asyncio.Event()

        async def act(job: Job, ref: TaskRef) -> Outcome:
            await go.wait()
            return success()

        executor = Recording(fleet.clock, act)
        job = await fleet.submit(0, mode=Mode.OPEN)
        worker = fleet.worker(executor, switch.system(fleet.system, "queue"))
        fleet.start(worker)
        await fleet.until(lambda: bool(lanes_of(worker)))
        switch.mode = "hang"
        await fleet.passing(0.5)
        _lose_index(fleet)
        await fleet.passing(0.5)
        await fleet.system.tasks.put(job.key, seeds(1))
        await fleet.system.queue.send(run_queue(job.run.run_id), messages(job.key, seeds(1), 1))
        switch.mode = "on"
        switch.answers.set()
        await fleet.until(lambda: bool(executor.starts))
        await fleet.passing(5)
        go.set()
        await fleet.passing(5)
        assert len(executor.starts) == 1, "one attempt, from beginning to end"
        assert (await fleet.system.tasks.counts(job.key)).succeeded == 1


async def test_a_run_is_served_although_the_rest_of_the_look_failed() -> None:
    """It was taken, and then the index could not be rebuilt."""
    async with open_fleet(lease_seconds=LEASE) as fleet:
        switch = Switch()
        fleet.start(fleet.worker(system=switch.system(fleet.system, "coordinator")))
        await fleet.passing(5)
        _lose_index(fleet)
        switch.fails.add("coordinator.mark_runs")
        job = await fleet.submit(3)
        await fleet.ended(job, within=60)
        assert not switch.fails


def _lose_index(fleet: Fleet) -> None:
    coordinator: Any = fleet.system.coordinator
    coordinator._engine._ready = MemoryReadyIndex(fleet.clock)


async def test_the_sweeper_restores_a_run_that_the_index_never_heard_of() -> None:
    async with open_fleet(lease_seconds=LEASE) as fleet:
        fleet.start(fleet.worker())
        await fleet.passing(1)
        coordinator: Any = fleet.system.coordinator
        index = coordinator._engine._ready
        job = await fleet.submit(3)
        await fleet.quiet()
        for table in (index._entries, index._listed, index._tenants, index._due):
            table.clear()
        for seats in index._workers.values():
            seats.runs.clear()
        await fleet.passing(30)
        assert fleet.executor.starts == []
        await fleet.sweeper.run_once()
        await fleet.ended(job, within=5)


async def test_another_worker_joins_a_run_that_falls_behind() -> None:
    async with open_fleet(lease_seconds=LEASE) as fleet:

        async def act(job: Job, ref: TaskRef) -> Outcome:
            await fleet.clock.sleep(1.0)
            return success()

        executors = [Recording(fleet.clock, act) for _ in range(3)]
        await fleet.submit(3000, concurrency=10, chunk_size=5)
        for executor in executors:
            fleet.start(fleet.worker(executor, worker_concurrency=4))
        await fleet.passing(20)
        assert [executor.running["all"] for executor in executors] in ([4, 4, 2], [4, 2, 4], [2, 4, 4])


async def test_a_run_that_one_worker_can_serve_has_one_worker() -> None:
    async with open_fleet(lease_seconds=LEASE) as fleet:

        async def act(job: Job, ref: TaskRef) -> Outcome:
            await fleet.clock.sleep(1.0)
            return success()

        fleet.executor.act = act
        await fleet.submit(3000, concurrency=10, chunk_size=5)
        workers = [fleet.worker() for _ in range(3)]
        for worker in workers:
            fleet.start(worker)
        await fleet.passing(20)
        assert sorted(len(lanes_of(worker)) for worker in workers) == [0, 0, 1]
        assert fleet.executor.running["all"] == 10


async def test_a_paused_run_is_left_and_taken_again_when_it_is_resumed() -> None:
    async with open_fleet(lease_seconds=LEASE) as fleet:

        async def act(job: Job, ref: TaskRef) -> Outcome:
            await fleet.clock.sleep(1.0)
            return success()

        fleet.executor.act = act
        job = await fleet.submit(100, concurrency=2)
        worker = fleet.worker()
        fleet.start(worker)
        await fleet.until(lambda: len(fleet.executor.starts) >= 4)
        await fleet.move(job, RunState.PAUSED)
        await fleet.passing(3)
        assert lanes_of(worker) == set()
        before = len(fleet.executor.starts)
        await fleet.passing(300)
        assert len(fleet.executor.starts) == before
        await fleet.move(await fleet.job(job.job_id), RunState.RUNNING)
        await fleet.passing(1)
        assert len(fleet.executor.starts) > before


async def test_a_run_is_taken_though_nobody_heard_that_it_was_resumed() -> None:
    """The records moved it, and their answer was lost."""
    async with open_fleet(lease_seconds=LEASE) as fleet:
        job = await fleet.submit(3)
        await fleet.move(job, RunState.PAUSED)
        fleet.start(fleet.worker())
        await fleet.passing(30)
        jobs = fleet.system.records.jobs

        class Lossy:
            async def move_run(self, *given: Any) -> bool:
                inner: Any = jobs
                await inner._inner.move_run(*given)
                raise EngineFailed("the answer was lost")

        event = OutboxEvent("evt_1", job.tenant, job.job_id, job.run.run_id, "run.resumed", fleet.clock.now(), {})
        lossy: Any = marking_jobs(Lossy(), fleet.system.ready_marks)
        with pytest.raises(EngineFailed):
            await lossy.move_run(job.job_id, job.run.run_id, {RunState.PAUSED}, RunState.RUNNING, None, event)
        await fleet.ended(job, within=5)


async def test_a_message_for_a_left_run_is_served_by_another() -> None:
    """The first worker has left the run, and has no slot for its next message."""
    async with open_fleet(lease_seconds=LEASE) as fleet:
        go = asyncio.Event()

        async def act(job: Job, ref: TaskRef) -> Outcome:
            await go.wait()
            return success()

        first, second = Recording(fleet.clock), Recording(fleet.clock)
        quiet = await fleet.submit(0, mode=Mode.OPEN)
        fleet.start(fleet.worker(first, worker_concurrency=1))
        await fleet.passing(10)
        first.act = act
        await fleet.submit(1)
        await fleet.until(lambda: first.running["all"] == 1)
        fleet.start(fleet.worker(second, worker_concurrency=1))
        await fleet.system.tasks.put(quiet.key, seeds(1))
        await fleet.system.queue.send(run_queue(quiet.run.run_id), messages(quiet.key, seeds(1), 1))
        await fleet.until(lambda: len(second.starts) == 1, within=5)
        go.set()


async def test_a_worker_joins_a_run_whose_message_it_was_offered() -> None:
    """As a queue that several runs share does: the message is here, and the seat elsewhere."""
    async with open_fleet(lease_seconds=LEASE) as fleet:
        go = asyncio.Event()

        async def act(job: Job, ref: TaskRef) -> Outcome:
            await go.wait()
            return success()

        first, second = Recording(fleet.clock, act), Recording(fleet.clock, act)
        job = await fleet.submit(2, chunk_size=1, concurrency=4)
        fleet.start(fleet.worker(first))
        await fleet.until(lambda: len(first.starts) == 2)
        joining = fleet.worker(second)
        fleet.start(joining)
        await fleet.passing(2)
        assert lanes_of(joining) == set(), "one worker suffices"
        queue = run_queue(job.run.run_id)
        sent = messages(job.key, seeds(1), 1)
        assert joining.on_offer(queue, sent[0].body)
        await fleet.until(lambda: lanes_of(joining) == {str(job.run.run_id)} or None, within=5)
        go.set()
        await fleet.ended(job)


async def test_a_worker_does_not_join_a_run_that_it_refused_a_moment_ago() -> None:
    async with open_fleet(lease_seconds=LEASE) as fleet:
        job = await fleet.submit(2, chunk_size=1)
        await fleet.move(job, RunState.PAUSED)
        worker = fleet.worker()
        fleet.start(worker)
        body = messages(job.key, seeds(1), 1)[0].body
        queue = run_queue(job.run.run_id)
        assert worker.on_offer(queue, body)
        await fleet.passing(1)
        assert lanes_of(worker) == set()
        assert not worker.on_offer(queue, body), "its message goes back, for a pause that grows"
        assert not worker.on_offer(queue, b"no chunk")
        await fleet.passing(10)
        assert worker.on_offer(queue, body), "it may have been resumed"


async def test_a_worker_takes_a_message_of_a_run_that_was_resumed_a_moment_ago() -> None:
    """It refused the run while that was paused, and serves it again."""
    async with open_fleet(lease_seconds=LEASE) as fleet:
        job = await fleet.submit(2, chunk_size=1)
        fleet.executor.act = lambda job, ref: asyncio.Event().wait()  # type: ignore[assignment, return-value]
        await fleet.move(job, RunState.PAUSED)
        worker = fleet.worker()
        fleet.start(worker)
        body = messages(job.key, seeds(1), 1)[0].body
        queue = run_queue(job.run.run_id)
        assert worker.on_offer(queue, body)
        await fleet.passing(1)
        assert not worker.on_offer(queue, body)
        await fleet.move(await fleet.job(job.job_id), RunState.RUNNING)
        await fleet.passing(1)
        assert lanes_of(worker) == {str(job.run.run_id)}
        assert worker.on_offer(queue, body)


async def test_a_worker_is_not_offered_runs_of_other_workers_again_and_again() -> None:
    """Its kind of task is not one that this worker runs."""
    async with open_fleet(lease_seconds=LEASE) as fleet:
        switch = Switch()
        job = await fleet.submit(2, chunk_size=1)
        worker = fleet.worker(system=switch.system(fleet.system, "records"), kinds=[JobKind.FETCH])
        fleet.start(worker)
        await fleet.passing(1)
        body = messages(job.key, seeds(1), 1)[0].body
        switch.calls.clear()
        for _ in range(10):
            assert not worker.on_offer(run_queue(job.run.run_id), body), "another worker gets it"
            await fleet.passing(5)
        assert switch.calls["records.jobs.jobs_of"] == 0
        await fleet.passing(60)
        assert switch.calls["records.jobs.jobs_of"] >= 1, "it looks again from time to time"


async def test_a_delayed_message_makes_nobody_look() -> None:
    async with open_fleet(lease_seconds=LEASE) as fleet:
        job = await fleet.submit(0, mode=Mode.OPEN)
        await fleet.passing(1)
        heard: list[Any] = []
        fleet.system.ready_marks.listeners.append(heard.extend)
        queue = run_queue(job.run.run_id)
        for delay in (5.0, 0.0):
            (message,) = messages(job.key, seeds(1), 1)
            await fleet.system.queue.send(queue, [msgspec.structs.replace(message, delay=delay)])
            await fleet.passing(1)
            assert heard == [job.run.run_id] * (delay == 0)


async def test_a_full_worker_looks_again_when_small_runs_end() -> None:
    """It takes no more runs while those that it has end soon: the next ones need not wait for its next look."""
    async with open_fleet(lease_seconds=LEASE) as fleet:
        jobs = [await fleet.submit(4) for _ in range(40)]
        began = fleet.clock.monotonic()
        fleet.start(fleet.worker(worker_concurrency=4))
        for job in jobs:
            await fleet.ended(job)
        assert fleet.clock.monotonic() - began < 2.0


async def test_a_full_worker_takes_runs_while_the_outcomes_of_others_are_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_fleet(lease_seconds=LEASE) as fleet:
        assert fleet.system.atomic_flush is not None
        go, record = asyncio.Event(), fleet.system.atomic_flush.record_flush

        async def record_flush(*given: Any) -> Any:
            await go.wait()
            return await record(*given)

        monkeypatch.setattr(fleet.system.atomic_flush, "record_flush", record_flush)
        jobs = [await fleet.submit(4) for _ in range(20)]
        fleet.start(fleet.worker(worker_concurrency=4))
        await fleet.passing(0.2)
        go.set()
        assert len(fleet.executor.starts) == 80
        for job in await fleet.ended(*jobs):
            await fleet.check(job)
