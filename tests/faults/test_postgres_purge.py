"""Purges on Postgres while somebody reads: a large run waits for its readers, and nobody waits for its purge."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from conveyor.engines.local_blobs import LocalBlobs
from conveyor.engines.postgres import PostgresEngine
from conveyor.engines.sqlite import SqliteEngine
from conveyor.errors import TasksInUse
from conveyor.model import Job, RunKey
from conveyor.recover.retention import SETTLE_SECONDS, Retention
from conveyor.states import RunState
from tests.servers.postgres import OWN_FROM, connect_to, open_engine
from tests.support.clocks import ManualClock
from tests.support.make_jobs import DAY, make_job, make_notice, seeds
from tests.support.places import quick_place

pytestmark = pytest.mark.server

# Twice as many as make retention blame the engine, if they fail in a row: one that succeeds among them changes nothing.
LARGE_RUNS = 20
# Seconds; each wait here ends at once, or never.
PATIENCE = 20.0


@asynccontextmanager
async def long_reader(place: Path, tables: list[str]) -> AsyncIterator[None]:
    """A transaction that has read these tables and goes on."""
    async with connect_to(place) as connection, connection.transaction():
        for table in tables:
            await connection.fetch(f"SELECT count(*) FROM {table}")
        yield


async def ended_job(engine: PostgresEngine, clock: ManualClock, tasks: int) -> Job:
    job = make_job(clock, total=tasks, state=RunState.COMPLETED, retention_days=1)
    assert await engine.records.jobs.create_job(job, make_notice(clock, job), None) is None
    await engine.tasks.put(job.key, seeds(tasks))
    return job


async def test_a_purge_waits_for_no_reader_and_no_reader_for_a_purge() -> None:
    with quick_place() as place:
        clock = ManualClock()
        async with open_engine(place, clock) as engine, asyncio.timeout(PATIENCE):
            large, other = [await ended_job(engine, clock, OWN_FROM + 10) for _ in range(2)]
            async with long_reader(place, ["tasks_1"]):
                waiting = asyncio.create_task(purge(engine, large.key))
                # All at once: a purge that waits for the reader would have the other reads wait behind it.
                read = await asyncio.gather(*(engine.tasks.at(large.key, [OWN_FROM + 1]) for _ in range(20)))
                assert [len(each) for each in read] == [1] * 20
                with pytest.raises(TasksInUse):
                    await waiting
                assert len(await engine.tasks.at(large.key, range(OWN_FROM + 10))) == OWN_FROM + 10
                assert await waits(place) == 0
                await purge(engine, other.key)
            await purge(engine, large.key)
            for job in (large, other):
                assert await engine.tasks.at(job.key, range(OWN_FROM + 10)) == []


async def test_long_readers_of_many_runs_stop_no_other_purge() -> None:
    """As a backup does, which reads every table in one transaction."""
    with quick_place() as place:
        clock = ManualClock()
        async with (
            open_engine(place, clock) as engine,
            SqliteEngine.open(place, clock) as beside,
            asyncio.timeout(2 * PATIENCE),
        ):
            large = [await ended_job(engine, clock, OWN_FROM + 10) for _ in range(LARGE_RUNS)]
            clock.advance(1.0)
            small = await ended_job(engine, clock, 5)
            blobs = LocalBlobs(place / "blobs")
            retention = Retention(engine.records, engine.tasks, engine.queue, beside.coordinator, blobs, clock)
            clock.advance(DAY + SETTLE_SECONDS + 1)
            async with long_reader(place, [f"ends_{number}" for number in range(1, LARGE_RUNS + 1)]):
                gone = 0
                for _ in range(10):
                    gone += (await retention.run_once()).jobs
                assert gone == 1
                assert await engine.records.jobs.runs(small.job_id) == []
                assert await engine.records.jobs.runs(large[0].job_id)
            # Longer than the longest pause of one that failed.
            clock.advance(61.0)
            for _ in range(10):
                gone += (await retention.run_once()).jobs
            assert gone == 1 + LARGE_RUNS


async def purge(engine: PostgresEngine, run: RunKey) -> None:
    while await engine.tasks.delete(run, 1000):
        pass


async def waits(place: Path) -> Any:
    """How many transactions wait for a lock."""
    async with connect_to(place) as connection:
        return await connection.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted")
