"""A2 for long tasks: die at every crash point of a download, of an export and of a handler that kills, come back, and
go on: one file, one remote export, one dead letter."""

import asyncio
import json
import signal
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from conveyor.clock import SystemClock
from conveyor.model import Job, JobId, Task
from conveyor.read.results import stream_body
from conveyor.settings import Settings
from conveyor.states import RunState, TaskStatus
from conveyor.system import System, open_system
from tests.faults.forks import Forks
from tests.faults.hits import ALL_HITS
from tests.faults.long_child import TENANT
from tests.flow.test_export_download import INPUT
from tests.support.dead_letters import dead_letters
from tests.support.export_site import SIZE as EXPORT_SIZE
from tests.support.export_site import ExportSite
from tests.support.file_site import MIB, Behaviour, FileSite, digest

CHILD = "tests.faults.long_child"
SIZE = 2 * MIB + 77
DOWNLOAD = [
    (point, nth)
    for point in (
        "progress.begin.before",
        "progress.begin.after",
        "progress.write.before",
        "progress.write.after",
        "download.piece.before",
        "download.piece.after",
        "download.seal.before",
        "download.seal.after",
        "recorder.flush.before",
        "recorder.flush.after",
    )
    for nth in ((1,) if not point.startswith("download.piece") else (1, 2, 5) if ALL_HITS else (1, 5))
]
EXPORT = (
    "progress.begin.before",
    "progress.begin.after",
    "progress.write.before",
    "progress.write.after",
    "export.create.before",
    "export.create.after",
    "download.piece.after",
    "recorder.flush.before",
    "recorder.flush.after",
)
# With a rate, an attempt ends after each request: the export is made, is not ready, is ready, and its file is there.
PACED = [
    (point, nth)
    for point in ("progress.write.before", "progress.write.after", "recorder.flush.before", "recorder.flush.after")
    for nth in ((1, 2, 3) if ALL_HITS else (1, 3))
]


async def killed_then_done(children: Forks, place: Path, spec: dict[str, Any], crash_at: str, deaths: int = 1) -> None:
    """Die there, up to `deaths` times in a row, and then run to the end."""

    async def run(crash_at: str | None) -> int:
        return await asyncio.to_thread(children.run, place, crash_at=crash_at)

    (place / "spec.json").write_text(json.dumps(spec))
    ends = [await run(crash_at) for _ in range(deaths)]
    assert ends[0] == -signal.SIGKILL, (place / "log").read_text()
    # The later ones may have had nothing left to do there.
    assert set(ends) <= {-signal.SIGKILL, 0}, (place / "log").read_text()
    assert await run(None) == 0, (place / "log").read_text()


async def ended(system: System, place: Path) -> tuple[Job, Task]:
    job = await system.records.jobs.job(TENANT, JobId((place / "job").read_text()))
    assert job is not None
    (task, *_) = await system.tasks.at(job.key, [0])
    return job, task


async def check_file(place: Path, size: int) -> Task:
    async with open_system(Settings(data=place / "data"), SystemClock()) as system:
        job, task = await ended(system, place)
        assert job.state is RunState.COMPLETED
        assert task.status is TaskStatus.SUCCEEDED, task.detail.error
        body = task.detail.body
        assert body is not None
        found = sha256()
        async for piece in stream_body(system.blobs, body):
            found.update(piece)
        assert (body.length, found.hexdigest(), body.sha256) == (size, digest(size), digest(size))
        # Nothing is left of what was given up on the way.
        kept = [info async for info in system.blobs.listing(f"results/{job.tenant}/{job.job_id}")]
        assert sum(info.size for info in kept) == size
    return task


@pytest.mark.parametrize(("point", "nth"), DOWNLOAD)
async def test_a_download(children: Forks, place: Path, point: str, nth: int) -> None:
    async with FileSite(Behaviour(SIZE)) as site:
        spec = {"kind": "download", "tasks": [{"url": site.url(), "sha256": digest(SIZE)}], "attempts": 1}
        await killed_then_done(children, place, spec, f"{point}:{nth}", deaths=2)
        assert (await check_file(place, SIZE)).attempts == 1


async def test_a_download_that_never_moves_is_given_up(children: Forks, place: Path) -> None:
    """Its worker dies each time before anything was kept."""
    async with FileSite(Behaviour(SIZE)) as site:
        spec = {"kind": "download", "tasks": [site.url()]}
        await killed_then_done(children, place, spec, "download.piece.before:1", deaths=3)
    async with open_system(Settings(data=place / "data"), SystemClock()) as system:
        job, task = await ended(system, place)
        assert (job.state, task.error_code) == (RunState.COMPLETED, "worker_lost")
        letters = await dead_letters(system, job.tenant)
        assert [letter["reason"] for letter in letters] == [task.detail.error.message if task.detail.error else None]
        assert "3 times" in letters[0]["reason"]


async def test_a_download_that_has_failed_for_good(children: Forks, place: Path) -> None:
    async with FileSite(Behaviour(SIZE)) as site:
        spec = {"kind": "download", "tasks": [{"url": site.url(), "sha256": "0" * 64}]}
        await killed_then_done(children, place, spec, "progress.remove.before:1")
    async with open_system(Settings(data=place / "data"), SystemClock()) as system:
        job, task = await ended(system, place)
        assert (job.state, task.error_code) == (RunState.COMPLETED, "checksum_mismatch")
        assert [info async for info in system.blobs.listing(f"results/{job.tenant}/{job.job_id}")] == []


@pytest.mark.parametrize("point", EXPORT)
async def test_an_export(children: Forks, place: Path, point: str) -> None:
    async with ExportSite(ready_after=2) as api:
        described = api.described(poll={"first": 0.1, "rate": 1, "cap": 0.1})
        spec = {"kind": "export_download", "tasks": [INPUT], "export": described, "attempts": 1}
        await killed_then_done(children, place, spec, f"{point}:1")
        assert len(api.made) == 1
    assert (await check_file(place, EXPORT_SIZE)).attempts == 1


@pytest.mark.parametrize(("point", "nth"), PACED)
async def test_an_export_at_a_rate(children: Forks, place: Path, point: str, nth: int) -> None:
    async with ExportSite(ready_after=1) as api:
        described = api.described(poll={"first": 0.1, "rate": 1, "cap": 0.1})
        spec = {"kind": "export_download", "tasks": [INPUT], "export": described, "attempts": 1, "rate_per_host": 100}
        await killed_then_done(children, place, spec, f"{point}:{nth}")
        assert len(api.made) == 1
    assert (await check_file(place, EXPORT_SIZE)).attempts == 1


async def test_a_handler_that_kills(children: Forks, place: Path) -> None:
    """The worker dies between the verdict on the task and the end of its message."""
    spec = {
        "kind": "python",
        "handler": "kills",
        "tasks": [{"number": n, "place": str(place), "times": 99 if n == 0 else 0} for n in range(3)],
    }
    await killed_then_done(children, place, spec, "worker.condemn.between:1")
    async with open_system(Settings(data=place / "data"), SystemClock()) as system:
        job, task = await ended(system, place)
        counts = await system.tasks.counts(job.key)
        assert (counts.succeeded, counts.failed) == (2, 1)
        assert task.error_code == "worker_lost"
        assert len(await dead_letters(system, job.tenant)) == 1
