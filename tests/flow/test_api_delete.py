"""Deleting over HTTP: gone at once for every reader, and soon from every table and every blob."""

import asyncio
from typing import Any

import msgspec
import pytest

from conveyor.engines.queue import CONTROL, Outgoing, run_queue
from conveyor.engines.tasks import TaskEvent
from conveyor.ingest.ingester import LEASE_SECONDS
from conveyor.jobs.chunks import encode, send_all
from conveyor.lifecycle import Lifecycle
from conveyor.model import Chunk, IngestJob, InputJson, Job, JobId, TaskRef, TenantId, task_id
from conveyor.recover import retention as retention_module
from conveyor.recover.retention import SETTLE_SECONDS, Removed, Retention
from conveyor.recover.sweeper import Sweeper
from conveyor.settings import Settings
from conveyor.system import System
from tests.support.api import Api
from tests.support.clocks import JumpingClock
from tests.support.stored_rows import rows
from tests.support.working import Echo, all_items, ended, until, working

ACME = TenantId("acme")
DAY = 86_400.0


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return Settings.load({}, data=settings.data, ingest_range_bytes=2000, sync_list_bytes=0)


def text(count: int) -> bytes:
    return b"".join(
        b"nonsense\n" if number % 10 == 9 else b"http://example.com/%d\n" % number for number in range(count)
    )


def retention(system: System) -> Retention:
    return Retention(system.records, system.tasks, system.queue, system.coordinator, system.blobs, system.clock)


async def remove_all(system: System, clock: JumpingClock) -> Removed:
    """Let retention do all that is due; what it removed in all."""
    total = Removed()
    # Jobs, and then uploads that nothing refers to any more.
    for _ in range(2):
        clock.advance(SETTLE_SECONDS + 1)
        while (once := await retention(system).run_once()) != Removed():
            for field in Removed.__struct_fields__:
                setattr(total, field, getattr(total, field) + getattr(once, field))
    return total


def files(system: System) -> list[str]:
    """Every blob, and every draft of one."""
    root = system.settings.data / "blobs"
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


async def job_of(api: Api, job_id: str) -> Job:
    job = await api.system.records.jobs.job(ACME, JobId(job_id))
    assert job is not None
    return job


async def upload_job(api: Api, count: int = 500, **spec: Any) -> str:
    answer = await api.submit({"source": {"upload_id": await api.upload(text(count))}, **spec})
    job_id: str = answer.json["id"]
    return job_id


async def check_gone(api: Api, job_id: str) -> None:
    task = task_id(JobId(job_id).replace("job_", "run_"), 0)  # type: ignore[arg-type]
    for method, path in (
        ("GET", ""),
        ("GET", "/results"),
        ("GET", f"/tasks/{task}"),
        ("GET", f"/tasks/{task}/body"),
        ("GET", "/events"),
        ("GET", "/invalid"),
        ("GET", "/export?partial=true"),
        ("POST", "/tasks"),
        ("POST", "/close"),
        ("POST", "/rerun"),
        ("DELETE", ""),
    ):
        answer = await api.request(method, f"/v1/jobs/{job_id}{path}")
        assert (answer.status, answer.json["code"]) == (404, "not_found"), path
    assert job_id not in [item["id"] for item in await all_items(api, "/v1/jobs")]


async def delete(api: Api, job_id: str) -> None:
    answer = await api.request("DELETE", f"/v1/jobs/{job_id}")
    assert (answer.status, answer.body) == (204, b"")
    await check_gone(api, job_id)


async def bury_letters(api: Api, job: Job) -> None:
    """A letter of its ingest and one of its tasks."""
    queue = api.system.queue
    ingest = Outgoing(msgspec.json.encode(IngestJob(job.tenant, job.job_id, job.run.run_id)))
    chunk = encode(Chunk(job.key, [TaskRef(0, InputJson('"secret input"'))]))
    for name, message in ((CONTROL, ingest), (run_queue(job.run.run_id), chunk)):
        await send_all(queue, name, [message], api.system.clock)
        for delivery in await queue.receive(name, 10, 60):
            await queue.dead_letter(name, [delivery.receipt], "given up")


async def test_nothing_is_left_of_a_job(server: Api, clock: JumpingClock) -> None:
    async with working(server.system):
        job_id = await upload_job(server, result_layout="object")
        await ended(server, job_id)
    job = await job_of(server, job_id)
    await server.system.tasks.note(job.key, [TaskEvent(0, 1.0, "task.retried", "{}")])
    await bury_letters(server, job)
    full = await rows(server.system)
    assert {"jobs", "runs", "ranges", "uploads", "outbox", "task_runs", "tasks", "task_events"} <= set(full)
    assert {"dead_letters", "leases"} <= set(full)
    assert {name.split("/")[0] for name in files(server.system)} == {"uploads", "results", "invalid"}
    await delete(server, job_id)
    removed = await remove_all(server.system, clock)
    assert (removed.jobs, removed.tasks >= 450, removed.letters, removed.uploads) == (1, True, 2, 1)
    assert await rows(server.system) == {}
    assert files(server.system) == []


@pytest.mark.parametrize("kind", ["small", "large", "open"])
async def test_nothing_is_left_of_any_kind(server: Api, clock: JumpingClock, kind: str) -> None:
    """Submitted under a key, whose answer is kept for its own time and no longer."""
    urls = [f"http://example.com/{number}" for number in range(1200)]
    spec = {"small": {"tasks": urls[:20]}, "large": {"tasks": urls}, "open": {"mode": "open"}}[kind]
    async with working(server.system):
        job_id = (await server.submit(spec, headers={"idempotency-key": "k"})).json["id"]
        if kind == "open":
            for last in (False, True):
                await server.post(f"/v1/jobs/{job_id}/tasks", {"tasks": urls[:30], "last_batch": last})
        assert (await ended(server, job_id))["state"] == "completed"
    await delete(server, job_id)
    await remove_all(server.system, clock)
    assert await rows(server.system) == {"idempotency": 1}
    assert files(server.system) == []
    clock.advance(DAY)
    await remove_all(server.system, clock)
    assert await rows(server.system) == {}


async def test_what_runs_of_it_stops(server: Api, clock: JumpingClock) -> None:
    echo = Echo()
    async with working(server.system, echo):
        echo.gate.clear()
        job_id = (await server.submit({"tasks": [f"http://example.com/{n}" for n in range(500)]})).json["id"]
        run = (await job_of(server, job_id)).run.run_id
        await until(lambda: server.system.coordinator.permits_in_use(f"run:{run}"))
        await delete(server, job_id)
        await until(lambda: server.system.coordinator.permits_in_use(f"run:{run}"), lambda held: held == 0)
        echo.gate.set()
        clock.advance(SETTLE_SECONDS + 1)
        await until(lambda: rows(server.system), lambda left: not left)
    assert files(server.system) == []
    assert echo.ran == {}


async def test_an_ingest_under_way_stops(server: Api, clock: JumpingClock) -> None:
    """It sees at its next checkpoint that there is nothing to go on with; its message goes when it is seen again."""
    put, checkpoint, go = server.system.tasks.put, server.system.records.ingests.checkpoint, asyncio.Event()
    waiting: list[int] = []
    refused: list[bool] = []

    async def slow(run: Any, seeds: Any) -> None:
        await put(run, seeds)
        waiting.append(len(seeds))
        await go.wait()

    async def watched(*given: Any) -> bool:
        taken = await checkpoint(*given)
        refused.append(not taken)
        return taken

    server.system.tasks.put = slow  # type: ignore[method-assign]
    server.system.records.ingests.checkpoint = watched  # type: ignore[method-assign]
    async with working(server.system):
        job_id = await upload_job(server, 2000)
        await until(lambda: found(waiting))
        await delete(server, job_id)
        go.set()
        await until(lambda: found(refused), lambda seen: len(seen) == len(waiting))
        assert all(refused)
        clock.advance(LEASE_SECONDS + 1)
        await until(lambda: rows(server.system), lambda left: left == {"uploads": 1})
        clock.advance(SETTLE_SECONDS + 1)
        await until(lambda: rows(server.system), lambda left: not left)
    assert files(server.system) == []


async def found(seen: list[Any]) -> list[Any]:
    return seen


async def test_a_failed_ingest_can_be_deleted(server: Api, clock: JumpingClock) -> None:
    async with working(server.system):
        upload_id = await server.upload(b"\x1f\x8b nonsense")
        job_id = (await server.submit({"source": {"upload_id": upload_id}})).json["id"]
        assert (await ended(server, job_id))["state"] == "failed"
        assert len(await all_items(server, "/v1/dead-letters")) == 1
    await delete(server, job_id)
    await remove_all(server.system, clock)
    assert await rows(server.system) == {}
    assert files(server.system) == []


async def test_others_stay_whole(server: Api, clock: JumpingClock) -> None:
    other = await server.as_tenant("other")
    async with working(server.system):
        gone, kept = await upload_job(server), await upload_job(server)
        theirs = (await other.submit({"tasks": ["http://example.com/"]})).json["id"]
        for api, job_id in ((server, gone), (server, kept), (other, theirs)):
            await ended(api, job_id)
    await bury_letters(server, await job_of(server, gone))
    await bury_letters(server, await job_of(server, kept))
    before = await server.get(f"/v1/jobs/{kept}/export")
    await delete(server, gone)
    removed = await remove_all(server.system, clock)
    assert (removed.jobs, removed.letters, removed.uploads) == (1, 2, 1)
    assert (await server.get(f"/v1/jobs/{kept}/export")).body == before.body
    assert len(await all_items(server, f"/v1/jobs/{kept}/results")) == 450
    assert len(await all_items(server, f"/v1/jobs/{kept}/invalid")) == 50
    assert [item["job_id"] for item in await all_items(server, "/v1/dead-letters")] == [kept, kept]
    assert (await other.get(f"/v1/jobs/{theirs}")).status == 200


async def test_a_list_that_serves_two_jobs_goes_with_the_second(server: Api, clock: JumpingClock) -> None:
    upload_id = await server.upload(text(20))
    async with working(server.system):
        jobs = [(await server.submit({"source": {"upload_id": upload_id}})).json["id"] for _ in range(2)]
        for job_id in jobs:
            await ended(server, job_id)
    await delete(server, jobs[0])
    await remove_all(server.system, clock)
    assert (await server.get(f"/v1/uploads/{upload_id}")).status == 200
    await delete(server, jobs[1])
    await remove_all(server.system, clock)
    assert (await server.get(f"/v1/uploads/{upload_id}")).status == 404
    assert await rows(server.system) == {}
    assert files(server.system) == []


async def test_what_expires_goes_the_same_way(server: Api, clock: JumpingClock) -> None:
    async with working(server.system):
        job_id = await upload_job(server, retention_days=2)
        await ended(server, job_id)
    clock.advance(2 * DAY)
    await check_gone(server, job_id)
    await remove_all(server.system, clock)
    assert await rows(server.system) == {}
    assert files(server.system) == []


async def test_workers_have_a_moment_to_see_it(server: Api, clock: JumpingClock) -> None:
    """What is removed under a worker's hands would be written again behind retention's back."""
    job_id = (await server.submit({"tasks": ["http://example.com/"]})).json["id"]
    await delete(server, job_id)
    clock.advance(SETTLE_SECONDS - 2)
    assert await retention(server.system).run_once() == Removed()
    clock.advance(3)
    assert (await retention(server.system).run_once()) != Removed()


async def test_large_jobs_are_removed_step_by_step(
    server: Api, clock: JumpingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_module, "_ROWS", 100)
    monkeypatch.setattr(retention_module, "_BLOBS", 3)
    async with working(server.system):
        job_id = await upload_job(server, 1000, result_layout="object")
        await ended(server, job_id)
    await delete(server, job_id)
    clock.advance(SETTLE_SECONDS + 1)
    steps = 0
    while (once := await retention(server.system).run_once()) != Removed():
        steps += 1
        assert once.tasks <= 100
        assert once.blobs <= 9
    assert steps > 100
    clock.advance(SETTLE_SECONDS + 1)
    assert (await retention(server.system).run_once()).uploads == 1
    assert await rows(server.system) == {}
    assert files(server.system) == []


async def test_the_sweeper_leaves_a_deleted_job_alone(server: Api, clock: JumpingClock) -> None:
    job_id = await upload_job(server)
    await delete(server, job_id)
    lifecycle = Lifecycle(server.system.records, server.system.tasks, clock)
    system = server.system
    sweeper = Sweeper(system.records, system.tasks, system.queue, lifecycle, clock)
    clock.advance(60)
    swept = await sweeper.run_once()
    assert (swept.checked, swept.resumed, swept.cleared) == (0, 0, 0)
