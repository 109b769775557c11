"""Admission: who is let in when many ask at once, what counts, and that a refusal leaves nothing behind."""

import asyncio
from typing import Any

import msgspec
import pytest

from conveyor.accept.add_tasks import AddTasks
from conveyor.accept.control import Control
from conveyor.accept.spec import TasksSpec, decode_spec
from conveyor.accept.submit import Submit
from conveyor.api.request_budget import BodyReservation, RequestBudget
from conveyor.errors import Overloaded, QuotaExceeded
from conveyor.jobs.admission import Admission
from conveyor.lists.uploads import Uploads, UploadSpec
from conveyor.model import JobId, Mode, TenantId
from conveyor.settings import Settings
from conveyor.system import System
from tests.support.api import Api
from tests.support.clocks import JumpingClock
from tests.support.make_jobs import ACME, OTHER, end
from tests.support.places import quick_place

SPEC = decode_spec(b'{"kind": "python", "handler": "x", "tasks": [1, 2, 3, 4, 5]}')


@pytest.fixture
def settings() -> Any:
    with quick_place() as place:
        yield Settings.load(
            {},
            data=place,
            tenant_jobs=5,
            max_jobs=8,
            tenant_queued_tasks=20,
            max_queued_tasks=30,
            tenant_staged_bytes=1000,
            max_staged_bytes=1500,
            max_requests_bytes=1024 * 1024,
        )


async def outcome(admitting: Any) -> str:
    try:
        await admitting
    except (QuotaExceeded, Overloaded) as refused:
        return refused.code
    return "in"


async def test_of_many_at_once_as_many_come_in_as_there_is_room_for(system: System) -> None:
    admissions = [Admission(system) for _ in range(4)]
    asked = [admissions[number % 4].admit(ACME, jobs=1) for number in range(40)]
    got = await asyncio.gather(*map(outcome, asked))
    assert got.count("in") == 5
    assert got.count("quota_exceeded") == 35
    got = await asyncio.gather(*(outcome(admissions[0].admit(TenantId(f"t{n}"), jobs=1)) for n in range(10)))
    assert (got.count("in"), got.count("overloaded")) == (3, 7)


async def test_tasks_that_have_ended_make_room(system: System, clock: JumpingClock) -> None:
    submit = Submit(system)
    jobs = [(await submit.submit(ACME, SPEC)).subject for _ in range(4)]
    with pytest.raises(QuotaExceeded) as refused:
        await submit.submit(ACME, SPEC)
    assert (refused.value.details["reason"], refused.value.details["limit"]) == ("tasks", 20)
    job = await system.records.jobs.job(ACME, JobId(jobs[0]))
    assert job is not None
    await system.tasks.finish(job.key, [end(index) for index in range(5)])
    with pytest.raises(QuotaExceeded):
        await submit.submit(ACME, SPEC)
    clock.advance(6)
    await submit.submit(ACME, SPEC)


async def test_a_job_that_ended_makes_room(system: System, clock: JumpingClock) -> None:
    submit = Submit(system)
    spec = msgspec.structs.replace(SPEC, tasks=[msgspec.Raw(b"1")])
    jobs = [(await submit.submit(ACME, spec)).subject for _ in range(5)]
    assert await outcome(submit.submit(ACME, spec)) == "quota_exceeded"
    job = await system.records.jobs.job(ACME, JobId(jobs[0]))
    assert job is not None
    await Control(system).cancel(job)
    clock.advance(6)
    assert await outcome(submit.submit(ACME, spec)) == "in"


async def test_what_was_refused_is_not_counted(system: System) -> None:
    admission = Admission(system)
    for _ in range(50):
        assert await outcome(admission.admit(ACME, jobs=1, tasks=21)) == "quota_exceeded"
    for _ in range(5):
        assert await outcome(admission.admit(ACME, jobs=1, tasks=4)) == "in"


async def test_batches_of_an_open_job_count(system: System) -> None:
    opened = msgspec.structs.replace(SPEC, tasks=[], mode=Mode.OPEN)
    job = await system.records.jobs.job(ACME, JobId((await Submit(system).submit(ACME, opened)).subject))
    assert job is not None
    add, batch = AddTasks(system), TasksSpec([msgspec.Raw(b"1")] * 10)
    assert [await outcome(add.add(job, batch)) for _ in range(3)] == ["in", "in", "quota_exceeded"]


async def test_uploads_count_by_their_bytes_and_not_for_ever(system: System, clock: JumpingClock) -> None:
    uploads = Uploads(system, Admission(system).admit_upload)

    async def promise(size: int, tenant: TenantId = ACME) -> str:
        spec = UploadSpec(size, "0" * 64)
        return await outcome(uploads.promise(tenant, spec, "{}/{}".format))

    assert [await promise(400) for _ in range(3)] == ["in", "in", "quota_exceeded"]
    assert await promise(600, OTHER) == "in"
    assert await promise(200, OTHER) == "overloaded"
    clock.advance(2 * 3600 + 1)
    assert await promise(400) == "in"


async def test_what_is_known_is_shared_and_not_looked_for_each_time(
    system: System, clock: JumpingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    found = system.records.jobs.active_jobs

    async def active_jobs() -> Any:
        nonlocal looks
        looks += 1
        return await found()

    monkeypatch.setattr(system.records.jobs, "active_jobs", active_jobs)
    for _ in range(20):
        await Admission(system).admit(OTHER, tasks=1)
    assert looks == 1
    clock.advance(6)
    await asyncio.gather(*(outcome(Admission(system).admit(OTHER, tasks=1)) for _ in range(20)))
    assert looks == 2


class TestIntake:
    async def test_bodies_together_have_a_limit(self, server: Api) -> None:
        body = {"kind": "python", "handler": "x", "tasks": ["x" * 1_100_000]}
        refused = await server.post("/v1/jobs", body)
        assert (refused.status, refused.json["code"], refused.json["reason"]) == (503, "overloaded", "requests")
        assert refused.headers["retry-after"] == "2"
        for _ in range(5):
            assert (await server.post("/v1/jobs", {"kind": "python", "handler": "x", "tasks": [1]})).status == 201
            assert (await server.post("/v1/jobs", {"kind": "python", "tasks": [1]})).status == 400

    def test_what_was_in_hand_is_let_go_of(self, settings: Settings) -> None:
        intake = RequestBudget(msgspec.structs.replace(settings, max_requests=2))
        first, second, third = (BodyReservation(intake) for _ in range(3))
        first.enter(10)
        first.take(600_000)
        second.enter(0)
        with pytest.raises(Overloaded):
            third.enter(0)
        third.leave()
        with pytest.raises(Overloaded):
            second.take(600_000)
        first.leave()
        first.leave()
        assert (intake.requests, intake.bytes) == (1, 0)
        second.take(600_000)
        third.enter(400_000)
        second.leave()
        third.leave()
        assert (intake.requests, intake.bytes) == (0, 0)
