"""Tenants are apart. The routes are read from the app: a route with an id that is not tried here fails the test."""

import json
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from conveyor.api.app import create_app
from conveyor.model import BodyRef, JobId, ResultDetail, TaskEnd, TenantId, task_id
from conveyor.states import TaskStatus
from conveyor.system import System
from tests.api import Answer, Api

URL = "http://example.com/"

# Each id-bearing route, with the parameters that carry an id beside its path.
MATRIX: dict[str, tuple[str, ...]] = {
    "/v1/jobs/{job_id}": ("",),
    "/v1/jobs/{job_id}/results": ("", "?status=succeeded", "?cursor={task_id}"),
    "/v1/jobs/{job_id}/tasks/{task_id}": ("",),
    "/v1/jobs/{job_id}/tasks/{task_id}/body": ("",),
    "/v1/jobs/{job_id}/events": ("", "?task={task_id}", "?cursor=1"),
    "/v1/jobs/{job_id}/export": ("", "?partial=true"),
}
# Routes that name no id, and so can name no one else's.
WITHOUT_ID = {"/healthz", "/readyz", "/v1/openapi.json", "/v1/jobs"}


@dataclass(frozen=True)
class Owned:
    """A job of a tenant, with a task that has a body."""

    job_id: str
    task_id: str

    def path(self, route: str, query: str) -> str:
        return (route + query).replace("{job_id}", self.job_id).replace("{task_id}", self.task_id)


UNKNOWN = Owned("job_" + "0" * 26, "0" * 64)


async def make_job(api: Api, tenant: str) -> Owned:
    answer = await api.submit({"tasks": [URL, URL], "name": f"of {tenant}"})
    job = await api.system.records.job(TenantId(tenant), JobId(answer.json["id"]))
    assert job is not None
    body = f"secret of {tenant}".encode()
    key = f"results/{job.job_id}"
    await api.system.blobs.put(key, body)
    from hashlib import sha256

    detail = ResultDetail(body=BodyRef(key, len(body), sha256(body).hexdigest()))
    end = TaskEnd(0, TaskStatus.SUCCEEDED, 1, 200, None, msgspec.json.encode(detail).decode(), 1.0)
    await api.system.tasks.finish(job.key, [end])
    return Owned(job.job_id, task_id(job.run.run_id, 0))


def routes(system: System) -> dict[str, set[str]]:
    return {route.path_format: set(route.methods) - {"OPTIONS"} for route in create_app(system).routes}


async def test_the_matrix_has_every_route(system: System) -> None:
    found = routes(system)
    assert {path for path in found if "{" in path} == set(MATRIX)
    assert {path for path in found if "{" not in path} == WITHOUT_ID


def comparable(answer: Answer) -> tuple[int, dict[str, str], Any]:
    headers = {name: value for name, value in answer.headers.items() if name not in {"date", "x-request-id"}}
    return answer.status, headers, answer.body


@pytest.mark.parametrize("route", MATRIX)
async def test_foreign_is_the_same_as_unknown(server: Api, route: str) -> None:
    intruder = await server.as_tenant("intruder")
    own = await make_job(server, "acme")
    foreign_to_own = await make_job(intruder, "intruder")
    for query in MATRIX[route]:
        assert (await server.get(own.path(route, query))).status in {200, 409}
        unknown = comparable(await intruder.get(UNKNOWN.path(route, query)))
        foreign = comparable(await intruder.get(own.path(route, query)))
        assert foreign == unknown
        assert unknown[0] == 404
        assert json.loads(unknown[2])["code"] == "not_found"
        for method in routes(server.system)[route] - {"GET"}:
            assert comparable(await intruder.request(method, own.path(route, query))) == comparable(
                await intruder.request(method, UNKNOWN.path(route, query))
            )
        mixed = Owned(foreign_to_own.job_id, own.task_id)
        if "{task_id}" in route + query and "cursor" not in query:
            assert comparable(await intruder.get(mixed.path(route, query))) == unknown


async def test_a_foreign_cursor_shows_only_ones_own(server: Api) -> None:
    intruder = await server.as_tenant("intruder")
    theirs = [await make_job(server, "acme") for _ in range(3)]
    mine = await make_job(intruder, "intruder")
    listed = await intruder.get(f"/v1/jobs?cursor={theirs[-1].job_id}")
    assert {item["id"] for item in listed.json["items"]} <= {mine.job_id}
    page = await intruder.get(f"/v1/jobs/{mine.job_id}/results?cursor={theirs[0].task_id}")
    assert b"acme" not in page.body
    for answer in (listed, page, await intruder.get("/v1/jobs")):
        assert b"of acme" not in answer.body


async def test_the_tenant_is_the_keys_whatever_is_said(server: Api) -> None:
    intruder = await server.as_tenant("intruder")
    own = await make_job(server, "acme")
    for headers in ({"x-tenant": "acme"}, {"tenant": "acme"}, {"x-tenant-id": "acme"}, {"cookie": "tenant=acme"}):
        assert (await intruder.get(f"/v1/jobs/{own.job_id}", headers=headers)).status == 404
        answer = await intruder.get("/v1/jobs", headers=headers)
        assert answer.json["items"] == []
    assert (await intruder.get("/v1/jobs?tenant=acme")).status == 400


async def test_a_key_of_ones_own_with_anothers_secret(server: Api) -> None:
    intruder = await server.as_tenant("intruder")
    _, their_id, _ = server.key.split("_")
    _, _, my_secret = intruder.key.split("_")
    forged = Api(server.url, server.system, f"cv_{their_id}_{my_secret}", server._client)
    assert (await forged.get("/v1/jobs")).status == 401


async def test_two_authorization_headers_are_refused(server: Api) -> None:
    from tests.api import parsed, raw

    intruder = await server.as_tenant("intruder")
    request = (
        f"GET /v1/jobs HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {intruder.key}\r\n"
        f"authorization: Bearer {server.key}\r\nconnection: close\r\n\r\n"
    )
    assert parsed(await raw(server.address, request.encode())).status == 401
