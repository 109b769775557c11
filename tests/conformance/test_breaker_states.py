"""Breakers over every coordinator: workers share them, and a reset reaches all."""

import asyncio

from conveyor.coordination.breaker import Breakers, Sign
from conveyor.coordination.breaker_states import breaker_key, count_breakers, list_breakers, reset_breakers
from conveyor.engines.coordinator import Coordinator
from conveyor.model import RunId
from conveyor.settings import Settings
from tests.support.clocks import ManualClock
from tests.support.make_jobs import ACME, OTHER

KEY = breaker_key(ACME, "https://a.example")
RUN = RunId("run_1")


def worker(coordinator: Coordinator, clock: ManualClock, name: str) -> Breakers:
    return Breakers(coordinator, clock, Settings.load({}), name)


async def fail(one: Breakers, key: str = KEY, sign: Sign = Sign.DOWN) -> None:
    for _ in range(20):
        one.count(key, sign, RUN, "timeout")
    await one.report()


async def test_opened_shared_and_reset(coordinator: Coordinator, clock: ManualClock) -> None:
    one, two = worker(coordinator, clock, "one"), worker(coordinator, clock, "two")
    await fail(one)
    await fail(one, breaker_key(OTHER, "https://a.example"))
    assert await two.refresh()
    assert await count_breakers(coordinator, clock) == (2, 0)
    ((tenant, target, state),) = await list_breakers(coordinator, ACME)
    assert (tenant, target, state.runs, state.error) == (ACME, "https://a.example", (RUN,), "timeout")
    # Everybody at once: each breaker is reset once.
    answers = await asyncio.gather(*(reset_breakers(coordinator, clock, ACME) for _ in range(5)))
    assert sorted(map(len, answers)) == [0, 0, 0, 0, 1]
    assert not await two.refresh()
    assert set(two.take_closed()) == {KEY}
    assert two.state(KEY) is None
    assert len(await list_breakers(coordinator, None)) == 1


async def test_errors_of_a_target_that_answers_another_worker(coordinator: Coordinator, clock: ManualClock) -> None:
    one, two = worker(coordinator, clock, "one"), worker(coordinator, clock, "two")
    two.note_answers(KEY, 10)
    await two.report()
    await fail(one, sign=Sign.ERROR)
    assert one.state(KEY) is None
    await fail(one)
    await fail(one)
    assert one.state(KEY) is None, "half of the attempts were answered"
    await fail(one)
    await fail(one)
    assert one.state(KEY) is not None


async def test_gone_with_the_last_run(coordinator: Coordinator, clock: ManualClock) -> None:
    one, two = worker(coordinator, clock, "one"), worker(coordinator, clock, "two")
    await fail(one)
    await two.refresh({RUN})
    assert two.is_watching
    await two.refresh(set())
    assert not two.is_watching
    await one.refresh()
    assert not one.is_watching


async def test_half_open_after_a_restart(coordinator: Coordinator, clock: ManualClock) -> None:
    one = worker(coordinator, clock, "one")
    await fail(one)
    two = worker(coordinator, clock, "two")
    await two.half_open_all()
    await two.refresh()
    assert await count_breakers(coordinator, clock) == (0, 1)
    assert await two.acquire_probe(KEY)
    assert not await two.acquire_probe(KEY)
