"""The Coordinator on a master that Sentinels watch: it fails over, and calls go on."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from conveyor.clock import SystemClock
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.redis import RedisEngine
from conveyor.errors import EngineFailed
from tests.faults.test_redis_cluster import Load
from tests.servers.redis_sentinel import SERVICE, Watched
from tests.support.clocks import JumpingClock

TTL = 30.0


@pytest.fixture(scope="module")
def shared() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.close()


@pytest.fixture
def watched(shared: Watched) -> Watched:
    """Both servers run, and one is the replica of the other."""
    shared.mend()
    return shared


@pytest.fixture
async def coordinator(watched: Watched) -> AsyncIterator[Coordinator]:
    async with RedisEngine.open(watched.url, SystemClock()) as engine:
        yield engine.coordinator


async def test_a_sentinel_that_is_away_does_not_matter(watched: Watched) -> None:
    watched.sentinels[0].kill()
    try:
        async with RedisEngine.open(watched.url, SystemClock()) as engine:
            assert await engine.coordinator.permits_in_use("run") == 0
            found = await engine.checks()
            assert [problem for _, problem in found if problem is not None] == []
    finally:
        watched.sentinels[0].start()


async def test_a_name_that_they_do_not_know_is_an_error(watched: Watched) -> None:
    clock = JumpingClock()

    async def start() -> None:
        async with RedisEngine.open(watched.url.replace(f"/{SERVICE}/", "/other/"), clock):
            pass

    starting = asyncio.create_task(start())
    while not starting.done():
        await asyncio.sleep(0.01)
        clock.advance(2.0)
    with pytest.raises(EngineFailed, match="the Sentinels know no master of the name 'other'"):
        await starting


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_a_master_that_dies_under_load(watched: Watched, coordinator: Coordinator, how: str) -> None:
    """Nobody sees an error. What it had not handed on may be lost; nothing is counted twice; fences grow."""
    name, load, fences = SystemClock().new_id("run"), Load(), list[int]()
    master, replica = watched.pair()

    async def step() -> None:
        await coordinator.add_counters(name, {"n": 1}, TTL)

    async def lease() -> None:
        granted = await coordinator.lease("ingest", "me", TTL)
        assert granted is not None
        fences.append(granted.fence)

    async with load.running(step), Load().running(lease, 1):
        await load.more()
        master.kill() if how == "killed" else master.freeze()
        try:
            await asyncio.to_thread(watched.wait_for_promotion, replica)
            await load.more()
        finally:
            master.start() if how == "killed" else master.thaw()
        await load.more()
    counted = (await coordinator.add_counters(name, {}, TTL))["n"]
    assert 0 < counted <= load.calls
    assert fences == sorted(set(fences))
