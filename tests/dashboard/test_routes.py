"""The routes that the dashboard brought with it, held to their shapes: statistics, search, the fleet, the stream."""

import asyncio
import json
from typing import Any, TypeVar

import msgspec
import pytest

from conveyor.api.schemas.fleet_shapes import BreakersPage, LanesPage, WorkersShape
from conveyor.api.schemas.job_shapes import ListedJob
from conveyor.api.schemas.statistics_shapes import StatisticsShape
from conveyor.api.schemas.task_shapes import TaskSearchPage
from conveyor.coordination.breaker_states import BreakerState, breaker_key
from conveyor.coordination.durations import count_durations
from conveyor.coordination.history import MAX_MOMENTS, Moment, add_moment, history
from conveyor.engines.queue import Outgoing, run_queue
from conveyor.engines.records import Document
from conveyor.model import BEAT, BEAT_TENANT, WORKERS, Beat, Job, LongTask, RunId, TaskEnd, task_id
from conveyor.notify.progress_notifier import ProgressNotifier
from conveyor.states import TaskStatus
from conveyor.system import System
from tests.support.api import Api
from tests.support.clocks import JumpingClock
from tests.support.make_jobs import ACME, OTHER, make_job, make_notice, seeds

S = TypeVar("S", bound=msgspec.Struct)


async def ask(api: Api, path: str, shape: type[S]) -> S:
    answer = await api.get(path)
    assert answer.status == 200, answer.body
    return msgspec.convert(answer.json, shape)


async def started(system: System, total: int, inputs: list[Any] | None = None, **fields: Any) -> Job:
    job = make_job(system.clock, total=total, **fields)
    given = seeds(total) if inputs is None else _seeds(inputs)
    await system.tasks.put(job.key, given)
    await system.records.jobs.create_job(job, make_notice(system.clock, job), None)
    return job


def _seeds(inputs: list[Any]) -> list[Any]:
    from conveyor.model import TaskSeed

    return [TaskSeed(index, json.dumps(each)) for index, each in enumerate(inputs)]


async def end(system: System, job: Job, indexes: range, code: str | None = None) -> None:
    status = TaskStatus.SUCCEEDED if code is None else TaskStatus.FAILED
    ends = [TaskEnd(index, status, 1, None, code, "{}", system.clock.now()) for index in indexes]
    await system.tasks.finish(job.key, ends)


async def test_statistics_tell_how_a_run_went(server: Api, clock: JumpingClock) -> None:
    system = server.system
    job = await started(system, 100)
    notifier = ProgressNotifier(system.records, system.tasks, system.coordinator, clock, 60.0)
    for start in range(0, 80, 20):
        await end(system, job, range(start, start + 20), "http_500" if start == 20 else None)
        clock.advance(10)
        await notifier.run_once()
    await count_durations(system.coordinator, {job.run.run_id: [0.1] * 30 + [1.0] * 10})
    found = await ask(server, f"/v1/jobs/{job.job_id}/statistics", StatisticsShape)
    done = [each.succeeded + each.failed for each in found.samples]
    assert (done[0], done[-1], len(done)) == (0, 80, len(found.samples))
    assert done == sorted(done)
    assert {20, 40, 60} <= set(done)
    times = [each.at for each in found.samples]
    assert times == sorted(times)
    assert [(each.code, each.count) for each in found.errors] == [("http_500", 20)]
    assert [each.count for each in found.durations] == [30, 10]
    assert found.durations[0].seconds == pytest.approx(0.1, rel=0.1)
    other = await ask(server, f"/v1/jobs/{job.job_id}/statistics?run=1", StatisticsShape)
    assert other.run_id == job.run.run_id
    assert (await server.get(f"/v1/jobs/{job.job_id}/statistics?run=2")).status == 404


async def test_a_long_history_stays_small(system: System) -> None:
    run = RunId("run_x")
    for at in range(2000):
        await add_moment(system.coordinator, run, Moment(float(at), at, 0, 0))
    kept = await history(system.coordinator, run)
    assert len(kept) <= MAX_MOMENTS
    assert (kept[0].at, kept[-1].at) == (0.0, 1999.0)
    await add_moment(system.coordinator, run, Moment(5.0, 0, 0, 0))
    assert await history(system.coordinator, run) == kept


async def search(api: Api, job: Job, text: str, more: str = "") -> list[int]:
    """The indexes that are found, over all pages; each once."""
    indexes: list[int] = []
    cursor = ""
    while True:
        found = await ask(api, f"/v1/jobs/{job.job_id}/search?limit=7&text={text}{more}{cursor}", TaskSearchPage)
        assert len(found.items) <= 7
        indexes += [task.index for task in found.items]
        if found.next_cursor is None:
            assert len(indexes) == len(set(indexes))
            return indexes
        cursor = f"&cursor={found.next_cursor}"


@pytest.mark.parametrize("shards", [1, 4])
async def test_search_finds_each_task_once(server: Api, shards: int) -> None:
    inputs = [
        {"url": f"http://Example.com/{index}", "tag": "even" if index % 2 == 0 else 'o"dd'} for index in range(60)
    ]
    job = await started(server.system, 60, [*inputs[:-1], "http://last.example/ÄÖ"], shards=shards)
    await end(server.system, job, range(10), "http_500")
    assert sorted(await search(server, job, "EVEN")) == list(range(0, 59, 2))
    assert sorted(await search(server, job, "example.com/", "&status=failed")) == list(range(10))
    assert await search(server, job, "%C3%A4%C3%B6") == [59]
    assert await search(server, job, "nowhere") == []
    assert (await search(server, job, "12"))[0] == 12
    assert await search(server, job, task_id(job.run.run_id, 5)) == [5]
    assert await search(server, job, task_id(job.run.run_id, 5), "&status=pending") == []
    assert (await server.get(f"/v1/jobs/{job.job_id}/search?text=")).status == 400


async def test_a_search_reads_so_much_and_no_more(server: Api) -> None:
    job = await started(server.system, 12_000)
    found = await ask(server, f"/v1/jobs/{job.job_id}/search?text=nowhere", TaskSearchPage)
    assert (found.items, found.read) == ([], 5000)
    assert found.next_cursor is not None


async def test_the_fleet_is_shown_as_one_tenant_may_see_it(server: Api, clock: JumpingClock) -> None:
    system, now = server.system, clock.now()
    job, paused, foreign = [await started(system, 5, tenant=tenant) for tenant in (ACME, ACME, OTHER)]
    await system.queue.send(run_queue(job.run.run_id), [Outgoing(b"x"), Outgoing(b"y", 60.0)])
    await system.coordinator.acquire(f"run:{job.run.run_id}", "w", 3, 64, 60.0)
    await system.coordinator.acquire(WORKERS, "w", 1, 10, 60.0)
    doc = {
        breaker_key(ACME, "down.example"): BreakerState(now, now + 60, 2),
        breaker_key(ACME, "back.example"): BreakerState(now - 60, now - 1, 1, 3),
        breaker_key(ACME, "closed.example"): BreakerState(now - 60, now - 1, 1, 6),
        breaker_key(OTHER, "foreign.example"): BreakerState(now, now + 60),
    }
    await system.coordinator.cache("breakers", msgspec.json.encode(doc), 60.0)
    tasks = [LongTask(each.tenant, each.job_id, each.run.run_id, 0) for each in (job, foreign)]
    await system.records.documents.create_documents(
        [Document(BEAT, BEAT_TENANT, "w", msgspec.json.encode(Beat(now, tasks)))]
    )

    breakers = await ask(server, "/v1/breakers", BreakersPage)
    assert [(each.target, each.state, each.at_once) for each in breakers.items] == [
        ("back.example", "half_open", 8),
        ("down.example", "open", 1),
    ]
    lanes = await ask(server, "/v1/lanes", LanesPage)
    assert [each.job_id for each in lanes.items] == sorted([job.job_id, paused.job_id], reverse=True)
    lane = next(each for each in lanes.items if each.job_id == job.job_id)
    assert (lane.running, lane.queue.ready, lane.queue.delayed, lane.recovery.ready) == (3, 1, 1, 0)
    first = await ask(server, "/v1/lanes?limit=1", LanesPage)
    rest = await ask(server, f"/v1/lanes?limit=1&cursor={first.next_cursor}", LanesPage)
    assert ([*first.items, *rest.items], rest.next_cursor) == (lanes.items, None)
    workers = await ask(server, "/v1/workers", WorkersShape)
    assert (workers.alive, [each.job_id for each in workers.long_tasks[0].tasks]) == (1, [job.job_id])


async def frames(api: Api, want: int, act: Any) -> list[tuple[str, Any]]:
    """So many frames of the stream; `act` is called with the number of those that came."""
    reader, writer = await asyncio.open_connection(*api.address)
    writer.write(f"GET /v1/stream HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {api.key}\r\n\r\n".encode())
    found: list[tuple[str, Any]] = []
    event = ""
    async with asyncio.timeout(20):
        while len(found) < want:
            line = (await reader.readline()).decode().strip()
            if line.startswith("event: "):
                event = line.removeprefix("event: ")
            elif line.startswith("data: "):
                found.append((event, json.loads(line.removeprefix("data: "))))
                await act(len(found))
    writer.close()
    return found


async def test_the_stream_of_jobs_tells_of_what_changed(server: Api, clock: JumpingClock) -> None:
    system = server.system
    first, second = [await started(system, 4, headers={"x-key": "secret"}) for _ in range(2)]
    await started(system, 4, tenant=OTHER)

    async def act(count: int) -> None:
        if count == 2:
            await end(system, first, range(2))
        elif count == 3:
            assert await system.records.jobs.mark_deleted(ACME, second.job_id)
        clock.advance(2)

    found = await frames(server, 4, act)
    assert [event for event, _ in found] == ["job", "job", "job", "gone"]
    shown = [msgspec.convert(data, ListedJob) for event, data in found if event == "job"]
    assert [job.id for job in shown] == [second.job_id, first.job_id, first.job_id]
    assert (shown[2].run.counts.succeeded, found[3][1]) == (2, {"id": second.job_id})
    assert "secret" not in json.dumps(found)
