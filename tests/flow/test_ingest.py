"""Ingest: a staged list becomes tasks, once each, whatever happens on the way."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from conveyor import faults
from conveyor.engines.queue import CONTROL, Depth, Outgoing, run_queue
from conveyor.ingest import pipeline
from conveyor.model import Counts, IngestJob, Job, Outcome, RunId, TaskRef
from conveyor.states import RunState, TaskStatus
from tests.flow.belt import Belt, failure, open_belt, success

LEASE = pipeline.LEASE_SECONDS


@pytest.fixture
async def belt(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Belt]:
    """With small batches, so that a short list has several."""
    monkeypatch.setattr(pipeline, "BATCH", 50)
    async with open_belt() as opened:
        yield opened


@pytest.fixture
def armed() -> AsyncIterator[Callable[[str, int], None]]:
    """Fail at the n-th passing of a crash point, once, as an exception and not as a death."""

    def arm(name: str, nth: int = 1) -> None:
        left = nth

        def hook(passed: str) -> None:
            nonlocal left
            if passed == name:
                left -= 1
                if left == 0:
                    raise Crash

        faults.arm(hook)

    yield arm
    faults.arm(None)


class Crash(BaseException):
    """Nothing in the product catches it."""


def lines(count: int) -> list[str]:
    return [json.dumps({"number": number, "text": "ü" * (number % 40)}, ensure_ascii=False) for number in range(count)]


async def ingested(belt: Belt, job: Job) -> Job:
    async def latched() -> bool:
        return (await belt.job(job.job_id)).run.last_batch

    await belt.until(latched, within=1000)
    await belt.quiet()
    return await belt.job(job.job_id)


async def check_list(belt: Belt, job: Job, given: list[str]) -> None:
    """Every line is a task under its number, and every task has a reference."""
    tasks = await belt.tasks(job)
    assert [bytes(tasks[index].input).decode() for index in range(len(tasks))] == given
    assert (await belt.job(job.job_id)).run.total == len(given)


@pytest.mark.parametrize("count", [0, 1, 49, 50, 51, 100, 333])
async def test_a_list_becomes_tasks_in_order(belt: Belt, count: int) -> None:
    job = await belt.stage(lines(count))
    assert (job.state, job.run.total, job.run.last_batch) == (RunState.INGESTING, 0, False)
    belt.start(belt.ingester())
    found = await ingested(belt, job)
    await check_list(belt, job, lines(count))
    if count == 0:
        assert found.state is RunState.COMPLETED
    else:
        assert found.state is RunState.RUNNING
    assert await belt.system.queue.depth(CONTROL) == Depth(0, 0, 0)


async def test_tasks_start_while_the_list_is_still_read(belt: Belt) -> None:
    job = await belt.stage(lines(400))
    seen: list[RunState] = []

    async def look(job: Job, ref: TaskRef) -> Outcome:
        seen.append((await belt.job(job.job_id)).state)
        return success()

    belt.executor.act = look
    hold = asyncio.Event()
    ingester = belt.ingester()
    real = ingester._ingest.records.checkpoint
    calls = 0

    async def slow_checkpoint(*args: Any) -> bool:
        nonlocal calls
        calls += 1
        if calls == 3:
            await hold.wait()
        return await real(*args)

    object.__setattr__(ingester._ingest, "records", _With(belt.system.records, checkpoint=slow_checkpoint))
    belt.start(ingester)
    belt.start(belt.worker())
    await belt.until(lambda: len(seen) >= 100)
    assert set(seen) == {RunState.INGESTING}
    assert (await belt.job(job.job_id)).state is RunState.INGESTING, (
        "all that is there has ended, and yet more may come"
    )
    hold.set()
    await belt.ended(job)
    await belt.check(job)


async def test_lines_of_any_length_cross_the_pieces(belt: Belt) -> None:
    given = [json.dumps("x" * size) for size in (1, 200_000, 0, 260_000, 3, 131_072, 262_142, 5)]
    job = await belt.stage(given)
    belt.start(belt.ingester())
    await ingested(belt, job)
    await check_list(belt, job, given)


async def test_a_last_line_without_an_end_is_a_task_too(belt: Belt) -> None:
    job = await belt.stage(lines(3))
    assert job.source is not None
    await belt.blobs.put(job.source, b'"one"\n"two"\n"three"')
    belt.start(belt.ingester())
    await ingested(belt, job)
    await check_list(belt, job, ['"one"', '"two"', '"three"'])


async def test_what_one_step_holds_is_bounded_in_bytes(belt: Belt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "BATCH", 5000)
    given = [json.dumps("x" * 200_000) for _ in range(120)]
    job = await belt.stage(given)
    ingester = belt.ingester()
    sizes: list[int] = []

    async def put(run: Any, seeds: Any) -> None:
        sizes.append(sum(len(seed.input) for seed in seeds))
        await belt.system.tasks.put(run, seeds)

    object.__setattr__(ingester._ingest, "tasks", _With(belt.system.tasks, put=put))
    belt.start(ingester)
    await ingested(belt, job)
    assert sum(sizes) == sum(len(line) for line in given)
    assert max(sizes) < 10 * 1024 * 1024


POINTS = ["tasks.put.after", "ingest.put.after", "queue.send.after", "ingest.enqueue.after", "ingest.checkpoint.after"]
LAST_POINTS = ["lifecycle.total.before", "lifecycle.latch.before", "lifecycle.latch.after", "queue.ack.before"]


@pytest.mark.parametrize(
    ("point", "nth"), [*((point, nth) for point in POINTS for nth in (1, 3, 5)), *((point, 1) for point in LAST_POINTS)]
)
async def test_an_ingest_that_dies_anywhere_is_taken_up_by_another(
    belt: Belt, armed: Callable[[str, int], None], point: str, nth: int
) -> None:
    given = lines(230)
    job = await belt.stage(given)
    armed(point, nth)
    with pytest.raises(Crash):
        await belt.ingester("first").tick()
    faults.arm(None)
    belt.clock.advance(LEASE)
    belt.start(belt.ingester("second"))
    belt.start(belt.worker())
    await belt.ended(job, within=LEASE)
    await check_list(belt, job, given)
    await belt.check(job)
    belt.clock.advance(LEASE)
    await belt.passing(1)
    assert await belt.system.queue.depth(CONTROL) == Depth(0, 0, 0)


async def test_it_goes_on_from_the_last_checkpoint(belt: Belt, armed: Callable[[str, int], None]) -> None:
    job = await belt.stage(lines(230))
    armed("ingest.enqueue.after", 4)
    with pytest.raises(Crash):
        await belt.ingester("first").tick()
    faults.arm(None)
    at = await belt.system.records.checkpointed(job.run.run_id)
    assert at is not None
    assert at.next_index == 150
    assert at.offset == sum(len(line.encode()) + 1 for line in lines(150))
    put: list[int] = []
    second = belt.ingester("second")

    async def watched(run: Any, seeds: Any) -> None:
        put.extend(seed.index for seed in seeds)
        await belt.system.tasks.put(run, seeds)

    object.__setattr__(second._ingest, "tasks", _With(belt.system.tasks, put=watched))
    belt.start(second)
    await ingested(belt, job)
    assert put == list(range(150, 230))
    await check_list(belt, job, lines(230))


async def test_of_two_at_once_one_ingests(belt: Belt) -> None:
    job = await belt.stage(lines(300))
    assert job.source is not None
    message = IngestJob(job.tenant, job.job_id, job.run.run_id, job.source)
    await belt.system.queue.send(CONTROL, [Outgoing(msgspec.json.encode(message))] * 3)
    for name in ("one", "two", "three"):
        belt.start(belt.ingester(name))
    await ingested(belt, job)
    await check_list(belt, job, lines(300))
    await belt.passing(LEASE / 4)
    assert await belt.system.queue.depth(CONTROL) == Depth(0, 0, 0)


async def test_one_that_lost_its_lease_stops_and_harms_nothing(belt: Belt) -> None:
    """It sleeps through its lease in the middle of the list; another does it all; then it wakes."""
    given = lines(300)
    job = await belt.stage(given)
    asleep = asyncio.Event()
    sleeper = belt.ingester("sleeper")
    put = belt.system.tasks.put
    calls = 0

    async def sleepy(run: Any, seeds: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            await asleep.wait()
        await put(run, seeds)

    object.__setattr__(sleeper._ingest, "tasks", _With(belt.system.tasks, put=sleepy))
    ticking = asyncio.create_task(sleeper.tick())
    await belt.quiet()
    assert calls == 3
    belt.start(belt.ingester("other"))
    belt.start(belt.worker())
    await belt.ended(job, within=5 * LEASE)
    asleep.set()
    await ticking
    assert calls == 3, "it went on after the lease was lost"
    await belt.quiet()
    await check_list(belt, job, given)
    await belt.check(job)


async def test_a_list_that_is_not_there_fails_the_run_in_the_end(belt: Belt) -> None:
    job = await belt.stage([])
    assert job.source is not None
    await belt.blobs.delete([job.source])
    belt.start(belt.ingester())
    belt.start(belt.sweeper)
    (ended,) = await belt.ended(job, within=10 * LEASE)
    assert ended.state is RunState.FAILED
    assert "ingest failed 5 times" in (ended.reason or "")
    (letter,) = (await belt.system.queue.dead_letters(None, 10)).items
    assert letter.queue == CONTROL
    await belt.passing(5)
    await belt.check(job, RunState.FAILED)


async def test_a_message_that_nobody_can_read_is_buried(belt: Belt) -> None:
    await belt.system.queue.send(CONTROL, [Outgoing(b"not json"), Outgoing(b'{"op":"from_the_future"}')])
    job = await belt.stage(lines(10))
    belt.start(belt.ingester())
    await ingested(belt, job)
    letters = (await belt.system.queue.dead_letters(None, 10)).items
    assert {letter.body for letter in letters} == {b"not json", b'{"op":"from_the_future"}'}


async def test_a_message_of_another_run_is_thrown_away(belt: Belt) -> None:
    job = await belt.stage(lines(10))
    strangers = [
        IngestJob(job.tenant, job.job_id, RunId("run_other"), "uploads/acme/x"),
        IngestJob(job.tenant, "job_other", job.run.run_id, "uploads/acme/x"),  # type: ignore[arg-type]
    ]
    await belt.system.queue.send(CONTROL, [Outgoing(msgspec.json.encode(message)) for message in strangers])
    belt.start(belt.ingester())
    await ingested(belt, job)
    await belt.passing(5)
    assert await belt.system.queue.depth(CONTROL) == Depth(0, 0, 0)
    await check_list(belt, job, lines(10))


async def test_a_lost_message_is_sent_again(belt: Belt) -> None:
    """The queue is a hint: the row knows where the list is."""
    job = await belt.stage(lines(120))
    await belt.system.queue.drop(CONTROL)
    belt.start(belt.ingester())
    belt.start(belt.sweeper)
    belt.start(belt.worker())
    await belt.ended(job, within=5 * LEASE)
    await belt.check(job)
    assert await belt.system.queue.depth(CONTROL) == Depth(0, 0, 0)


async def test_a_paused_ingest_goes_on_when_it_is_resumed(belt: Belt, armed: Callable[[str, int], None]) -> None:
    job = await belt.stage(lines(230))
    armed("ingest.checkpoint.after", 2)
    with pytest.raises(Crash):
        await belt.ingester("first").tick()
    faults.arm(None)
    assert await belt.lifecycle.move(job, RunState.PAUSED, "by hand", Counts()) is RunState.PAUSED
    for role in (belt.ingester("second"), belt.sweeper, belt.worker()):
        belt.start(role)
    await belt.passing(3 * LEASE)
    assert belt.executor.starts == []
    assert await belt.lifecycle.move(job, RunState.INGESTING, None, Counts()) is RunState.INGESTING
    await belt.ended(job, within=5 * LEASE)
    await check_list(belt, job, lines(230))
    await belt.check(job)


class TestEndedOnTheWay:
    """A run that ends while its list is still read leaves nothing pending, and its counts add up."""

    async def test_the_rest_of_the_list_is_not_read(self, belt: Belt) -> None:
        job = await belt.stage(lines(500))
        await self._stop_after(belt, job, 3, swept_at_once=False)
        belt.start(belt.sweeper)
        belt.start(belt.ingester("second"))
        await belt.passing(3 * LEASE)
        await self._nothing_is_left(belt, job)

    async def test_not_even_what_was_written_after_the_sweep(self, belt: Belt) -> None:
        job = await belt.stage(lines(500))
        await self._stop_after(belt, job, 3, swept_at_once=True)
        belt.start(belt.sweeper)
        belt.start(belt.ingester("second"))
        await belt.passing(3 * LEASE)
        await self._nothing_is_left(belt, job)

    async def test_a_threshold_that_is_passed_early(self, belt: Belt) -> None:
        async def always(job: Job, ref: TaskRef) -> Outcome:
            return failure("result_not_json")

        belt.executor.act = always
        job = await belt.stage(lines(2000), failure_threshold={"failed": 30})
        for role in (belt.ingester(), belt.worker(), belt.sweeper):
            belt.start(role)
        await belt.ended(job, within=5 * LEASE)
        await belt.passing(3 * LEASE)
        await self._nothing_is_left(belt, job, RunState.FAILED)

    async def _stop_after(self, belt: Belt, job: Job, batches: int, *, swept_at_once: bool) -> None:
        """Cancel the run between two batches, and perhaps sweep it before the next is written."""
        ingester = belt.ingester("first")
        put = belt.system.tasks.put
        calls = 0

        async def interrupted(run: Any, seeds: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == batches:
                await belt.lifecycle.move(job, RunState.CANCELLED, "by hand", await belt.counts(job))
                while swept_at_once and (await belt.sweeper.run_once()).cleared == 0:
                    pass
            await put(run, seeds)

        object.__setattr__(ingester._ingest, "tasks", _With(belt.system.tasks, put=interrupted))
        await ingester.tick()
        assert calls == batches

    async def _nothing_is_left(self, belt: Belt, job: Job, state: RunState = RunState.CANCELLED) -> None:
        found = await belt.job(job.job_id)
        tasks = await belt.tasks(job)
        assert found.state is state
        assert TaskStatus.PENDING not in {task.status for task in tasks.values()}
        counts = await belt.counts(job)
        assert counts.ended == found.run.total == len(tasks)
        assert await belt.system.queue.depth(run_queue(job.run.run_id)) == Depth(0, 0, 0)
        assert await belt.system.queue.depth(CONTROL) == Depth(0, 0, 0)


class _With:
    """An engine with some methods of its own."""

    def __init__(self, engine: Any, **methods: Any) -> None:
        self.__dict__.update(methods)
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
