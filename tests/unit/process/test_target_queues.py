"""Queues of references for their targets: nothing lost, nothing over a limit, and few calls."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from conveyor.coordination.limits import TargetLimits
from conveyor.engines.sqlite import SqliteEngine
from conveyor.errors import EngineFailed
from conveyor.model import Options
from conveyor.process.target_queues import TargetQueues
from tests.support.clocks import ManualClock
from tests.support.make_jobs import make_job
from tests.support.places import quick_place


class One:
    """A reference, of a target."""

    def __init__(self, number: int, target: str | None = "host", *, recovered: bool = False) -> None:
        self.number = number
        self.target = target
        self.recovered = recovered
        self.is_lost = False
        self.is_plain = True
        self.slot: str | None = None


class Counting:
    """A coordinator that counts its calls, answers a turn later, as over a network, and fails those that it is told."""

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator
        self.calls: Counter[str] = Counter()
        self.failing = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._coordinator, name)

        async def call(*args: Any) -> Any:
            self.calls[name] += 1
            await asyncio.sleep(0)
            if self.failing > 0:
                self.failing -= 1
                raise EngineFailed("for a moment")
            answer = await method(*args)
            await asyncio.sleep(0)
            return answer

        return call


class Lane:
    """What a lane does with its queues: it starts what can start, as far as it has room."""

    def __init__(self, coordinator: Any, clock: ManualClock, job: Any, name: str, width: int = 10) -> None:
        self.clock = clock
        self.limits = TargetLimits(coordinator, job, name)
        self.width = width
        self.running: list[One] = []
        self.started: list[tuple[float, One]] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.queues: TargetQueues[One] = TargetQueues(self.limits, clock, 4, self.room, self.go_on, self.start)

    def room(self) -> int:
        return self.width - len(self.running) if self.width or self.running else 1

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def add(self, *ones: One) -> None:
        for one in ones:
            self.queues.add(one.target, one)
        self.go_on()

    def go_on(self) -> None:
        while len(self.running) < self.width and (one := self.queues.take()) is not None:
            self.running.append(one)
            self.started.append((self.clock.monotonic(), one))
        self.queues.request()

    def finish(self, count: int) -> None:
        done, self.running = self.running[:count], self.running[count:]
        for one in done:
            self.queues.free_slot(one)
        self.go_on()

    @property
    def numbers(self) -> list[int]:
        return [one.number for _, one in self.started]


async def settle() -> None:
    for _ in range(60):
        await asyncio.sleep(0)


async def passing(clock: ManualClock, seconds: float, step: float = 0.05) -> None:
    for _ in range(round(seconds / step)):
        await settle()
        clock.advance(step)
    await settle()


class World:
    def __init__(self, clock: ManualClock, coordinator: Counting, engine: Any) -> None:
        self.clock = clock
        self.coordinator = coordinator
        self.engine = engine
        self.lanes: list[Lane] = []

    def job(self, **options: Any) -> Any:
        return make_job(self.clock, **options)

    def lane(self, job: Any, width: int = 10) -> Lane:
        lane = Lane(self.coordinator, self.clock, job, f"w{len(self.lanes)}", width)
        self.lanes.append(lane)
        return lane

    def held(self) -> int:
        """Slots of targets that anybody has."""
        now = self.clock.monotonic()
        found = [entry for name, held in self.engine._holders.items() if name[0] == "t" for entry in held.values()]
        return sum(count for count, until in found if until > now)


@asynccontextmanager
async def a_world() -> AsyncIterator[World]:
    clock = ManualClock()
    with quick_place() as place:
        async with SqliteEngine.open(place, clock) as engine:
            world = World(clock, Counting(engine.coordinator), engine.coordinator)
            yield world
            for lane in world.lanes:
                await lane.queues.close()
                await asyncio.gather(*lane.tasks, return_exceptions=True)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with a_world() as made:
        yield made


def many(count: int, target: str | None = "host", first: int = 0) -> list[One]:
    return [One(first + number, target) for number in range(count)]


class TestSlots:
    async def test_no_more_than_the_limit_and_each_in_its_turn(self, world: World) -> None:
        lane = world.lane(world.job(concurrency_per_host=3))
        lane.add(*many(10))
        await settle()
        assert (lane.numbers, len(lane.queues), world.held()) == ([0, 1, 2], 7, 3)
        lane.finish(2)
        assert lane.numbers == [0, 1, 2, 3, 4], "a slot that is left goes on at once"
        while lane.running:
            lane.finish(1)
        await settle()
        assert (lane.numbers, world.held()) == (list(range(10)), 0)

    async def test_calls_do_not_grow_with_those_that_wait(self, world: World) -> None:
        lane = world.lane(world.job(concurrency_per_host=3))
        lane.add(*many(1000))
        for _ in range(300):
            await settle()
            lane.finish(3)
        assert len(lane.started) >= 900
        assert world.coordinator.calls["acquire"] <= 2
        await passing(world.clock, 4.9)
        assert world.coordinator.calls["acquire"] <= 2

    async def test_no_more_slots_than_the_lane_can_use(self, world: World) -> None:
        lane = world.lane(world.job(concurrency_per_host=8), width=3)
        lane.add(*many(100))
        lane.add(*many(50, "another", first=100))
        await settle()
        assert len(lane.running) == 3
        assert world.held() <= 5
        lane.width = 10
        lane.go_on()
        await settle()
        assert len(lane.running) == 10

    async def test_a_lane_without_width_asks_for_one(self, world: World) -> None:
        lane = world.lane(world.job(concurrency_per_host=8), width=0)
        lane.add(*many(100))
        await settle()
        assert (world.held(), lane.queues.count_ready(50), lane.queues.count_promising(50)) == (1, 1, 8)

    async def test_targets_take_turns(self, world: World) -> None:
        lane = world.lane(world.job(concurrency_per_host=5), width=1)
        lane.add(*many(4, "a"))
        lane.add(*many(4, "b", first=10), *many(2, None, first=20))
        for _ in range(10):
            await settle()
            lane.finish(1)
        targets = [one.target for _, one in lane.started]
        assert len(targets) == 10
        assert max(targets.index(each) for each in ("a", "b", None)) <= 4

    async def test_what_another_worker_frees_is_found(self, world: World) -> None:
        job = world.job(concurrency_per_host=2)
        one, two = world.lane(job), world.lane(job)
        one.add(*many(2))
        await settle()
        two.add(*many(2, first=10))
        await passing(world.clock, 3)
        assert two.started == []
        asked = world.coordinator.calls["acquire"]
        await passing(world.clock, 10)
        assert world.coordinator.calls["acquire"] - asked <= 2 * 12, "it is asked for less and less often"
        one.finish(2)
        await passing(world.clock, 1.1)
        assert two.numbers == [10, 11]

    async def test_a_worker_gives_way_to_another(self, world: World) -> None:
        job = world.job(concurrency_per_host=2)
        lanes = [world.lane(job), world.lane(job)]
        lanes[0].add(*many(2000))
        await settle()
        lanes[1].add(*many(2000))
        for _ in range(300):
            await passing(world.clock, 0.1)
            assert len(lanes[0].running) + len(lanes[1].running) <= 2
            for lane in lanes:
                lane.finish(2)
        counts = [len(lane.started) for lane in lanes]
        assert min(counts) >= 60, counts
        assert sum(counts) >= 450, counts

    async def test_recovered_ones_go_first(self, world: World) -> None:
        lane = world.lane(world.job(concurrency_per_host=1))
        lane.add(One(0), One(1), One(2, recovered=True), One(3, recovered=True))
        for _ in range(4):
            await settle()
            lane.finish(1)
        assert lane.numbers == [2, 3, 0, 1]

    async def test_closing_gives_all_back(self, world: World) -> None:
        lane = world.lane(world.job(concurrency_per_host=3))
        for number in range(5):
            lane.add(*many(10, f"host{number}"))
        await settle()
        assert 10 <= world.held() <= 12
        await lane.queues.close()
        assert (world.held(), len(lane.queues), lane.queues.take()) == (0, 0, None)
        lane.finish(10)
        await settle()
        assert world.held() == 0

    async def test_slots_are_renewed_while_they_are_used(self, world: World) -> None:
        lane = world.lane(world.job(concurrency_per_host=3))
        lane.add(*many(3))
        await settle()
        for _ in range(10):
            world.clock.advance(20)
            lane.queues.renew_slots()
            await settle()
        assert world.held() == 3


class TestRates:
    async def test_starts_come_at_the_rate(self, world: World) -> None:
        lane = world.lane(world.job(rate_per_host=10.0), width=100)
        lane.add(*many(100))
        await passing(world.clock, 5, step=0.01)
        times = [at for at, _ in lane.started]
        assert 49 <= len(times) <= 52
        assert min(after - before for before, after in pairwise(times)) >= 0.1 - 0.011
        assert world.coordinator.calls["reserve"] <= 35

    async def test_a_high_rate_takes_few_calls(self, world: World) -> None:
        lane = world.lane(world.job(rate_per_host=1000.0), width=2000)
        lane.add(*many(4000))
        await passing(world.clock, 2, step=0.01)
        assert 1950 <= len(lane.started) <= 2020
        assert world.coordinator.calls["reserve"] <= 20

    async def test_a_slow_rate_is_used_to_the_full(self, world: World) -> None:
        lane = world.lane(world.job(rate_per_host=0.5), width=100)
        lane.add(*many(100))
        await passing(world.clock, 60)
        assert 30 <= len(lane.started) <= 31
        assert world.coordinator.calls["reserve"] <= 2.5 * 31

    async def test_workers_share_a_rate(self, world: World) -> None:
        for rate, seconds in ((4.0, 30), (0.5, 120), (50.0, 10)):
            job = world.job(rate_per_host=rate)
            lanes = [world.lane(job) for _ in range(3)]
            for lane in lanes:
                lane.add(*many(600))
            for _ in range(seconds * 10):
                await passing(world.clock, 0.1)
                for lane in lanes:
                    lane.finish(10)
            counts = [len(lane.started) for lane in lanes]
            assert rate * seconds * 0.97 - 1 <= sum(counts) <= rate * seconds + 2, (rate, counts)
            assert min(counts) >= rate * seconds / 12, (rate, counts)

    async def test_another_rate_does_not_wait_for_the_old_one(self, world: World) -> None:
        job = world.job(rate_per_host=0.01)
        lane = world.lane(job, width=100)
        lane.add(*many(50))
        await passing(world.clock, 1)
        assert len(lane.started) == 1
        lane.limits.follow(msgspec.structs.replace(job, options=Options(rate_per_host=100.0)))
        lane.queues.follow()
        await passing(world.clock, 1)
        assert len(lane.started) == 50

    async def test_without_limits_all_go(self, world: World) -> None:
        job = world.job(concurrency_per_host=1, rate_per_host=1.0)
        lane = world.lane(job, width=100)
        lane.add(*many(50))
        await settle()
        lane.limits.follow(msgspec.structs.replace(job, options=Options()))
        lane.queues.follow()
        await settle()
        assert len(lane.started) == 50
        lane.finish(50)
        await settle()
        assert world.held() == 0
        assert not lane.queues.is_limited


class TestFailures:
    async def test_a_coordinator_that_fails_is_asked_again_and_said_once(self, world: World) -> None:
        lane = world.lane(world.job(concurrency_per_host=3, rate_per_host=100.0))
        world.coordinator.failing = 6
        with capture_logs() as logs:
            lane.add(*many(3, "a"))
            lane.add(*many(3, "b", first=3))
            await passing(world.clock, 5)
        assert sorted(lane.numbers) == list(range(6))
        assert [entry["event"] for entry in logs] == ["target limits not available: the coordinator fails"]

    async def test_slots_that_could_not_be_given_back_are_later(self, world: World) -> None:
        lane = world.lane(world.job(concurrency_per_host=3))
        lane.add(*many(3))
        await settle()
        world.coordinator.failing = 2
        lane.finish(3)
        await passing(world.clock, 1)
        assert world.held() == 0
        assert not lane.queues._targets

    async def test_a_coordinator_that_fails_at_the_end(self, world: World) -> None:
        lane = world.lane(world.job(concurrency_per_host=3))
        lane.add(*many(3))
        await settle()
        world.coordinator.failing = 1
        await lane.queues.close()
        world.clock.advance(60)
        assert world.held() == 0, "they expire"


async def test_lost_references_use_neither_a_slot_nor_a_pass() -> None:
    """They wait in front of others."""
    async with a_world() as world:
        lane = world.lane(world.job(concurrency_per_host=1, rate_per_host=0.1))
        refs = many(6)
        lane.add(*refs)
        for ref in (*refs[:2], *refs[3:5]):
            ref.is_lost = True
        await passing(world.clock, 2.0)
        assert lane.numbers == [2]
        lane.finish(1)
        await passing(world.clock, 12.0)
        assert lane.numbers == [2, 5]
        assert len(lane.queues) == 0


async def test_slots_that_wait_for_passes_keep_nobody_from_asking_for_them() -> None:
    """A lane that became narrow has more idle slots than it can use; their targets have no passes left."""
    async with a_world() as world:
        lane = world.lane(world.job(concurrency_per_host=2, rate_per_host=0.5))
        lane.add(*many(4, "a"), *many(4, "b", first=4))
        await passing(world.clock, 1.0)
        assert {one.target for one in lane.running} == {"a", "b"}
        lane.width = 2
        for _ in range(20):
            lane.finish(10)
            await passing(world.clock, 1.0)
        assert sorted(lane.numbers) == list(range(8))


ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 1), st.integers(1, 20), st.sampled_from(["a", "b", None])),
        st.tuples(st.just("finish"), st.integers(0, 1), st.integers(1, 10), st.none()),
        st.tuples(st.just("width"), st.integers(0, 1), st.integers(0, 12), st.none()),
        st.tuples(st.just("pass"), st.just(0), st.integers(1, 40), st.none()),
        st.tuples(st.just("fail"), st.just(0), st.integers(1, 4), st.none()),
        st.tuples(st.just("remove"), st.integers(0, 1), st.just(0), st.none()),
    ),
    max_size=40,
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    acts=ACTS,
    slots=st.sampled_from([None, 1, 3]),
    rate=st.sampled_from([None, 0.4, 5.0, 200.0]),
    width=st.sampled_from([1, 2, 10]),
)
async def test_whatever_happens_all_start_within_the_limits(
    acts: Any, slots: int | None, rate: float | None, width: int
) -> None:
    async with a_world() as world:
        job = world.job(concurrency_per_host=slots, rate_per_host=rate)
        lanes = [world.lane(job), world.lane(job)]
        added = 0

        def check() -> None:
            for target in ("a", "b"):
                running = sum(one.target == target for lane in lanes for one in lane.running)
                assert slots is None or running <= slots

        for act, which, count, target in acts:
            lane = lanes[which]
            if act == "add":
                lane.add(*many(count, target, first=added))
                added += count
            elif act == "finish":
                lane.finish(count)
            elif act == "width":
                lane.width = count
                lane.go_on()
            elif act == "pass":
                await passing(world.clock, count / 20)
            elif act == "fail":
                world.coordinator.failing = count
            else:
                removed: list[Any] = []
                lane.queues.retain(lambda one, removed=removed: one.number % 2 == 0 or bool(removed.append(one)))  # type: ignore[misc]  # the default binds it
                lane.add(*removed)
            await settle()
            check()
        world.coordinator.failing = 0
        for lane in lanes:
            lane.width = width
            lane.go_on()
        for _ in range(40 + added * 6):
            if not any(lane.queues or lane.running for lane in lanes):
                break
            await passing(world.clock, 0.5, step=0.25)
            check()
            for lane in lanes:
                lane.finish(10)
        assert sorted(number for lane in lanes for number in lane.numbers) == list(range(added))
        for target in ("a", "b"):
            times = sorted(at for lane in lanes for at, one in lane.started if one.target == target)
            assert rate is None or not times or len(times) <= 2 + rate * (world.clock.monotonic() - times[0])
        await passing(world.clock, 2)
        assert world.held() == 0
        assert not any(lane.queues._targets or lane.queues._wanting or lane.queues._reporting for lane in lanes)
