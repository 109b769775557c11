"""Fetchers: real processes that fetch for a worker, killed and stopped while they are at it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from conveyor.clock import SystemClock
from conveyor.embedded import Embedded
from conveyor.engines.tasks import TaskFilter
from conveyor.model import Job, Task, TenantId
from conveyor.read.results import read_body
from conveyor.settings import Settings
from conveyor.states import RunState, TaskStatus
from conveyor.system import open_system
from tests.support.processes import fetchers_of
from tests.support.target_site import Site

ACME = TenantId("acme")


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with Site() as made:
        yield made


@asynccontextmanager
async def embedded(data: Path, **given: Any) -> AsyncIterator[Embedded]:
    settings = Settings.load({}, data=data, allow_private_targets=True, **given)
    async with open_system(settings, SystemClock()) as system:
        made = Embedded(system)
        async with made.running():
            await made.until_ready()
            yield made


async def submitted(fleet: Embedded, place: Path, urls: list[str], **options: Any) -> Job:
    listed = place / "urls.txt"
    listed.write_text("\n".join(urls))
    return await fleet.submit_list([str(listed)], options, ACME)


async def until(condition: Callable[[], Any]) -> None:
    while not (await condition()):  # noqa: ASYNC110  (what is waited for happens in other processes)
        await asyncio.sleep(0.01)


async def ended(fleet: Embedded, job: Job) -> Job:
    async def over() -> bool:
        return (await fleet.job(ACME, job.job_id)).run.ended_at is not None

    await until(over)
    return await fleet.job(ACME, job.job_id)


async def rows(fleet: Embedded, job: Job) -> list[Task]:
    return sorted(await fleet.system.tasks.page(job.key, 0, None, 10_000, TaskFilter()), key=lambda task: task.index)


def fetchers() -> list[int]:
    """The processes that fetch for this one."""
    return fetchers_of(os.getpid())


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("layout", ["packed", "object"])
async def test_pages_come_back_whole_through_other_processes(
    site: Site, tmp_path: Path, count: int, layout: str
) -> None:
    async with embedded(tmp_path / "data", fetchers=count) as fleet:
        assert len(fetchers()) == count
        urls = [site.url(f"/ok?size={100 + 3 * number}") for number in range(300)] + [site.url("/status/404")]
        job = await ended(fleet, await submitted(fleet, tmp_path, urls, result_layout=layout, concurrency=20))
        assert job.state is RunState.COMPLETED
        tasks = await rows(fleet, job)
        assert [task.status for task in tasks] == [TaskStatus.SUCCEEDED] * 300 + [TaskStatus.FAILED]
        for task in tasks[:300]:
            body = await read_body(fleet.system.blobs, task)
            assert len(body) == 100 + 3 * task.index
            assert task.detail.body is not None
            assert task.detail.body.sha256 == sha256(body).hexdigest()
            assert task.detail.final_url == urls[task.index]
            assert (task.detail.body.stored is not None) == (layout == "packed" and len(body) > 511), "deflated there"
        assert tasks[300].error_code == "http_404"
    assert fetchers() == []


async def test_a_job_keeps_to_its_concurrency_over_all_fetchers(site: Site, tmp_path: Path) -> None:
    async with embedded(tmp_path / "data", fetchers=3) as fleet:
        urls = [site.url(f"/late/20?n={number}") for number in range(60)]
        job = await ended(fleet, await submitted(fleet, tmp_path, urls, concurrency=4))
        assert (await fleet.system.tasks.counts(job.key)).succeeded == 60
    assert 1 < site.most_at_once <= 4


async def test_limits_of_a_target_hold_over_all_fetchers(site: Site, tmp_path: Path) -> None:
    async with embedded(tmp_path / "data", fetchers=2) as fleet:
        urls = [site.url(f"/late/20?n={number}") for number in range(40)]
        job = await submitted(fleet, tmp_path, urls, concurrency=30, concurrency_per_host=3)
        job = await ended(fleet, job)
        assert (await fleet.system.tasks.counts(job.key)).succeeded == 40
    assert site.most_at_once <= 3


async def test_tasks_of_a_fetcher_that_is_killed_are_fetched_again(site: Site, tmp_path: Path) -> None:
    async with embedded(tmp_path / "data", fetchers=2, max_lost_starts=100) as fleet:
        urls = [site.url(f"/late/10?n={number}") for number in range(2000)]
        job = await submitted(fleet, tmp_path, urls, concurrency=40)
        for kill in range(1, 6):

            async def some_done(least: int = kill * 150) -> bool:
                return (await fleet.system.tasks.counts(job.key)).ended >= least and len(fetchers()) == 2

            await until(some_done)
            # One that was killed before may end only now.
            alive = fetchers()
            os.kill(alive[kill % len(alive)], signal.SIGKILL)
        job = await ended(fleet, job)
        assert job.state is RunState.COMPLETED
        kept, truth = await fleet.system.tasks.counts(job.key), await fleet.system.tasks.recount(job.key)
        assert kept == truth
        assert (truth.succeeded, truth.ended) == (2000, 2000)


async def test_stopping_gives_back_what_did_not_begin(site: Site, tmp_path: Path) -> None:
    urls = [site.url(f"/late/50?n={number}") for number in range(400)]
    async with embedded(tmp_path / "data") as fleet:
        job = await submitted(fleet, tmp_path, urls, concurrency=10)

        async def some_done() -> bool:
            return (await fleet.system.tasks.counts(job.key)).ended >= 20

        await until(some_done)
    assert fetchers() == []
    async with embedded(tmp_path / "data") as fleet:
        job = await ended(fleet, job)
        tasks = await rows(fleet, job)
        assert [task.attempts for task in tasks] == [1] * 400
        assert {task.status for task in tasks} == {TaskStatus.SUCCEEDED}
    # Nothing was given back that had begun: each page was asked for once.
    assert len(site.seen) == 400
