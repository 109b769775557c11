"""Retention: nothing goes that something refers to, nothing is left behind, and what arrives is removed as fast."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any

import msgspec
import pytest

from conveyor import faults
from conveyor.accept.option_changes import change_options
from conveyor.accept.rerun import Rerun, RerunSpec
from conveyor.accept.schedules import Schedules, ScheduleSpec
from conveyor.accept.spec import JobSpec, SourceSpec
from conveyor.accept.submit import Submit
from conveyor.engines.records import Document, IdempotencyClaim
from conveyor.errors import Conflict, InvalidField, JobEnded
from conveyor.lifecycle import Lifecycle
from conveyor.lists.uploads import Uploads, UploadSpec
from conveyor.model import Counts, Job, JobId, JobKind, Mode
from conveyor.recover.retention import SETTLE_SECONDS, Removed, Retention
from conveyor.recover.sweeper import Sweeper
from conveyor.states import ReasonCode, RunState
from tests.support.make_jobs import ACME, DAY, end, make_job, make_notice
from tests.support.small_fleet import Fleet, open_fleet

LIST = b"http://target.example/\n"
# More than five steps of retention.
EXPIRED = 5500


def retention(fleet: Fleet) -> Retention:
    system = fleet.system
    return Retention(system.records, system.tasks, system.queue, system.coordinator, system.blobs, fleet.clock)


async def remove_all(fleet: Fleet) -> None:
    """All that has been due for long enough."""
    fleet.clock.advance(SETTLE_SECONDS + 1)
    while await retention(fleet).run_once() != Removed():
        pass


async def uploaded(fleet: Fleet) -> str:
    uploads = Uploads(fleet.system)
    spec = UploadSpec(len(LIST), sha256(LIST).hexdigest())
    promised = await uploads.promise(ACME, spec, "{}/{}".format)
    _, _, signature = msgspec.json.decode(promised.body)["url"].partition("/")

    async def pieces() -> AsyncIterator[bytes]:
        yield LIST

    await uploads.fill(promised.subject, signature, None, None, pieces())
    return promised.subject


async def stored(fleet: Fleet, upload_id: str) -> bool:
    return await fleet.blobs.size(f"uploads/{ACME}/{upload_id}") is not None


async def scheduled(fleet: Fleet, upload_id: str) -> str:
    job = msgspec.json.encode({"kind": "fetch", "source": {"upload_id": upload_id}})
    return (await Schedules(fleet.system).create(ACME, ScheduleSpec("0 0 * * *", msgspec.Raw(job)))).subject


async def test_an_upload_is_kept_while_a_job_or_a_schedule_refers_to_it() -> None:
    async with open_fleet() as fleet:
        upload_id = await uploaded(fleet)
        spec = JobSpec(kind=JobKind.FETCH, source=SourceSpec(upload_id))
        jobs = [JobId((await Submit(fleet.system).submit(ACME, spec)).subject) for _ in range(2)]
        schedule = await scheduled(fleet, upload_id)
        for job_id in jobs:
            await fleet.system.records.jobs.mark_deleted(ACME, job_id)
            await remove_all(fleet)
            await remove_all(fleet)
            assert await stored(fleet, upload_id)
            assert await fleet.system.records.access.upload(upload_id) is not None
        await Schedules(fleet.system).remove(ACME, schedule)
        await remove_all(fleet)
        assert not await stored(fleet, upload_id)
        assert await fleet.system.records.access.upload(upload_id) is None


class Died(BaseException):
    """In the place of a process that dies at a crash point."""


@asynccontextmanager
async def dying_at(point: str) -> AsyncIterator[None]:
    def die(name: str) -> None:
        if name == point:
            raise Died

    faults.arm(die)
    try:
        with pytest.raises(Died):
            yield
    finally:
        faults.arm(None)


async def test_a_death_between_an_uploads_object_and_its_row_leaves_neither() -> None:
    for moment in ("before", "between", "after"):
        async with open_fleet() as fleet:
            upload_id = await uploaded(fleet)
            fleet.clock.advance(fleet.system.settings.upload_seconds + SETTLE_SECONDS + 1)
            async with dying_at(f"retention.upload.{moment}"):
                await retention(fleet).run_once()
            await remove_all(fleet)
            assert not await stored(fleet, upload_id), moment
            assert await fleet.system.records.access.expired_uploads(fleet.clock.now(), 10) == []


async def test_expired_rows_are_removed_as_fast_as_they_come() -> None:
    async with open_fleet() as fleet:
        records, now = fleet.system.records, fleet.clock.now()
        claims = [
            IdempotencyClaim(ACME, "POST /v1/jobs", f"key {number}", "", "", now, now + 60) for number in range(EXPIRED)
        ]
        await asyncio.gather(*map(records.access.claim, claims))
        rows = [Document("delivery", ACME, f"{number}", b"", expires_at=now + 60) for number in range(EXPIRED)]
        await asyncio.gather(*(records.documents.create_documents(rows[at : at + 25]) for at in range(0, EXPIRED, 25)))
        fleet.clock.advance(60)
        fleet.start(retention(fleet))
        await fleet.quiet()
        assert await records.access.purge_expired(1) == 0, "without that a second has passed"


async def expiry(fleet: Fleet, job: Job) -> float | None:
    return (await fleet.job(job.job_id)).expires_at


async def ended_job(fleet: Fleet, **spec: Any) -> Job:
    job = await fleet.submit(3, **spec)
    await fleet.system.tasks.finish(job.key, [end(index) for index in range(3)])
    assert (await fleet.sweeper.run_once()).completed == 1
    return await fleet.job(job.job_id)


async def test_a_job_that_is_not_finished_stays_with_all_that_it_needs() -> None:
    async with open_fleet() as fleet:
        job = await fleet.submit(3, retention_days=1)
        staged = await fleet.stage(['"one"', '"two"'], retention_days=1)
        for _ in range(3):
            fleet.clock.advance(100 * DAY)
            await remove_all(fleet)
        fleet.start(fleet.worker())
        fleet.start(fleet.ingester())
        await fleet.ended(job, staged)
        for each in (job, staged):
            ended = await fleet.job(each.job_id)
            assert ended.run.ended_at is not None
            assert ended.expires_at == ended.run.ended_at + DAY
            await fleet.check(each)
        fleet.clock.advance(DAY)
        await remove_all(fleet)
        assert await fleet.system.records.jobs.runs(job.job_id) == []


async def test_a_rerun_keeps_the_job_and_its_end_starts_the_time_anew() -> None:
    async with open_fleet() as fleet:
        job = await ended_job(fleet, retention_days=14)
        fleet.clock.advance(13 * DAY)
        await Rerun(fleet.system).rerun(job, RerunSpec("all", {"retention_days": 30}))
        assert await expiry(fleet, job) is None
        fleet.clock.advance(40 * DAY)
        fleet.start(fleet.worker())
        fleet.start(fleet.ingester())
        (ended,) = await fleet.ended(job)
        assert ended.run.number == 2
        assert ended.expires_at == (ended.run.ended_at or 0) + 30 * DAY
        fleet.clock.advance(29 * DAY)
        await remove_all(fleet)
        assert len(await fleet.system.records.jobs.runs(job.job_id)) == 2, "all runs are kept"


async def test_the_retention_of_a_finished_job_can_change() -> None:
    async with open_fleet() as fleet:
        job = await ended_job(fleet, retention_days=14)
        at = job.run.ended_at
        assert at is not None
        fleet.clock.advance(10 * DAY)
        for days in (20.0, 365.0, 11.0):
            job = await change_options(fleet.system, job, {"retention_days": days})
            assert job.expires_at == pytest.approx(at + days * DAY, abs=1e-3)
        for changes, error in (({"retention_days": 9}, InvalidField), ({"concurrency": 9}, JobEnded)):
            with pytest.raises(error):
                await change_options(fleet.system, job, changes)
        assert await expiry(fleet, job) == job.expires_at, "no change removes a job at once"
        fleet.clock.advance(DAY)
        await remove_all(fleet)
        assert await fleet.system.records.jobs.runs(job.job_id) == []


@pytest.mark.parametrize("state", ["running", "paused", "ingesting", "open"])
async def test_a_run_fails_at_its_maximum_lifetime(state: str) -> None:
    async with open_fleet() as fleet:
        if state in ("ingesting", "open"):
            mode = Mode.OPEN if state == "open" else Mode.CLOSED
            job = make_job(
                fleet.clock, latched=False, state=RunState.INGESTING, mode=mode, max_lifetime=60, idle_timeout=1e6
            )
            await fleet.system.records.jobs.create_job(job, make_notice(fleet.clock, job), None)
        else:
            job = await fleet.submit(3, max_lifetime=60)
            await fleet.system.tasks.finish(job.key, [end(0)])
        if state == "paused":
            await fleet.move(job, RunState.PAUSED)
        fleet.clock.advance(59)
        assert (await fleet.sweeper.run_once()).failed == 0
        fleet.clock.advance(1)
        swept = await fleet.sweeper.run_once()
        assert swept.failed == 1
        shown = await fleet.job(job.job_id)
        unfinished = "its list is" if state in ("ingesting", "open") else "2 tasks are"
        reason = f"max_lifetime: not finished within 60 s; {unfinished} unfinished"
        assert (shown.state, shown.reason, shown.run.reason_code) == (RunState.FAILED, reason, "max_lifetime")
        assert shown.expires_at == fleet.clock.now() + 14 * DAY
        last = (await fleet.system.records.outbox.events(ACME, job.job_id, None, 100)).items[-1]
        assert (last.event, last.data["reason_code"], last.data["reason"]) == ("run.failed", "max_lifetime", reason)
        await fleet.sweeper.run_once()
        if state in ("running", "paused"):
            assert await fleet.counts(job) == Counts(succeeded=1, cancelled=2)
        assert any(entry["event"] == "run reached its maximum lifetime" for entry in fleet.logs)
        fleet.logs.clear()


async def test_a_run_whose_tasks_have_all_finished_completes_at_its_maximum_lifetime() -> None:
    async with open_fleet() as fleet:
        job = await fleet.submit(3, max_lifetime=60)
        await fleet.system.tasks.finish(job.key, [end(index) for index in range(3)])
        fleet.clock.advance(60)
        swept = await fleet.sweeper.run_once()
        assert (swept.completed, swept.failed) == (1, 0)


async def test_the_maximum_lifetime_of_the_operator_holds_for_every_run() -> None:
    async with open_fleet() as fleet:
        system = fleet.system
        jobs = [await fleet.submit(1), await fleet.submit(1, max_lifetime=50), await fleet.submit(1, max_lifetime=90)]
        lifecycle = Lifecycle(system.records, system.tasks, system.clock)
        sweeper = Sweeper(system.records, system.tasks, system.queue, lifecycle, system.clock, 60.0)
        fleet.clock.advance(50)
        assert (await sweeper.run_once()).failed == 1
        assert (await fleet.job(jobs[1].job_id)).state is RunState.FAILED
        fleet.clock.advance(10)
        assert (await sweeper.run_once()).failed == 2
        fleet.logs.clear()


async def test_a_failed_ingest_past_its_maximum_lifetime_is_not_resumed_to_fail_for_good() -> None:
    async with open_fleet() as fleet:
        job = await fleet.stage(['"one"'], max_lifetime=60)
        counts, failed = Counts(), RunState.FAILED
        lifecycle = Lifecycle(fleet.system.records, fleet.system.tasks, fleet.clock)
        await lifecycle.move(job, failed, "why", counts, keep=True, code=ReasonCode.INGEST_FAILED)
        fleet.clock.advance(60)
        with pytest.raises(Conflict, match="max_lifetime"):
            await Rerun(fleet.system).rerun(await fleet.job(job.job_id), RerunSpec())
        await Rerun(fleet.system).rerun(await fleet.job(job.job_id), RerunSpec(options={"max_lifetime": None}))
        fleet.start(fleet.worker())
        fleet.start(fleet.ingester())
        (ended,) = await fleet.ended(job)
        assert (ended.state, ended.run.total) == (RunState.COMPLETED, 1)
