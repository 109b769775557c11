"""Fetchers, as a worker sees them: a lane's references over several, whose processes run inside the test."""

import asyncio
import errno
import itertools
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from conveyor.model import InputJson, JobKind, Outcome, TaskRef
from conveyor.process.executors.fetch.fetchers import Fetchers
from conveyor.settings import Settings
from conveyor.states import TaskStatus
from tests.support.clocks import ManualClock
from tests.support.in_process_fetchers import Launcher, idle
from tests.support.make_jobs import make_job

TIMEOUT = 20.0


class One(NamedTuple):
    """A reference in the hands of a lane."""

    ref: TaskRef
    gateway: int = 0
    condition: None = None


class FakeLane:
    """A lane that has nothing but references and a width."""

    _numbers = itertools.count(1)

    def __init__(self, fetchers: Fetchers, clock: ManualClock, count: int = 0) -> None:
        self.number = next(self._numbers)
        self.job = make_job(clock, kind=JobKind.FETCH, timeout=TIMEOUT)
        self.width = 0
        self.waiting = deque(One(TaskRef(index, InputJson('"http://site.test/"'))) for index in range(count))
        self.total = count
        self.done: list[int] = []
        self.open = asyncio.Event()
        self.open.set()
        self._fetchers = fetchers

    @property
    def reach(self) -> int:
        return self.width

    def add(self, count: int) -> None:
        refs = [TaskRef(self.total + more, InputJson('"http://site.test/"')) for more in range(count)]
        self.waiting.extend(One(ref) for ref in refs)
        self.total += count
        self._send()

    def set_width(self, width: int) -> None:
        self.width = width
        self._fetchers.update_width(self)
        self._send()
        if not self.waiting:
            self._fetchers.balance(self)

    def change(self, **options: Any) -> None:
        changed = msgspec.structs.replace(self.job.options, **options)
        self.job = msgspec.structs.replace(self.job, options=changed)

    def on_outcomes(self, held: list[Any], outcomes: list[Outcome]) -> None:
        self.done += [one.ref.index for one in held]
        self._send()

    async def until_capacity(self) -> None:
        await self.open.wait()

    def on_dropped(self, held: list[Any]) -> None:
        self.waiting.extendleft(reversed(held))
        asyncio.get_running_loop().call_soon(self._send)

    def on_lost(self, held: list[Any]) -> None:
        self.waiting.extendleft(reversed(held))

    def on_narrowed(self) -> None:
        self.set_width(self.width)

    def _send(self) -> None:
        room = self._fetchers.capacity(self)
        self._fetchers.start(self, [self.waiting.popleft() for _ in range(min(room, len(self.waiting)))])


class Bench(NamedTuple):
    """Fetchers at work."""

    clock: ManualClock
    launcher: Launcher
    fetchers: Fetchers
    logs: list[Any]

    async def passing(self, seconds: float) -> None:
        await idle()
        self.clock.advance(seconds)
        await idle()


@asynccontextmanager
async def at_work(count: int, *failures: Exception) -> AsyncIterator[Bench]:
    clock, launcher = ManualClock(), Launcher(*failures)
    fetchers = Fetchers(Settings.load({}, fetchers=count), clock, launcher)
    with capture_logs() as logs:
        fetchers.open()
        await idle()
        try:
            yield Bench(clock, launcher, fetchers, logs)
        finally:
            await fetchers.close()


async def test_references_of_a_fetcher_without_a_share_go_to_the_others() -> None:
    async with at_work(2) as bench:
        line = FakeLane(bench.fetchers, bench.clock, 40)
        line.set_width(8)
        await idle()
        # One of the two has no share of one slot, and holds half of all.
        line.set_width(1)
        await idle()
        for _ in range(50):
            bench.launcher.end(100)
            await idle()
        assert sorted(line.done) == list(range(40))


async def test_a_lane_that_was_dealt_nothing_goes_on_when_it_is_dealt_something() -> None:
    async with at_work(2) as bench:
        line = FakeLane(bench.fetchers, bench.clock, 10)
        line.set_width(2)
        await idle()
        line.set_width(0)
        bench.launcher.end(100)
        await idle()
        assert (bench.launcher.running(), len(line.done), len(line.waiting)) == (0, 2, 8)
        line.set_width(1)
        await idle()
        assert bench.launcher.running() == 1
        for _ in range(10):
            bench.launcher.end(100)
            await idle()
        assert sorted(line.done) == list(range(10))


async def test_a_fetcher_with_free_slots_gets_what_waits_at_another() -> None:
    async with at_work(2) as bench:
        line = FakeLane(bench.fetchers, bench.clock, 6)
        bench.launcher.processes[0].kill()
        await idle()
        line.set_width(2)
        await idle()
        # The second has all of it, and then half of the slots.
        await bench.passing(1.0)
        line.set_width(2)
        await idle()
        bench.launcher.end(100)
        await idle()
        assert [executor.running() for executor in bench.launcher.executors[1:]] == [1, 1]


async def test_attempts_beyond_a_narrower_lane_count_until_they_end() -> None:
    async with at_work(2) as bench:
        line = FakeLane(bench.fetchers, bench.clock, 40)
        line.set_width(8)
        await idle()
        line.set_width(2)
        assert bench.fetchers.attempts(line) == 8, "before the fetchers know of it"
        await idle()
        for left in (6, 4, 2, 2):
            bench.launcher.end(1)
            await idle()
            assert (bench.launcher.running(), bench.fetchers.attempts(line)) == (left, left)


async def test_a_fetcher_that_is_new_waits_for_slots_of_the_others() -> None:
    async with at_work(2) as bench:
        line = FakeLane(bench.fetchers, bench.clock, 40)
        bench.launcher.processes[0].kill()
        await idle()
        line.set_width(4)
        await bench.passing(1.0)
        line.set_width(4)
        await idle()
        assert bench.launcher.running() == 4
        for _ in range(8):
            bench.launcher.end(1)
            await idle()
            assert bench.launcher.running() == 4
        assert [executor.running() for executor in bench.launcher.executors[1:]] == [2, 2]


async def test_an_order_that_nothing_runs_is_noticed_though_others_are_answered() -> None:
    async with at_work(1) as bench:
        stuck, busy = FakeLane(bench.fetchers, bench.clock, 1), FakeLane(bench.fetchers, bench.clock, 200)
        stuck.set_width(1)
        busy.set_width(1)
        await idle()
        first, *_ = bench.launcher.executors[0]._running.values()
        for _ in range(40):
            await bench.passing(2.0)
            for ending in list(bench.launcher.executors[0]._running.values()):
                if ending is not first:
                    ending.set_result(Outcome(TaskStatus.SUCCEEDED))
            await idle()
            bench.fetchers.watch()
        killed = [log for log in bench.logs if log["event"] == "fetcher hangs; killing it"]
        assert [(log["run"], log["owed"]) for log in killed] == [(stuck.job.run.run_id, 1)]
        assert len(bench.launcher.processes) == 2
        assert bench.launcher.processes[0].killed


async def test_silence_while_nothing_is_read_is_not_the_fetchers() -> None:
    async with at_work(1) as bench:
        line = FakeLane(bench.fetchers, bench.clock, 3)
        line.set_width(2)
        await idle()
        line.open.clear()
        bench.launcher.end(1)
        await bench.passing(3600.0)
        bench.fetchers.watch()
        line.open.set()
        await idle()
        bench.fetchers.watch()
        assert not bench.launcher.processes[0].killed
        await bench.passing(TIMEOUT + 31.0)
        bench.fetchers.watch()
        assert bench.launcher.processes[0].killed


async def test_a_process_that_died_while_nothing_was_read_gets_no_more() -> None:
    async with at_work(1) as bench:
        line = FakeLane(bench.fetchers, bench.clock, 3)
        line.set_width(2)
        await idle()
        # The recorder is behind: nobody reads that the process has ended.
        line.open.clear()
        bench.launcher.end(1)
        await idle()
        bench.launcher.processes[0].kill()
        line.add(3)
        line.set_width(3)
        bench.fetchers.drop(line, everything=False)
        line.open.set()
        await bench.passing(1.0)
        line.set_width(3)
        for _ in range(6):
            await idle()
            bench.launcher.end(100)
        await idle()
        assert sorted(line.done) == list(range(6))


async def test_references_come_back_if_there_is_no_process_to_take_them() -> None:
    async with at_work(1) as bench:
        line = FakeLane(bench.fetchers, bench.clock, 1)
        line.width = 1
        # The lane asks for room, awaits something else, and the process dies meanwhile.
        assert bench.fetchers.capacity(line) > 0
        one = line.waiting.popleft()
        bench.launcher.processes[0].kill()
        await idle()
        bench.fetchers.start(line, [one])
        assert list(line.waiting) == [one]
        await bench.passing(1.0)
        line.set_width(1)
        await idle()
        assert bench.launcher.running() == 1


async def test_a_fetcher_that_can_not_be_launched_is_tried_again_later() -> None:
    failures = [OSError(errno.EMFILE, "too many open files"), OSError(errno.EAGAIN, "no process"), ValueError("odd")]
    async with at_work(1, *failures) as bench:
        for pause in (0.1, 0.2, 0.4):
            assert bench.launcher.processes == []
            await bench.passing(pause)
        assert len(bench.launcher.processes) == 1
        line = FakeLane(bench.fetchers, bench.clock, 1)
        line.set_width(1)
        await idle()
        bench.launcher.end(1)
        await idle()
        assert line.done == [0]
        assert [log["event"] for log in bench.logs].count("fetcher failed") == 3


async def test_a_fetcher_whose_restart_fails_is_tried_again_later() -> None:
    async with at_work(2) as bench:
        line = FakeLane(bench.fetchers, bench.clock, 4)
        line.set_width(4)
        await idle()
        bench.launcher.failures = [OSError(errno.EMFILE, "too many open files")] * 3
        bench.launcher.processes[0].kill()
        await idle()
        for _ in range(5):
            await bench.passing(30.0)
        assert len(bench.launcher.processes) == 3
        line.set_width(4)
        await idle()
        bench.launcher.end(100)
        await idle()
        assert sorted(line.done) == [0, 1, 2, 3]


_steps = st.one_of(
    st.tuples(st.just("width"), st.integers(0, 1), st.integers(0, 9)),
    st.tuples(st.just("add"), st.integers(0, 1), st.integers(1, 60)),
    st.tuples(st.just("options"), st.integers(0, 1), st.integers(1, 9)),
    st.tuples(st.just("end"), st.just(0), st.integers(1, 20)),
    st.tuples(st.just("kill"), st.integers(0, 2), st.just(0)),
)


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 3), steps=st.lists(_steps, max_size=25))
def test_every_slot_of_a_lane_runs_something_while_there_is_something(
    count: int, steps: list[tuple[str, int, int]]
) -> None:
    asyncio.run(follow(count, steps))


async def follow(count: int, steps: list[tuple[str, int, int]]) -> None:
    async with at_work(count) as bench:
        lines = [FakeLane(bench.fetchers, bench.clock) for _ in range(2)]
        for step, which, number in steps:
            if step == "width":
                lines[which].set_width(number)
            elif step == "add":
                lines[which].add(number)
            elif step == "options":
                lines[which].change(attempts=number)
            elif step == "end":
                bench.launcher.end(number)
            else:
                bench.launcher.processes[-1 - which % count].kill()
                await bench.passing(60.0)
            await tick(bench, lines)
        for line in lines:
            line.width = 2
        while any(len(line.done) < line.total for line in lines):
            bench.launcher.end(100)
            await tick(bench, lines)
        assert all(sorted(line.done) == list(range(line.total)) for line in lines)


async def tick(bench: Bench, lines: list[FakeLane]) -> None:
    """Deal the slots again, as each tick of a worker does, and see that they are used."""
    await idle()
    for line in lines:
        line.set_width(line.width)
    await idle()
    _check(bench, lines)


def _check(bench: Bench, lines: list[FakeLane]) -> None:
    for line in lines:
        running = sum(executor.running(line.job) for executor in bench.launcher.executors)
        assert running >= min(line.width, line.total - len(line.done))
        # The worker knows how many run, at most: those slots are not free.
        assert running <= max(line.width, bench.fetchers.attempts(line)) == max(line.width, running)
    # What is assumed here of each process is what it was told; it is not told of a width that changes nothing for it.
    for member in bench.fetchers.members:
        child = next(
            fetcher
            for fetcher, process in zip(bench.launcher.fetchers, bench.launcher.processes, strict=True)
            if process.pid == member.process_id
        )
        assert member._shares.keys() == child._lanes.keys()
        for number, share in member._shares.items():
            lane = child._lanes[number]
            assert share.owed == len(lane.waiting) + len(lane.running)
            assert share.width == lane.width or share.owed <= min(share.width, lane.width)


async def test_what_is_attempted_is_what_was_sent_first() -> None:
    """A fetcher gets more than it attempts."""
    async with at_work(1) as bench:
        line, other = FakeLane(bench.fetchers, bench.clock, 40), FakeLane(bench.fetchers, bench.clock, 40)
        line.set_width(4)
        other.set_width(2)
        await idle()
        assert (bench.fetchers.in_progress(line), bench.fetchers.in_progress(other)) == ([0, 1, 2, 3], [0, 1])
        bench.launcher.end(3)
        await idle()
        assert sorted(line.done + other.done) == [0, 1, 2]
        assert (bench.fetchers.in_progress(line), bench.fetchers.in_progress(other)) == ([3, 4, 5, 6], [0, 1])
