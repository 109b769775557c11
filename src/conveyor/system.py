"""The composition root: Settings in, System out. The only module that imports concrete engines."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from conveyor import faults
from conveyor.clock import Clock, SystemClock
from conveyor.engines.blobs import Blobs
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.queue import Queue
from conveyor.engines.records import AcceptsWhole, Records
from conveyor.engines.tasks import Tasks
from conveyor.settings import Settings
from conveyor.signing import signing_key


@dataclass(frozen=True)
class System:
    """The engines that the settings chose, and the inputs that all stages share."""

    settings: Settings
    clock: Clock
    records: Records
    tasks: Tasks
    queue: Queue
    coordinator: Coordinator
    blobs: Blobs
    # None where records, tasks and queue are not one database.
    whole: AcceptsWhole | None
    # What upload links are signed with.
    signing_key: bytes
    # Whether large and open jobs are split over shards (settings.task_shard_count).
    sharded: bool


@asynccontextmanager
async def open_system(settings: Settings, clock: Clock | None = None) -> AsyncIterator[System]:
    """Open every engine, hand out the system, and close them."""
    from conveyor.engines.local import LocalBlobs
    from conveyor.engines.sqlite import SqliteEngine

    clock = clock or SystemClock()
    if settings.crash_at is not None:
        faults.arm(faults.kill_at(settings.crash_at))
    settings.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    async with SqliteEngine.open(settings.data, clock) as engine:
        yield System(
            settings=settings,
            clock=clock,
            records=engine.records,
            tasks=engine.tasks,
            queue=engine.queue,
            coordinator=engine.coordinator,
            blobs=LocalBlobs(settings.data / "blobs"),
            whole=engine,
            signing_key=signing_key(settings),
            # One file has no partitions to spread writes over.
            sharded=settings.force_task_shards,
        )
