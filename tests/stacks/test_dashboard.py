"""What the dashboard asks for, on each stack."""

import asyncio
from typing import TypeVar

import msgspec

from conveyor.api.schemas.fleet_shapes import BreakersPage, LanesPage, WorkersShape
from conveyor.api.schemas.statistics_shapes import StatisticsShape
from conveyor.api.schemas.task_shapes import TaskSearchPage
from tests.support.api import Api

S = TypeVar("S", bound=msgspec.Struct)


async def test_the_dashboard_is_served_on_every_stack(api: Api, stack: str) -> None:
    page = await api.get("/", auth=False)
    elsewhere = "'self' http://127.0.0.1" in page.headers["content-security-policy"]
    assert (page.status, elsewhere) == (200, stack in {"aws", "mixture"})

    link = (await api.post("/v1/sign-in/links")).json["path"].rpartition("/")[2]
    proof = {"x-conveyor-dashboard": "1"}
    signed = await api.post("/v1/sign-in", {"link": link}, auth=False, headers=proof)
    cookie = {"cookie": signed.headers["set-cookie"].partition(";")[0]}
    assert (await api.post("/v1/sign-in", {"link": link}, auth=False, headers=proof)).status == 401

    tasks = [{"number": number} for number in range(40)]
    spec = {"kind": "python", "handler": "tests.broken", "attempts": 1, "tasks": tasks}
    job_id = (await api.submit(spec, headers={"prefer": "respond-async"})).json["id"]
    async with asyncio.timeout(60):
        state = ""
        while state != "completed":
            await asyncio.sleep(0.05)
            state = (await api.get(f"/v1/jobs/{job_id}", auth=False, headers=cookie)).json["state"]
    statistics = await shown(api, f"/v1/jobs/{job_id}/statistics", StatisticsShape)
    assert (statistics.samples[-1].failed, statistics.errors[0].code) == (40, "handler_raised")
    found = await shown(api, f"/v1/jobs/{job_id}/search?text=3&status=failed", TaskSearchPage)
    assert found.items[0].index == 3
    assert sorted(task.index for task in found.items) == [3, 13, 23, *range(30, 40)]
    assert (await shown(api, "/v1/workers", WorkersShape)).alive == 1
    assert (await shown(api, "/v1/breakers", BreakersPage)).items == []
    assert (await shown(api, "/v1/lanes", LanesPage)).items == []
    await api.submit({"mode": "open"})
    lanes = await shown(api, "/v1/lanes", LanesPage)
    assert [(lane.state, lane.queue.ready) for lane in lanes.items] == [("ingesting", 0)]

    out = await api.request("DELETE", "/v1/session", auth=False, headers={**cookie, **proof})
    assert out.status == 204


async def shown(api: Api, path: str, shape: type[S]) -> S:
    answer = await api.get(path)
    assert answer.status == 200, answer.body
    return msgspec.convert(answer.json, shape)
