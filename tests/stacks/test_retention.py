"""Retention on each stack: unfinished jobs stay, and a submit that died before its job leaves nothing."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from conveyor import faults
from conveyor.accept.spec import JobSpec
from conveyor.accept.submit import Submit
from conveyor.clock import SystemClock
from conveyor.engines.tasks import TaskFilter
from conveyor.errors import EngineFailed
from conveyor.jobs.idempotency import IdempotentRequest
from conveyor.jobs.orphans import ORPHANS
from conveyor.lifecycle import Lifecycle
from conveyor.model import JobId, JobKind, RunKey, TenantId, UploadRecord, first_run_id
from conveyor.recover.retention import SETTLE_SECONDS, Removed, Retention
from conveyor.settings import Settings
from conveyor.states import RunState
from conveyor.system import System, open_system
from tests.support.make_jobs import DAY

ACME = TenantId("acme")
TASKS = [msgspec.Raw(msgspec.json.encode(f"http://example.com/{number}")) for number in range(30)]
SPEC = JobSpec(kind=JobKind.FETCH, tasks=TASKS)
REQUEST = IdempotentRequest("POST /v1/jobs", "k1", "print")

# Before its job is written, and after.
LOST = ("orphans.note.before", "orphans.note.after", "accept.stage.after", "accept.tasks.after", "accept.job.before")
KEPT = ("accept.job.after", "accept.ingested.after", "orphans.forget.before", "orphans.forget.after")
RETENTION = (
    "retention.orphan.before",
    "retention.orphan.doomed",
    "retention.orphan.between",
    "retention.orphan.after",
)


class Moved(SystemClock):
    """The time of this machine, and some more."""

    ahead = 0.0
    job_id = ""

    def now(self) -> float:
        return super().now() + self.ahead

    def new_id(self, prefix: str) -> str:
        made = super().new_id(prefix)
        if prefix == "job":
            self.job_id = made
        return made


class DeadProcess(BaseException):
    """In the place of a process that dies at a crash point."""


@pytest.fixture
async def clock() -> Moved:
    return Moved()


@pytest.fixture
async def system(settings: Settings, clock: Moved) -> Any:
    async with open_system(settings, clock) as opened:
        yield opened


def retention(system: System) -> Retention:
    return Retention(system.records, system.tasks, system.queue, system.coordinator, system.blobs, system.clock)


async def purge(system: System) -> Removed:
    """Everything that is due; what was removed in all."""
    total = Removed()
    while (once := await retention(system).run_once()) != Removed():
        for name in Removed.__struct_fields__:
            setattr(total, name, getattr(total, name) + getattr(once, name))
    return total


async def died(point: str, work: Any) -> bool:
    """Whether it came to the point, and died there."""

    def die(name: str) -> None:
        if name == point:
            raise DeadProcess

    faults.arm(die)
    try:
        await work
    except DeadProcess:
        return True
    finally:
        faults.arm(None)
    return False


async def left(system: System, job_id: str) -> dict[str, int]:
    """What there is of a job, but for the job itself."""
    run = RunKey(ACME, JobId(job_id), first_run_id(job_id))
    tasks = await system.tasks.scan(run, 0, None, 1000, TaskFilter())
    blobs = [info.key async for info in system.blobs.listing(f"lists/{ACME}/{job_id}/")]
    notes = await system.records.documents.documents(ORPHANS, ACME, None, 100)
    found = {"tasks": len(tasks.tasks), "lists": len(blobs), "notes": len(notes.items)}
    return {name: count for name, count in found.items() if count}


def submit(system: System, prefer_async: bool) -> Any:
    return Submit(system).submit(ACME, SPEC, REQUEST, prefer_async)


@pytest.mark.parametrize("point", LOST)
@pytest.mark.parametrize("prefer_async", [False, True], ids=["with tasks", "staged"])
async def test_a_submit_that_died_before_its_job_leaves_nothing(
    system: System, clock: Moved, point: str, prefer_async: bool
) -> None:
    if not await died(point, submit(system, prefer_async)):
        # This stack accepts another way, without this step.
        return
    job_id = clock.job_id
    before = await left(system, job_id)
    await purge(system)
    assert await left(system, job_id) == before, "the client may ask again"
    clock.ahead = system.settings.idempotency_seconds + 3601
    removed = await purge(system)
    assert await left(system, job_id) == {}
    assert removed.orphans == before.get("notes", 0)
    # The key is free by then, and makes another job.
    accepted = await submit(system, prefer_async)
    assert accepted.subject != job_id
    await purge(system)
    job = await system.records.jobs.job(ACME, JobId(accepted.subject))
    assert job is not None
    found = await left(system, accepted.subject)
    assert found == ({"lists": 1} if prefer_async else {"tasks": len(TASKS)})


@pytest.mark.parametrize("point", [*LOST, *KEPT])
@pytest.mark.parametrize("prefer_async", [False, True], ids=["with tasks", "staged"])
async def test_a_submit_that_is_sent_again_is_whole(
    system: System, clock: Moved, point: str, prefer_async: bool
) -> None:
    await died(point, submit(system, prefer_async))
    job_id = clock.job_id
    clock.ahead = system.settings.idempotency_seconds - 60
    accepted = await submit(system, prefer_async)
    assert accepted.subject == job_id, "what the claim reserved"
    # The time of what was noted counts from the second attempt.
    clock.ahead += 3600 + 120
    await purge(system)
    clock.ahead += system.settings.idempotency_seconds
    await purge(system)
    assert await left(system, job_id) == ({"lists": 1} if prefer_async else {"tasks": len(TASKS)})
    assert await system.records.jobs.job(ACME, JobId(job_id)) is not None


@pytest.mark.parametrize("point", RETENTION)
async def test_retention_that_dies_goes_on_with_what_was_left(system: System, clock: Moved, point: str) -> None:
    if not await died("accept.stage.after", submit(system, True)):
        pytest.fail("the list was not staged")
    job_id = clock.job_id
    clock.ahead = system.settings.idempotency_seconds + 3601
    assert await died(point, purge(system))
    await purge(system)
    assert await left(system, job_id) == {}


async def test_what_is_being_removed_is_not_written_again(system: System, clock: Moved) -> None:
    """As by a schedule, whose fire has the same id however late it is tried again."""
    job_id = JobId(clock.new_id("job"))
    fire = IdempotentRequest("schedules", "fire", "fire")
    steps = replace(system, atomic_accept=None)
    await died("accept.job.before", Submit(steps).submit_as(job_id, ACME, SPEC, None, fire))
    clock.ahead = system.settings.idempotency_seconds + 3601
    assert await died("retention.orphan.doomed", purge(system))
    with pytest.raises(EngineFailed, match="being removed"):
        await Submit(steps).submit_as(job_id, ACME, SPEC, None, fire)
    await purge(system)
    assert await left(system, job_id) == {}
    clock.ahead += system.settings.idempotency_lease_seconds + 1
    accepted = await Submit(steps).submit_as(job_id, ACME, SPEC, None, fire)
    assert accepted.subject == job_id
    assert await left(system, job_id) == {"tasks": len(TASKS)}


async def test_an_unfinished_job_stays_and_a_finished_one_goes_after_its_time(system: System, clock: Moved) -> None:
    spec = JobSpec(kind=JobKind.FETCH, tasks=TASKS, retention_days=2)
    job_id = JobId((await Submit(system).submit(ACME, spec)).subject)
    clock.ahead = 100 * DAY
    await purge(system)
    assert await left(system, job_id) == {"tasks": len(TASKS)}
    job = await system.records.jobs.job(ACME, job_id)
    assert job is not None
    assert job.expires_at is None
    lifecycle = Lifecycle(system.records, system.tasks, clock)
    assert await lifecycle.move(job, RunState.CANCELLED, "why", await system.tasks.counts(job.key))
    clock.ahead += 2 * DAY - 60
    await purge(system)
    assert await left(system, job_id) == {"tasks": len(TASKS)}
    clock.ahead += 120
    await purge(system)
    assert await left(system, job_id) == {}
    assert await system.records.jobs.runs(job_id) == []


async def test_a_list_that_arrives_after_its_upload_was_purged_goes_too(system: System, clock: Moved) -> None:
    """Straight to the store: the signature was valid when the client began to send."""
    now = clock.now()
    upload = UploadRecord(ACME, "upload_late", f"uploads/{ACME}/upload_late", 4, "0" * 64, now, now + 60)
    await system.records.access.create_upload(upload, None)
    clock.ahead = 60 + SETTLE_SECONDS + 1
    assert (await purge(system)).uploads == 1
    if await system.blobs.presigned_put(upload.key, upload.size, upload.sha256, 60) is None:
        # Through the API, which refuses it.
        return
    await system.blobs.put(upload.key, b"late")
    clock.ahead += DAY + 1
    await purge(system)
    assert await system.blobs.size(upload.key) is None
    assert (await system.records.documents.documents(ORPHANS, ACME, None, 10)).items == []
