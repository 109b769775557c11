"""A clock that jumps forward by weeks: it hides what it makes look expired, and nothing of that is purged before the
clock has run on evenly for an hour. What it hid is there again when it is right."""

from collections.abc import AsyncIterator
from hashlib import sha256

import pytest

from conveyor.engines.records import Document
from conveyor.lists.uploads import Uploads, UploadSpec
from conveyor.model import Counts, Job
from conveyor.recover.retention import Removed, Retention
from conveyor.recover.trusted_time import TrustedTime
from conveyor.states import RunState
from tests.support.make_jobs import ACME, DAY, OTHER
from tests.support.small_fleet import Fleet, open_fleet

JUMP = 20 * DAY
HOUR = 3600.0


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with open_fleet() as opened:
        yield opened


def retention(fleet: Fleet) -> Retention:
    """As a process has it that starts now."""
    system, clock = fleet.system, fleet.clock
    engines = (system.records, system.tasks, system.queue, system.coordinator, system.blobs)
    return Retention(*engines, clock, trusted=TrustedTime(system.records.documents, clock))


async def finished(fleet: Fleet) -> Job:
    job = await fleet.submit(5)
    fleet.start(fleet.worker())
    (ended,) = await fleet.ended(job)
    return ended


async def passes(fleet: Fleet, role: Retention, seconds: float) -> int:
    """How many jobs it purges in this time."""
    jobs = 0
    for _ in range(int(seconds / 60)):
        fleet.clock.advance(60)
        while (removed := await role.run_once()) != Removed():
            jobs += removed.jobs
    return jobs


async def is_shown(fleet: Fleet, job: Job) -> bool:
    return await fleet.system.records.jobs.job(job.tenant, job.job_id) is not None


async def what_a_jump_hides_comes_back() -> None:
    async with open_fleet() as fleet:
        job, role = await finished(fleet), retention(fleet)
        assert await role.run_once() == Removed()
        fleet.clock.step(JUMP)
        assert not await is_shown(fleet, job)
        assert await passes(fleet, role, 3000) == 0
        assert any(each["event"].startswith("clock jumped forward") for each in fleet.logs)
        fleet.clock.step(-JUMP)
        assert await passes(fleet, role, 2 * HOUR) == 0
        assert await is_shown(fleet, job)
        await fleet.check(job)


async def a_process_that_starts_after_the_jump_purges_nothing() -> None:
    async with open_fleet() as fleet:
        job = await finished(fleet)
        assert await retention(fleet).run_once() == Removed()
        fleet.clock.step(JUMP)
        assert await passes(fleet, retention(fleet), 3000) == 0
        fleet.clock.step(-JUMP)
        assert await is_shown(fleet, job)


async def test_what_a_jump_hides_comes_back() -> None:
    await what_a_jump_hides_comes_back()


async def test_a_process_that_starts_after_the_jump_purges_nothing() -> None:
    await a_process_that_starts_after_the_jump_purges_nothing()


async def test_documents_and_uploads_stay_too(fleet: Fleet) -> None:
    role, documents = retention(fleet), fleet.system.records.documents
    uploads = Uploads(fleet.system)
    promised = await uploads.promise(ACME, UploadSpec(5, sha256(b"lines").hexdigest()), "{}/{}".format)
    await documents.create_documents(
        [Document("session", OTHER, "one", b"{}", expires_at=fleet.clock.now() + 4 * HOUR)]
    )
    await role.run_once()
    fleet.clock.step(JUMP)
    assert await passes(fleet, role, 1200) == 0
    fleet.clock.step(-JUMP)
    assert await fleet.system.records.access.upload(promised.subject) is not None
    assert await documents.document("session", OTHER, "one") is not None


async def test_a_clock_that_runs_on_evenly_is_trusted_after_an_hour(fleet: Fleet) -> None:
    job, role = await finished(fleet), retention(fleet)
    await role.run_once()
    fleet.clock.step(JUMP)
    assert await passes(fleet, role, HOUR - 60) == 0
    assert await passes(fleet, role, 300) == 1
    assert await fleet.system.tasks.counts(job.key) == Counts()


async def test_each_jump_begins_the_hour_anew(fleet: Fleet) -> None:
    await finished(fleet)
    role = retention(fleet)
    await role.run_once()
    for _ in range(3):
        fleet.clock.step(JUMP)
        assert await passes(fleet, role, HOUR - 120) == 0
    fleet.clock.step(-2 * JUMP)
    assert await passes(fleet, role, HOUR - 120) == 0


async def test_processes_that_never_run_for_an_hour_purge_too(fleet: Fleet) -> None:
    await finished(fleet)
    await retention(fleet).run_once()
    jobs = 0
    for _ in range(20):
        # Two days off, ten minutes on.
        fleet.clock.step(2 * DAY)
        jobs += await passes(fleet, retention(fleet), 600)
    assert jobs == 1


async def test_time_that_passes_is_no_jump(fleet: Fleet) -> None:
    job, role = await finished(fleet), retention(fleet)
    await role.run_once()
    for _ in range(13):
        fleet.clock.advance(DAY)
        assert (await role.run_once()).jobs == 0
    fleet.clock.advance(2 * DAY)
    assert (await role.run_once()).jobs == 1
    assert not await is_shown(fleet, job)
    assert not any(each["log_level"] == "error" for each in fleet.logs)


async def test_a_deleted_job_is_purged_as_ever(fleet: Fleet) -> None:
    job, role = await finished(fleet), retention(fleet)
    assert job.state is RunState.COMPLETED
    await role.run_once()
    await fleet.system.records.jobs.mark_deleted(ACME, job.job_id)
    assert await passes(fleet, role, 60) == 1
