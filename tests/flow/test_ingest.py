"""Ingest: a staged list becomes tasks, once each, whatever happens on the way, whoever shares in it."""

import asyncio
import dataclasses
import gzip
import itertools
import json
import operator
from collections.abc import AsyncIterator, Callable, Iterator
from hashlib import sha256
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor import faults
from conveyor.accept.add_tasks import AddTasks
from conveyor.accept.resume import resume_ingest
from conveyor.accept.spec import TasksSpec
from conveyor.engines.queue import CONTROL, Depth, Outgoing, run_queue
from conveyor.engines.tasks import TaskFilter
from conveyor.errors import ListChanged
from conveyor.ingest.ingester import LEASE_SECONDS, Ingester
from conveyor.ingest.pipeline import PUTS_AHEAD
from conveyor.ingest.plan import make_plan, range_pieces, reading_of
from conveyor.lists import reader as lists
from conveyor.lists.list_bytes import ListBytes
from conveyor.model import (
    Counts,
    IngestJob,
    IngestRange,
    Job,
    JobKind,
    ListFormat,
    Mode,
    Outcome,
    Range,
    RunId,
    Source,
    TaskRef,
    TaskSeed,
    task_id,
)
from conveyor.read.invalid_lines import invalid_page
from conveyor.read.merge import merged_page
from conveyor.read.results import result_page
from conveyor.states import RunState, TaskStatus
from tests.support.make_jobs import ACME, make_run, seeds
from tests.support.small_fleet import Fleet, failure, open_fleet, success
from tests.support.zstd_library import zstd

LEASE = LEASE_SECONDS
# Some 20 lines.
RANGE_BYTES = 1000
MOST = 1 << 30


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a short list has several."""
    monkeypatch.setattr(lists, "BATCH", 7)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    """With small ranges too."""
    async with open_fleet(ingest_range_bytes=RANGE_BYTES) as opened:
        yield opened


@pytest.fixture
async def whole() -> AsyncIterator[Fleet]:
    """A list is one range."""
    async with open_fleet() as opened:
        yield opened


@pytest.fixture
def armed() -> Iterator[Callable[[str, int], None]]:
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


async def ingested(fleet: Fleet, job: Job, within: float = 1000) -> Job:
    async def latched() -> bool:
        return (await fleet.job(job.job_id)).run.last_batch

    await fleet.until(latched, within=within)
    await fleet.quiet()
    return await fleet.job(job.job_id)


async def drive(ingester: Ingester, ticks: int = 1000) -> None:
    """Have one ingester do all that is ready."""
    for _ in range(ticks):
        if await ingester.tick() > 0:
            return
    raise AssertionError("there is always more")


async def check_list(fleet: Fleet, job: Job, given: list[str]) -> None:
    """Every line is a task under its number."""
    tasks = await fleet.tasks(job)
    assert [bytes(tasks[index].input).decode() for index in range(len(tasks))] == given
    assert (await fleet.job(job.job_id)).run.total == len(given)


async def control_is_empty(fleet: Fleet) -> None:
    assert await fleet.system.queue.depth(CONTROL) == Depth(0, 0, 0)


def patched(ingester: Ingester, engine: str, **methods: Any) -> Ingester:
    """An ingester whose engine has some methods of its own."""
    name, _, part = engine.partition(".")
    real = getattr(ingester._ingest, name)
    own = dataclasses.replace(real, **{part: _With(getattr(real, part), **methods)}) if part else _With(real, **methods)
    object.__setattr__(ingester._ingest, name, own)
    return ingester


class _With:
    def __init__(self, engine: Any, **methods: Any) -> None:
        self.__dict__.update(methods)
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class _OneBlob:
    """As much of Blobs as a plan needs, in pieces of any size."""

    def __init__(self, data: bytes, piece: int) -> None:
        self.data = data
        self.piece = piece

    async def size(self, key: str) -> int | None:
        return len(self.data)

    async def get(self, key: str, start: int = 0, length: int | None = None) -> bytes | None:
        return self.data[start:] if length is None else self.data[start : start + length]

    async def stream(self, key: str, start: int = 0) -> AsyncIterator[bytes]:
        for at in range(start, len(self.data), self.piece):
            yield self.data[at : at + self.piece]


async def held() -> bool:
    return True


def bytes_of(blobs: Any) -> ListBytes:
    return ListBytes(blobs, ACME, MOST)


def source_of(data: bytes, form: ListFormat | None = None) -> Source:
    return Source("key", len(data), sha256(data).hexdigest(), form)


class TestPlan:
    @settings(max_examples=150, deadline=None)
    @given(
        st.lists(st.one_of(st.just(""), st.just("# c"), st.just("{"), st.text("aü\r", max_size=30)), max_size=60),
        st.booleans(),
        st.integers(1, 400),
        st.integers(1, 100),
        st.sampled_from([ListFormat.TEXT, ListFormat.JSONL]),
    )
    def test_the_ranges_are_the_list(
        self, given: list[str], newline: bool, range_bytes: int, piece: int, form: ListFormat
    ) -> None:
        data = ("\n".join(given) + ("\n" if newline else "")).encode()
        asyncio.run(self._check(data, range_bytes, piece, form))

    async def _check(self, data: bytes, range_bytes: int, piece: int, form: ListFormat) -> None:
        blobs: Any = _OneBlob(data, piece)
        ranges = await make_plan(bytes_of(blobs), source_of(data, form), JobKind.PYTHON, range_bytes, held)
        assert [one.number for one in ranges] == list(range(len(ranges)))
        assert (ranges[0].start, ranges[0].first_index, ranges[-1].end) == (0, 0, None)
        for one, following in itertools.pairwise(ranges):
            assert one.end == following.start
            assert following.start - one.start >= min(range_bytes, len(data))
            assert data[following.start - 1 : following.start] == b"\n"
            assert following.first_index == data[: following.start].count(b"\n")
        (entire,) = await make_plan(bytes_of(blobs), source_of(data, form), JobKind.PYTHON, MOST, held)
        parts = [await self._read(blobs, one) for one in ranges]
        assert list(itertools.chain.from_iterable(parts)) == await self._read(blobs, entire)

    async def _read(self, blobs: Any, one: Range) -> list[Any]:
        batches = [b async for b in lists.read(range_pieces(bytes_of(blobs), one), reading_of(one, JobKind.PYTHON))]
        return [item for batch in batches for item in [*batch.seeds, *batch.invalid]]

    @pytest.mark.parametrize("pack", [gzip.compress, zstd.compress])
    async def test_a_compressed_list_is_one_range(self, pack: Callable[[bytes], bytes]) -> None:
        data = pack(b'"x"\n' * 1000)
        (one,) = await make_plan(bytes_of(_OneBlob(data, 1000)), source_of(data), JobKind.PYTHON, 10, held)
        assert one.format is ListFormat.JSONL
        assert len(await self._read(_OneBlob(data, 1000), one)) == 1000

    async def test_a_first_member_that_is_empty(self) -> None:
        data = gzip.compress(b"") + gzip.compress(b'"x"\n')
        (one,) = await make_plan(bytes_of(_OneBlob(data, 1000)), source_of(data), JobKind.PYTHON, 10, held)
        assert one.format is ListFormat.JSONL

    @pytest.mark.parametrize("other", [b'"a"\n"c"\n', b'"a"\n"b"\n\n', b""])
    async def test_a_list_that_is_not_the_accepted_one(self, other: bytes) -> None:
        blobs: Any = _OneBlob(other, 10)
        with pytest.raises(ListChanged):
            await make_plan(bytes_of(blobs), source_of(b'"a"\n"b"\n', ListFormat.JSONL), JobKind.PYTHON, 10, held)


class TestLists:
    @pytest.mark.parametrize("count", [1, 6, 7, 8, 20, 333])
    async def test_a_list_becomes_tasks_in_order(self, fleet: Fleet, count: int) -> None:
        job = await fleet.stage(lines(count))
        assert (job.state, job.run.total, job.run.last_batch) == (RunState.INGESTING, 0, False)
        fleet.start(fleet.ingester())
        found = await ingested(fleet, job)
        await check_list(fleet, job, lines(count))
        assert found.state is RunState.RUNNING
        assert (len(await fleet.system.records.ingests.ranges(job.run.run_id)) > 1) == (count > 20)
        await control_is_empty(fleet)

    @pytest.mark.parametrize("data", [b"", b"\n\n", b"# c\n"])
    async def test_a_list_without_tasks_fails(self, fleet: Fleet, data: bytes) -> None:
        job = await fleet.stage_bytes(data, ListFormat.TEXT)
        fleet.start(fleet.ingester())
        (ended,) = await fleet.ended(job)
        assert (ended.state, ended.run.total) == (RunState.FAILED, 0)
        assert "no tasks" in (ended.reason or "")

    @pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd.compress])
    async def test_the_total_is_exact_with_blanks_and_invalid_lines(
        self, fleet: Fleet, pack: Callable[[bytes], bytes]
    ) -> None:
        given = [["", "{", f'"{number}"', "  ", f'{{"n": {number}}}'][number % 5] for number in range(403)]
        job = await fleet.stage_bytes(pack("\n".join(given).encode()), ListFormat.JSONL)
        for role in (fleet.ingester("one"), fleet.ingester("two"), fleet.worker(), fleet.sweeper):
            fleet.start(role)
        (ended,) = await fleet.ended(job)
        want = {number: line for number, line in enumerate(given) if number % 5 in (2, 4)}
        tasks = await fleet.tasks(job)
        assert {index: bytes(task.input).decode() for index, task in tasks.items()} == want
        wrong = [number + 1 for number in range(403) if number % 5 == 1]
        assert (ended.state, ended.run.total, ended.run.invalid) == (RunState.COMPLETED, len(want), len(wrong))
        assert (await fleet.counts(job)).succeeded == len(want)
        seen: list[int] = []
        cursor = None
        while True:
            page = await invalid_page(fleet.blobs, ended, 10, cursor)
            seen += [line.line for line in page.items]
            cursor = page.next_cursor
            if cursor is None:
                break
        assert seen == wrong

    async def test_a_list_with_one_bad_line_is_rejected_whole(self, fleet: Fleet) -> None:
        given = lines(300)
        given[250] = "{"
        job = await fleet.stage(given, on_invalid="reject")
        for role in (fleet.ingester(), fleet.worker(), fleet.sweeper):
            fleet.start(role)
        (ended,) = await fleet.ended(job)
        assert ended.state is RunState.FAILED
        assert "line 251" in (ended.reason or "")
        await fleet.passing(3 * LEASE)
        assert await fleet.tasks(job) == {}
        assert fleet.executor.starts == []
        assert [line.line for line in (await invalid_page(fleet.blobs, ended, 10, None)).items] == [251]

    async def test_a_good_list_is_not(self, fleet: Fleet) -> None:
        job = await fleet.stage(lines(100), on_invalid="reject")
        fleet.start(fleet.ingester())
        await ingested(fleet, job)
        await check_list(fleet, job, lines(100))

    async def test_lines_of_any_length_cross_the_pieces(self, fleet: Fleet) -> None:
        given = [json.dumps("x" * size) for size in (1, 200_000, 0, 260_000, 3, 131_072, 262_142, 5)]
        job = await fleet.stage(given)
        fleet.start(fleet.ingester())
        await ingested(fleet, job)
        await check_list(fleet, job, given)

    async def test_tasks_start_while_the_list_is_still_read(self, fleet: Fleet) -> None:
        job = await fleet.stage(lines(400))
        seen: list[RunState] = []

        async def look(job: Job, ref: TaskRef) -> Outcome:
            seen.append((await fleet.job(job.job_id)).state)
            return success()

        fleet.executor.act = look
        hold = asyncio.Event()
        real = fleet.system.records.ingests.checkpoint

        async def slow_checkpoint(run_id: Any, one: Range, fence: int) -> bool:
            if one.number == 5:
                await hold.wait()
            return await real(run_id, one, fence)

        fleet.start(patched(fleet.ingester("slow"), "records.ingests", checkpoint=slow_checkpoint))
        fleet.start(fleet.worker())
        await fleet.until(lambda: len(seen) >= 40)
        assert set(seen) == {RunState.INGESTING}
        assert (await fleet.job(job.job_id)).state is RunState.INGESTING, "more may come"
        hold.set()
        await fleet.ended(job)
        await fleet.check(job)

    async def test_the_latch_waits_for_the_last_range(self, fleet: Fleet) -> None:
        """All tasks that are there have ended, one range is not done: the run does not complete."""
        job = await fleet.stage(lines(300))
        hold = asyncio.Event()
        real = fleet.system.records.ingests.checkpoint

        async def slow_checkpoint(run_id: Any, one: Range, fence: int) -> bool:
            if one.number == 2 and one.done:
                await hold.wait()
            return await real(run_id, one, fence)

        for name in ("one", "two"):
            fleet.start(patched(fleet.ingester(name), "records.ingests", checkpoint=slow_checkpoint))
        for role in (fleet.worker(), fleet.sweeper):
            fleet.start(role)

        async def all_but_one() -> bool:
            done = await fleet.system.records.ingests.ingested(job.run.run_id)
            return done.ranges > 0 and done.ranges_done == done.ranges - 1 and (await fleet.counts(job)).ended == 300

        await fleet.until(all_but_one)
        await fleet.passing(5)
        found = await fleet.job(job.job_id)
        assert (found.state, found.run.last_batch) == (RunState.INGESTING, False)
        hold.set()
        await fleet.ended(job)
        await fleet.check(job)

    async def test_two_share_a_list(self, fleet: Fleet) -> None:
        job = await fleet.stage(lines(400))
        took: dict[str, set[int]] = {"one": set(), "two": set()}
        real = fleet.system.records.ingests.checkpoint
        for name, numbers in took.items():

            async def noted(run_id: Any, one: Range, fence: int, numbers: set[int] = numbers) -> bool:
                numbers.add(one.number)
                # So that the other has the time to look.
                await fleet.clock.sleep(0.5)
                return await real(run_id, one, fence)

            fleet.start(patched(fleet.ingester(name), "records.ingests", checkpoint=noted))
        await ingested(fleet, job)
        await check_list(fleet, job, lines(400))
        assert took["one"]
        assert took["two"]
        assert not took["one"] & took["two"], "a range was read twice"


POINTS = ["tasks.put.after", "ingest.put.after", "queue.send.after", "ingest.enqueue.after", "ingest.checkpoint.after"]
ONCE = [
    "ingest.split.before",
    "ingest.split.after",
    "ingest.done.after",
    "lifecycle.total.before",
    "lifecycle.latch.before",
    "lifecycle.latch.after",
    "ingester.ack.before",
    "queue.ack.before",
]


class TestMishaps:
    @pytest.mark.parametrize(
        ("point", "nth"), [*((point, nth) for point in POINTS for nth in (1, 5, 12)), *((point, 1) for point in ONCE)]
    )
    async def test_an_ingest_that_dies_anywhere_is_taken_up_by_another(
        self, fleet: Fleet, armed: Callable[[str, int], None], point: str, nth: int
    ) -> None:
        given = lines(100)
        job = await fleet.stage(given)
        armed(point, nth)
        with pytest.raises(Crash):
            await drive(fleet.ingester("first"))
        faults.arm(None)
        fleet.clock.advance(LEASE)
        for role in (fleet.ingester("second"), fleet.worker(), fleet.sweeper):
            fleet.start(role)
        await fleet.ended(job, within=5 * LEASE)
        await check_list(fleet, job, given)
        await fleet.check(job)
        await fleet.passing(1)
        await control_is_empty(fleet)

    async def test_it_goes_on_from_the_last_checkpoint(self, whole: Fleet, armed: Callable[[str, int], None]) -> None:
        """The fourth batch is written and sent and its checkpoint is lost: only that one is done again."""
        job = await whole.stage(lines(50))
        armed("ingest.enqueue.after", 4)
        with pytest.raises(Crash):
            await drive(whole.ingester("first"))
        faults.arm(None)
        (one,) = await whole.system.records.ingests.ranges(job.run.run_id)
        assert (one.index, one.tasks) == (21, 21)
        assert one.offset == sum(len(line.encode()) + 1 for line in lines(21))
        put: list[int] = []

        async def watched(run: Any, seeds: Any) -> None:
            put.extend(seed.index for seed in seeds)
            await whole.system.tasks.put(run, seeds)

        whole.start(patched(whole.ingester("second"), "tasks", put=watched))
        await ingested(whole, job)
        assert put == list(range(21, 50))
        await check_list(whole, job, lines(50))

    @pytest.mark.parametrize("pack", [bytes, gzip.compress])
    async def test_a_last_line_without_an_end_and_a_crash_behind_it(
        self, whole: Fleet, armed: Callable[[str, int], None], pack: Callable[[bytes], bytes]
    ) -> None:
        """The checkpoint is one byte behind the end of the list."""
        job = await whole.stage_bytes(pack(b'"one"\n"two"\n"three"'), ListFormat.JSONL)
        armed("ingest.checkpoint.after", 1)
        with pytest.raises(Crash):
            await drive(whole.ingester("first"))
        faults.arm(None)
        whole.start(whole.ingester("second"))
        await ingested(whole, job)
        await check_list(whole, job, ['"one"', '"two"', '"three"'])

    @pytest.mark.parametrize(
        "engine", ["tasks.put", "queue.send", "records.ingests.checkpoint", "records.ingests.split"]
    )
    async def test_an_engine_that_fails_a_few_times(self, fleet: Fleet, engine: str) -> None:
        job = await fleet.stage(lines(100))
        name, _, method = engine.rpartition(".")
        real = operator.attrgetter(engine)(fleet.system)
        left = 3

        async def failing(*args: Any) -> Any:
            nonlocal left
            result = await real(*args)
            left -= 1
            if left >= 0:
                raise OSError("done, and yet an error")
            return result

        fleet.start(patched(fleet.ingester(), name, **{method: failing}))
        for role in (fleet.worker(), fleet.sweeper):
            fleet.start(role)
        await fleet.ended(job, within=10 * LEASE)
        assert left < 3, "it never failed"
        await check_list(fleet, job, lines(100))
        await fleet.check(job)

    async def test_duplicated_messages(self, fleet: Fleet) -> None:
        job = await fleet.stage(lines(300))
        where = (job.tenant, job.job_id, job.run.run_id)
        message = Outgoing(msgspec.json.encode(IngestJob(*where)))
        parts = [Outgoing(msgspec.json.encode(IngestRange(*where, number))) for number in range(30)]
        await fleet.system.queue.send(CONTROL, [message] * 3)
        await fleet.ingester("zero").tick()
        await fleet.system.queue.send(CONTROL, [*parts, message, *parts])
        for name in ("one", "two", "three"):
            fleet.start(fleet.ingester(name))
        fleet.start(fleet.worker())
        await fleet.ended(job)
        await check_list(fleet, job, lines(300))
        await fleet.passing(LEASE)
        await control_is_empty(fleet)
        await fleet.check(job)

    async def test_one_that_lost_its_lease_is_refused_and_harms_nothing(self, whole: Fleet) -> None:
        """It sleeps through its lease in the middle of the list; another does it all; then it wakes."""
        given = lines(100)
        job = await whole.stage(given)
        asleep = asyncio.Event()
        calls = 0
        checkpoints: list[bool] = []
        put, checkpoint = whole.system.tasks.put, whole.system.records.ingests.checkpoint

        async def sleepy(run: Any, seeds: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                await asleep.wait()
            await put(run, seeds)

        async def noted(*args: Any) -> bool:
            checkpoints.append(await checkpoint(*args))
            return checkpoints[-1]

        sleeper = patched(patched(whole.ingester("sleeper"), "tasks", put=sleepy), "records.ingests", checkpoint=noted)
        ticking = asyncio.create_task(drive(sleeper, 2))
        await whole.until(lambda: calls >= 3)
        whole.start(whole.ingester("other"))
        await ingested(whole, job, within=5 * LEASE)
        asleep.set()
        with pytest.raises(AssertionError):
            await ticking
        assert checkpoints == [True, True, False]
        assert calls == 3 + PUTS_AHEAD, "the batches that were being written meanwhile, and none after that"
        for role in (whole.worker(), whole.sweeper):
            whole.start(role)
        await whole.ended(job)
        await check_list(whole, job, given)
        await whole.check(job)

    async def test_a_message_that_nobody_can_read_is_buried(self, fleet: Fleet) -> None:
        await fleet.system.queue.send(CONTROL, [Outgoing(b"not json"), Outgoing(b'{"op":"from_the_future"}')])
        job = await fleet.stage(lines(10))
        fleet.start(fleet.ingester())
        await ingested(fleet, job)
        letters = (await fleet.system.queue.dead_letters(None, 10)).items
        assert {letter.body for letter in letters} == {b"not json", b'{"op":"from_the_future"}'}

    async def test_a_message_of_another_run_is_thrown_away(self, fleet: Fleet) -> None:
        job = await fleet.stage(lines(10))
        strangers: list[IngestJob | IngestRange] = [
            IngestJob(job.tenant, job.job_id, RunId("run_other")),
            IngestJob(job.tenant, "job_other", job.run.run_id),  # type: ignore[arg-type]
            IngestRange(job.tenant, job.job_id, RunId("run_other"), 0),
            IngestRange(job.tenant, job.job_id, job.run.run_id, 99),
        ]
        await fleet.system.queue.send(CONTROL, [Outgoing(msgspec.json.encode(message)) for message in strangers])
        fleet.start(fleet.ingester())
        await ingested(fleet, job)
        await fleet.passing(5)
        await control_is_empty(fleet)
        await check_list(fleet, job, lines(10))

    @pytest.mark.parametrize("ticks", [0, 1, 3])
    async def test_lost_messages_are_sent_again(self, fleet: Fleet, ticks: int) -> None:
        """The queue is a hint: the rows know what is to be ingested."""
        job = await fleet.stage(lines(120))
        first = fleet.ingester("first")
        for _ in range(ticks):
            await first.tick()
        await fleet.system.queue.drop(CONTROL)
        for role in (fleet.ingester(), fleet.sweeper, fleet.worker()):
            fleet.start(role)
        await fleet.ended(job, within=2 * LEASE)
        await check_list(fleet, job, lines(120))
        await fleet.check(job)
        await control_is_empty(fleet)

    async def test_a_paused_ingest_goes_on_when_it_is_resumed(
        self, fleet: Fleet, armed: Callable[[str, int], None]
    ) -> None:
        job = await fleet.stage(lines(100))
        armed("ingest.checkpoint.after", 2)
        with pytest.raises(Crash):
            await drive(fleet.ingester("first"))
        faults.arm(None)
        assert await fleet.lifecycle.move(job, RunState.PAUSED, "by hand", Counts()) is RunState.PAUSED
        for role in (fleet.ingester("second"), fleet.sweeper, fleet.worker()):
            fleet.start(role)
        await fleet.passing(3 * LEASE)
        assert fleet.executor.starts == []
        assert await fleet.lifecycle.move(job, RunState.INGESTING, None, Counts()) is RunState.INGESTING
        await fleet.ended(job, within=5 * LEASE)
        await check_list(fleet, job, lines(100))
        await fleet.check(job)


class TestBadLists:
    async def _fails(self, fleet: Fleet, job: Job, why: str, within: float = 10 * LEASE) -> Job:
        for role in (fleet.ingester(), fleet.sweeper, fleet.worker()):
            fleet.start(role)
        (ended,) = await fleet.ended(job, within=within)
        assert ended.state is RunState.FAILED
        assert (ended.reason or "").startswith("ingest failed: ")
        assert why in (ended.reason or "")
        letters = (await fleet.system.queue.dead_letters(None, 10)).items
        assert letters
        assert all((letter.queue, letter.reason) == (CONTROL, ended.reason) for letter in letters)
        assert await fleet.notices(job) == ["job.accepted", "run.failed"]
        return ended

    async def test_one_that_is_not_there(self, fleet: Fleet) -> None:
        job = await fleet.stage(lines(3))
        assert job.source is not None
        await fleet.blobs.delete([job.source.key])
        await self._fails(fleet, job, "no longer exists", within=5)

    async def test_one_that_goes_away_after_it_was_split(self, fleet: Fleet) -> None:
        job = await fleet.stage(lines(100))
        assert job.source is not None
        await fleet.ingester("first").tick()
        await fleet.blobs.delete([job.source.key])
        await self._fails(fleet, job, "")

    @pytest.mark.parametrize("pack", [gzip.compress, zstd.compress])
    async def test_one_that_is_damaged(self, fleet: Fleet, pack: Callable[[bytes], bytes]) -> None:
        data = pack("\n".join(lines(2000)).encode())
        job = await fleet.stage_bytes(data[: len(data) // 2], ListFormat.JSONL)
        await self._fails(fleet, job, "ends too early", within=900)

    async def test_one_that_was_replaced_between_two_tries(
        self, fleet: Fleet, armed: Callable[[str, int], None]
    ) -> None:
        job = await fleet.stage(lines(100))
        assert job.source is not None
        armed("ingest.split.before", 1)
        with pytest.raises(Crash):
            await drive(fleet.ingester("first"))
        faults.arm(None)
        await fleet.blobs.put(job.source.key, "\n".join(reversed(lines(100))).encode() + b"\n")
        await self._fails(fleet, job, "has changed since it was accepted")
        assert await fleet.tasks(job) == {}

    @pytest.mark.parametrize("pack", [bytes, gzip.compress])
    async def test_one_that_is_replaced_after_it_was_split(self, fleet: Fleet, pack: Callable[[bytes], bytes]) -> None:
        """Of a range that is not what it was, nothing becomes a task, not even of the part that is the same."""
        given = "\n".join(lines(100)).encode() + b"\n"
        job = await fleet.stage_bytes(pack(given), ListFormat.JSONL)
        assert job.source is not None
        first = fleet.ingester("first")
        await first.tick()
        before = await fleet.system.records.ingests.ingested(job.run.run_id)
        assert (before.ranges > 0, before.tasks) == (True, 0)
        await fleet.blobs.put(job.source.key, pack(given[:-4] + b'00"\n'))
        await self._fails(fleet, job, "has changed since it was accepted", within=900)
        last = lines(100)[-1]
        assert all(task.input != last.encode() for task in (await fleet.tasks(job)).values())

    async def test_what_failed_goes_on_where_it_stopped(self, fleet: Fleet) -> None:
        """The list is put back, and the ingest is resumed."""
        given = lines(100)
        job = await fleet.stage(given)
        assert job.source is not None
        data = await fleet.blobs.get(job.source.key)
        assert data is not None
        first = fleet.ingester("first")
        for _ in range(3):
            await first.tick()
        before = await fleet.system.records.ingests.ingested(job.run.run_id)
        assert 0 < before.tasks < 100
        await fleet.blobs.delete([job.source.key])
        failed = await self._fails(fleet, job, "")
        await fleet.passing(LEASE)
        assert len(await fleet.tasks(job)) >= before.tasks, "what it has is kept"
        await fleet.blobs.put(job.source.key, data)
        await resume_ingest(fleet.system, failed)
        (ended,) = await fleet.ended(job, within=5 * LEASE)
        assert (ended.state, ended.run.total) == (RunState.COMPLETED, 100)
        await check_list(fleet, job, given)
        assert (await fleet.counts(job)).succeeded == 100


class TestOpenJobs:
    async def _open(self, fleet: Fleet, **spec: Any) -> Job:
        return await fleet.submit([], mode=Mode.OPEN, **spec)

    async def _add(self, fleet: Fleet, job: Job, values: list[Any], last: bool = False) -> None:
        tasks = [msgspec.Raw(json.dumps(value).encode()) for value in values]
        await AddTasks(fleet.system).add(await fleet.job(job.job_id), TasksSpec(tasks, last))

    async def test_batches_are_ranges(self, fleet: Fleet) -> None:
        job = await self._open(fleet)
        for role in (fleet.ingester("one"), fleet.ingester("two"), fleet.worker(), fleet.sweeper):
            fleet.start(role)
        values = [f"task {number}" for number in range(60)]
        await asyncio.gather(*(self._add(fleet, job, values[at : at + 10]) for at in range(0, 50, 10)))

        async def all_ended() -> bool:
            return (await fleet.counts(job)).ended == 50

        await fleet.until(all_ended)
        await fleet.passing(LEASE)
        assert (await fleet.job(job.job_id)).state is RunState.INGESTING, "nobody closed it"
        await self._add(fleet, job, values[50:], last=True)
        await fleet.ended(job)
        tasks = await fleet.check(job)
        assert sorted(json.loads(bytes(task.input)) for task in tasks.values()) == sorted(values)
        ranges = await fleet.system.records.ingests.ranges(job.run.run_id)
        assert [(one.number, one.first_index, one.done) for one in ranges] == [(n, 10 * n, True) for n in range(6)]

    async def test_lost_messages_of_batches(self, fleet: Fleet) -> None:
        job = await self._open(fleet)
        await self._add(fleet, job, [1, 2, 3])
        await self._add(fleet, job, [4], last=True)
        await fleet.system.queue.drop(CONTROL)
        for role in (fleet.ingester(), fleet.worker(), fleet.sweeper):
            fleet.start(role)
        await fleet.ended(job, within=LEASE)
        assert len(await fleet.check(job)) == 4

    async def test_it_is_closed_when_nobody_adds(self, fleet: Fleet) -> None:
        job = await self._open(fleet, idle_timeout=120.0)
        for role in (fleet.ingester(), fleet.worker(), fleet.sweeper):
            fleet.start(role)
        await fleet.passing(100)
        await self._add(fleet, job, [1, 2, 3])
        await fleet.passing(100)
        assert (await fleet.job(job.job_id)).state is RunState.INGESTING
        (ended,) = await fleet.ended(job, within=60)
        assert (ended.state, ended.run.total) == (RunState.COMPLETED, 3)
        assert "nothing was added for 120 s" in (ended.reason or "")
        await fleet.check(job)

    async def test_one_that_got_nothing_at_all_fails(self, fleet: Fleet) -> None:
        job = await self._open(fleet, idle_timeout=120.0)
        for role in (fleet.ingester(), fleet.sweeper):
            fleet.start(role)
        (ended,) = await fleet.ended(job, within=200)
        assert (ended.state, ended.run.total) == (RunState.FAILED, 0)
        assert "no tasks" in (ended.reason or "")


class TestEndedOnTheWay:
    """A run that ends while its list is still read leaves nothing pending, and its counts add up."""

    @pytest.mark.parametrize("swept_at_once", [False, True])
    async def test_the_rest_of_the_list_is_not_read(self, fleet: Fleet, swept_at_once: bool) -> None:
        job = await fleet.stage(lines(300))
        put = fleet.system.tasks.put
        calls = 0

        async def interrupted(run: Any, seeds: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 5:
                await fleet.lifecycle.move(job, RunState.CANCELLED, "by hand", await fleet.counts(job))
                while swept_at_once and (await fleet.sweeper.run_once()).cleared == 0:
                    pass
            await put(run, seeds)

        await drive(patched(fleet.ingester("first"), "tasks", put=interrupted))
        assert 5 <= calls <= 5 + PUTS_AHEAD
        fleet.start(fleet.sweeper)
        fleet.start(fleet.ingester("second"))
        await fleet.passing(3 * LEASE)
        await self._nothing_is_left(fleet, job, RunState.CANCELLED)

    async def test_a_threshold_that_is_passed_early(self, fleet: Fleet) -> None:
        async def always(job: Job, ref: TaskRef) -> Outcome:
            return failure("result_not_json")

        fleet.executor.act = always
        job = await fleet.stage(lines(1000), failure_threshold={"failed": 30})
        for role in (fleet.ingester("one"), fleet.ingester("two"), fleet.worker(), fleet.sweeper):
            fleet.start(role)
        await fleet.ended(job, within=5 * LEASE)
        await fleet.passing(3 * LEASE)
        await self._nothing_is_left(fleet, job, RunState.FAILED)

    async def _nothing_is_left(self, fleet: Fleet, job: Job, state: RunState) -> None:
        found = await fleet.job(job.job_id)
        tasks = await fleet.tasks(job)
        assert found.state is state
        assert TaskStatus.PENDING not in {task.status for task in tasks.values()}
        counts = await fleet.counts(job)
        assert counts == await fleet.system.tasks.recount(job.key)
        assert counts.ended == found.run.total == len(tasks)
        assert await fleet.system.queue.depth(run_queue(job.run.run_id)) == Depth(0, 0, 0)
        await control_is_empty(fleet)


async def listing(fleet: Fleet, job: Job, limit: int) -> list[str]:
    found: list[str] = []
    cursor = None
    while True:
        page = await result_page(fleet.system.tasks, job.key, TaskFilter(), limit, cursor)
        assert len(page.items) == limit or page.next_cursor is None
        found += [task.task_id for task in page.items]
        cursor = page.next_cursor
        if cursor is None:
            return found


class TestShards:
    @pytest.mark.parametrize("count", [4, 16])
    async def test_a_listing_is_all_tasks_in_order(self, count: int) -> None:
        """Under settings that change after the job was accepted, and again before it is listed."""
        async with open_fleet(force_task_shards=True, task_shard_count=count, ingest_range_bytes=RANGE_BYTES) as fleet:
            job = await fleet.stage(lines(500))
            assert job.task_shard_count == count
            first = fleet.ingester("first")
            for _ in range(6):
                await first.tick()
            drifted = msgspec.structs.replace(fleet.system.settings, task_shard_count=3, force_task_shards=False)
            fleet.system = dataclasses.replace(fleet.system, settings=drifted, sharded=False)
            for role in (fleet.ingester("second"), fleet.worker(), fleet.sweeper):
                fleet.start(role)
            await fleet.ended(job)
            await check_list(fleet, job, lines(500))
            await fleet.check(job)
            found = await fleet.job(job.job_id)
            want = sorted(task_id(job.run.run_id, index) for index in range(500))
            for limit in (1, 7, 100, 499, 500, 501):
                assert await listing(fleet, found, limit) == want
            other = await fleet.stage(lines(3))
            assert other.task_shard_count == 1
            pages = [
                await fleet.system.tasks.page(found.key, shard, None, 1000, TaskFilter()) for shard in range(count)
            ]
            assert sum(map(len, pages)) == 500
            assert all(pages), "every shard has its part"

    async def test_a_full_listing_reads_little_more_than_it_returns(self) -> None:
        async with open_fleet() as fleet:
            run = make_run(fleet.clock, shards=16)
            for start in range(0, 100_000, 5000):
                await fleet.system.tasks.put(run, [TaskSeed(index, "1") for index in range(start, start + 5000)])  # type: ignore[arg-type]
            read = returned = 0
            last = ""
            positions: Any = [None] * 16
            while positions is not None:
                page = await merged_page(fleet.system.tasks, run, TaskFilter(), 1000, positions)
                ids = [task.task_id for task in page.items]
                assert ids == sorted(ids)
                assert last < ids[0]
                last = ids[-1]
                read += page.rows_read
                returned += len(ids)
                positions = page.positions
            assert returned == 100_000
            assert read / returned <= 1.15

    async def test_a_short_page_takes_few_reads(self) -> None:
        async with open_fleet() as fleet:
            run = make_run(fleet.clock, shards=4)
            await fleet.system.tasks.put(run, seeds(1000))
            scanning: Any = Counting(fleet.system.tasks)
            pages = 0
            positions: Any = [None] * 4
            while positions is not None:
                positions = (await merged_page(scanning, run, TaskFilter(), 20, positions)).positions
                pages += 1
            assert pages == 50
            assert scanning.scans <= 8 * pages, "one for each shard, and some where a shard runs out"


class Counting:
    """Tasks of which the scans are counted."""

    def __init__(self, tasks: Any) -> None:
        self._tasks = tasks
        self.scans = 0

    async def scan(self, *given: Any) -> Any:
        self.scans += 1
        return await self._tasks.scan(*given)
