"""An ingester that is told to stop in the middle of a list, and the next one that goes on there."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from conveyor.embedded import Embedded
from conveyor.engines.queue import CONTROL
from conveyor.ingest.ingester import Ingester
from conveyor.ingest.pipeline import IngestPipeline
from conveyor.model import Job, TenantId
from conveyor.service import Service
from conveyor.settings import Settings
from conveyor.system import System, open_system

TENANT = TenantId("local")
LINES = 100_000


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    async with open_system(Settings(data=tmp_path / "data", ingest_range_bytes=1 << 30)) as opened:
        yield opened


def ingester(system: System, embedded: Embedded, name: str) -> Ingester:
    parts = (system.settings, system.clock, system.records, system.tasks, system.queue, system.blobs)
    return Ingester(IngestPipeline(*parts, embedded.lifecycle), system.coordinator, name)


async def submitted(embedded: Embedded, place: Path, on_invalid: str) -> Job:
    path = place / "numbers.jsonl"
    path.write_text("".join(f"{number}\n" for number in range(LINES)))
    spec: dict[str, object] = {"kind": "python", "handler": "absent", "on_invalid": on_invalid}
    return await embedded.submit_list([str(path)], spec, TENANT)


async def some_tasks(system: System, job: Job) -> bool:
    return (await system.records.ingests.ingested(job.run.run_id)).tasks > 0


async def run_until_latched(service: Service, system: System, job: Job) -> Job:
    task = asyncio.create_task(service.run())
    while True:
        found = await system.records.jobs.job(TENANT, job.job_id)
        assert found is not None
        if found.run.last_batch:
            break
        await asyncio.sleep(0)
    service.stop()
    await task
    return found


async def test_it_stops_between_two_batches_and_another_goes_on_there(system: System, tmp_path: Path) -> None:
    embedded = Embedded(system, executors={})
    job = await submitted(embedded, tmp_path, "skip")
    first = Service(ingester(system, embedded, "first"), system.clock)
    task = asyncio.create_task(first.run())
    # A point read does not give way to others by itself.
    while not await some_tasks(system, job):  # noqa: ASYNC110  (seen from outside)
        await asyncio.sleep(0)
    first.stop()
    await task

    then = await system.records.ingests.ingested(job.run.run_id)
    assert 0 < then.tasks < LINES
    assert not then.done
    depth = await system.queue.depth(CONTROL)
    assert (depth.ready, depth.held, depth.delayed) == (1, 0, 0)

    ended = await run_until_latched(Service(ingester(system, embedded, "second"), system.clock), system, job)
    assert ended.run.total == LINES
    assert (await system.records.ingests.ingested(job.run.run_id)).tasks == LINES


async def test_it_stops_while_it_looks_a_list_over(system: System, tmp_path: Path) -> None:
    embedded = Embedded(system, executors={})
    job = await submitted(embedded, tmp_path, "reject")
    first = ingester(system, embedded, "first")
    first.stopping = True
    await first.tick()
    assert await system.records.ingests.ranges(job.run.run_id) == []
    depth = await system.queue.depth(CONTROL)
    assert (depth.ready, depth.held, depth.delayed) == (1, 0, 0)

    ended = await run_until_latched(Service(ingester(system, embedded, "second"), system.clock), system, job)
    assert ended.run.total == LINES
