"""A coordinator that is away, or never answers: what it only shows is missing, and everything else is answered."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from conveyor.api.schemas.job_shapes import JobShape
from conveyor.coordination import fail_open, own_counts
from conveyor.errors import EngineFailed, QuotaExceeded
from conveyor.jobs.admission import Admission
from conveyor.lifecycle import Lifecycle
from conveyor.notify.progress_notifier import ProgressNotifier
from conveyor.read.status import status_json
from conveyor.settings import Settings
from conveyor.system import System, open_system
from tests.support.api import Api
from tests.support.clocks import JumpingClock
from tests.support.make_jobs import ACME, end
from tests.support.small_fleet import open_fleet

TASKS = 5


class Leaving:
    """A coordinator that can go away: it then fails, or does not answer."""

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator
        self.how: str | None = None

    def __getattr__(self, name: str) -> Any:
        there = getattr(self._coordinator, name)

        async def call(*given: Any, **named: Any) -> Any:
            if self.how == "hangs":
                await asyncio.Event().wait()
            if self.how == "fails":
                raise EngineFailed("the coordinator is away")
            return await there(*given, **named)

        return call


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fail_open.FailOpen.__init__, "__defaults__", (0.05,))
    monkeypatch.setattr(own_counts, "PATIENCE", 0.05)


@pytest.fixture
async def system(settings: Settings, clock: JumpingClock) -> AsyncIterator[System]:
    async with open_system(settings, clock) as opened:
        leaving: Any = Leaving(opened.coordinator)
        yield replace(opened, coordinator=leaving)


async def exported(server: Api) -> tuple[str, str]:
    """The path of a job that has finished, and the id of an export of it."""
    system = server.system
    made = (await server.submit({"tasks": ["http://example.com/"]})).json
    job = await system.records.jobs.job(ACME, made["id"])
    assert job is not None
    finished = await system.tasks.finish(job.key, [end(0)])
    await Lifecycle(system.records, system.tasks, system.clock).settle(job, finished.counts)
    asked = await server.request("POST", f"/v1/jobs/{job.job_id}/exports", body=b'{"format": "jsonl"}')
    return f"/v1/jobs/{job.job_id}", asked.json["id"]


@pytest.mark.parametrize("how", ["fails", "hangs"])
async def test_every_read_is_answered(server: Api, clock: JumpingClock, how: str) -> None:
    urls = [f"http://example.com/{number}" for number in range(TASKS)]
    made = (await server.submit({"tasks": urls})).json
    path = f"/v1/jobs/{made['id']}"
    finished, export = await exported(server)
    await server.get(path)
    leaving: Any = server.system.coordinator
    leaving.how = how
    # What was cached is too old.
    clock.advance(10.0)
    answers = {
        each: await server.get(each)
        for each in (
            *("/v1/jobs", path, f"{path}?verify=true", f"{path}?run=latest", f"{path}/results", f"{path}/events"),
            *(f"{path}/statistics", f"{path}/exports", f"/v1/exports/{export}", f"{finished}/export"),
            *(f"{path}/search?text=example", f"{path}/invalid", f"{path}/callbacks", f"{path}/deliveries"),
            *("/v1/lanes", "/v1/workers", "/v1/breakers", "/v1/dead-letters", "/v1/webhooks", "/v1/schedules"),
        )
    }
    assert {each: answer.status for each, answer in answers.items() if answer.status != 200} == {}
    shown = answers[path].json
    msgspec.convert(shown, JobShape)
    assert (shown["state"], shown["total"], shown["counts"]["pending"]) == ("running", TASKS, TASKS)
    assert (shown["counts"]["running"], shown["waiting"], shown["task_time"]) == (0, None, None)
    assert answers["/v1/workers"].json["alive"] == 0
    assert len(answers[f"{path}/results"].json["items"]) == TASKS


async def test_what_was_missing_is_back_with_the_coordinator(server: Api, clock: JumpingClock) -> None:
    made = (await server.submit({"tasks": ["http://example.com/"]})).json
    leaving: Any = server.system.coordinator
    await server.system.coordinator.acquire(f"run:{made['run']['id']}", "worker", 1, 10, 600.0)
    leaving.how = "fails"
    assert (await server.get(f"/v1/jobs/{made['id']}")).json["counts"]["running"] == 0
    leaving.how = None
    clock.advance(5.0)
    assert (await server.get(f"/v1/jobs/{made['id']}")).json["counts"]["running"] == 1


async def test_a_status_is_read_without_it() -> None:
    async with open_fleet() as fleet:
        job = await fleet.submit(4)
        leaving: Any = Leaving(fleet.system.coordinator)
        leaving.how = "fails"
        reader = fail_open.FailOpen(leaving, fleet.clock)
        try:
            shown = await status_json(fleet.system.records, fleet.system.tasks, reader, fleet.clock, job)
        except EngineFailed as error:
            raise AssertionError("the status needs the coordinator") from error
        assert (shown["total"], shown["counts"]["pending"]) == (4, 4)


async def test_progress_is_reported_without_it() -> None:
    async with open_fleet() as fleet:
        jobs = [await fleet.submit(4) for _ in range(50)]
        for job in jobs:
            await fleet.system.tasks.finish(job.key, [end(0), end(1)])
        leaving: Any = Leaving(fleet.system.coordinator)
        leaving.how = "hangs"
        reader = fail_open.FailOpen(leaving, fleet.clock)
        notifier = ProgressNotifier(fleet.system.records, fleet.system.tasks, reader, fleet.clock, 60.0)
        assert (await notifier.run_once()).quarters == 50


@pytest.mark.parametrize("how", ["fails", "hangs"])
async def test_work_is_accepted_without_it(server: Api, clock: JumpingClock, how: str) -> None:
    finished, _ = await exported(server)
    leaving: Any = server.system.coordinator
    leaving.how = how
    urls = [f"http://example.com/{number}" for number in range(TASKS)]
    answers = [
        await server.submit({"tasks": urls}),
        await server.submit({"tasks": urls}, headers={"prefer": "respond-async"}),
        opened := await server.submit({"mode": "open"}),
        await server.post(f"{opened.headers['location']}/tasks", {"tasks": urls}),
        await server.post(f"{finished}/rerun", {"select": "all"}),
        await server.submit({"source": {"upload_id": await server.upload(b"http://example.com/\n")}}),
        await server.post("/v1/schedules", {"cron": "0 3 * * *", "job": {"tasks": urls}}),
    ]
    assert [answer.status for answer in answers] == [201, 202, 202, 202, 202, 201, 201]
    assert len((await server.get(f"{answers[0].headers['location']}/results")).json["items"]) == TASKS


async def limits_hold_without_it() -> None:
    """Each process counts what it admits, and what is stored."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_counts, "PATIENCE", 0.05)
        async with open_fleet(tenant_jobs=3) as fleet:
            await fleet.submit(1)
            leaving: Any = Leaving(fleet.system.coordinator)
            leaving.how = "fails"
            admission = Admission(replace(fleet.system, coordinator=leaving))
            await admission.admit(ACME, jobs=1)
            await admission.admit(ACME, jobs=1)
            with pytest.raises(QuotaExceeded):
                await admission.admit(ACME, jobs=1)
            # What is stored counts, and what was only admitted no longer does.
            fleet.clock.advance(6.0)
            await admission.admit(ACME, jobs=2)
            leaving.how = None
            fleet.clock.advance(6.0)
            await admission.admit(ACME, jobs=2)


async def test_limits_hold_without_it() -> None:
    await limits_hold_without_it()
