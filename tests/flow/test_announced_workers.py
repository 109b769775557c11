"""Workers announce themselves: the fleet shows where they run, and a submit knows which handlers there are."""

import pytest

from conveyor import faults
from conveyor.embedded import Embedded
from conveyor.jobs.announced_workers import ANNOUNCED, ANNOUNCED_TENANT, WorkerAnnouncement, live_workers
from conveyor.system import System
from tests.support.api import Api
from tests.support.clocks import JumpingClock
from tests.support.working import until


def job_of(handler: str) -> dict[str, object]:
    return {"kind": "python", "handler": handler, "tasks": [{"n": 1}]}


async def test_the_fleet_shows_workers_until_they_stop(server: Api, system: System) -> None:
    async def look() -> list[dict[str, object]]:
        found: list[dict[str, object]] = (await server.get("/v1/workers")).json["workers"]
        return found

    async with Embedded(system).running({"work"}):
        workers = await until(look, lambda found: len(found) == system.settings.workers)
        assert {worker["slots"] for worker in workers} == {system.settings.worker_concurrency}
        assert all(worker["host"] and worker["version"] and worker["started_at"] for worker in workers)
    assert await look() == []


async def test_one_that_is_silent_for_three_minutes_does_not_count(system: System, clock: JumpingClock) -> None:
    worker = WorkerAnnouncement(system.records.documents, clock, "worker_1", 4, ["a"])
    assert await worker.renew() == 60.0
    clock.advance(170)
    await worker.renew()
    clock.advance(170)
    (alive,) = await live_workers(system.records.documents, clock.now())
    assert (alive.name, alive.said.handlers) == ("worker_1", ["a"])
    clock.advance(11)
    assert await live_workers(system.records.documents, clock.now()) == []


async def test_a_handler_that_no_live_worker_has_is_refused(server: Api, system: System, clock: JumpingClock) -> None:
    assert (await server.submit(job_of("nobody"))).status == 201
    workers = [
        WorkerAnnouncement(system.records.documents, clock, f"worker_{number}", 4, names)
        for number, names in enumerate((["a", "b"], ["c"]))
    ]
    for worker in workers:
        await worker.renew()
    # That any is accepted may hold for a second.
    clock.advance(1)
    refused = await server.submit(job_of("nobody"))
    assert (refused.status, refused.json["code"]) == (400, "unknown_handler")
    assert (
        f"handler '{refused.json['handler']}'. They have {', '.join(refused.json['known'])}." in refused.json["detail"]
    )
    assert (refused.json["handler"], refused.json["known"]) == ("nobody", ["a", "b", "c"])
    for handler in ("a", "c"):
        assert (await server.submit(job_of(handler))).status == 201
    # One that starts now has it, and is seen at once.
    other = WorkerAnnouncement(system.records.documents, clock, "worker_9", 4, ["nobody"])
    await other.renew()
    assert (await server.submit(job_of("nobody"))).status == 201
    # One that does not tell may have any.
    await WorkerAnnouncement(system.records.documents, clock, "worker_8", 4, None).renew()
    assert (await server.submit(job_of("anything"))).status == 201


async def test_an_answer_that_was_lost_is_made_up_for(system: System, clock: JumpingClock) -> None:
    worker = WorkerAnnouncement(system.records.documents, clock, "worker_1", 4, None)

    def cut(point: str) -> None:
        if point == "worker.announce.after":
            raise RuntimeError

    for _ in range(2):
        faults.arm(cut)
        try:
            with pytest.raises(RuntimeError):
                await worker.renew()
        finally:
            faults.arm(None)
    await worker.renew()
    rows = (await system.records.documents.documents(ANNOUNCED, ANNOUNCED_TENANT, None, 10)).items
    assert [row.id for row in rows] == ["worker_1"]
    await worker.close()
    assert await live_workers(system.records.documents, clock.now()) == []
