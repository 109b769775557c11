"""The class that runs in a fetching process: whatever it is told in whatever order, it is never idle while orders wait
that it may run, and it answers each order once."""

import asyncio
import gc
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.model import InputJson, Job, JobKind, Outcome, TaskRef
from conveyor.process.executors.fetch.child import ChildFetcher
from conveyor.process.executors.fetch.frames import Drop, Order, Orders, decode_pack, framed, read_frame
from conveyor.process.executors.fetch.packs import Packer
from conveyor.states import TaskStatus
from tests.support.clocks import ManualClock
from tests.support.in_process_fetchers import Attempts, PipeEnd, idle
from tests.support.make_jobs import make_job


class Child:
    """A fetcher, and what it has answered."""

    def __init__(self, executor: Any = None) -> None:
        clock = ManualClock()
        self.jobs = [make_job(clock, kind=JobKind.FETCH) for _ in range(2)]
        self.attempts = Attempts()
        self._orders, self._packs = asyncio.StreamReader(), asyncio.StreamReader()
        back = PipeEnd(self._packs)
        self.hang_up = back.close
        self.fetcher = ChildFetcher(executor or self.attempts, back, Packer(back, clock, linger=0.0))
        self._serving = [asyncio.create_task(self.fetcher.serve(self._orders)), asyncio.create_task(self._read())]
        self._told: set[int] = set()
        self._number = 0
        self.given: dict[int, list[int]] = {0: [], 1: []}
        self.outcomes: list[tuple[int, TaskStatus, str | None]] = []
        self.dropped: list[int] = []

    async def _read(self) -> None:
        await read_frame(self._packs)
        while True:
            pack = decode_pack(await read_frame(self._packs))
            self.outcomes += [(one.number, one.status, one.error and one.error.code) for one in pack.outcomes]
            self.dropped += pack.dropped

    async def tell(self, lane: int, width: int, count: int = 0) -> None:
        orders = []
        for _ in range(count):
            self._number += 1
            self.given[lane].append(self._number)
            orders.append(Order(self._number, TaskRef(self._number, InputJson('"http://site.test/"'))))
        job = None if lane in self._told else self.jobs[lane]
        self._told.add(lane)
        self._orders.feed_data(framed(Orders(lane, width, orders, job)))
        await idle()

    async def drop(self, lane: int, everything: bool = False) -> None:
        self._orders.feed_data(framed(Drop(lane, everything)))
        if everything:
            self._told.discard(lane)
            self.given[lane] = []
        await idle()

    async def end(self, count: int) -> None:
        """End so many attempts in one step of the loop."""
        self.attempts.end(count)
        await idle()

    def open(self, lane: int) -> int:
        """Orders of a lane without an answer."""
        answered = {number for number, _, _ in self.outcomes} | set(self.dropped)
        return len([number for number in self.given[lane] if number not in answered])

    def running(self, lane: int) -> int:
        return self.attempts.running(self.jobs[lane])

    def check_answers(self) -> None:
        answers = Counter([number for number, _, _ in self.outcomes] + self.dropped)
        assert not [number for number, count in answers.items() if count > 1]

    async def close(self) -> None:
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        self.attempts.end(1_000_000)
        await idle()


@asynccontextmanager
async def child_with(executor: Any = None) -> AsyncIterator[Child]:
    child = Child(executor)
    try:
        yield child
    finally:
        await child.close()


async def test_outcomes_for_a_worker_that_is_gone_are_no_errors() -> None:
    loop = asyncio.get_running_loop()
    unhandled: list[Any] = []
    loop.set_exception_handler(lambda _, context: unhandled.append(context))
    try:
        async with child_with() as child:
            await child.tell(0, 2, 4)
            child.hang_up()
            # One whose outcome waits for others, and the last.
            await child.end(1)
            await child.end(10)
            await child.tell(0, 0)
        gc.collect()
    finally:
        loop.set_exception_handler(None)
    assert unhandled == []


async def test_runners_that_end_in_one_step_leave_no_order_behind_in_a_narrower_lane() -> None:
    async with child_with() as child:
        await child.tell(0, 8, 30)
        await child.tell(0, 3)
        await child.end(8)
        assert child.running(0) == 3
        while child.open(0):
            await child.end(3)
        assert len(child.outcomes) == 30


async def test_a_lane_without_a_width_hands_back_what_has_not_begun() -> None:
    async with child_with() as child:
        await child.tell(0, 2, 5)
        await child.tell(0, 0)
        assert child.dropped == [3, 4, 5]
        await child.end(2)
        assert child.running(0) == 0
        assert [number for number, _, _ in child.outcomes] == [1, 2]
        # What comes while there is no width goes back too.
        await child.tell(0, 0, 2)
        assert child.dropped == [3, 4, 5, 6, 7]
        await child.tell(0, 1, 1)
        assert child.running(0) == 1


async def test_a_new_width_without_orders_counts() -> None:
    async with child_with() as child:
        await child.tell(0, 1, 10)
        assert child.running(0) == 1
        await child.tell(0, 4)
        assert child.running(0) == 4
        await child.end(4)
        assert child.running(0) == 4


class Broken:
    """An executor that breaks its promise, in one of several ways."""

    def __init__(self, way: str) -> None:
        self._way = way

    def attempt_one(self, job: Job, ref: TaskRef, gateway: int = 0, condition: object = None) -> Awaitable[Outcome]:
        if self._way == "at once":
            raise RuntimeError("no plan for this job")
        return self._attempt()

    async def _attempt(self) -> Outcome:
        if self._way == "later":
            raise RuntimeError("no outcome")
        if self._way == "cancelled":
            raise asyncio.CancelledError
        return Outcome(TaskStatus.SUCCEEDED, final_url="http://site.test/\ud800")


async def answers_of_a_broken_executor(way: str) -> None:
    async with child_with(Broken(way)) as child:
        await child.tell(0, 2, 5)
        assert sorted(child.outcomes) == [(number, TaskStatus.FAILED, "internal") for number in range(1, 6)]


async def test_an_executor_that_raises_costs_its_order_and_no_runner() -> None:
    for way in ("at once", "later", "cancelled", "unwritable"):
        await answers_of_a_broken_executor(way)


_lanes = st.integers(0, 1)
_steps = st.one_of(
    st.tuples(st.just("tell"), _lanes, st.integers(0, 6), st.integers(0, 12)),
    st.tuples(st.just("drop"), _lanes, st.just(0), st.just(0)),
    st.tuples(st.just("forget"), _lanes, st.just(0), st.just(0)),
    st.tuples(st.just("end"), st.just(0), st.integers(1, 20), st.just(0)),
)


Step = tuple[str, int, int, int]


@settings(max_examples=150, deadline=None)
@given(steps=st.lists(_steps, max_size=25))
def test_never_idle_while_orders_wait_and_each_is_answered_once(steps: list[Step]) -> None:
    asyncio.run(follow(steps))


async def follow(steps: list[Step]) -> None:
    async with child_with() as child:
        widths, running = [0, 0], [0, 0]
        for step, lane, number, count in steps:
            if step == "tell":
                widths[lane] = number
                await child.tell(lane, number, count)
            elif step == "end":
                await child.end(number)
            else:
                await child.drop(lane, everything=step == "forget")
            for each in (0, 1):
                now, unanswered = child.running(each), child.open(each)
                # As many as may run do, or all; more only of a wider time before.
                assert min(widths[each], unanswered) <= now <= max(widths[each], running[each])
                # None waits where none may run.
                assert unanswered == now or widths[each] > 0
                running[each] = now
            child.check_answers()
        while child.running(0) + child.running(1):
            await child.end(1_000_000)
        assert [child.open(each) for each in (0, 1)] == [0, 0]
        child.check_answers()


def test_a_fetcher_loads_no_library_that_it_does_not_need() -> None:
    """It starts in half the time without these."""
    code = "import sys, conveyor.process.executors.fetch.child; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"structlog", "rich", "litestar", "apsw", "conveyor.client.client"} & set(loaded)
