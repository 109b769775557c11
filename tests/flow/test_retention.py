"""Retention: nothing goes that something refers to, nothing is left behind, and what arrives is removed as fast."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256

import msgspec
import pytest

from conveyor import faults
from conveyor.accept.schedules import Schedules, ScheduleSpec
from conveyor.accept.spec import JobSpec, SourceSpec
from conveyor.accept.submit import Submit
from conveyor.engines.records import Document, IdempotencyClaim
from conveyor.lists.uploads import Uploads, UploadSpec
from conveyor.model import JobId, JobKind
from conveyor.recover.retention import SETTLE_SECONDS, Removed, Retention
from tests.support.make_jobs import ACME
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
