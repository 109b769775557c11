"""A clock that is set back, by hours or days: what is queued is processed all the same, and the log says why."""

from collections import Counter
from collections.abc import AsyncIterator

import pytest

from conveyor.engines.queue import CONTROL
from conveyor.model import Backoff, Mode
from conveyor.states import RunState
from tests.support.small_fleet import Fleet, fail, open_fleet, succeed

HOURS, DAYS = 2 * 3600.0, 6 * 86_400.0
SLOW = Backoff(base=100.0, rate=1.0, cap=100.0, jitter=False)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with open_fleet() as opened:
        yield opened


async def queued_chunks_are_processed(back: float = HOURS) -> None:
    async with open_fleet() as fleet:
        job = await fleet.submit(250)
        fleet.clock.step(-back)
        fleet.start(fleet.worker())
        fleet.start(fleet.sweeper)
        await fleet.ended(job)
        await fleet.check(job)
        assert fleet.executor.count() == Counter(range(250))
        assert any(each["event"].startswith("clock was set back") for each in fleet.logs)


async def retries_are_processed(back: float = HOURS) -> None:
    async with open_fleet() as fleet:
        fleet.executor.act = fail
        job = await fleet.submit(5, backoff=SLOW)
        fleet.start(fleet.worker())
        fleet.start(fleet.sweeper)
        await fleet.until(lambda: len(fleet.executor.starts) == 5)
        await fleet.passing(5.0)
        fleet.executor.act = succeed
        fleet.clock.step(-back)
        await fleet.ended(job)
        await fleet.check(job)
        assert fleet.executor.count() == Counter(dict.fromkeys(range(5), 2))


@pytest.mark.parametrize("back", [HOURS, DAYS])
class TestSetBack:
    async def test_queued_chunks_are_processed(self, back: float) -> None:
        await queued_chunks_are_processed(back)

    async def test_retries_are_processed(self, back: float) -> None:
        await retries_are_processed(back)

    async def test_a_list_is_ingested(self, fleet: Fleet, back: float) -> None:
        job = await fleet.stage([f'"{number}"' for number in range(250)])
        fleet.clock.step(-back)
        assert (await fleet.sweeper.run_once()).resumed == 1
        assert (await fleet.system.queue.depth(CONTROL)).ready == 1
        fleet.start(fleet.ingester())
        fleet.start(fleet.worker())
        fleet.start(fleet.sweeper)
        await fleet.ended(job)
        await fleet.check(job)

    async def test_an_open_job_is_not_closed_for_it(self, fleet: Fleet, back: float) -> None:
        job = await fleet.submit(0, mode=Mode.OPEN, tasks=[], idle_timeout=30)
        fleet.clock.step(-back)
        assert (await fleet.sweeper.run_once()).closed == 0
        assert (await fleet.job(job.job_id)).state is RunState.INGESTING


async def test_delays_that_the_options_allow_are_kept(fleet: Fleet) -> None:
    fleet.executor.act = fail
    long = Backoff(base=1100.0, rate=1.0, cap=1100.0, jitter=False)
    job = await fleet.submit(3, backoff=long, attempts=2)
    fleet.start(fleet.worker())
    fleet.start(fleet.sweeper)
    await fleet.ended(job, within=2000)
    for index in range(3):
        first, second = fleet.executor.times(index)
        assert second - first >= 1100
