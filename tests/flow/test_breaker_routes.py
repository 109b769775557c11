"""Breakers over HTTP: a tenant lists and resets its own, an administrator those of all tenants."""

import asyncio

import msgspec
import pytest

from conveyor.api.schemas.fleet_shapes import BreakersPage, ResetBreaker, ResetBreakers
from conveyor.coordination.breaker_states import BreakerState, breaker_key, list_breakers
from conveyor.coordination.waits import Wait, publish_wait
from conveyor.model import JobId, RunId
from conveyor.read.job_stream import JobStream, Streams
from tests.support.api import Api
from tests.support.clocks import JumpingClock
from tests.support.make_jobs import ACME, OTHER

HOST = "https://a.example:8443"


@pytest.fixture
async def other(server: Api) -> Api:
    return await server.as_tenant(OTHER)


@pytest.fixture
async def admin(server: Api) -> Api:
    return await server.as_tenant("local", admin=True)


async def submit(api: Api) -> tuple[str, RunId]:
    made = (await api.submit({"tasks": [f"{HOST}/1"]})).json
    return made["id"], RunId(made["run"]["id"])


async def open_breakers(api: Api, clock: JumpingClock, *keys: str, runs: tuple[RunId, ...] = ()) -> None:
    now = clock.now()
    states = {key: BreakerState(now, now + 60, 2, runs=runs, error="timeout") for key in keys}
    await api.system.coordinator.cache("breakers", msgspec.json.encode(states), 600.0)


async def targets(api: Api, query: str = "") -> list[str]:
    answer = await api.get(f"/v1/breakers{query}")
    assert answer.status == 200, answer.body
    page = msgspec.convert(answer.json, BreakersPage)
    return [f"{each.tenant} {each.target}" for each in page.items]


async def test_a_breaker_is_listed_and_reset(server: Api, clock: JumpingClock) -> None:
    job_id, run_id = await submit(server)
    await open_breakers(server, clock, breaker_key(ACME, HOST), breaker_key(ACME, "upstream:erp"), runs=(run_id,))
    (first, _) = msgspec.convert((await server.get("/v1/breakers")).json, BreakersPage).items
    assert (first.target, first.state, first.error, first.times, first.runs) == (HOST, "open", "timeout", 2, [run_id])
    wait = Wait("breaker", "waiting", None, HOST)
    await publish_wait(server.system.coordinator, run_id, wait, 60.0)
    shown = (await server.get(f"/v1/jobs/{job_id}")).json
    assert (shown["waiting"]["code"], shown["waiting"]["target"], shown["waiting"]["error"]) == (
        "breaker",
        HOST,
        "timeout",
    )
    assert shown["reason"] == shown["waiting"]["detail"]
    answer = await server.post("/v1/breakers/reset", {"targets": [HOST, "https://unknown.example"]})
    assert answer.status == 200
    assert msgspec.convert(answer.json, ResetBreakers).reset == [ResetBreaker(ACME, HOST)]
    clock.advance(2)
    assert (await server.get(f"/v1/jobs/{job_id}")).json["waiting"] is None
    assert await targets(server) == ["acme upstream:erp"]
    assert (await server.post("/v1/breakers/reset", {"targets": [HOST]})).json == {"reset": []}
    assert (await server.request("POST", "/v1/breakers/reset")).json == {
        "reset": [{"tenant": "acme", "target": "upstream:erp"}]
    }
    assert await targets(server) == []


async def test_nobody_sees_or_resets_those_of_another_tenant(
    server: Api, other: Api, admin: Api, clock: JumpingClock
) -> None:
    await open_breakers(server, clock, breaker_key(ACME, HOST), breaker_key(OTHER, HOST), breaker_key(OTHER, "b"))
    assert await targets(other) == ["other b", f"other {HOST}"]
    assert (await other.get("/v1/breakers?all_tenants=true")).status == 403
    assert (await other.post("/v1/breakers/reset", {"all_tenants": True})).status == 403
    assert (await other.post("/v1/breakers/reset", {"targets": [HOST]})).json == {
        "reset": [{"tenant": "other", "target": HOST}]
    }
    assert await targets(server) == [f"acme {HOST}"]
    assert await targets(admin) == []
    assert len(await targets(admin, "?all_tenants=true")) == 2
    answer = await admin.post("/v1/breakers/reset", {"targets": [HOST], "all_tenants": True})
    assert answer.json == {"reset": [{"tenant": "acme", "target": HOST}]}
    assert await targets(admin, "?all_tenants=true") == ["other b"]


async def test_one_that_no_unfinished_run_needs_is_not_listed(server: Api, clock: JumpingClock) -> None:
    job_id, run_id = await submit(server)
    await open_breakers(server, clock, breaker_key(ACME, HOST), runs=(RunId("run_gone"), run_id))
    assert await targets(server) == [f"acme {HOST}"]
    await server.post(f"/v1/jobs/{job_id}/cancel")
    assert await targets(server) == []
    assert len(await list_breakers(server.system.coordinator, ACME)) == 1


@pytest.mark.parametrize("body", [{"targets": []}, {"targets": "x"}, {"target": "x"}, {"targets": ["x"] * 1001}])
async def test_what_is_wrong_is_refused(server: Api, body: object) -> None:
    assert (await server.post("/v1/breakers/reset", body)).status == 400


async def _always() -> bool:
    return True


async def test_the_stream_of_a_job_says_what_it_waits_for(server: Api, clock: JumpingClock) -> None:
    job_id, run_id = await submit(server)
    await open_breakers(server, clock, breaker_key(ACME, HOST), runs=(run_id,))
    await publish_wait(server.system.coordinator, run_id, Wait("breaker", "waiting", None, HOST), 60.0)
    job = await server.system.records.jobs.job(ACME, JobId(job_id))
    assert job is not None
    stream = JobStream(server.system, Streams(1, asyncio.Event()), job, _always)
    shown = await stream._progress()
    assert shown["waiting"]["target"] == HOST
