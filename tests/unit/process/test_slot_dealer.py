"""The slot dealer: attempts never exceed the slots of the worker, no slot is idle while a lane waits for one, and those
that were served least are next."""

from collections import Counter
from collections.abc import Mapping
from random import Random
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.coordination.limits import run_slots
from conveyor.engines.sqlite.coordinator import SqliteCoordinator
from conveyor.model import Job, RunId, TenantId
from conveyor.process.run_permits import PermitWish, RunPermits
from conveyor.process.slot_dealer import SlotDealer
from conveyor.settings import Settings
from tests.support.clocks import ManualClock
from tests.support.fleet_simulation import jain_index
from tests.support.make_jobs import make_job


class StubLane:
    """A lane whose attempts end when the test says so."""

    def __init__(self, job: Job, waiting: int, pool: "Pool") -> None:
        self.job = job
        self.waiting = waiting
        self.width = 0
        self.active = 0
        self.help_at = 0.0
        self.portion = 1
        self.has_whole_run = False
        self._pool = pool

    @property
    def demand(self) -> int:
        return self.active + self.waiting

    @property
    def attempts(self) -> int:
        return self.active

    @property
    def slots_in_use(self) -> int:
        return max(self.width, self.active)

    def is_settled(self, width: int) -> bool:
        return False

    def set_width(self, width: int) -> None:
        self.width = width
        while self.active < self.width and self.waiting:
            self.waiting -= 1
            self.active += 1
            self._pool.on_started(self)

    def note_starved(self, *, is_starved: bool) -> None:
        pass

    def end_attempt(self) -> None:
        """As a runner does: it goes on while the lane is wide enough."""
        self.active -= 1
        if self.active < self.width:
            self.set_width(self.width)
        else:
            self._pool.dealer.on_slots_freed(cast(Any, self))


class Pool:
    """One worker's slots and lanes."""

    def __init__(self, slots: int, fleet: int = 0) -> None:
        self.slots = slots
        self.clock = ManualClock()
        self.coordinator = SqliteCoordinator(cast(Any, None), self.clock)
        permits = RunPermits(self.coordinator, self.clock, "worker", 60.0)
        given = Settings.load({}, worker_concurrency=slots, fleet_concurrency=fleet)
        self.dealer = SlotDealer(given, self.clock, permits, lambda run_id: None)
        self.lanes: list[StubLane] = []
        self.started: Counter[str] = Counter()
        self.runs: Counter[RunId] = Counter()

    def add(self, tenant: str, waiting: int, concurrency: int = 64) -> StubLane:
        job = make_job(self.clock, tenant=TenantId(tenant), concurrency=concurrency)
        self.lanes.append(StubLane(job, waiting, self))
        return self.lanes[-1]

    def on_started(self, lane: StubLane) -> None:
        self.started[lane.job.tenant] += 1
        self.runs[lane.job.run.run_id] += 1
        assert self.attempts <= self.slots

    @property
    def attempts(self) -> int:
        return sum(lane.active for lane in self.lanes)

    async def deal(self) -> None:
        await self.dealer.deal(cast(Any, self.lanes))

    async def pass_on_idle(self) -> None:
        """As the worker does when lanes say that they have no references for their slots."""
        for lane in self.lanes:
            if lane.demand < lane.width:
                self.dealer.note_idle(cast(Any, lane))
        await self.dealer.pass_on_idle(cast(Any, {lane.job.run.run_id: lane for lane in self.lanes}))

    def check(self) -> None:
        in_use = sum(lane.slots_in_use for lane in self.lanes)
        assert self.attempts <= in_use <= self.slots
        assert self.dealer._in_use == in_use
        assert not self.dealer._owed or in_use >= self.dealer._slots


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30), slots=st.integers(1, 8), fleet=st.sampled_from([0, 0, 3]))
async def test_attempts_never_exceed_the_slots_and_no_slot_is_idle(seed: int, slots: int, fleet: int) -> None:
    chance = Random(seed)
    pool = Pool(slots, fleet)
    for _ in range(60):
        match chance.randrange(5):
            case 0:
                pool.add(f"tenant-{chance.randrange(4)}", chance.randrange(30), chance.choice([1, 2, 64]))
            case 1 if pool.lanes:
                chance.choice(pool.lanes).waiting += chance.randrange(20)
            case 2 if pool.lanes:
                gone = pool.lanes.pop(chance.randrange(len(pool.lanes)))
                pool.dealer.forget(cast(Any, gone))
                gone.width = gone.waiting = gone.active = 0
                pool.dealer.on_slots_freed(cast(Any, gone))
            case 3:
                for lane in [lane for lane in pool.lanes if lane.active]:
                    lane.end_attempt()
                    pool.check()
                await pool.pass_on_idle()
                pool.check()
            case _:
                pool.clock.advance(chance.choice([0.01, 0.3, 1.0]))
        await pool.deal()
        pool.check()
        if not fleet:
            # Of what there is to do, as much is done as the slots and the runs allow.
            possible = sum(min(lane.demand, lane.job.options.concurrency) for lane in pool.lanes)
            assert pool.attempts == min(slots, possible)


async def test_what_starts_while_permits_are_asked_for_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that gives slots to another one gets references, and an attempt of it ends, before the coordinator has
    answered: nothing starts for which its run has no permit."""
    pool = Pool(4)
    large = pool.add("tenant", 3)
    await pool.deal()
    large.end_attempt()
    assert (large.width, large.active) == (3, 2)
    pool.add("tenant", 10)
    ask = RunPermits.acquire
    asked: list[int] = []

    async def acquire(self: RunPermits, wishes: Mapping[str, PermitWish]) -> Mapping[str, int]:
        granted = await ask(self, wishes)
        large.waiting += 5
        large.set_width(large.width)
        asked.append(wishes[run_slots(large.job.run.run_id)].want)
        assert large.active <= granted[run_slots(large.job.run.run_id)]
        return granted

    monkeypatch.setattr(RunPermits, "acquire", acquire)
    await pool.deal()
    assert asked == [2]
    pool.check()


async def test_a_lane_that_waits_for_slots_gets_no_more_than_it_has_permits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was dealt more slots before than now, and one becomes free before the coordinator has answered."""
    pool = Pool(4)
    first = pool.add("first", 10)
    await pool.deal()
    second = pool.add("second", 10)
    await pool.deal()
    assert (first.width, first.active, second.active) == (2, 4, 0)
    assert pool.dealer._owed
    second.waiting = 1
    ask = RunPermits.acquire

    async def acquire(self: RunPermits, wishes: Mapping[str, PermitWish]) -> Mapping[str, int]:
        granted = await ask(self, wishes)
        second.waiting = 10
        first.end_attempt()
        first.end_attempt()
        assert second.active <= granted[run_slots(second.job.run.run_id)] == 1
        return granted

    monkeypatch.setattr(RunPermits, "acquire", acquire)
    await pool.deal()
    pool.check()


@pytest.mark.parametrize("seconds", [(0.5, 2.0), (0.001, 0.01), (5.0, 20.0)])
async def test_tenants_have_equal_slot_time_however_many_runs_they_have(seconds: tuple[float, float]) -> None:
    """Four slots for one tenant of twenty runs and nine of one."""
    pool = Pool(4)
    chance = Random(7)
    for number in range(29):
        pool.add("big" if number < 20 else f"tenant-{number}", 1_000_000)
    ends: list[tuple[float, StubLane]] = []
    had: Counter[str] = Counter()
    runs: Counter[RunId] = Counter()
    until = pool.clock.monotonic() + max(100.0, 60 * seconds[1])
    step = max(0.1, seconds[1] / 20)
    while (now := pool.clock.monotonic()) < until:
        await pool.deal()
        for lane in pool.lanes:
            had[lane.job.tenant] += int(1000 * step) * lane.active
            runs[lane.job.run.run_id] += lane.active
            running = sum(each is lane for _, each in ends)
            ends += [(now + chance.uniform(*seconds), lane) for _ in range(lane.active - running)]
        pool.clock.advance(step)
        due = [end for end in ends if end[0] <= pool.clock.monotonic()]
        ends = [end for end in ends if end[0] > pool.clock.monotonic()]
        for _, lane in due:
            lane.end_attempt()
        pool.check()
    assert jain_index(had.values()) > 0.95, had
    assert len(runs) == 29 and all(runs.values())


async def test_a_slot_goes_to_who_waits_when_an_attempt_ends() -> None:
    """Not with the next tick, and not before: four attempts of one run, then another tenant."""
    pool = Pool(4)
    first = pool.add("first", 100)
    await pool.deal()
    late = pool.add("late", 100)
    await pool.deal()
    assert (first.active, first.width, late.active) == (4, 2, 0)
    first.end_attempt()
    assert (first.active, late.active) == (3, 1)
    first.end_attempt()
    assert (first.active, late.active) == (2, 2)
    first.end_attempt()
    assert (first.active, late.active) == (2, 2), "each has its share"


async def test_slots_of_lanes_that_are_done_go_to_those_that_are_next_without_another_deal() -> None:
    """Forty runs of three tasks on four slots: after the first deal each gets slots as others are done."""
    pool = Pool(4)
    for _ in range(40):
        pool.add("tenant", 3)
    await pool.deal()
    for _ in range(200):
        for lane in [lane for lane in pool.lanes if lane.active]:
            lane.end_attempt()
        done = [lane for lane in pool.lanes if not lane.demand]
        await pool.pass_on_idle()
        pool.check()
        left = sum(lane.demand for lane in pool.lanes)
        assert pool.attempts == min(4, left)
        for lane in done:
            pool.lanes.remove(lane)
            pool.dealer.forget(cast(Any, lane))
        if not left:
            break
    assert sorted(pool.runs.values()) == [3] * 40


async def test_what_is_passed_on_is_within_the_permits_of_the_run() -> None:
    pool = Pool(4)
    first, second = pool.add("tenant", 4), pool.add("tenant", 10)
    other = RunPermits(pool.coordinator, pool.clock, "other worker", 60.0)
    name = run_slots(second.job.run.run_id)
    assert await other.acquire({name: PermitWish(62, 64)}) == {name: 62}
    await pool.deal()
    assert (first.width, second.width) == (2, 2)
    first.waiting = 0
    first.end_attempt()
    await pool.pass_on_idle()
    pool.check()
    assert (first.width, second.width) == (1, 2), "another worker has the other slots of the run"


async def test_quick_runs_have_equal_slot_time_in_turns_and_a_new_one_starts_at_once() -> None:
    """Of forty runs sixteen are served at a time, with a portion of four slots each."""
    pool = Pool(64)
    for _ in range(40):
        pool.add("tenant", 100_000).portion = 16
    for step in range(400):
        await pool.deal()
        assert step or sorted(lane.width for lane in pool.lanes) == [0] * 24 + [4] * 16
        pool.clock.advance(0.1)
        for lane in pool.lanes:
            for _ in range(lane.active):
                lane.end_attempt()
            pool.check()
    assert min(pool.runs.values()) >= 0.9 * max(pool.runs.values())
    new = pool.add("tenant", 10)
    await pool.deal()
    for lane in pool.lanes:
        if lane.active > lane.width:
            lane.end_attempt()
    assert new.active == 1


async def test_runs_whose_outcomes_wait_to_be_recorded_leave_room_for_others() -> None:
    pool = Pool(8)
    lanes = [pool.add("tenant", 2) for _ in range(4)]
    await pool.deal()
    assert pool.dealer.free_slots(cast(Any, lanes), 0) == 0
    assert not pool.dealer.has_room
    for lane in lanes:
        lane.active = 0
    assert pool.dealer.free_slots(cast(Any, lanes), 1) == 3, "their queues may have more"
    lanes[0].has_whole_run = lanes[1].has_whole_run = True
    assert pool.dealer.free_slots(cast(Any, lanes), 1) == 5
    await pool.pass_on_idle()
    assert pool.dealer.has_room
