"""The lane whose references are attempted by fetchers: when pages wait for `extract`, and when its slots are free."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from conveyor.coordination.limits import TargetLimits
from conveyor.egress.lru import Lru
from conveyor.engines.queue import QueueName
from conveyor.model import InputJson, Job, JobKind, Outcome, TaskRef
from conveyor.process.executors.fetch import remote_lane
from conveyor.process.executors.fetch.fetch_executor import host_of
from conveyor.process.executors.fetch.remote_lane import RemoteLane
from conveyor.process.lane import LaneTools, LeasedRef
from conveyor.process.recorder import LeasedChunk
from conveyor.states import TaskStatus
from tests.support.clocks import ManualClock
from tests.support.in_process_fetchers import idle
from tests.support.make_jobs import make_job

LIMIT = 100


class HandFetchers:
    """Fetchers that take four references at once and end what the test says."""

    generation = 0

    def __init__(self) -> None:
        self.started: list[LeasedRef] = []
        self.host_seconds: Lru[str, tuple[float, float]] = Lru(10)

    def target(self, ref: TaskRef) -> str | None:
        return host_of(ref.input)

    def attempts(self, lane: RemoteLane) -> int:
        return len(self.started)

    def capacity(self, lane: RemoteLane) -> int:
        return 4 - len(self.started)

    def start(self, lane: RemoteLane, entries: list[LeasedRef]) -> None:
        self.started += entries

    def update_width(self, lane: RemoteLane) -> None:
        return

    def balance(self, lane: RemoteLane) -> None:
        return

    def drop(self, lane: RemoteLane, *, everything: bool) -> None:
        self.started.clear()

    def end(self, lane: RemoteLane, body: bytes) -> None:
        """End the oldest attempt."""
        lane.on_outcomes([self.started.pop(0)], [Outcome(TaskStatus.SUCCEEDED, 200, body=body)])


class Quiet:
    """A worker, recorder and gate that have nothing to say."""

    full = is_watching = is_urgent = is_recording = False

    def __init__(self) -> None:
        self.recorded: list[int] = []

    def add(self, job: Job, chunks: Sequence[Any], refs: Sequence[TaskRef], outcomes: Sequence[Outcome]) -> None:
        self.recorded += [ref.index for ref in refs]

    def request_tick(self) -> None:
        return

    close = request_tick

    def record(self, *_: object) -> None:
        return

    on_slots_idle = on_slots_freed = release = assign_gateways = follow = record


class Listener(Quiet):
    """Remembers how many slots a lane had in use when it said that some are free."""

    def __init__(self) -> None:
        super().__init__()
        self.in_use: list[int] = []

    def on_slots_freed(self, lane: RemoteLane) -> None:
        self.in_use.append(lane.slots_in_use)


class SlowExtractor:
    """Ends when the test says so."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def extract(self, job: Job, refs: Sequence[TaskRef], outcomes: Sequence[Outcome]) -> None:
        await self.may_end.wait()


async def test_many_bytes_that_wait_for_extract_hold_up_their_own_lane_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_lane, "_EXTRACTING_BYTES", LIMIT)
    monkeypatch.setattr(remote_lane, "_MAX_EXTRACTING_BYTES", 4 * LIMIT)
    clock, quiet, extractor = ManualClock(), Quiet(), SlowExtractor()
    job = make_job(clock, kind=JobKind.FETCH, extract="product")
    fetchers: Any = HandFetchers()
    parts: Any = (quiet, quiet, TargetLimits(None, job, "worker"), quiet)  # type: ignore[arg-type]
    slow: Any = extractor
    lane = RemoteLane(job, fetchers, 1, LaneTools(*parts, clock, extractor=slow))
    chunk = LeasedChunk(QueueName("run"), "receipt", 8)
    lane.feed(chunk, [TaskRef(index, InputJson('"http://site.test/"')) for index in range(8)])
    lane.set_width(4)
    fetchers.end(lane, b"x" * LIMIT)
    assert [entry.ref.index for entry in fetchers.started] == [1, 2, 3, 4]
    fetchers.end(lane, b"x")
    await idle()
    assert [entry.ref.index for entry in fetchers.started] == [2, 3, 4], "above the limit it sends no more"
    # The packs of the fetcher are read on: other lanes have outcomes in them.
    async with asyncio.timeout(10):
        await lane.until_capacity()
    fetchers.end(lane, b"x" * 3 * LIMIT)
    reading = asyncio.ensure_future(lane.until_capacity())
    await idle()
    assert not reading.done(), "memory is bounded"
    extractor.may_end.set()
    await idle()
    assert reading.done()
    assert quiet.recorded == [0, 1, 2]
    assert [entry.ref.index for entry in fetchers.started] == [3, 4, 5, 6]
    await lane.stop(0.0)


async def test_a_lane_gets_larger_portions_at_a_quick_host_and_the_largest_when_it_is_nearly_done() -> None:
    clock, quiet = ManualClock(), Quiet()
    fetchers: Any = HandFetchers()

    def new_lane(count: int, host: str, total: int) -> RemoteLane:
        job = make_job(clock, kind=JobKind.FETCH)
        job = msgspec.structs.replace(job, run=msgspec.structs.replace(job.run, total=total, last_batch=True))
        parts: Any = (quiet, quiet, TargetLimits(None, job, "worker"), quiet)  # type: ignore[arg-type]
        lane = RemoteLane(job, fetchers, 1, LaneTools(*parts, clock))
        lane.received = count
        refs = [TaskRef(index, InputJson(f'"http://{host}/"')) for index in range(count)]
        lane.feed(LeasedChunk(QueueName("run"), "receipt", count), refs)
        return lane

    first = new_lane(100, "quick.test", 100)
    assert first.portion == 1, "nothing is known of its attempts"
    second = new_lane(100, "quick.test", 100)
    first.set_width(1)
    fetchers.end(first, b"x")
    assert first.portion == 64
    assert new_lane(100, "quick.test", 100).portion == 64, "another run at the same host"
    assert second.portion == 64, "one that was there before anything was known"
    assert new_lane(100, "other.test", 100).portion == 1
    assert new_lane(300, "quick.test", 300).portion == 16, "it has more left"
    assert new_lane(100, "quick.test", 1000).portion == 16, "more of it is in the queue"
    clock.advance(11.0)
    assert new_lane(100, "quick.test", 100).portion == 1, "that was long ago"


async def test_slots_of_a_stopped_lane_are_free_at_once() -> None:
    """Its attempts are cancelled; the coordinator has yet to answer that it has the slots of its targets back."""
    clock, listener = ManualClock(), Listener()
    job = make_job(clock, kind=JobKind.FETCH)
    parts: Any = (listener, listener, TargetLimits(None, job, "worker"), listener)  # type: ignore[arg-type]
    fetchers: Any = HandFetchers()
    lane = RemoteLane(job, fetchers, 1, LaneTools(*parts, clock))
    lane.feed(
        LeasedChunk(QueueName("run"), "receipt", 2), [TaskRef(index, InputJson('"http://a.test/"')) for index in (0, 1)]
    )
    lane.set_width(2)
    assert lane.slots_in_use == 2
    asked, answer = asyncio.Event(), asyncio.Event()

    async def free_slots() -> None:
        asked.set()
        await answer.wait()

    lane._targets.close = free_slots  # type: ignore[method-assign]  # a coordinator that takes its time
    stopping = asyncio.create_task(lane.stop(0.0))
    await asked.wait()
    assert listener.in_use[-1:] == [0], "another lane could use them"
    answer.set()
    assert len(await stopping) == 1


class Full(Quiet):
    """A recorder that is full until the test says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.full = True
        self.resumes: dict[Callable[[], None], None] = {}

    def when_capacity(self, resume: Callable[[], None]) -> None:
        self.resumes[resume] = None


async def test_a_lane_waits_for_the_recorder_and_needs_no_second_deal_of_the_same_width() -> None:
    clock, recorder = ManualClock(), Full()
    job = make_job(clock, kind=JobKind.FETCH)
    parts: Any = (recorder, recorder, TargetLimits(None, job, "worker"), recorder)  # type: ignore[arg-type]
    fetchers: Any = HandFetchers()
    lane = RemoteLane(job, fetchers, 1, LaneTools(*parts, clock))
    refs = [TaskRef(index, InputJson('"http://site.test/"')) for index in range(8)]
    lane.feed(LeasedChunk(QueueName("run"), "receipt", 8), refs)
    assert not lane.is_settled(0), "references were fed"
    for _ in range(3):
        lane.set_width(4)
    assert not fetchers.started
    recorder.full = False
    (resume,) = recorder.resumes
    resume()
    assert [entry.ref.index for entry in fetchers.started] == [0, 1, 2, 3]
    assert lane.is_settled(4) and not lane.is_settled(3)
    fetchers.generation += 1
    assert not lane.is_settled(4), "another process is ready"
    lane.set_width(4)
    lane.follow(job)
    assert not lane.is_settled(4), "fetchers do not know the options"
    lane.set_width(4)
    lane.feed(LeasedChunk(QueueName("run"), "other", 1), [TaskRef(8, InputJson('"http://site.test/"'))])
    assert not lane.is_settled(4)
    await lane.stop(0.0)
