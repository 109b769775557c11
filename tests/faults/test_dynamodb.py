"""DynamoDB on a bad day: throttles, partial batches, lost answers, cut connections. Nothing is lost, and nothing is
counted twice.

Each seed chooses some faults and their rates. `CONVEYOR_DYNAMODB_CASES` asks for more seeds.
"""

import asyncio
import itertools
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conveyor import faults as crashes
from conveyor.engines.dynamodb import DynamoEngine
from conveyor.engines.dynamodb.table import Key
from conveyor.engines.dynamodb.wire import Patience
from conveyor.engines.records import Document, IdempotencyClaim
from conveyor.engines.tasks import TaskEvent, TaskFilter, Tasks
from conveyor.errors import EngineFailed, EngineRefused, is_outage
from conveyor.model import Counts, Job, Mode, Range, RunKey, Source, Task, shard_of, task_id
from conveyor.states import RunState, TaskStatus, sources_of
from tests.faults.shim import (
    Answer,
    Call,
    DynamoFaults,
    Forward,
    Interceptor,
    Reset,
    Shim,
    Stall,
    json_answer,
    refusal,
    statement_error,
)
from tests.servers.aws import aws
from tests.servers.dynamodb import open_engine, url_for
from tests.support.clocks import ManualClock
from tests.support.make_jobs import ACME, end, make_job, make_notice, make_run, seeds

CASES = int(os.environ.get("CONVEYOR_DYNAMODB_CASES", "10"))
QUICK = Patience(base=0.0005, cap=0.004, limit=30.0)

SUCCEEDED, FAILED, CANCELLED = TaskStatus.SUCCEEDED, TaskStatus.FAILED, TaskStatus.CANCELLED
POINTS = (
    "tasks.put.after",
    "tasks.finish.before",
    "tasks.announce.before",
    "tasks.announce.after",
    "tasks.count.before",
    "tasks.count.after",
    "tasks.finish.after",
)

replace = msgspec.structs.replace


class Died(BaseException):
    """What a process does at a crash point."""


def clock_for(seed: int) -> ManualClock:
    return ManualClock(start=1_800_000_000.0 + seed * 10_000, seed=seed)


_tables = itertools.count()


def new_tables() -> Path:
    """A place for tables. Each test has its own: the same seed makes the same ids, and would find the tasks of another
    test, or of the same test when it runs again, already finished."""
    return Path(f"/dynamodb-on-a-bad-day/{next(_tables)}")


@asynccontextmanager
async def opened(clock: ManualClock, *interceptors: Interceptor, count: int = 2) -> AsyncIterator[list[DynamoEngine]]:
    """Engines behind a shim, as in so many processes, and one last that has none."""
    async with AsyncExitStack() as stack:
        shim = await stack.enter_async_context(Shim(aws(), *interceptors))
        tables = new_tables()
        urls = [*([url_for(tables, shim.url)] * count), url_for(tables)]
        engines = [await stack.enter_async_context(DynamoEngine.open(url, clock, QUICK)) for url in urls]
        await engines[-1].migrate()
        yield engines


async def rows_of(tasks: Tasks, run: RunKey) -> dict[int, Task]:
    found: dict[int, Task] = {}
    for shard in range(max(1, run.shard_count)):
        for task in await tasks.page(run, shard, None, 10_000, TaskFilter()):
            assert task.index not in found
            assert shard_of(task.task_id, run.shard_count) == shard
            found[task.index] = task
    return found


def counted(rows: dict[int, Task]) -> Counts:
    seen = Counter(task.status for task in rows.values())
    return Counts(seen[SUCCEEDED], seen[FAILED], seen[CANCELLED])


def not_ahead(counts: Counts, truth: Counts) -> bool:
    return all(getattr(counts, name) <= getattr(truth, name) for name in truth.__struct_fields__)


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    crashes.arm(None)


def die_at(point: str, nth: int) -> Callable[[], bool]:
    """Have whoever passes a point die there, once. Returns how to ask whether it came to that."""
    left = nth

    def hook(passed: str) -> None:
        nonlocal left
        if passed == point:
            left -= 1
            if left == 0:
                raise Died

    crashes.arm(hook)
    return lambda: left <= 0


class Work:
    """What one seed does to a run: puts, ends, cancels and recounts from two processes at once."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(f"work {seed}")
        self.clock = clock_for(seed)
        self.run = make_run(self.clock, self.chance.choice((1, 1, 4, 8)))
        self.total = self.chance.randint(15, 70)
        self.moved: list[frozenset[int]] = []
        self.cancelled = 0
        self.recounts = seed % 3 == 0

    async def put(self, tasks: Tasks, everything: bool) -> None:
        starts = list(range(0, self.total, 30))
        self.chance.shuffle(starts)
        for start in starts:
            if everything or self.chance.random() < 0.5:
                await tasks.put(self.run, seeds(min(30, self.total - start), start))

    async def process(self, tasks: Tasks) -> None:
        for _ in range(3):
            chosen = self.chance.sample(range(self.total + 3), self.chance.randint(1, self.total // 2))
            status = self.chance.choice((SUCCEEDED, SUCCEEDED, FAILED))
            code = self.chance.choice(("timeout", "http_503")) if status is FAILED else None
            finished = await tasks.finish(self.run, [end(index, status, code=code) for index in chosen])
            assert finished.moved <= set(chosen)
            self.moved.append(finished.moved)
            if self.chance.random() < 0.2:
                cancelled = await tasks.cancel_pending(self.run, 3, 9.0)
                self.cancelled += cancelled
            if self.recounts and self.chance.random() < 0.3:
                await tasks.recount(self.run)

    async def check_codes(self, tasks: Tasks, rows: dict[int, Task]) -> None:
        codes = Counter(task.error_code for task in rows.values() if task.error_code is not None)
        assert dict(await tasks.error_codes(self.run, 10)) == dict(codes)


async def together(*steps: Awaitable[None]) -> bool:
    """Whether all of them lived to their end."""
    results = await asyncio.gather(*steps, return_exceptions=True)
    for result in results:
        if result is not None and not isinstance(result, Died):
            raise result
    return not any(isinstance(result, Died) for result in results)


@pytest.mark.parametrize("seed", range(CASES))
async def test_tasks_are_stored_ended_and_counted_once(seed: int) -> None:
    work, faults = Work(seed), DynamoFaults.swarm(seed)
    async with opened(work.clock, faults) as (one, two, truth):
        alive = await together(work.put(one.tasks, everything=True), work.put(two.tasks, everything=False))
        rows = await rows_of(truth.tasks, work.run)
        assert alive
        assert {index: bytes(task.input).decode() for index, task in rows.items()} == {
            index: f'"input {index}"' for index in range(work.total)
        }, "sent is stored"
        await together(*(work.process(engine.tasks) for engine in (one, two, one, two)))
        rows = await rows_of(truth.tasks, work.run)
        assert sum(map(len, work.moved)) == len(frozenset[int]().union(*work.moved)), "each moved for one caller"
        assert sum(map(len, work.moved)) + work.cancelled == counted(rows).ended, "what was not moved has not ended"
        counts = await truth.tasks.counts(work.run)
        assert not_ahead(counts, counted(rows))
        assert work.recounts or counts == counted(rows), "nobody died"
        assert await one.tasks.recount(work.run) == await truth.tasks.counts(work.run) == counted(rows)
        await work.check_codes(truth.tasks, rows)
        pending = {index for index, task in rows.items() if task.status is TaskStatus.PENDING}
        assert await two.tasks.unfinished(work.run, range(work.total + 5)) == pending


@pytest.mark.parametrize("seed", range(CASES))
async def test_who_dies_on_the_way_leaves_counts_that_lag_and_are_mended(seed: int) -> None:
    work, faults = Work(seed + 100_000), DynamoFaults.swarm(seed + 100_000)
    async with opened(work.clock, faults) as (one, two, truth):
        point = work.chance.choice(POINTS)
        die_at(point, work.chance.randint(1, 4))
        if not await together(work.put(one.tasks, everything=True)):
            # Whoever takes the list over puts it again.
            await one.tasks.put(work.run, seeds(work.total))
        died = not await together(*(work.process(engine.tasks) for engine in (one, two, one, two)))
        crashes.arm(None)
        rows = await rows_of(truth.tasks, work.run)
        assert sorted(rows) == list(range(work.total))
        assert sum(map(len, work.moved)) == len(frozenset[int]().union(*work.moved))
        assert sum(map(len, work.moved)) + work.cancelled <= counted(rows).ended
        assert died or sum(map(len, work.moved)) + work.cancelled == counted(rows).ended
        assert not_ahead(await truth.tasks.counts(work.run), counted(rows)), "it may lag, it never leads"
        await truth.tasks.settle_counts(work.run)
        work.clock.advance(5.0)
        settled = await truth.tasks.settle_counts(work.run)
        assert not_ahead(settled.counts, counted(rows))
        assert work.recounts or settled.counts == counted(rows), "without a recount, two looks settle all of it"
        assert await two.tasks.recount(work.run) == await truth.tasks.counts(work.run) == counted(rows)
        await work.check_codes(truth.tasks, rows)
        # A second end changes nothing, and the rest can still end.
        await one.tasks.finish(work.run, [end(index, FAILED, code="late") for index in range(work.total)])
        after = await rows_of(truth.tasks, work.run)
        assert {index: after[index] for index, task in rows.items() if task.status in (1, 2, 3)} == {
            index: task for index, task in rows.items() if task.status in (1, 2, 3)
        }
        assert (await truth.tasks.counts(work.run)).ended == counted(after).ended == work.total


@pytest.mark.parametrize("seed", range(CASES // 4))
async def test_events_are_noted_once_and_all_is_removed(seed: int) -> None:
    clock, chance = clock_for(seed + 200_000), random.Random(f"events {seed}")
    async with opened(clock, DynamoFaults.swarm(seed + 200_000)) as (one, two, truth):
        run = make_run(clock, chance.choice((1, 4)))
        await one.tasks.put(run, seeds(40))
        await one.tasks.finish(run, [end(index) for index in range(20)])
        noted = [TaskEvent(index % 40, 1.0, f"event {index}", "{}") for index in range(90)]
        await asyncio.gather(
            *(
                engine.tasks.note(run, noted[start : start + 15])
                for engine, start in zip((one, two) * 3, range(0, 90, 15), strict=True)
            )
        )
        page = await truth.tasks.events(run, None, None, 1000)
        assert sorted(event.event for event in page.items) == sorted(event.event for event in noted)
        assert [event.seq for event in page.items] == sorted({event.seq for event in page.items})
        removed = 0
        while step := await one.tasks.delete(run, 50):
            removed += step
        assert removed >= 130
        assert await rows_of(truth.tasks, run) == {}
        assert (await truth.tasks.events(run, None, None, 10)).items == []
        assert await truth.tasks.counts(run) == Counts()


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(
    "point", ["dynamodb.write.before", "dynamodb.write.after", "dynamodb.batch.before", "dynamodb.batch.after"]
)
async def test_another_process_does_what_one_died_over(point: str, nth: int) -> None:
    """A job is created and moved, its tasks are put, and removed."""
    clock = clock_for(400_000)
    async with opened(clock) as (one, two, truth):
        job, run = make_job(clock, total=60, latched=True), make_run(clock, 4)

        async def live(engine: DynamoEngine) -> None:
            jobs = engine.records.jobs
            await jobs.create_job(job, make_notice(clock, job), None)
            notice = make_notice(clock, job, "run.completed")
            completed = RunState.COMPLETED
            await jobs.move_run(job.job_id, job.run.run_id, sources_of(completed), completed, None, notice)
            await engine.tasks.put(run, seeds(60))
            while await engine.tasks.delete(run, 30):
                pass

        has_died = die_at(point, nth)
        assert not await together(live(one))
        assert has_died()
        crashes.arm(None)
        assert await together(live(two))
        events = (await truth.records.outbox.events(ACME, job.job_id, None, 100)).items
        assert [event.event for event in events] == ["job.accepted", "run.completed"], "each once"
        stored = await truth.records.jobs.job(ACME, job.job_id)
        assert stored is not None
        assert stored.state is RunState.COMPLETED
        assert await rows_of(truth.tasks, run) == {}


def claim_of(clock: ManualClock, subject: str) -> IdempotencyClaim:
    now = clock.now()
    return IdempotencyClaim(ACME, "POST /v1/jobs", f"key of {subject}", "print", subject, now + 30, now + 60)


@pytest.mark.parametrize("seed", range(CASES // 2))
async def test_records_change_once(seed: int) -> None:
    """Rivals in two processes: one of them makes each change, and what is written with it is written once."""
    clock = clock_for(seed + 300_000)
    async with opened(clock, DynamoFaults.swarm(seed + 300_000)) as (one, two, truth):
        records = [one.records, two.records] * 3
        jobs = [make_job(clock, total=3, latched=True) for _ in records]
        claim = claim_of(clock, jobs[0].job_id)
        claimed = await asyncio.gather(*(each.access.claim(claim) for each in records))
        assert sum(each.granted for each in claimed) <= 1, "a lost answer may leave it with nobody for a while"
        standing = await asyncio.gather(
            *(
                each.jobs.create_job(job, make_notice(clock, job), replace(claim, status=201, body=job.job_id.encode()))
                for each, job in zip(records, jobs, strict=True)
            )
        )
        assert standing.count(None) == 1
        job = jobs[standing.index(None)]
        assert {row.body for row in standing if row is not None} == {job.job_id.encode()}
        written = [await truth.records.jobs.job(ACME, each.job_id) is not None for each in jobs]
        assert written == [each is job for each in jobs]
        await _move_once(clock, job, one, two, truth)
        await _hand_out_once(clock, one, two, truth)
        await _replace_once(clock, seed, one, two, truth)


async def _move_once(clock: ManualClock, job: Job, one: DynamoEngine, two: DynamoEngine, truth: DynamoEngine) -> None:
    targets = [RunState.COMPLETED, RunState.CANCELLED, RunState.FAILED] * 2
    moved = await asyncio.gather(
        *(
            engine.records.jobs.move_run(
                job.job_id,
                job.run.run_id,
                sources_of(target),
                target,
                None,
                make_notice(clock, job, f"run.{target}"),
            )
            for engine, target in zip((one, two) * 3, targets, strict=True)
        )
    )
    assert sum(moved) == 1
    winner = targets[moved.index(True)]
    events = (await truth.records.outbox.events(ACME, job.job_id, None, 100)).items
    assert [(event.seq, event.event) for event in events] == [(1, "job.accepted"), (2, f"run.{winner}")]
    stored = await truth.records.jobs.job(ACME, job.job_id)
    assert stored is not None
    assert stored.state is stored.run.state is winner


async def _hand_out_once(clock: ManualClock, one: DynamoEngine, two: DynamoEngine, truth: DynamoEngine) -> None:
    job = make_job(clock, mode=Mode.OPEN, latched=False, state=RunState.INGESTING)
    await one.records.jobs.create_job(job, make_notice(clock, job), None)
    where, source = (job.job_id, job.run.run_id), Source("lists/acme/one", 9, "0" * 64)
    added = await asyncio.gather(
        *(
            engine.records.ingests.append_range(*where, source, lines, None, False)
            for engine, lines in zip((one, two) * 4, range(1, 9), strict=True)
        )
    )
    ranges = [each for each in added if isinstance(each, Range)]
    given = [
        index
        for each, lines in zip(ranges, range(1, 9), strict=True)
        for index in range(each.first_index, each.first_index + lines)
    ]
    assert sorted(given) == list(range(36))

    async def ingest(engine: DynamoEngine, each: Range, fence: int) -> None:
        for tasks in (2, 5, 4):
            reached = replace(each, tasks=tasks, invalid=1, offset=tasks, done=tasks == 4)
            await engine.records.ingests.checkpoint(job.run.run_id, reached, fence)

    await asyncio.gather(*(ingest(engine, each, 1) for engine, each in zip((one, two) * 4, ranges, strict=True)))
    assert await two.records.ingests.checkpoint(job.run.run_id, replace(ranges[0], tasks=7, done=True), 2)
    assert not await one.records.ingests.checkpoint(job.run.run_id, replace(ranges[0], tasks=99), 1)
    ingested = await truth.records.ingests.ingested(job.run.run_id)
    run = await truth.records.jobs.run(*where)
    assert run is not None
    assert (ingested.tasks, ingested.ranges_done) == (7 * 4 + 7, 8)
    assert (run.total, run.invalid) == (ingested.tasks, ingested.invalid)


async def _replace_once(
    clock: ManualClock, seed: int, one: DynamoEngine, two: DynamoEngine, truth: DynamoEngine
) -> None:
    row = Document("schedule", ACME, f"row of {seed}", b"0", due_at=clock.now())
    await asyncio.gather(*(engine.records.documents.create_documents([row]) for engine in (one, two, one, two)))
    won = 0
    for _ in range(3):
        standing = await truth.records.documents.document(row.kind, ACME, row.id)
        assert standing is not None
        changes = [replace(standing, body=b"%d" % number) for number in range(4)]
        replaced = await asyncio.gather(
            *(
                engine.records.documents.replace_document(change)
                for engine, change in zip((one, two) * 2, changes, strict=True)
            )
        )
        won += sum(each is not None for each in replaced)
    standing = await truth.records.documents.document(row.kind, ACME, row.id)
    assert won == 3
    assert standing is not None
    assert standing.version == 4


class Times:
    """Does something to the first calls that match."""

    def __init__(
        self, count: int, action: str, do: Callable[[Call, Forward], Awaitable[Answer]], about: str = ""
    ) -> None:
        self.left = count
        self._action = action
        self._do = do
        self._about = about.encode()

    async def __call__(self, call: Call, forward: Forward) -> Answer:
        if self.left == 0 or call.action != self._action or self._about not in call.body:
            return await forward(call)
        self.left -= 1
        return await self._do(call, forward)


async def lose_answer(call: Call, forward: Forward) -> Answer:
    assert (await forward(call)).status == 200
    return refusal("InternalServerError", 500)


async def cut_after(call: Call, forward: Forward) -> Answer:
    assert (await forward(call)).status == 200
    raise Reset


async def deny(call: Call, forward: Forward) -> Answer:
    return refusal("AccessDeniedException", prefix="com.amazon.coral.service#")


@pytest.mark.parametrize(("seed", "fault"), [(400_000, lose_answer), (400_100, cut_after)])
class TestLostAnswers:
    """The call was carried out; nobody told the caller. It finds its own writes when it makes them again."""

    async def test_of_an_end(self, seed: int, fault: Any) -> None:
        clock = clock_for(seed + 1)
        lost = Times(2, "BatchExecuteStatement", fault, "UPDATE")
        async with opened(clock, lost) as (one, _, truth):
            run = make_run(clock, 1)
            await one.tasks.put(run, seeds(60))
            finished = await one.tasks.finish(run, [end(index) for index in range(60)])
            assert lost.left == 0
            assert finished.moved == frozenset(range(60))
            assert finished.counts == await truth.tasks.counts(run) == Counts(succeeded=60)

    async def test_of_a_count(self, seed: int, fault: Any) -> None:
        clock = clock_for(seed + 2)
        lost = Times(3, "UpdateItem", fault, "count#")
        async with opened(clock, lost) as (one, _, truth):
            run = make_run(clock, 4)
            await one.tasks.put(run, seeds(30))
            for start in (0, 10, 20):
                await one.tasks.finish(run, [end(index, FAILED, code="x") for index in range(start, start + 10)])
            assert lost.left == 0
            assert await truth.tasks.counts(run) == Counts(failed=30)
            assert await truth.tasks.error_codes(run, 5) == [("x", 30)]

    async def test_of_a_transaction(self, seed: int, fault: Any) -> None:
        clock = clock_for(seed + 3)
        lost = Times(3, "TransactWriteItems", fault)
        async with opened(clock, lost) as (one, _, truth):
            job = make_job(clock)
            claim = claim_of(clock, job.job_id)
            assert (await one.records.access.claim(claim)).granted
            answer = replace(claim, status=201, body=b"yes")
            assert await one.records.jobs.create_job(job, make_notice(clock, job), answer) is None
            target = RunState.CANCELLED
            notice = make_notice(clock, job, "run.cancelled")
            assert await one.records.jobs.move_run(job.job_id, job.run.run_id, sources_of(target), target, None, notice)
            assert lost.left == 0
            events = (await truth.records.outbox.events(ACME, job.job_id, None, 10)).items
            assert [event.event for event in events] == ["job.accepted", "run.cancelled"]


async def refuse_one_of_a_batch(call: Call, forward: Forward) -> Answer:
    """The others are executed."""
    statements = call.payload["Statements"]
    answer = await forward(call.with_payload({"Statements": statements[1:]}))
    return json_answer(200, {"Responses": [statement_error("ValidationError"), *answer.payload["Responses"]]})


class RefuseBatchesWith:
    """Refuses a whole batch as invalid if a statement in it is."""

    def __init__(self, text: str) -> None:
        self._text = text.encode()

    async def __call__(self, call: Call, forward: Forward) -> Answer:
        if call.action == "BatchExecuteStatement" and b"UPDATE" in call.body and self._text in call.body:
            return refusal("ValidationException", prefix="com.amazon.coral.validate#")
        return await forward(call)


class TestInvalidStatements:
    """One of them costs the others neither their end nor their count."""

    async def test_one_of_a_batch(self) -> None:
        await ends_beside_an_invalid_one()

    @pytest.mark.parametrize("shards", [1, 4])
    async def test_one_that_fails_its_whole_batch(self, shards: int) -> None:
        clock = clock_for(400_020 + shards)
        run = make_run(clock, shards)
        bad = task_id(run.run_id, 7)
        async with opened(clock, RefuseBatchesWith(bad)) as (one, _, truth):
            await one.tasks.put(run, seeds(60))
            with pytest.raises(EngineRefused, match="refused"):
                await one.tasks.finish(run, [end(index) for index in range(60)])
            rows = await rows_of(truth.tasks, run)
            assert {index for index, task in rows.items() if task.status is TaskStatus.PENDING} == {7}
            assert await truth.tasks.counts(run) == Counts(succeeded=59)

    async def test_one_of_a_put(self) -> None:
        clock = clock_for(400_030)
        fault = Times(1, "BatchExecuteStatement", refuse_one_of_a_batch, "INSERT")
        async with opened(clock, fault) as (one, _, truth):
            run = make_run(clock, 1)
            with pytest.raises(EngineRefused, match="refused a statement: ValidationError"):
                await one.tasks.put(run, seeds(60))
            assert len(await rows_of(truth.tasks, run)) == 59
            await one.tasks.put(run, seeds(60))
            assert len(await rows_of(truth.tasks, run)) == 60


async def ends_beside_an_invalid_one() -> None:
    clock = clock_for(400_021)
    fault = Times(1, "BatchExecuteStatement", refuse_one_of_a_batch, "UPDATE")
    async with opened(clock, fault) as (one, _, truth):
        run = make_run(clock, 1)
        await one.tasks.put(run, seeds(75))
        with pytest.raises(EngineRefused, match="refused a statement: ValidationError"):
            await one.tasks.finish(run, [end(index) for index in range(75)])
        rows = await rows_of(truth.tasks, run)
        assert counted(rows).ended == 74
        assert await truth.tasks.counts(run) == counted(rows)


async def test_ends_that_were_on_their_way_when_another_lane_failed_are_counted() -> None:
    """A lane is denied for good; the calls of the others are cancelled, and may have been carried out."""
    clock = clock_for(400_022)
    run = make_run(clock, 4)
    carried_out = asyncio.Event()

    async def fault(call: Call, forward: Forward) -> Answer:
        if call.action != "BatchExecuteStatement" or b"UPDATE" not in call.body:
            return await forward(call)
        if b"#TS0" in call.body:
            await carried_out.wait()
            return refusal("AccessDeniedException", prefix="com.amazon.coral.service#")
        answer = await forward(call)
        carried_out.set()
        # Answered later than the failure of the other lane.
        await asyncio.Event().wait()
        return answer

    async with opened(clock, fault) as (one, _, truth):
        await one.tasks.put(run, seeds(200))
        with pytest.raises(EngineFailed):
            await one.tasks.finish(run, [end(index) for index in range(200)])
        rows = await rows_of(truth.tasks, run)
        counts = await truth.tasks.counts(run)
        assert counts.succeeded > 0
        assert not_ahead(counts, counted(rows))


async def test_a_filter_that_matches_nothing_reads_so_many_items() -> None:
    clock = clock_for(400_023)
    async with opened(clock) as (one, _, _):
        run = make_run(clock, 8)
        # Those of the shard that is read: the others would take the emulator seconds.
        await one.tasks.put(run, [seed for seed in seeds(6000) if shard_of(task_id(run.run_id, seed.index), 8) == 0])
        scanned = await one.tasks.scan(run, 0, None, 10, TaskFilter(tag="no such tag"))
        assert (scanned.tasks, scanned.read) == ([], 625), "an eighth of the bound on a request"
        assert scanned.last is not None


async def test_a_job_of_a_newer_version_hides_no_other() -> None:
    clock = clock_for(400_024)
    async with opened(clock) as (one, _, truth):
        known, novel = make_job(clock), make_job(clock)
        for job in (known, novel):
            await truth.records.jobs.create_job(job, make_notice(clock, job), None)
        key = Key(f"Job#{novel.job_id}", "acme#job")
        (stored,) = await truth.records.jobs._table.read(key)
        await truth.records.jobs._table.write([truth.records.jobs._table.save(stored, {"v": 2})])
        active = {job.job_id for job in await one.records.jobs.active_jobs()}
        assert known.job_id in active
        assert novel.job_id not in active


async def test_a_throttled_shard_holds_up_no_other() -> None:
    clock = clock_for(400_010)
    run = make_run(clock, 4)
    others = {index for index in range(400) if shard_of(task_id(run.run_id, index), 4) != 2}
    hot = f"Job#{run.job_id}#TS2"
    throttled, written = 0, 0
    cool, done = asyncio.Event(), asyncio.Event()

    async def cap(call: Call, forward: Forward) -> Answer:
        nonlocal throttled, written
        if call.action != "BatchExecuteStatement":
            return await forward(call)
        statements = call.payload["Statements"]
        if hot.encode() in call.body and not cool.is_set():
            # The whole call, also what it carries of others: they are sent again without it.
            throttled += 1
            return refusal("ThrottlingException")
        answer = await forward(call)
        written += len(statements)
        if written == len(others):
            done.set()
        return answer

    async with opened(clock, cap) as (one, _, truth):
        putting = asyncio.create_task(one.tasks.put(run, seeds(400)))
        await done.wait()
        assert await truth.tasks.unfinished(run, range(400)) == others
        assert throttled > 0
        assert not putting.done()
        cool.set()
        await putting
        assert await truth.tasks.unfinished(run, range(400)) == set(range(400))


async def test_a_recount_between_a_move_and_its_count_counts_once() -> None:
    clock = clock_for(400_011)
    held = Stall(lambda call: call.action == "UpdateItem" and b"count#" in call.body)
    async with opened(clock, held) as (one, _, truth):
        run = make_run(clock, 4)
        await truth.tasks.put(run, seeds(20))
        await truth.tasks.finish(run, [end(0)])
        finishing = asyncio.create_task(one.tasks.finish(run, [end(index) for index in range(10)]))
        await held.reached.wait()
        assert await truth.tasks.counts(run) == Counts(succeeded=1)
        assert await truth.tasks.recount(run) == Counts(succeeded=10)
        held.opened.set()
        finished = await finishing
        assert finished.moved == frozenset(range(1, 10))
        assert (
            finished.counts == await truth.tasks.counts(run) == await truth.tasks.recount(run) == Counts(succeeded=10)
        )
        await one.tasks.finish(run, [end(index) for index in range(20)])
        assert await truth.tasks.counts(run) == Counts(succeeded=20)


async def test_what_is_counted_during_a_recount_is_not_lost_by_it() -> None:
    clock = clock_for(400_013)
    held = Stall(lambda call: call.action == "TransactWriteItems")
    async with opened(clock, held) as (one, _, truth):
        run = make_run(clock, 4)
        await truth.tasks.put(run, seeds(20))
        await truth.tasks.finish(run, [end(19)])
        die_at("tasks.count.before", 1)
        with pytest.raises(Died):
            await truth.tasks.finish(run, [end(index) for index in range(5)])
        recounting = asyncio.create_task(one.tasks.recount(run))
        await held.reached.wait()
        finished = await truth.tasks.finish(run, [end(index) for index in range(5, 12)])
        assert finished.counts == Counts(succeeded=8), "it lags by what the dead had moved"
        held.opened.set()
        assert await recounting == await truth.tasks.counts(run) == Counts(succeeded=13)


async def test_errors_of_the_driver_do_not_get_out() -> None:
    clock, brief = clock_for(400_012), Patience(base=0.001, cap=0.01, limit=0.1)
    run = make_run(clock)
    tables = new_tables()
    async with open_engine(tables, clock):
        pass
    async with Shim(aws(), Times(1000, "BatchExecuteStatement", deny), Times(1000, "Query", deny)) as shim:
        gone = url_for(tables, "http://127.0.0.1:9")
        for url, about in (
            (gone, "did not complete"),
            (url_for(Path("/no tables here")), "conveyor migrate"),
            (url_for(tables, shim.url), "AccessDenied"),
        ):
            async with DynamoEngine.open(url, clock, brief) as engine:
                for step in (
                    engine.tasks.put(run, seeds(3)),
                    engine.tasks.counts(run),
                    engine.records.jobs.jobs(ACME, None, 10),
                ):
                    with pytest.raises(EngineFailed, match=about) as caught:
                        await step
                    assert is_outage(caught.value)
    async with DynamoEngine.open(url_for(tables), clock, brief) as engine:
        pass
    with pytest.raises(EngineFailed):
        await engine.records.jobs.job(ACME, make_job(clock).job_id)
