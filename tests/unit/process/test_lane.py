"""The lane that awaits attempts: what becomes of references, slots and probes, whatever an attempt does."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from conveyor.coordination.limits import TargetLimits
from conveyor.engines.queue import QueueName
from conveyor.errors import EngineFailed
from conveyor.model import InputJson, Job, JobKind, Lineage, Outcome, RunId, TaskError, TaskRef
from conveyor.process.earlier_outcomes import KnownOutcomes
from conveyor.process.executors import LocalExecutor
from conveyor.process.lane import Lane, LaneTools, LeasedRef
from conveyor.process.local_lane import LocalLane
from conveyor.process.recorder import LeasedChunk
from conveyor.process.retry import WORKER_LOST
from conveyor.process.task_progress import Superseded
from conveyor.states import TaskStatus
from tests.support.clocks import ManualClock
from tests.support.in_process_fetchers import idle
from tests.support.make_jobs import make_job

Act = Callable[[Sequence[TaskRef]], Awaitable[list[Outcome]]]


def success() -> Outcome:
    return Outcome(TaskStatus.SUCCEEDED)


class Acting(LocalExecutor):
    def __init__(self, act: Act, grain: int) -> None:
        self._act = act
        self._grain = grain
        self.batches: list[list[int]] = []

    def grain(self, job: Job) -> int:
        return self._grain

    def set_grain(self, grain: int) -> None:
        self._grain = grain

    def target(self, ref: TaskRef) -> str | None:
        return None

    async def attempt(self, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        self.batches.append([ref.index for ref in refs])
        return await self._act(refs)


class StubRecorder:
    """Remembers outcomes. While `failing`, no start can be marked."""

    def __init__(self) -> None:
        self.outcomes: dict[int, tuple[int, Outcome]] = {}
        self.marked: list[str] = []
        self.failing = 0
        self.full = False

    def add(self, job: Job, chunks: Sequence[Any], refs: Sequence[TaskRef], outcomes: Sequence[Outcome]) -> None:
        for ref, outcome in zip(refs, outcomes, strict=True):
            self.outcomes[ref.index] = (ref.attempt, outcome)

    async def mark_started(self, chunk: LeasedChunk) -> None:
        if self.failing:
            self.failing -= 1
            raise EngineFailed("for a moment")
        self.marked.append(chunk.receipt)

    def when_capacity(self, resume: Callable[[], None]) -> None:
        return

    async def until_capacity(self) -> None:
        return


class StubGate:
    """Checks what the test says, and remembers for which references it was released or got an outcome."""

    def __init__(self) -> None:
        self.is_watching = False
        self.is_urgent = False
        self.answers: dict[int, float | TaskError | None] = {}
        self.probe_wait: float | Exception = 0.0
        self.recorded: list[int] = []
        self.released: list[int] = []

    def check(self, ref: TaskRef) -> float | TaskError | None:
        return self.answers.get(ref.index, 0.0)

    async def acquire_probe(self, entry: LeasedRef) -> float:
        if isinstance(self.probe_wait, Exception):
            raise self.probe_wait
        return self.probe_wait

    def record(self, entries: Sequence[LeasedRef], outcomes: Sequence[Outcome]) -> None:
        self.recorded += [entry.ref.index for entry in entries]

    def assign_gateways(self, entries: Sequence[LeasedRef]) -> None:
        return

    def release(self, entries: Sequence[LeasedRef]) -> None:
        self.released += [entry.ref.index for entry in entries]

    def close(self) -> None:
        return


class StubOwner:
    def __init__(self) -> None:
        self.ticks = 0
        self.freed = 0
        self.idle = 0
        self.superseded: list[str] = []
        self.poisoned: list[tuple[int, str]] = []

    def request_tick(self) -> None:
        self.ticks += 1

    def on_slots_freed(self, lane: Lane) -> None:
        self.freed += 1

    def on_slots_idle(self, lane: Lane) -> None:
        self.idle += 1

    async def on_superseded(self, chunk: LeasedChunk) -> None:
        self.superseded.append(chunk.receipt)

    async def on_poisoned(self, job: Job, chunk: LeasedChunk, ref: TaskRef, reason: str) -> None:
        self.poisoned.append((ref.index, reason))

    def on_lost(self, chunks: list[LeasedChunk]) -> None:
        raise AssertionError("only fetchers lose chunks")


class Bench:
    def __init__(self, act: Act | None = None, *, grain: int = 1, kind: JobKind = JobKind.PYTHON, **options: Any):
        self.clock = ManualClock()
        self.owner, self.recorder, self.gate = StubOwner(), StubRecorder(), StubGate()
        self.executor = Acting(act or self._succeed, grain)
        job = make_job(self.clock, kind=kind, **options)
        parts: Any = (self.owner, self.recorder, TargetLimits(None, job, "worker"), self.gate)  # type: ignore[arg-type]
        lane = self.executor.lane(job, LaneTools(*parts, self.clock))
        assert isinstance(lane, LocalLane)
        self.lane = lane
        self.total = 0

    async def _succeed(self, refs: Sequence[TaskRef]) -> list[Outcome]:
        return [success() for _ in refs]

    def feed(self, count: int, *, suspect: bool = False, **ref: Any) -> LeasedChunk:
        receipt = f"receipt {len(self.lane.chunks)}"
        chunk = LeasedChunk(QueueName("run"), receipt, count, suspect=suspect)
        indexes = range(self.total, self.total + count)
        self.total += count
        self.lane.feed(chunk, [TaskRef(index, InputJson("1"), **ref) for index in indexes])
        return chunk

    async def run(self, width: int = 1) -> None:
        self.lane.set_width(width)
        await idle()

    def statuses(self) -> dict[int, TaskStatus]:
        return {index: outcome.status for index, (_, outcome) in self.recorder.outcomes.items()}


async def test_references_run_in_batches_and_are_recorded() -> None:
    bench = Bench(grain=2)
    bench.feed(5)
    await bench.run()
    assert bench.executor.batches == [[0, 1], [2, 3], [4]]
    assert set(bench.statuses().values()) == {TaskStatus.SUCCEEDED}
    assert bench.gate.recorded == [0, 1, 2, 3, 4]
    assert (bench.gate.released, bench.lane.active) == ([], 0)
    assert bench.owner.ticks > 0, "it runs low"


async def test_no_more_runners_than_the_width() -> None:
    gate = asyncio.Event()

    async def act(refs: Sequence[TaskRef]) -> list[Outcome]:
        await gate.wait()
        return [success()]

    bench = Bench(act)
    bench.feed(10)
    await bench.run(width=4)
    assert (len(bench.executor.batches), bench.lane.active, bench.lane.demand) == (4, 4, 10)
    await bench.run(width=2)
    assert (bench.lane.slots_in_use, bench.owner.freed) == (4, 0), "what runs goes on in its slots"
    gate.set()
    await idle()
    assert len(bench.recorder.outcomes) == 10
    assert (bench.lane.slots_in_use, bench.owner.freed) == (2, 2)
    await bench.lane.stop(0.0)


async def test_references_of_a_chunk_that_was_lost_do_not_start() -> None:
    bench = Bench()
    bench.feed(3).lost = True
    await bench.run()
    assert bench.executor.batches == []


async def test_an_executor_that_raises_loses_its_chunk_and_nothing_else() -> None:
    async def act(refs: Sequence[TaskRef]) -> list[Outcome]:
        if refs[0].index == 0:
            raise ValueError("of the executor")
        return [success()]

    bench = Bench(act)
    first, second = bench.feed(1), bench.feed(2)
    with capture_logs() as logs:
        await bench.run()
    assert (first.lost, second.lost) == (True, False)
    assert [entry["event"] for entry in logs] == ["executor failed"]
    assert (bench.gate.released, sorted(bench.recorder.outcomes)) == ([0], [1, 2])


async def test_too_few_outcomes_count_as_a_failed_executor() -> None:
    async def act(refs: Sequence[TaskRef]) -> list[Outcome]:
        return []

    bench = Bench(act)
    chunk = bench.feed(1)
    with capture_logs():
        await bench.run()
    assert chunk.lost
    assert bench.recorder.outcomes == {}


async def test_a_superseded_attempt_is_left_to_the_worker() -> None:
    async def act(refs: Sequence[TaskRef]) -> list[Outcome]:
        raise Superseded

    bench = Bench(act)
    chunk = bench.feed(1)
    await bench.run()
    assert bench.owner.superseded == [chunk.receipt]
    assert (bench.gate.released, bench.recorder.outcomes, chunk.lost) == ([0], {}, False)


async def test_references_that_a_batch_left_start_at_once_beside_each_other() -> None:
    async def act(refs: Sequence[TaskRef]) -> list[Outcome]:
        if len(refs) > 1:
            bench.executor.set_grain(1)
            return [success()]
        running.append(refs[0].index)
        await released.wait()
        return [success()]

    released, running = asyncio.Event(), list[int]()
    bench = Bench(act, grain=4)
    chunk = bench.feed(4)
    await bench.run(width=4)
    assert running == [1, 2, 3]
    assert (bench.statuses(), chunk.lost) == ({0: TaskStatus.SUCCEEDED}, False)
    released.set()
    await idle()
    assert bench.statuses() == dict.fromkeys(range(4), TaskStatus.SUCCEEDED)
    assert bench.lane.active == 0


async def test_a_poison_task_goes_to_the_worker_and_the_others_are_recorded() -> None:
    async def act(refs: Sequence[TaskRef]) -> list[Outcome]:
        poison = Outcome(TaskStatus.FAILED, error=TaskError(WORKER_LOST, "It kills."))
        return [poison if ref.index == 1 else success() for ref in refs]

    bench = Bench(act, grain=3)
    bench.feed(3)
    await bench.run()
    assert bench.owner.poisoned == [(1, "It kills.")]
    assert bench.statuses() == {0: TaskStatus.SUCCEEDED, 2: TaskStatus.SUCCEEDED}
    assert bench.gate.recorded == [0, 2]


async def test_a_poison_task_that_the_worker_can_not_requeue_loses_its_chunk() -> None:
    async def act(refs: Sequence[TaskRef]) -> list[Outcome]:
        return [Outcome(TaskStatus.FAILED, error=TaskError(WORKER_LOST, "It kills."))]

    async def fail(*_: object) -> None:
        raise EngineFailed("for a moment")

    bench = Bench(act)
    bench.owner.on_poisoned = fail  # type: ignore[method-assign]
    chunk = bench.feed(1)
    with capture_logs():
        await bench.run()
    assert chunk.lost
    assert (bench.gate.released, bench.recorder.outcomes) == ([0], {})


async def test_a_task_past_its_deadline_fails_without_an_attempt() -> None:
    bench = Bench(grain=2, task_deadline=10.0)
    bench.feed(2, attempt=2, since=int(bench.clock.now()) - 60)
    await bench.run()
    assert bench.executor.batches == []
    for attempt, outcome in bench.recorder.outcomes.values():
        assert outcome.error is not None
        assert (attempt, outcome.error.code) == (1, "deadline")


async def test_a_redelivered_chunk_is_marked_before_it_starts() -> None:
    bench = Bench()
    chunk = bench.feed(1, suspect=True)
    await bench.run()
    assert bench.recorder.marked == [chunk.receipt]
    assert len(bench.recorder.outcomes) == 1


async def test_a_lane_backs_off_longer_each_time_that_no_task_can_start() -> None:
    bench = Bench()
    bench.feed(1, suspect=True)
    bench.recorder.failing = 3
    started = bench.clock.now()
    with capture_logs() as logs:
        await bench.run()
        assert bench.executor.batches == []
        while not bench.recorder.outcomes:
            bench.clock.advance(0.1)
            await idle()
    assert bench.clock.now() - started == pytest.approx(0.1 + 0.2 + 0.4, abs=0.11)
    assert len(logs) == 3


class Earlier:
    """Earlier outcomes, none of them stored. While `failing`, they cannot be read."""

    failing = 0

    async def stored(self, job: Job, refs: Sequence[TaskRef]) -> dict[int, Outcome]:
        if self.failing:
            self.failing -= 1
            raise EngineFailed("for a moment")
        return {}

    async def look(self, job: Job, refs: Sequence[TaskRef]) -> KnownOutcomes:
        return KnownOutcomes(await self.stored(job, refs), {})


class Unchanging:
    """An extractor that makes nothing of what it gets."""

    async def extract(self, job: Job, refs: Sequence[TaskRef], outcomes: Sequence[Outcome]) -> None:
        return


def rerun_bench(earlier: Earlier, act: Act | None = None, *, extract_only: bool = False) -> Bench:
    bench = Bench(act, grain=2, kind=JobKind.FETCH, extract="product")
    lineage = Lineage(RunId("before"), extract_only=extract_only)
    job = bench.lane.job
    bench.lane.job = msgspec.structs.replace(job, run=msgspec.structs.replace(job.run, lineage=lineage))
    parts: Any = (earlier, Unchanging())
    bench.lane._earlier, bench.lane._extractor = parts
    return bench


class TestReruns:
    @pytest.mark.parametrize("extract_only", [False, True])
    async def test_tasks_whose_earlier_outcomes_can_not_be_read_wait(self, extract_only: bool) -> None:
        async def look(refs: Sequence[TaskRef]) -> list[Outcome]:
            await earlier.stored(bench.lane.job, refs)
            return [success() for _ in refs]

        earlier = Earlier()
        earlier.failing = 8
        bench = rerun_bench(earlier, look if extract_only else None, extract_only=extract_only)
        chunk = bench.feed(2)
        with capture_logs() as logs:
            await bench.run()
            assert (bench.lane.demand, bench.recorder.outcomes) == (2, {})
            while not bench.recorder.outcomes:
                bench.clock.advance(5.0)
                await idle()
        assert {entry["event"] for entry in logs} == {"no task could start; the lane backs off"}
        assert [attempt for attempt, _ in bench.recorder.outcomes.values()] == [1, 1]
        assert not chunk.lost

    async def test_an_attempt_that_raises_is_not_repeated_at_once(self) -> None:
        async def act(refs: Sequence[TaskRef]) -> list[Outcome]:
            raise EngineFailed("after the request")

        bench = rerun_bench(Earlier(), act)
        chunk = bench.feed(2)
        with capture_logs():
            await bench.run()
        assert (chunk.lost, bench.executor.batches, bench.lane.demand) == (True, [[0, 1]], 0)


class TestBreakers:
    async def test_a_task_waits_while_its_breaker_is_open(self) -> None:
        bench = Bench()
        bench.gate.is_watching, bench.gate.answers = True, {1: 30.0}
        bench.feed(3)
        await bench.run()
        assert bench.executor.batches == [[0], [2]]
        attempt, outcome = bench.recorder.outcomes[1]
        assert (attempt, outcome.status, outcome.retry_after, outcome.spends_attempt) == (
            0,
            TaskStatus.PENDING,
            30.0,
            False,
        )

    async def test_a_lane_is_blocked_if_nothing_that_it_got_could_start(self) -> None:
        bench = Bench()
        bench.gate.is_watching, bench.gate.answers = True, {0: 30.0, 1: 30.0}
        bench.feed(2)
        await bench.run()
        assert bench.lane.check_blocked()
        assert not bench.lane.check_blocked()
        bench.feed(3)
        await bench.run()
        assert not bench.lane.check_blocked()

    async def test_a_task_fails_when_its_patience_is_over(self) -> None:
        bench = Bench()
        bench.gate.is_watching, bench.gate.answers = True, {0: TaskError("target_down", "It is down.")}
        bench.feed(1)
        await bench.run()
        assert bench.statuses() == {0: TaskStatus.FAILED}
        assert bench.gate.released == [0]

    async def test_a_probe_starts(self) -> None:
        bench = Bench()
        bench.gate.is_watching, bench.gate.answers = True, {0: None}
        bench.feed(1)
        await bench.run()
        assert bench.statuses() == {0: TaskStatus.SUCCEEDED}

    async def test_a_task_that_may_not_probe_waits(self) -> None:
        bench = Bench()
        bench.gate.is_watching, bench.gate.answers, bench.gate.probe_wait = True, {0: None}, 3.0
        bench.feed(1)
        await bench.run()
        assert bench.statuses() == {0: TaskStatus.PENDING}

    async def test_a_probe_that_can_not_be_acquired_is_put_back(self) -> None:
        bench = Bench()
        bench.gate.is_watching, bench.gate.answers, bench.gate.probe_wait = True, {0: None}, EngineFailed("gone")
        bench.feed(1)
        with capture_logs():
            await bench.run()
            assert (bench.recorder.outcomes, bench.lane.demand) == ({}, 1)
            bench.gate.probe_wait = 0.0
            bench.clock.advance(0.2)
            await idle()
        assert bench.statuses() == {0: TaskStatus.SUCCEEDED}


class TestLongTasks:
    async def test_a_lane_sheds_what_no_slot_is_left_for(self) -> None:
        gate = asyncio.Event()

        async def act(refs: Sequence[TaskRef]) -> list[Outcome]:
            await gate.wait()
            return [success()]

        bench = Bench(act, kind=JobKind.DOWNLOAD)
        running, waiting = bench.feed(1), bench.feed(1)
        await bench.run()
        assert bench.lane.shed_long_tasks() == [waiting]
        assert (running.lost, waiting.lost) == (False, True)
        assert [task.index for task in bench.lane.long_tasks()] == [0]
        assert bench.lane.shortage() == (1, 1)
        gate.set()
        await idle()
        assert bench.lane.long_tasks() == []

    async def test_one_at_a_time_is_received(self) -> None:
        bench = Bench(kind=JobKind.DOWNLOAD)
        assert bench.lane.shortage() == (1, 1)
        bench.feed(1)
        assert bench.lane.shortage() == (0, 0)


async def test_stopping_returns_the_chunks_that_are_not_finished() -> None:
    async def act(refs: Sequence[TaskRef]) -> list[Outcome]:
        await asyncio.Event().wait()
        raise AssertionError

    bench = Bench(act)
    chunk, lost = bench.feed(1), bench.feed(1)
    lost.lost = True
    await bench.run()
    assert await bench.lane.stop(0.0) == [chunk]
    assert bench.gate.released == [0]
    assert bench.recorder.outcomes == {}
