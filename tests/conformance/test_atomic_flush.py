"""Atomic flush: records, tasks and queue are one database, and one transaction records the outcomes of many runs."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from conveyor.engines.queue import Depth, Outgoing, recovery_queue, run_queue
from conveyor.engines.records import RunFlush, RunMove
from conveyor.engines.tasks import TaskEvent, TaskFilter
from conveyor.lifecycle import Lifecycle
from conveyor.model import UNCHANGED, Counts, Job, ResultDetail, TaskEnd
from conveyor.states import RunState, TaskStatus
from tests.support.clocks import ManualClock
from tests.support.make_jobs import ACME, make_job, make_notice, seeds

# Past where runs of tests have tables of their own.
LARGE = 120


async def accepted(engine: Any, clock: ManualClock, total: int, messages: int = 1, **changes: Any) -> Job:
    job = make_job(clock, total=total, **changes)
    outgoing = [Outgoing(b"chunk")] * messages
    await engine.accept_atomically(
        job, make_notice(clock, job), None, seeds(total), run_queue(job.run.run_id), outgoing
    )
    return job


def end(index: int, status: TaskStatus = TaskStatus.SUCCEEDED, code: str | None = None, detail: str = "{}") -> TaskEnd:
    return TaskEnd(index, status, 1, 200, code, detail, 5.0)


def decision(engine: Any, clock: ManualClock, job: Job) -> Callable[[Counts], RunMove | None]:
    decide = Lifecycle(engine.records, engine.tasks, clock).decision(job)
    assert decide is not None
    return decide


async def state(engine: Any, job: Job) -> RunState:
    found = await engine.records.jobs.job(ACME, job.job_id)
    assert found is not None and found.state is found.run.state
    return found.state  # type: ignore[no-any-return]  # the engine is any


async def events(engine: Any, job: Job) -> list[str]:
    return [event.event for event in (await engine.records.outbox.events(ACME, job.job_id, None, 10)).items]


async def test_many_runs_in_one_step(atomic_engine: Any, clock: ManualClock) -> None:
    jobs = [await accepted(atomic_engine, clock, 3) for _ in range(3)]
    chunks = [(await atomic_engine.queue.receive(run_queue(job.run.run_id), 1, 30.0))[0] for job in jobs]
    # The first is finished, the second has failed in part and is retried, the third is only acknowledged.
    failed = end(0, TaskStatus.FAILED, "http_503")
    runs = [
        RunFlush(jobs[0], [end(index) for index in range(3)], decide=decision(atomic_engine, clock, jobs[0])),
        RunFlush(
            jobs[1],
            [failed, end(1)],
            [TaskEvent(0, 5.0, "task.failed", "{}"), TaskEvent(2, 5.0, "task.retried", '{"a":1}')],
            recovery_queue(jobs[1].run.run_id),
            [Outgoing(b"again", 0.0), Outgoing(b"later", 9.0)],
            decision(atomic_engine, clock, jobs[1]),
        ),
        RunFlush(jobs[2]),
    ]
    acks = [(run_queue(job.run.run_id), chunk.receipt) for job, chunk in zip(jobs, chunks, strict=True)]
    done = await atomic_engine.record_flush(runs, acks)
    assert [each.finished.moved for each in done] == [frozenset({0, 1, 2}), frozenset({0, 1}), frozenset()]
    assert [each.finished.counts for each in done[:2]] == [Counts(3, 0, 0), Counts(1, 1, 0)]
    assert [None if each.moved is None else each.moved.target for each in done] == [RunState.COMPLETED, None, None]
    assert [await state(atomic_engine, job) for job in jobs] == [
        RunState.COMPLETED,
        RunState.RUNNING,
        RunState.RUNNING,
    ]
    assert await events(atomic_engine, jobs[0]) == ["job.accepted", "run.completed"]
    assert await atomic_engine.tasks.error_codes(jobs[1].key, 10) == [("http_503", 1)]
    noted = (await atomic_engine.tasks.events(jobs[1].key, None, None, 10)).items
    assert [(event.index, event.event) for event in noted] == [(0, "task.failed"), (2, "task.retried")]
    assert await atomic_engine.queue.depth(recovery_queue(jobs[1].run.run_id)) == Depth(1, 0, 1)
    for job in jobs:
        assert await atomic_engine.queue.depth(run_queue(job.run.run_id)) == Depth(0, 0, 0)
        assert await atomic_engine.tasks.counts(job.key) == await atomic_engine.tasks.recount(job.key)


async def test_each_of_many_neighbours_gets_its_own_outcome(atomic_engine: Any, clock: ManualClock) -> None:
    one, other = [await accepted(atomic_engine, clock, 200) for _ in range(2)]

    def said(index: int, text: str) -> TaskEnd:
        # Of different lengths, in characters and in bytes.
        detail = msgspec.json.encode({"content_type": f"{text} {index} {'é' * (index % 5)}"}).decode()
        failed = index % 10 == 3
        return end(index, TaskStatus.FAILED if failed else TaskStatus.SUCCEEDED, "http_404" if failed else None, detail)

    # Near each other, in any order, with others between; and far from each other.
    near, far = [*range(3, 170, 2)], [*range(0, 200, 5)]
    flushes = [
        RunFlush(one, [said(index, "near") for index in near[::-1]]),
        RunFlush(other, [said(index, "far") for index in far]),
    ]
    done = await atomic_engine.record_flush(flushes, [])
    assert [each.finished.moved for each in done] == [frozenset(near), frozenset(far)]
    # Of these, some have finished.
    (again,) = await atomic_engine.record_flush([RunFlush(one, [said(index, "late") for index in range(200)])], [])
    assert again.finished.moved == frozenset(range(200)) - frozenset(near)
    for job, text, finished, rest in ((one, "near", near, "late"), (other, "far", far, None)):
        found = {task.index: task for task in await atomic_engine.tasks.at(job.key, range(200))}
        for index in range(200):
            wanted = text if index in finished else rest
            expected = None if wanted is None else said(index, wanted)
            task = found[index]
            assert task.status is (TaskStatus.PENDING if expected is None else expected.status)
            assert task.error_code == (expected.error_code if expected else None)
            assert task.detail == msgspec.json.decode(expected.detail if expected else "{}", type=ResultDetail)
        assert await atomic_engine.tasks.counts(job.key) == await atomic_engine.tasks.recount(job.key)


async def test_it_completes_as_a_move_does(atomic_engine: Any, clock: ManualClock) -> None:
    """The rows of a run that a flush has completed are those of one that `move_run` has completed."""
    one, other = [await accepted(atomic_engine, clock, 1, retention_days=3.0) for _ in range(2)]
    clock.advance(5)
    await atomic_engine.record_flush([RunFlush(one, [end(0)], decide=decision(atomic_engine, clock, one))], [])
    finished = await atomic_engine.tasks.finish(other.key, [end(0)])
    lifecycle = Lifecycle(atomic_engine.records, atomic_engine.tasks, clock)
    assert await lifecycle.settle(other, finished.counts) is RunState.COMPLETED
    first, second = [await atomic_engine.records.jobs.job(ACME, job.job_id) for job in (one, other)]
    run = msgspec.structs.replace(first.run, run_id=second.run.run_id)
    assert msgspec.structs.replace(first, job_id=second.job_id, run=run) == second
    told = [(await atomic_engine.records.outbox.events(ACME, job.job_id, None, 9)).items[1] for job in (one, other)]
    assert told[0].data == told[1].data


async def test_a_completed_run_without_messages_needs_no_sweep(atomic_engine: Any, clock: ManualClock) -> None:
    jobs = [await accepted(atomic_engine, clock, 1) for _ in range(3)]
    chunks = [(await atomic_engine.queue.receive(run_queue(job.run.run_id), 1, 30.0))[0] for job in jobs]
    # The second has a message left, which some worker has in flight, the third a requeued reference.
    await atomic_engine.queue.send(recovery_queue(jobs[2].run.run_id), [Outgoing(b"again", 60.0)])
    runs = [RunFlush(job, [end(0)], decide=decision(atomic_engine, clock, job)) for job in jobs]
    acks = [(run_queue(jobs[at].run.run_id), chunks[at].receipt) for at in (0, 2)]
    done = await atomic_engine.record_flush(runs, acks)
    assert all(each.moved is not None for each in done)
    unswept = await atomic_engine.records.jobs.unswept_jobs(10)
    assert {job.job_id for job in unswept} == {jobs[1].job_id, jobs[2].job_id}
    assert all([await state(atomic_engine, job) is RunState.COMPLETED for job in jobs])


async def test_only_the_first_outcome_of_a_task_counts(atomic_engine: Any, clock: ManualClock) -> None:
    job = await accepted(atomic_engine, clock, 2)
    decide = decision(atomic_engine, clock, job)
    twice = [end(0), end(0, TaskStatus.FAILED, "late")]
    (first,) = await atomic_engine.record_flush([RunFlush(job, twice, decide=decide)], [])
    (second,) = await atomic_engine.record_flush([RunFlush(job, [*twice, end(7)], decide=decide)], [])
    assert (first.finished.moved, second.finished.moved) == (frozenset({0}), frozenset())
    assert second.finished.counts == Counts(1, 0, 0) == await atomic_engine.tasks.recount(job.key)
    assert await atomic_engine.tasks.error_codes(job.key, 10) == []


async def test_a_run_completes_once(atomic_engine: Any, clock: ManualClock) -> None:
    job = await accepted(atomic_engine, clock, 1)
    decide = decision(atomic_engine, clock, job)
    done = [await atomic_engine.record_flush([RunFlush(job, [end(0)], decide=decide)], []) for _ in range(2)]
    assert [each[0].moved is not None for each in done] == [True, False]
    assert await events(atomic_engine, job) == ["job.accepted", "run.completed"]


async def test_writers_of_the_last_tasks_complete_it_together(atomic_engine: Any, clock: ManualClock) -> None:
    """Of several that finish the last tasks at once, one moves the run, or sees that it has to be moved."""
    for _ in range(5):
        job = await accepted(atomic_engine, clock, 6)
        decide = decision(atomic_engine, clock, job)
        done = await asyncio.gather(
            *(atomic_engine.record_flush([RunFlush(job, [end(index)], decide=decide)], []) for index in range(6))
        )
        moved = [each for (each,) in done if each.moved is not None]
        assert len(moved) <= 1
        assert moved or any(decide(each.finished.counts) is not None for (each,) in done)
        assert await atomic_engine.tasks.counts(job.key) == Counts(6, 0, 0)


async def test_runs_in_any_order_do_not_block_each_other(atomic_engine: Any, clock: ManualClock) -> None:
    jobs = [await accepted(atomic_engine, clock, 8) for _ in range(6)]

    def flush(index: int) -> list[RunFlush]:
        order = jobs if index % 2 else list(reversed(jobs))
        return [
            RunFlush(job, [end(index)], [TaskEvent(index, 1.0, "task.failed", "{}")],
                     decide=decision(atomic_engine, clock, job))
            for job in order
        ]  # fmt: skip

    await asyncio.gather(*(atomic_engine.record_flush(flush(index), []) for index in range(8)))
    for job in jobs:
        assert await atomic_engine.tasks.counts(job.key) == Counts(8, 0, 0)
        assert len((await atomic_engine.tasks.events(job.key, None, None, 20)).items) == 8


async def test_a_failure_threshold_fails_the_run(atomic_engine: Any, clock: ManualClock) -> None:
    job = await accepted(atomic_engine, clock, 5, failure_threshold={"failed": 2})
    job = msgspec.structs.replace(
        job, options=msgspec.convert({"failure_threshold": {"failed": 2}}, type=type(job.options))
    )
    ends = [end(index, TaskStatus.FAILED, "http_500") for index in range(2)]
    (done,) = await atomic_engine.record_flush([RunFlush(job, ends, decide=decision(atomic_engine, clock, job))], [])
    assert done.moved is not None and done.moved.target is RunState.FAILED
    found = await atomic_engine.records.jobs.job(ACME, job.job_id)
    assert (found.state, found.run.reason_code) == (RunState.FAILED, "failure_threshold")
    assert await events(atomic_engine, job) == ["job.accepted", "run.failed"]


async def test_a_cancelled_run_stays_cancelled(atomic_engine: Any, clock: ManualClock) -> None:
    job = await accepted(atomic_engine, clock, 1)
    lifecycle = Lifecycle(atomic_engine.records, atomic_engine.tasks, clock)
    await lifecycle.move(job, RunState.CANCELLED, "on request", Counts())
    decide = decision(atomic_engine, clock, job)
    (done,) = await atomic_engine.record_flush([RunFlush(job, [end(0)], decide=decide)], [])
    assert (done.finished.moved, done.moved) == (frozenset({0}), None)
    assert await state(atomic_engine, job) is RunState.CANCELLED
    assert await events(atomic_engine, job) == ["job.accepted", "run.cancelled"]


async def test_a_deleted_run_gets_nothing(atomic_engine: Any, clock: ManualClock) -> None:
    gone, there = [await accepted(atomic_engine, clock, 1, messages=0) for _ in range(2)]
    while await atomic_engine.tasks.delete(gone.key, 100):
        pass
    runs = [
        RunFlush(job, [end(0)], [TaskEvent(0, 1.0, "task.failed", "{}")], decide=decision(atomic_engine, clock, job))
        for job in (gone, there)
    ]
    done = await atomic_engine.record_flush(runs, [])
    assert [each.finished.moved for each in done] == [frozenset(), frozenset({0})]
    assert (await atomic_engine.tasks.events(gone.key, None, None, 10)).items == []


async def test_all_or_nothing(atomic_engine: Any, clock: ManualClock) -> None:
    """A flush that fails at its end has written none of it, and can be made again."""
    jobs = [await accepted(atomic_engine, clock, 1) for _ in range(2)]
    (chunk,) = await atomic_engine.queue.receive(run_queue(jobs[0].run.run_id), 1, 30.0)
    broken = True

    def decide(counts: Counts) -> RunMove | None:
        if broken:
            raise ValueError("a decision that fails")
        return decision(atomic_engine, clock, jobs[1])(counts)

    runs = [
        RunFlush(jobs[0], [end(0)], decide=decision(atomic_engine, clock, jobs[0])),
        RunFlush(jobs[1], [end(0)], decide=decide),
    ]
    acks = [(run_queue(jobs[0].run.run_id), chunk.receipt)]
    with pytest.raises(ValueError, match="a decision that fails"):
        await atomic_engine.record_flush(runs, acks)
    for job in jobs:
        assert await atomic_engine.tasks.unfinished(job.key, [0]) == frozenset({0})
        assert await state(atomic_engine, job) is RunState.RUNNING
    assert (await atomic_engine.queue.depth(acks[0][0])).held == 1
    broken = False
    assert [each.moved is not None for each in await atomic_engine.record_flush(runs, acks)] == [True, True]


async def test_a_stale_receipt_is_not_acknowledged(atomic_engine: Any, clock: ManualClock) -> None:
    job = await accepted(atomic_engine, clock, 1)
    queue = run_queue(job.run.run_id)
    (first,) = await atomic_engine.queue.receive(queue, 1, 1.0)
    clock.advance(20)
    (second,) = await atomic_engine.queue.receive(queue, 1, 30.0)
    await atomic_engine.record_flush([], [(queue, first.receipt)])
    assert (await atomic_engine.queue.depth(queue)).held == 1
    await atomic_engine.record_flush([], [(queue, second.receipt)])
    assert (await atomic_engine.queue.depth(queue)).total == 0


async def test_a_large_run(atomic_engine: Any, clock: ManualClock) -> None:
    """Its rows may be in tables of their own."""
    jobs = [await accepted(atomic_engine, clock, total) for total in (LARGE, 3)]
    runs = [
        RunFlush(
            job,
            [end(index, detail='{"elapsed":1.5}') for index in range(job.run.total)],
            [TaskEvent(job.run.total - 1, 1.0, "task.failed", "{}")],
            decide=decision(atomic_engine, clock, job),
        )
        for job in jobs
    ]
    done = await atomic_engine.record_flush(runs, [])
    for job, each in zip(jobs, done, strict=True):
        assert each.finished.moved == frozenset(range(job.run.total))
        assert each.moved is not None
        rows = await atomic_engine.tasks.page(job.key, 0, None, LARGE, TaskFilter(status=TaskStatus.SUCCEEDED))
        assert [row.detail.elapsed for row in rows] == [1.5] * job.run.total
        assert len((await atomic_engine.tasks.events(job.key, None, None, 10)).items) == 1


async def test_a_rerun_counts_what_it_replaces(atomic_engine: Any, clock: ManualClock) -> None:
    job = make_job(clock, total=2)
    priors = [msgspec.structs.replace(seed, prior="2http_500") for seed in seeds(2)]
    await atomic_engine.records.jobs.create_job(job, make_notice(clock, job), None)
    await atomic_engine.tasks.put(job.key, priors)
    (done,) = await atomic_engine.record_flush([RunFlush(job, [end(0)])], [])
    assert done.finished.counts == Counts(1, 0, 0)
    replaced = await atomic_engine.tasks.replaced(job.key)
    assert (replaced.counts, replaced.codes) == (Counts(0, 1, 0), {"http_500": 1})


async def test_unchanged_tasks_count_beside_the_succeeded(atomic_engine: Any, clock: ManualClock) -> None:
    job = make_job(clock, total=3)
    priors = [msgspec.structs.replace(seed, prior=f"1{UNCHANGED}") for seed in seeds(3)]
    await atomic_engine.records.jobs.create_job(job, make_notice(clock, job), None)
    await atomic_engine.tasks.put(job.key, priors)
    (done,) = await atomic_engine.record_flush([RunFlush(job, [end(0, code=UNCHANGED), end(1)])], [])
    assert done.finished.counts == await atomic_engine.tasks.recount(job.key) == Counts(2, 0, 0, 1)
    assert (await atomic_engine.tasks.replaced(job.key)).counts == Counts(2, 0, 0, 2)
    assert await atomic_engine.tasks.error_codes(job.key, 9) == []
