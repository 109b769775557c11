"""What would hold up the event loop: lists that are small until they are unpacked, crowds that wait for one host. And
the watch itself: it names what blocks, and leaves the test's own work alone."""

import asyncio
import gzip
import time
from collections.abc import Awaitable, Callable
from math import inf

from conveyor.model import Job, Outcome, TaskRef
from conveyor.service import Service
from tests.flow.conftest import BOUND_SECONDS
from tests.support.clocks import ManualClock
from tests.support.loop_watch import LoopWatch
from tests.support.small_fleet import Fleet, Recording, open_fleet, success

MIB = 1024 * 1024
# Four times what was measured.
CROWD_SECONDS = 0.1


async def sealed(fleet: Fleet, job: Job) -> bool:
    return (await fleet.job(job.job_id)).run.sealed


async def longest_step_of_a_compressible_list() -> float:
    line = b'"http://a.example/0123456789"\n'
    packed = gzip.compress(line * (24 * MIB // len(line)), 1)
    async with open_fleet() as fleet:
        job = await fleet.stage_bytes(packed, on_invalid="reject")
        fleet.start(fleet.ingester())
        with LoopWatch(BOUND_SECONDS) as watch:
            await fleet.until(lambda: sealed(fleet, job))
    return watch.longest.seconds


async def longest_step_of_a_crowd() -> float:
    """Thousands of tasks of one host, which may be asked by one at a time."""
    async with open_fleet() as fleet:

        async def act(job: Job, ref: TaskRef) -> Outcome:
            await fleet.clock.sleep(5.0)
            return success()

        fleet.executor = Recording(fleet.clock, act, target=lambda ref: "one.example")
        await fleet.submit(6000, concurrency_per_host=1, concurrency=200, chunk_size=1000)
        fleet.start(fleet.worker())
        with LoopWatch(BOUND_SECONDS) as watch:
            await fleet.passing(10.0)
    return watch.longest.seconds


async def quickest(measure: Callable[[], Awaitable[float]], bound: float) -> float:
    """The least of some measurements; the first that is within the bound is enough."""
    least = inf
    for _ in range(3):
        least = min(least, await measure())
        if least < bound:
            break
    return least


async def test_a_list_that_is_checked_before_it_is_run_lets_others_run() -> None:
    assert await quickest(longest_step_of_a_compressible_list, BOUND_SECONDS) < BOUND_SECONDS


async def test_references_that_wait_for_a_slot_let_others_run() -> None:
    """With a look at each of them every 50 ms it was six times as long as it is."""
    assert await quickest(longest_step_of_a_crowd, CROWD_SECONDS) < CROWD_SECONDS


def spin(seconds: float) -> None:
    """Of processor time: what the machine takes away meanwhile, the watch does not count."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class Busy:
    """A role whose tick holds everybody up."""

    name = "busy"
    stopping = False

    async def tick(self) -> float:
        spin(0.1)
        return 1000.0

    async def close(self) -> None:
        """Nothing is held."""


async def test_a_step_that_blocks_is_found_and_named() -> None:
    service = Service(Busy(), ManualClock())
    with LoopWatch(0.01) as watch:
        running = asyncio.create_task(service.run())
        await asyncio.sleep(0.01)
        service.stop()
        await running
    assert watch.blocked
    assert "service.py" in watch.longest.where


async def test_what_the_test_itself_does_is_not_counted() -> None:
    with LoopWatch(0.01) as watch:
        await asyncio.sleep(0)
        spin(0.05)
        await asyncio.sleep(0)
    assert not watch.blocked
