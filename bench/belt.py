"""Belt: our side of a measurement. Opens the embedded system as the command line does, and waits for a job."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.child import MeasurementFailed
from conveyor.cli.loop import freeze_loaded_objects, use_one_heap
from conveyor.embedded import Embedded
from conveyor.engines.queue import run_queue
from conveyor.model import Job, JobId, TenantId
from conveyor.settings import Settings
from conveyor.states import RunState
from conveyor.system import System, open_system
from conveyor.telemetry.logs import configure_log

TENANT = TenantId("bench")

_LOOK_SECONDS = 0.01


@asynccontextmanager
async def store(data: str, **settings: Any) -> AsyncIterator[System]:
    """The engines alone, under a directory of their own."""
    configure_log("info", quiet=True)
    use_one_heap()
    async with open_system(Settings.load({}, data=Path(data), **settings)) as system:
        yield system


@asynccontextmanager
async def belt(data: str, **settings: Any) -> AsyncIterator[Embedded]:
    """The embedded system with its roles at work."""
    async with store(data, **settings) as system:
        embedded = Embedded(system)
        async with embedded.running():
            await embedded.until_ready()
            freeze_loaded_objects()
            yield embedded


async def ended(embedded: Embedded, job_id: str) -> Job:
    """The job, once its run has ended."""
    while True:
        job = await embedded.job(TENANT, JobId(job_id))
        if job.run.ended_at is not None:
            return job
        await asyncio.sleep(_LOOK_SECONDS)


async def check_counts(system: System, job: Job, count: int) -> None:
    """From the rows, not from what was counted along the way: all succeeded, and nothing waits any more."""
    kept, truth = await system.tasks.counts(job.key), await system.tasks.recount(job.key)
    depth = await system.queue.depth(run_queue(job.run.run_id))
    if job.state is not RunState.COMPLETED or job.run.total != count:
        raise MeasurementFailed(f"the run is {job.state} with a total of {job.run.total}, not completed with {count}")
    if truth.succeeded != count or truth.ended != count or kept != truth:
        raise MeasurementFailed(f"{count} tasks, but the rows say {truth} and the kept counts {kept}")
    if depth.ready:
        raise MeasurementFailed(f"{depth.ready} messages are left on the queue")
