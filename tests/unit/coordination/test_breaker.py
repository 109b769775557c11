"""Breakers over a real coordinator: when they open, who knows, how they are tried and released, and that losing the
coordinator only closes them."""

from collections import Counter
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from conveyor.coordination.breaker import Breakers, Sign
from conveyor.coordination.breaker_states import MAX_RUNS, breaker_key, current_wait, list_breakers, reset_breakers
from conveyor.coordination.trusted_time import TrustedTime
from conveyor.coordination.waits import waiting
from conveyor.engines.coordinator import Coordinator
from conveyor.errors import EngineFailed
from conveyor.model import (
    Breaking,
    Gateway,
    InputJson,
    Job,
    Outcome,
    PooledGateway,
    RunId,
    TaskError,
    TaskRef,
    TenantId,
)
from conveyor.process.executors.fetch.fetch_executor import input_origin
from conveyor.process.gate import Gate
from conveyor.settings import Settings
from conveyor.states import TaskStatus
from conveyor.system import System, open_system
from tests.support.clocks import ManualClock
from tests.support.make_jobs import ACME, OTHER, make_job
from tests.support.places import quick_place

KEY = breaker_key(ACME, "a.example")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def system(clock: ManualClock) -> AsyncIterator[System]:
    with quick_place() as place:
        async with open_system(Settings.load({}, data=place), clock) as opened:
            yield opened


def breakers(system: System, clock: ManualClock, name: str = "one", **settings: Any) -> Breakers:
    changed = msgspec.structs.replace(system.settings, **settings)
    return Breakers(system.coordinator, clock, changed, name)


async def opened(one: Breakers, key: str = KEY, count: int = 20) -> None:
    for _ in range(count):
        one.count(key, Sign.DOWN)
    await one.report()


class TestOpening:
    async def test_it_takes_enough_attempts_and_enough_failures(self, system: System, clock: ManualClock) -> None:
        one = breakers(system, clock)
        await opened(one, count=19)
        assert one.state(KEY) is None
        assert not one.is_watching
        for _ in range(9):
            one.count(KEY, Sign.UP)
        await one.report()
        assert one.state(KEY) is None, "19 of 28 are less than 70 %"
        for _ in range(2):
            one.count(KEY, Sign.DOWN)
        await one.report()
        state = one.state(KEY)
        assert state is not None
        assert one.is_open(state)
        assert state.until == clock.now() + 30

    async def test_what_goes_well_before_anything_failed_is_not_counted(
        self, system: System, clock: ManualClock
    ) -> None:
        one = breakers(system, clock)
        for _ in range(1000):
            one.count(KEY, Sign.UP)
        assert not one.has_suspects
        await opened(one)
        assert one.state(KEY) is not None

    async def test_failures_add_up_over_workers(self, system: System, clock: ManualClock) -> None:
        one, two = breakers(system, clock, "one"), breakers(system, clock, "two")
        await opened(one, count=12)
        await opened(two, count=12)
        assert two.state(KEY) is not None
        assert one.state(KEY) is None
        assert await one.refresh()
        assert one.state(KEY) == two.state(KEY)
        assert not await one.refresh(), "it is no news any more"
        assert await two.refresh(), "nor is it to the worker that opened it, once it was told"
        assert not await two.refresh()

    async def test_one_that_a_probe_opened_again_is_news(self, system: System, clock: ManualClock) -> None:
        one, two = breakers(system, clock, "one"), breakers(system, clock, "two")
        await opened(one)
        for worker in (one, two):
            await worker.refresh()
        clock.advance(31)
        assert not await one.refresh(), "it half-opened"
        assert await one.acquire_probe(KEY)
        one.record_probe(KEY, Sign.DOWN)
        await one.report()
        assert [await worker.refresh() for worker in (one, two)] == [True, True]
        assert [await worker.refresh() for worker in (one, two)] == [False, False]

    async def test_old_failures_lapse(self, system: System, clock: ManualClock) -> None:
        one = breakers(system, clock)
        await opened(one, count=15)
        clock.advance(61)
        await one.report()
        assert not one.has_suspects
        await opened(one, count=15)
        assert one.state(KEY) is None

    async def test_a_tenant_has_its_own_and_not_too_many(self, system: System, clock: ManualClock) -> None:
        one = breakers(system, clock)
        for number in range(101):
            await opened(one, breaker_key(ACME, f"host{number}"))
        assert one.state(breaker_key(ACME, "host99")) is not None
        assert one.state(breaker_key(ACME, "host100")) is None
        assert one.state(breaker_key(OTHER, "host99")) is None
        await opened(one, breaker_key(OTHER, "host99"))
        assert one.state(breaker_key(OTHER, "host99")) is not None


class TestErrors:
    """Answers of 500 and more are an outage only of a target that gives no other answer."""

    async def test_errors_alone_open_it(self, system: System, clock: ManualClock) -> None:
        one = breakers(system, clock)
        for _ in range(20):
            one.count(KEY, Sign.ERROR)
        await one.report()
        assert one.state(KEY) is not None

    async def test_not_while_the_target_answers(self, system: System, clock: ManualClock) -> None:
        one = breakers(system, clock)
        one.count(KEY, Sign.ERROR)
        one.count(KEY, Sign.UP)
        for _ in range(500):
            one.count(KEY, Sign.ERROR)
        await one.report()
        assert one.state(KEY) is None

    async def test_not_if_it_answered_before_the_first_error(self, system: System, clock: ManualClock) -> None:
        one = breakers(system, clock)
        one.note_answers(KEY)
        clock.advance(40)
        for _ in range(50):
            one.count(KEY, Sign.ERROR)
        await one.report()
        assert one.state(KEY) is None
        clock.advance(30)
        for _ in range(50):
            one.count(KEY, Sign.ERROR)
        await one.report()
        assert one.state(KEY) is not None, "that answer has left the window"

    async def test_not_if_it_answers_other_workers(self, system: System, clock: ManualClock) -> None:
        one, two = breakers(system, clock, "one"), breakers(system, clock, "two")
        two.note_answers(KEY, 10)
        await two.report()
        for _ in range(50):
            one.count(KEY, Sign.ERROR)
        await one.report()
        assert one.state(KEY) is None

    async def test_a_target_that_does_not_answer_is_down_even_so(self, system: System, clock: ManualClock) -> None:
        one = breakers(system, clock)
        one.note_answers(KEY)
        one.count(KEY, Sign.UP)
        await opened(one, count=30)
        assert one.state(KEY) is not None

    async def test_answers_before_it_closed_do_not_count(self, system: System, clock: ManualClock) -> None:
        """It came back, was released, and all that it says is 503: it is down again."""
        one = breakers(system, clock)
        one.note_answers(KEY)
        await opened(one)
        clock.advance(1)
        await reset_breakers(system.coordinator, clock, ACME)
        await one.refresh()
        for _ in range(50):
            one.count(KEY, Sign.ERROR)
        await one.report()
        assert one.state(KEY) is not None

    async def test_a_few_bad_pages_do_not_keep_it_half_open(self, system: System, clock: ManualClock) -> None:
        one = breakers(system, clock)
        await opened(one)
        clock.advance(31)
        assert await one.acquire_probe(KEY)
        one.record_probe(KEY, Sign.UP)
        await one.report()
        for _ in range(30):
            # One of two probes meets a bad page.
            assert await one.acquire_probe(KEY)
            one.record_probe(KEY, Sign.ERROR)
            await one.report()
            if await one.acquire_probe(KEY):
                one.record_probe(KEY, Sign.UP)
            await one.report()
            if one.state(KEY) is None:
                return
        raise AssertionError(one.state(KEY))

    async def test_probes_that_all_meet_errors_open_it(self, system: System, clock: ManualClock) -> None:
        one = breakers(system, clock)
        await opened(one)
        clock.advance(31)
        assert await one.acquire_probe(KEY)
        one.record_probe(KEY, Sign.ERROR)
        await one.report()
        state = one.state(KEY)
        assert state is not None
        assert (state.times, one.is_open(state)) == (2, True)
        clock.advance(61)
        assert await one.acquire_probe(KEY)
        one.record_probe(KEY, Sign.UP)
        await one.report()
        for _ in range(2):
            assert await one.acquire_probe(KEY)
            one.record_probe(KEY, Sign.ERROR)
            await one.report()
        state = one.state(KEY)
        assert state is not None
        assert (state.times, one.is_open(state)) == (3, True)


class TestNeed:
    """A breaker that no unfinished run needs is gone."""

    async def test_it_goes_with_its_last_run(self, system: System, clock: ManualClock) -> None:
        one, two = breakers(system, clock, "one"), breakers(system, clock, "two")
        first, second = RunId("run_1"), RunId("run_2")
        for _ in range(20):
            one.count(KEY, Sign.DOWN, first, "timeout")
        await one.report()
        await two.refresh({first, second})
        state = two.state(KEY)
        assert state is not None
        assert (state.runs, state.error) == ((first,), "timeout")
        two.report_wait(second, KEY, state)
        await two.report()
        await two.refresh({second})
        assert two.is_watching, "it blocks another one"
        await one.refresh({RunId("run_3")})
        assert not one.is_watching
        await two.refresh({second})
        assert not two.is_watching
        assert await list_breakers(system.coordinator, ACME) == []
        one.count(KEY, Sign.DOWN, second)
        await one.report()
        assert one.state(KEY) is None, "failures before that no longer count"

    async def test_the_runs_of_a_busy_target_are_bounded(self, system: System, clock: ManualClock) -> None:
        one = breakers(system, clock)
        await opened(one)
        state = one.state(KEY)
        assert state is not None
        for number in range(100):
            one.report_wait(RunId(f"run_{number}"), KEY, state)
        await one.report()
        state = one.state(KEY)
        assert state is not None
        assert len(state.runs) == MAX_RUNS


class TestReset:
    async def test_it_closes_those_of_the_tenant(self, system: System, clock: ManualClock) -> None:
        one = breakers(system, clock)
        other = breaker_key(ACME, "b.example")
        foreign = breaker_key(OTHER, "a.example")
        for key in (KEY, other, foreign):
            await opened(one, key)
        await one.refresh()
        assert await reset_breakers(system.coordinator, clock, ACME, ["a.example", "c.example"]) == [
            (ACME, "a.example")
        ]
        assert not await one.refresh()
        assert set(one.take_closed()) == {KEY}
        assert one.take_closed() == {}
        assert [one.state(key) is None for key in (KEY, other, foreign)] == [True, False, False]
        assert await reset_breakers(system.coordinator, clock, ACME) == [(ACME, "b.example")]
        assert await reset_breakers(system.coordinator, clock, ACME) == []
        assert await reset_breakers(system.coordinator, clock, None) == [(OTHER, "a.example")]
        await opened(one, KEY, 19)
        assert one.state(KEY) is None
        await opened(one, KEY, 1)
        assert one.state(KEY) is not None, "it opens again, with failures after the reset"

    async def test_a_run_no_longer_waits(self, system: System, clock: ManualClock) -> None:
        one = breakers(system, clock)
        job = make_job(clock)
        await opened(one)
        assert isinstance(gate_of(one, job).check(ref()), float)
        await one.report()
        wait = await current_wait(system.coordinator, clock, job)
        assert wait is not None
        assert (wait.code, wait.target, wait.until) == ("breaker", "a.example", clock.now() + 30)
        clock.advance(31)
        wait = await current_wait(system.coordinator, clock, job)
        assert wait is not None
        assert wait.detail == "waiting: breaker half-open for a.example"
        await reset_breakers(system.coordinator, clock, ACME)
        assert await current_wait(system.coordinator, clock, job) is None

    async def test_after_a_restart_all_are_half_open(self, system: System, clock: ManualClock) -> None:
        one = breakers(system, clock)
        await opened(one)
        clock.advance(10)
        await one.half_open_all()
        await one.refresh()
        state = one.state(KEY)
        assert state is not None
        assert not one.is_open(state)
        assert one.age(state) == 0, "how long it was down while nobody looked is not known"
        assert await one.acquire_probe(KEY)


class TestClockSetBack:
    async def test_a_breaker_from_before_is_half_open(self, system: System, clock: ManualClock) -> None:
        one, two = breakers(system, clock), breakers(system, clock, "two")
        await opened(one)
        clock.step(-600)
        await two.refresh()
        state = two.state(KEY)
        assert state is not None
        assert two.is_open(state), "within the longest time that it may be open"
        clock.step(-6600)
        await two.refresh()
        state = two.state(KEY)
        assert state is not None
        assert not two.is_open(state)
        assert two.age(state) == 0.0
        assert await two.acquire_probe(KEY)
        ((_, _, shown),) = await list_breakers(system.coordinator, ACME)
        assert shown == state, "everyone sees it"


class TestTrying:
    async def test_one_then_two_then_four_and_closed(self, system: System, clock: ManualClock) -> None:
        one, two = breakers(system, clock, "one"), breakers(system, clock, "two")
        await opened(one)
        clock.advance(31)
        places = []
        while await two.refresh() or two.state(KEY) is not None:
            entered = [await (one, two)[number % 2].acquire_probe(KEY) for number in range(100)]
            places.append(sum(entered))
            for number, went in enumerate(entered):
                if went:
                    (one, two)[number % 2].record_probe(KEY, Sign.UP)
            await one.report()
            await two.report()
            await one.refresh()
        # Both tell of success and only one of them raises the level: it is never raised twice for one look.
        assert places[0] == 1
        assert all(now <= 2 * before for before, now in pairwise(places))
        assert max(places) == 32
        assert not one.is_watching
        # What it was opened for does not count any more.
        one.count(KEY, Sign.DOWN)
        await one.report()
        assert one.state(KEY) is None
        await opened(one)
        assert one.state(KEY) is not None

    async def test_a_canary_that_fails_doubles_the_wait(self, system: System, clock: ManualClock) -> None:
        one = breakers(system, clock, breaker_longest=200)
        await opened(one)
        waits = []
        for _ in range(5):
            state = one.state(KEY)
            assert state is not None
            waits.append(state.until - clock.now())
            clock.advance(waits[-1] + 1)
            assert await one.acquire_probe(KEY)
            assert not await one.acquire_probe(KEY)
            one.record_probe(KEY, Sign.DOWN)
            await one.report()
        assert waits == [30, 60, 120, 200, 200]
        assert one.age(state) > 400

    async def test_a_canary_without_an_answer_makes_way(self, system: System, clock: ManualClock) -> None:
        one = breakers(system, clock)
        await opened(one)
        clock.advance(31)
        assert await one.acquire_probe(KEY)
        one.record_probe(KEY, None)
        assert not await one.acquire_probe(KEY), "not before it is told"
        await one.report()
        assert await one.acquire_probe(KEY)

    async def test_a_worker_that_died_frees_its_place(self, system: System, clock: ManualClock) -> None:
        one, two = breakers(system, clock, "one"), breakers(system, clock, "two")
        await opened(one)
        clock.advance(31)
        await two.refresh()
        assert await one.acquire_probe(KEY)
        assert not await two.acquire_probe(KEY)
        clock.advance(61)
        assert await two.acquire_probe(KEY)

    async def test_one_that_nobody_tries_is_forgotten(self, system: System, clock: ManualClock) -> None:
        one = breakers(system, clock)
        await opened(one)
        clock.advance(30 + 2 * 900 + 1)
        await one.refresh()
        assert not one.is_watching


class Broken:
    """A coordinator that is gone."""

    def __getattr__(self, name: str) -> Any:
        async def fail(*_: object, **__: object) -> Any:
            raise EngineFailed("gone")

        return fail


class TestLoss:
    async def test_without_a_coordinator_all_are_closed(self, system: System, clock: ManualClock) -> None:
        one = breakers(system, clock)
        await opened(one)
        broken: Coordinator = Broken()  # type: ignore[assignment]
        one._coordinator = broken
        await one.refresh()
        assert not one.is_watching
        assert await one.acquire_probe(KEY)
        await opened(one)
        assert one.state(KEY) is None
        await one.renew_probes()

    async def test_a_value_of_another_version_counts_as_none(self, system: System, clock: ManualClock) -> None:
        await system.coordinator.cache("breakers", b"\x00 something else", 60)
        one = breakers(system, clock)
        assert not await one.refresh()
        await opened(one)
        assert one.state(KEY) is not None


def ref(text: str = "https://a.example/x") -> TaskRef:
    return TaskRef(0, InputJson(f'"{text}"'))


class Passing:
    def __init__(self, given: TaskRef, gateway: int = 0) -> None:
        self.ref = given
        self.probes: tuple[str, ...] = ()
        self.gateway = gateway


def failed(code: str, status: int | None = None) -> Outcome:
    return Outcome(TaskStatus.FAILED, http_status=status, error=TaskError(code, code))


def gate_of(one: Breakers, job: Job, gateway: str | None = None) -> Gate:
    return Gate(one, job, lambda given: "a.example", gateway)


class TestGate:
    @pytest.mark.parametrize(
        ("outcome", "opens"),
        [
            (failed("connect_failed"), True),
            (failed("timeout"), True),
            (failed("dns_failed"), True),
            (failed("read_failed"), True),
            (failed("http_500", 500), True),
            (failed("http_503", 503), True),
            (failed("http_429", 429), False),
            (failed("http_404", 404), False),
            (failed("target_refused"), False),
            (failed("handler_raised"), False),
            (Outcome(TaskStatus.SUCCEEDED, http_status=200), False),
        ],
        ids=lambda value: getattr(getattr(value, "error", None), "code", None),
    )
    async def test_which_failures_count(
        self, system: System, clock: ManualClock, outcome: Outcome, opens: bool
    ) -> None:
        one = breakers(system, clock)
        gate = gate_of(one, make_job(clock))
        gate.record([Passing(ref())] * 50, [outcome] * 50)
        await one.report()
        assert (one.state(KEY) is not None) is opens

    async def test_a_job_may_pass_it_by(self, system: System, clock: ManualClock) -> None:
        one = breakers(system, clock)
        await opened(one)
        gate = gate_of(one, make_job(clock, breaker=Breaking(enabled=False)))
        assert not gate.is_watching
        gate.record([Passing(ref())] * 50, [failed("timeout")] * 50)
        assert gate_of(one, make_job(clock)).is_watching

    async def test_open_half_open_and_the_end_of_patience(self, system: System, clock: ManualClock) -> None:
        one = breakers(system, clock)
        job = make_job(clock, breaker=Breaking(patience=100))
        gate = gate_of(one, job)
        assert gate.check(ref()) == 0.0
        await opened(one)
        wait = gate.check(ref())
        assert isinstance(wait, float)
        assert 30 <= wait <= 36
        await one.report()
        said = await waiting(system.coordinator, job.run.run_id)
        assert said is not None
        assert said.detail.startswith("waiting: breaker open for a.example until 20")
        clock.advance(31)
        assert gate.check(ref()) is None
        first, second = Passing(ref()), Passing(ref())
        assert await gate.acquire_probe(first) == 0.0
        assert first.probes == (KEY,)
        assert 2 <= await gate.acquire_probe(second) <= 4
        assert second.probes == ()
        gate.record([first], [failed("timeout")])
        assert first.probes == ()
        await one.report()
        clock.advance(59)
        assert isinstance(gate.check(ref()), float)
        clock.advance(11)
        state = one.state(KEY)
        assert state is not None
        late = gate.check(ref()) if one.is_open(state) else None
        assert late is None, "while it may be tried nobody is given up"
        other = Passing(ref())
        assert await gate.acquire_probe(other) == 0.0
        gate.record([other], [failed("timeout")])
        await one.report()
        verdict = gate.check(ref())
        assert isinstance(verdict, TaskError)
        assert verdict.code == "target_down"

    async def test_a_clock_that_jumps_ends_no_patience(self, system: System, clock: ManualClock) -> None:
        trusted = TrustedTime(system.records.documents, clock, deadlines=True)
        await trusted.now()
        one = Breakers(system.coordinator, clock, system.settings, "one", trusted.peek)
        gate = gate_of(one, make_job(clock, breaker=Breaking(patience=3600)))
        await opened(one)
        clock.step(2 * 3600)
        other = Passing(ref())
        assert await gate.acquire_probe(other) == 0.0
        gate.record([other], [failed("timeout")])
        await one.report()
        assert isinstance(gate.check(ref()), float), "it is not over"

    async def test_the_gateway_and_the_host_are_two(self, system: System, clock: ManualClock) -> None:
        one = breakers(system, clock)
        job = make_job(clock, gateway=Gateway(proxy="http://user:secret@gate.example:3128"))
        gate = gate_of(one, job)
        gate.record([Passing(ref())] * 20, [failed("gateway_failed")] * 20)
        await one.report()
        assert one.state(KEY) is None
        assert one.state(breaker_key(ACME, "gateway:http://gate.example:3128")) is not None
        assert gate.open_until() is not None, "nothing of the job can go on"
        assert gate_of(one, make_job(clock)).open_until() is None
        clock.advance(31)
        canary = Passing(ref())
        assert await gate.acquire_probe(canary) == 0.0
        # The gateway answers, the host behind it does not.
        gate.record([canary], [failed("http_504", 504)])
        await one.report()
        state = one.state(breaker_key(ACME, "gateway:http://gate.example:3128"))
        assert state is not None
        assert state.level == 1

    async def test_the_operators_gateway(self, system: System, clock: ManualClock) -> None:
        one = breakers(system, clock)
        gate = gate_of(one, make_job(clock), "http://gate.example/?to={url}")
        gate.record([Passing(ref())] * 20, [failed("gateway_failed")] * 20)
        await one.report()
        assert one.state(breaker_key(ACME, "gateway:http://gate.example")) is not None

    async def test_a_gateway_of_a_pool_that_is_down_gets_nothing_and_nobody_waits(
        self, system: System, clock: ManualClock
    ) -> None:
        one = breakers(system, clock)
        names = [f"gateway:http://gate{number}.example:3128" for number in range(3)]
        members = [PooledGateway(proxy=f"http://u:p@gate{number}.example:3128") for number in range(3)]
        job = make_job(clock, gateway=Gateway(pool=members), breaker=Breaking(patience=100))
        gate = gate_of(one, job)

        def taken(count: int = 30) -> Counter[int]:
            entries = [Passing(ref()) for _ in range(count)]
            gate.assign_gateways(entries)
            return Counter(entry.gateway for entry in entries)

        assert taken() == {0: 10, 1: 10, 2: 10}
        entries = [Passing(ref(), gateway=1) for _ in range(20)]
        gate.record(entries, [failed("gateway_failed")] * 20)
        await one.report()
        assert [one.state(breaker_key(ACME, name)) is not None for name in names] == [False, True, False]
        assert gate.check(ref()) == 0.0
        assert gate.open_until() is None
        assert taken() == {0: 15, 2: 15}
        # Half-open: a task probes it; the next one may not, and goes through another gateway at once.
        clock.advance(31)
        assert gate.check(ref()) is None
        probe, other = Passing(ref()), Passing(ref())
        assert await gate.acquire_probe(probe) == 0.0
        assert await gate.acquire_probe(other) == 0.0
        gate.assign_gateways([probe, other])
        assert probe.gateway == 1
        assert other.gateway != 1
        assert (len(probe.probes), other.probes) == (1, ())
        assert gate.check(ref()) == 0.0, "after a refusal nobody asks for a while"
        # The probe meets a host that is down behind a gateway that is up.
        gate.record([probe], [failed("http_504", 504)])
        await one.report()
        state = one.state(breaker_key(ACME, names[1]))
        assert state is not None
        assert state.level == 1

    async def test_a_job_waits_once_all_gateways_of_its_pool_are_down(self, system: System, clock: ManualClock) -> None:
        one = breakers(system, clock)
        members = [PooledGateway(proxy=f"http://gate{number}.example:3128") for number in range(2)]
        job = make_job(clock, gateway=Gateway(pool=members), breaker=Breaking(patience=50))
        gate = gate_of(one, job)
        gate.record([Passing(ref(), gateway=0)] * 20, [failed("gateway_failed")] * 20)
        await one.report()
        clock.advance(20)
        gate.record([Passing(ref(), gateway=1)] * 20, [failed("gateway_failed")] * 20)
        await one.report()
        until = gate.open_until()
        assert until is not None
        assert until - clock.now() == pytest.approx(10), "until the first one half-opens"
        wait = gate.check(ref())
        assert isinstance(wait, float)
        assert 10 <= wait <= 12
        await one.report()
        said = await waiting(system.coordinator, job.run.run_id)
        assert said is not None
        assert said.target == "gateway:http://gate0.example:3128"
        # Both stay down: the patience is that with the last one that went.
        clock.advance(11)
        for _ in range(2):
            probe = Passing(ref())
            assert await gate.acquire_probe(probe) == 0.0
            gate.record([probe], [failed("gateway_failed")])
            await one.report()
            clock.advance(20)
        verdict = gate.check(ref())
        assert isinstance(verdict, TaskError)
        assert verdict.message == "all 2 gateways of the pool were down for more than 50 seconds: gateway_failed"

    async def test_a_lane_that_goes_leaves_no_canary_behind(self, system: System, clock: ManualClock) -> None:
        one = breakers(system, clock)
        gate = gate_of(one, make_job(clock))
        await opened(one)
        clock.advance(31)
        assert await gate.acquire_probe(Passing(ref())) == 0.0
        gate.close()
        await one.report()
        assert await one.acquire_probe(KEY)

    async def test_the_whole_job_waits_and_says_so(self, system: System, clock: ManualClock) -> None:
        """All of it depends on one target: no task is even received, and still the job says what it waits for."""
        one = breakers(system, clock)
        job = make_job(clock, upstream="erp")
        await opened(one, breaker_key(ACME, "upstream:erp"))
        gate = gate_of(one, job)
        assert gate.open_until() is not None
        await one.report()
        wait = await current_wait(system.coordinator, clock, job)
        assert wait is not None
        assert wait.target == "upstream:erp"
        state = one.state(breaker_key(ACME, "upstream:erp"))
        assert state is not None
        assert state.runs == (job.run.run_id,)

    async def test_a_handler_that_fails_for_some_inputs_is_no_outage(self, system: System, clock: ManualClock) -> None:
        one = breakers(system, clock)
        gate = gate_of(one, make_job(clock, upstream="erp"))
        gate.record([Passing(ref())], [Outcome(TaskStatus.SUCCEEDED)])
        gate.record([Passing(ref())] * 50, [failed("handler_raised")] * 50)
        await one.report()
        assert not one.is_watching
        clock.advance(61)
        gate.record([Passing(ref())] * 50, [failed("handler_raised")] * 50)
        await one.report()
        assert one.is_watching

    async def test_a_target_that_redirects_to_a_dead_host_is_up(self, system: System, clock: ManualClock) -> None:
        one = breakers(system, clock)
        gate = Gate(one, make_job(clock), lambda given: "https://a.example")
        elsewhere = Outcome(
            TaskStatus.FAILED, 503, TaskError("http_503", "away"), final_url="https://b.example:8443/there"
        )
        gate.record([Passing(ref())] * 50, [elsewhere] * 50)
        await one.report()
        assert not one.is_watching
        here = Outcome(TaskStatus.FAILED, 503, TaskError("http_503", "away"), final_url="https://a.example/there")
        clock.advance(61)
        gate.record([Passing(ref())] * 50, [here] * 50)
        await one.report()
        assert one.is_watching

    async def test_answers_are_noted_while_nothing_fails(self, system: System, clock: ManualClock) -> None:
        one = breakers(system, clock)
        gate = Gate(one, make_job(clock), lambda given: input_origin(given.input))
        urls = ["http://a.example/1", "http://a.example/2", "http://a.example:81/", "http://a.example/3"]
        gate.record([Passing(ref(url)) for url in urls], [Outcome(TaskStatus.SUCCEEDED)] * 4)
        for origin in ("http://a.example", "http://a.example:81", "https://a.example"):
            for _ in range(50):
                one.count(breaker_key(ACME, origin), Sign.ERROR)
        await one.report()
        opened_ones = [target for _, target, _ in await list_breakers(system.coordinator, ACME)]
        assert opened_ones == ["https://a.example"]

    async def test_tenants_do_not_close_each_other_out(self, system: System, clock: ManualClock) -> None:
        one = breakers(system, clock)
        gate_of(one, make_job(clock)).record([Passing(ref())] * 20, [failed("timeout")] * 20)
        await one.report()
        other = gate_of(one, make_job(clock, tenant=TenantId("other")))
        assert other.check(ref()) == 0.0


async def test_nothing_is_said_of_a_run_that_does_not_wait(system: System) -> None:
    assert await waiting(system.coordinator, RunId("run_1")) is None


class Down:
    """A coordinator whose semaphores do not answer."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coordinator, name)

    async def acquire(self, *args: Any) -> int:
        if self.error is not None:
            raise self.error
        granted: int = await self._coordinator.acquire(*args)
        return granted


async def probes_that_could_not_be_freed() -> None:
    """Their places expire: nobody renews them."""
    clock = ManualClock()
    with quick_place() as place:
        async with open_system(Settings.load({}, data=place), clock) as system:
            down = Down(system.coordinator)
            one = Breakers(down, clock, system.settings, "one")  # type: ignore[arg-type]  # a stand-in for one
            keys = [breaker_key(ACME, f"{number}.example") for number in range(3)]
            for key in keys:
                await opened(one, key)
            clock.advance(30)
            for key in keys:
                assert await one.acquire_probe(key)
                one.record_probe(key, None)
            down.error = EngineFailed("for a moment")
            await one.report()
            down.error = None
            for _ in range(7):
                clock.advance(10)
                await one.renew_probes()
            assert [await system.coordinator.permits_in_use(f"canary:{key}") for key in keys] == [0, 0, 0]


async def test_probes_that_could_not_be_freed() -> None:
    await probes_that_could_not_be_freed()


async def test_a_canary_whose_call_breaks_has_no_place(system: System, clock: ManualClock) -> None:
    """Of a task with two targets, the second does not answer: the place at the first is free again."""
    down = Down(system.coordinator)
    one = Breakers(down, clock, system.settings, "one")  # type: ignore[arg-type]  # a stand-in for one
    gate = gate_of(one, make_job(clock, gateway=Gateway(url="https://gate.example/?u={url}")))
    await opened(one)
    await opened(one, breaker_key(ACME, "gateway:https://gate.example"))
    clock.advance(30)
    enter = one.acquire_probe

    async def break_at_the_gateway(key: str) -> bool:
        down.error = RuntimeError("unforeseen") if key != KEY else None
        return await enter(key)

    one.acquire_probe = break_at_the_gateway  # type: ignore[method-assign]  # to fail the second of two calls
    passing = Passing(ref())
    with pytest.raises(RuntimeError):
        await gate.acquire_probe(passing)
    gate.release([passing])
    down.error = None
    await one.report()
    assert await system.coordinator.permits_in_use(f"canary:{KEY}") == 0
    await one.renew_probes()
    assert await system.coordinator.permits_in_use(f"canary:{breaker_key(ACME, 'gateway:https://gate.example')}") == 0


async def a_breaker_opens_again() -> None:
    """Nobody needed it for long; its old state is still stored."""
    clock = ManualClock()
    with quick_place() as place:
        async with open_system(Settings.load({}, data=place), clock) as system:
            one, other = (breakers(system, clock, name, breaker_longest=60.0) for name in ("one", "other"))
            await opened(one)
            clock.advance(30 + 2 * 60 + 1)
            await one.refresh()
            assert one.state(KEY) is None
            await opened(one)
            state = one.state(KEY)
            assert state is not None
            assert state.since == clock.now()
            await other.refresh()
            assert other.state(KEY) == state


async def test_a_breaker_that_nobody_needed_for_long_opens_again() -> None:
    await a_breaker_opens_again()
