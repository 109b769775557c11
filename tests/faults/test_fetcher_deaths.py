"""Fetchers append pages to logs of their own, and the worker makes these durable before it writes a row. A fetcher or
the worker dies before and after each of these steps: every task ends once, with its page."""

import asyncio
import os
import signal
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from conveyor.embedded import Embedded
from conveyor.engines.tasks import TaskFilter
from conveyor.model import Job, JobKind, TenantId
from conveyor.process.executors.fetch.fetchers import Fetchers
from conveyor.process.executors.fetch.launch import Launched, launch_fetcher
from conveyor.read.results import read_body
from conveyor.settings import Settings
from conveyor.states import RunState, TaskStatus
from conveyor.system import System, open_system
from conveyor.verify.findings import FindingKind
from tests.support.clocks import JumpingClock
from tests.support.installations import verified
from tests.support.target_site import Site

CONVEYOR = str(Path(sys.executable).with_name("conveyor"))
ACME, LOCAL = TenantId("acme"), TenantId("local")
# More than fit into two packs of a fetcher.
PAGES = 600
DAY = 86_400.0


async def check_pages(system: System, job: Job) -> None:
    """Each task has its page, in a log, and the counts are those of the rows."""
    assert job.state is RunState.COMPLETED
    kept, counted = await system.tasks.counts(job.key), await system.tasks.recount(job.key)
    assert kept == counted
    assert counted.succeeded == counted.ended == PAGES
    for task in await system.tasks.page(job.key, 0, None, PAGES, TaskFilter()):
        body, place = await read_body(system.blobs, task), task.detail.body
        assert task.status is TaskStatus.SUCCEEDED and place is not None
        assert len(body) == 1000 + task.index
        assert place.sha256 == sha256(body).hexdigest()
        assert place.offset >= 0 and "=" in place.key


def write_list(site: Site, place: Path) -> Path:
    listed = place / "urls.txt"
    listed.write_text("\n".join(site.url(f"/ok?size={1000 + number}") for number in range(PAGES)))
    return listed


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(
    "point", ["blob.append.before", "blob.append.unsynced", "fetcher.pack.before", "fetcher.pack.after"]
)
async def test_a_fetcher_that_dies_at_a_step_of_its_pages(tmp_path: Path, point: str, nth: int) -> None:
    launched: list[Launched] = []

    async def launch(settings: Settings) -> Launched:
        launched.append(await launch_fetcher(settings, f"{point}:{nth}" if not launched else None))
        return launched[-1]

    settings = Settings.load({}, data=tmp_path / "data", allow_private_targets=True, fetchers=1)
    async with Site() as site, open_system(settings) as system:
        fleet = Embedded(system, {JobKind.FETCH: Fetchers(settings, system.clock, launch)})
        async with fleet.running():
            await fleet.until_ready()
            job = await fleet.submit_list([str(write_list(site, tmp_path))], {"concurrency": 20}, ACME)
            while job.run.ended_at is None:
                await asyncio.sleep(0.02)
                job = await fleet.job(ACME, job.job_id)
        assert len(launched) == 2
        await check_pages(system, job)
        # What the dead one wrote, and no row points to, lies under the job's prefix: a purge removes it.
        assert await system.blobs.delete_prefix(f"results/{ACME}/{job.job_id}", 10_000) > 0
        assert [info async for info in system.blobs.listing("results")] == []


@pytest.mark.parametrize("point", ["blob.sync.before", "blob.sync.after", "bodies.keep.after"])
async def test_a_worker_that_dies_while_it_makes_pages_durable(tmp_path: Path, point: str) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CONVEYOR_")}
    data = tmp_path / "data"
    environ = {**clean, "NO_COLOR": "1", "CONVEYOR_DATA": str(data), "CONVEYOR_ALLOW_PRIVATE_TARGETS": "1"}
    async with Site() as site:
        command = [CONVEYOR, "run", str(write_list(site, tmp_path)), "-o", str(tmp_path / "out.zip")]
        await check_exit(command, environ | {"CONVEYOR_CRASH_AT": point}, -signal.SIGKILL)
        await check_exit([*command, "--resume"], environ, 0)
    clock = JumpingClock()
    async with open_system(Settings(data=data), clock) as system:
        (job,) = (await system.records.jobs.jobs(LOCAL, None, 10)).items
        await check_pages(system, job)
        # The pages of the dead worker, which no row points to, are orphans once they are old enough, and nothing else.
        clock.advance(1.5 * DAY)
        findings = await verified(system, job.job_id, repair=True)
        assert set(findings.by_kind) == {FindingKind.ORPHAN}
        assert all("=" in each.key for each in findings.by_kind[FindingKind.ORPHAN].examples)
        assert (await verified(system, job.job_id)).by_kind == {}
        await check_pages(system, job)


async def check_exit(command: list[str], environ: dict[str, str], expected: int) -> None:
    # Not blocking: this process serves the pages.
    process = await asyncio.create_subprocess_exec(*command, env=environ, stderr=subprocess.PIPE)
    _, said = await process.communicate()
    assert process.returncode == expected, said
