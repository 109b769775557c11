"""A clock that jumps forward by weeks: it hides what it makes look expired, and nothing of that is purged before the
clock has run on evenly for an hour. What it hid is there again when it is right."""

from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any

import pytest

from conveyor.coordination.trusted_time import TrustedTime
from conveyor.engines.records import Document
from conveyor.lists.uploads import Uploads, UploadSpec
from conveyor.model import Backoff, Counts, Job, Mode
from conveyor.recover.monitor import Monitor, monitor_of
from conveyor.recover.retention import Removed, Retention
from conveyor.recover.sweeper import Sweeper
from conveyor.states import RunState
from tests.support.make_jobs import ACME, DAY, OTHER
from tests.support.small_fleet import Fleet, fail, open_fleet, succeed

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


def monitor(fleet: Fleet) -> Monitor:
    """As a process has it that starts now."""
    return monitor_of(fleet.system)


def sweeper(fleet: Fleet, **given: Any) -> Sweeper:
    system, clock = fleet.system, fleet.clock
    trusted = TrustedTime(system.records.documents, clock, deadlines=True)
    return Sweeper(system.records, system.tasks, system.queue, fleet.lifecycle, clock, trusted=trusted, **given)


async def no_run_fails_by_a_jump() -> None:
    async with open_fleet() as fleet:
        job, role = await fleet.submit(5, deadline=2 * HOUR), monitor(fleet)
        await role.run_once()
        fleet.clock.step(JUMP)
        for _ in range(50):
            assert (await role.run_once()).overdue == 0
            fleet.clock.advance(60)
        fleet.clock.step(-JUMP)
        fleet.start(fleet.worker())
        (ended,) = await fleet.ended(job)
        assert ended.state is RunState.COMPLETED


async def test_no_run_fails_by_a_jump() -> None:
    await no_run_fails_by_a_jump()


@pytest.mark.parametrize("jump", [120.0, JUMP])
async def test_deadlines_go_on_without_the_jump(fleet: Fleet, jump: float) -> None:
    await fleet.submit(5, deadline=600.0)
    role = monitor(fleet)
    await role.run_once()
    fleet.clock.step(jump)
    for minute in range(1, 12):
        fleet.clock.advance(60)
        assert bool((await role.run_once()).overdue) is (minute == 10)


async def test_a_clock_that_runs_on_evenly_counts_for_deadlines_after_an_hour(fleet: Fleet) -> None:
    await fleet.submit(5, deadline=5 * HOUR)
    role = monitor(fleet)
    await role.run_once()
    fleet.clock.step(6 * HOUR)
    overdue = []
    for _ in range(62):
        fleet.clock.advance(60)
        overdue.append((await role.run_once()).overdue)
    assert sum(overdue[:59]) == 0
    assert sum(overdue) == 1


@pytest.mark.parametrize("jump", [3 * HOUR, JUMP])
async def test_a_monitor_that_starts_after_the_jump_fails_no_run(fleet: Fleet, jump: float) -> None:
    await fleet.submit(5, deadline=2 * HOUR)
    await monitor(fleet).run_once()
    fleet.clock.step(jump)
    assert (await monitor(fleet).run_once()).overdue == 0


async def test_monitors_that_start_often_count_deadlines(fleet: Fleet) -> None:
    await fleet.submit(5, deadline=2 * HOUR)
    overdue = 0
    for _ in range(13):
        overdue += (await monitor(fleet).run_once()).overdue
        fleet.clock.advance(600)
    assert overdue == 1


async def test_lifetimes_and_idle_timeouts_go_on_without_the_jump(fleet: Fleet) -> None:
    job = await fleet.submit(5, max_lifetime=2 * HOUR)
    idle = await fleet.submit(0, mode=Mode.OPEN, tasks=[], idle_timeout=HOUR)
    role = sweeper(fleet)
    await role.run_once()
    fleet.clock.step(JUMP)
    for _ in range(30):
        fleet.clock.advance(60)
        swept = await role.run_once()
        assert (swept.failed, swept.closed) == (0, 0)
    assert (await fleet.job(job.job_id)).state is RunState.RUNNING
    assert (await fleet.job(idle.job_id)).state is RunState.INGESTING
    for _ in range(40):
        fleet.clock.advance(60)
        await role.run_once()
    assert (await fleet.job(job.job_id)).state is RunState.FAILED


async def a_jump_after_a_step_back_closes_nobody() -> None:
    """Back and then forward, with a restart: less than it went back."""
    async with open_fleet() as fleet:
        role, _ = sweeper(fleet), await fleet.submit(1)
        await role.run_once()
        fleet.clock.step(-5 * HOUR)
        await role.run_once()
        job = await fleet.submit(0, mode=Mode.OPEN, tasks=[], idle_timeout=HOUR)
        fleet.clock.step(2 * HOUR)
        assert (await sweeper(fleet).run_once()).closed == 0
        assert (await fleet.job(job.job_id)).state is RunState.INGESTING


async def test_a_jump_after_a_step_back_closes_nobody() -> None:
    await a_jump_after_a_step_back_closes_nobody()


async def a_second_jump_during_a_restart_closes_nobody() -> None:
    """An hour by the wall clock has passed since the first jump, but nobody has seen it pass."""
    async with open_fleet() as fleet:
        role = sweeper(fleet)
        job = await fleet.submit(0, mode=Mode.OPEN, tasks=[], idle_timeout=HOUR)
        await role.run_once()
        fleet.clock.step(2 * HOUR)
        await role.run_once()
        fleet.clock.step(2 * HOUR)
        role = sweeper(fleet)
        for _ in range(50):
            assert (await role.run_once()).closed == 0
            fleet.clock.advance(60)
        assert (await fleet.job(job.job_id)).state is RunState.INGESTING


async def test_a_second_jump_during_a_restart_closes_nobody() -> None:
    await a_second_jump_during_a_restart_closes_nobody()


async def test_a_server_that_was_off_says_so_and_reports_no_error(fleet: Fleet) -> None:
    await finished(fleet)
    await retention(fleet).run_once()
    await monitor(fleet).run_once()
    fleet.clock.step(3 * DAY)
    await retention(fleet).run_once()
    await monitor(fleet).run_once()
    said = [each for each in fleet.logs if each["event"].startswith("nothing ran for a while")]
    assert [each["log_level"] for each in said] == ["info", "info"]
    assert not [each for each in fleet.logs if each["log_level"] in ("warning", "error")]
    fleet.clock.step(-4 * DAY)
    await retention(fleet).run_once()
    assert [each["log_level"] for each in fleet.logs if each["event"] == "clock was set back"] == ["warning"]


SLOW = Backoff(base=100.0, rate=1.0, cap=100.0, jitter=False)


async def retried(fleet: Fleet, **spec: Any) -> Job:
    """A job whose tasks have failed once and wait for their retry."""
    fleet.executor.act = fail
    job = await fleet.submit(5, backoff=SLOW, attempts=5, **spec)
    fleet.start(fleet.worker())
    fleet.start(fleet.sweeper)
    await fleet.until(lambda: len(fleet.executor.starts) == 5)
    await fleet.passing(5.0)
    return job


async def no_task_fails_by_a_jump(jump: float = JUMP) -> None:
    async with open_fleet() as fleet:
        job = await retried(fleet, task_deadline=1800.0)
        fleet.clock.step(jump)
        await fleet.until(lambda: len(fleet.executor.starts) == 10)
        await fleet.passing(5.0)
        fleet.executor.act = succeed
        fleet.clock.step(-jump)
        (ended,) = await fleet.ended(job)
        assert ended.state is RunState.COMPLETED
        await fleet.check(job)
        assert (await fleet.system.tasks.counts(job.key)).succeeded == 5


@pytest.mark.parametrize("jump", [2 * HOUR, 6 * DAY, JUMP])
async def test_no_task_fails_by_a_jump(jump: float) -> None:
    await no_task_fails_by_a_jump(jump)


async def test_no_task_fails_by_a_jump_during_a_restart(fleet: Fleet) -> None:
    fleet.executor.act = fail
    job = await fleet.submit(5, backoff=SLOW, attempts=5, task_deadline=1800.0)
    worker = fleet.start(fleet.worker())
    await fleet.until(lambda: len(fleet.executor.starts) == 5)
    await fleet.passing(5.0)
    await fleet.stop(worker)
    fleet.clock.step(2 * HOUR)
    fleet.executor.act = succeed
    fleet.start(fleet.worker())
    fleet.start(fleet.sweeper)
    await fleet.ended(job)
    assert (await fleet.system.tasks.counts(job.key)).succeeded == 5


async def test_deadlines_of_tasks_go_on_without_the_jump(fleet: Fleet) -> None:
    job = await retried(fleet, task_deadline=250.0)
    fleet.clock.step(JUMP)
    await fleet.ended(job)
    # The second at once, by the wall clock; two more within the time, and none after it.
    assert set(fleet.executor.count().values()) == {4}
    assert (await fleet.system.tasks.counts(job.key)).failed == 5


async def test_deadlines_of_tasks_begin_anew_when_the_clock_was_set_back(fleet: Fleet) -> None:
    job = await retried(fleet, task_deadline=450.0)
    began = fleet.clock.monotonic()
    fleet.clock.step(-6 * DAY)
    await fleet.ended(job, within=2000)
    assert fleet.clock.monotonic() - began < 1000
    assert (await fleet.system.tasks.counts(job.key)).failed == 5
