"""A life of the system: from its start to its end, on a loop whose time is an input, with executors that answer by
themselves."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from conveyor.clock import Clock
from conveyor.egress.target_guard import TargetGuard
from conveyor.embedded import Embedded
from conveyor.engines.local_blobs import LocalBlobs
from conveyor.engines.shared_logs import open_shared_logs
from conveyor.engines.sqlite import database, shrinking
from conveyor.model import Job, JobKind, Outcome, TaskError, TaskRef
from conveyor.process.executors import Executor, LocalExecutor
from conveyor.process.executors.download.download_executor import DownloadExecutor
from conveyor.process.executors.fetch.child import ChildFetcher
from conveyor.process.executors.fetch.fetchers import Fetchers
from conveyor.process.executors.fetch.launch import Launched
from conveyor.process.executors.fetch.packs import Packer
from conveyor.settings import Settings
from conveyor.states import TaskStatus
from conveyor.system import System, open_system
from tests.machine.loop import LoopDatabase
from tests.powerloss.origin import PowerlossOrigin
from tests.support.in_process_fetchers import InProcess, PipeEnd

# In the recorded directory. Nothing of it exists at first.
DATA = Path("srv/conveyor")

# What attempts take, and what an origin of downloads waits before each part of an answer.
_SECONDS = (0.01, 0.05, 0.25)
_PAUSE = 0.2
PIECE_BYTES = 64 * 1024
# Pages of the log after which it is copied into the database: a few commits.
_CHECKPOINT_PAGES = 60
SETTINGS: dict[str, Any] = {
    "allow_private_targets": True,
    # A list in a request is accepted at once up to this size; a stored one never.
    "sync_task_limit": 30,
    "sync_list_bytes": 0,
    "ingest_range_bytes": 400,
    "export_piece_bytes": 64 * 1024,
    "download_piece_bytes": PIECE_BYTES,
    "progress_seconds": 1,
    # When it has passed, the progress of finished tasks is removed.
    "stuck_after": 60.0,
    "lease_seconds": 12.0,
    "flush_seconds": 0.05,
    "worker_concurrency": 8,
    "fetchers": 1,
    "ingesters": 1,
    "idempotency_lease_seconds": 5.0,
}


def settings_of(place: Path) -> Settings:
    return Settings.load({}, data=place / DATA, **SETTINGS)


class RecordedDatabase(LoopDatabase):
    """The database on the loop, as durable as that of production, and copied from its log often."""

    def start(self) -> None:
        super().start()
        for pragma in database.WRITER_PRAGMAS:
            if "synchronous" in pragma:
                self._writer.execute(pragma)
        self._writer.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}")

    async def close(self) -> None:
        # What the writer does when nothing was written for a while.
        while shrinking.shrink(self._writer):
            pass
        # As a thread's, which ends before: so the last connection is the writer's.
        if (reader := getattr(self._local, "connection", None)) is not None:
            reader.close()
        await super().close()


class ThreadedDatabase(database.SqliteDatabase):
    """The database of production, copied from its log often."""

    def start(self) -> None:
        self._writer.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}")
        super().start()


class Work:
    """What tasks do. Each attempt has another body, so that a finished task that ran again would show."""

    def __init__(self, clock: Clock, seed: int, seconds: Sequence[float]) -> None:
        self._clock = clock
        self._seconds = seconds
        self._chance = random.Random(seed)
        self._attempts = itertools.count()

    async def attempt_one(self, job: Job, ref: TaskRef, gateway: int = 0, condition: object = None) -> Outcome:
        """An attempt takes its time; some fail at first, some for good."""
        await self._clock.sleep(self._chance.choice(self._seconds))
        if ref.index % 11 == 5 or (ref.index % 7 == 3 and ref.attempt == 1):
            is_fetch = job.kind is JobKind.FETCH
            error = TaskError("http_500" if is_fetch else "handler_raised", "as it was told")
            return Outcome(TaskStatus.FAILED, http_status=500 if is_fetch else None, error=error)
        text = f"attempt {next(self._attempts)} at {ref.index} of {job.job_id}, {self._chance.getrandbits(64):x}\n"
        # Some fit into the row, most do not, and a few take several pages of a disk.
        body = text.encode() * self._chance.choice((1, 30, 30, 200))
        return Outcome(TaskStatus.SUCCEEDED, http_status=200, body=body, content_type="application/octet-stream")


class AtOnce(LocalExecutor):
    """Work in this process."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def target(self, ref: TaskRef) -> str | None:
        return None

    async def attempt(self, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        return list(await asyncio.gather(*(self._work.attempt_one(job, ref) for ref in refs)))


def executors_of(
    system: System, clock: Clock, work: Work, origin: PowerlossOrigin, *, fetches: bool
) -> dict[JobKind, Executor]:
    """Executors for one life: fetches by a fetcher that appends pages to a log of its own, or as everything else;
    downloads by their own executor, from the origin."""
    settings = system.settings

    async def launch(settings: Settings) -> Launched:
        there, here = asyncio.StreamReader(), asyncio.StreamReader()
        back, logs = PipeEnd(here), open_shared_logs(settings)
        assert isinstance(logs, LocalBlobs)
        process = InProcess(ChildFetcher(work, back, Packer(back, clock, logs)), there, back)
        process._serving.add_done_callback(lambda _: logs.close())
        return Launched(here, PipeEnd(there), process)

    others = AtOnce(work)
    guard = TargetGuard(allow_private=True, clock=clock)
    download = DownloadExecutor(settings, clock, guard, system.records, system.blobs)
    origin.serve(download)
    fetcher = Fetchers(settings, clock, launch) if fetches else others
    return {JobKind.PYTHON: others, JobKind.FETCH: fetcher, JobKind.DOWNLOAD: download}


def seconds_of(*, is_first: bool) -> Sequence[float]:
    """What attempts take, before the power cut and after it."""
    return _SECONDS if is_first else (0.0,)


def origin_of(clock: Clock, *, is_first: bool) -> PowerlossOrigin:
    return PowerlossOrigin(clock, _PAUSE if is_first else 0.0)


@asynccontextmanager
async def living(
    place: Path, clock: Clock, seed: int, *, is_first: bool, origin: PowerlossOrigin | None = None
) -> AsyncIterator[System]:
    """A system with all its roles. Before the power cut its tasks take their time, and a fetcher fetches."""
    settings = settings_of(place)
    async with open_system(settings, clock) as system:
        work = Work(clock, seed, seconds_of(is_first=is_first))
        origin = origin or origin_of(clock, is_first=is_first)
        executors = executors_of(system, clock, work, origin, fetches=is_first)
        async with Embedded(system, executors).running():
            yield system
        # A process that ends unlocks its logs.
        blobs: Any = system.blobs
        blobs.close()
