"""Tenants are apart. The matrix is made from the route table: every route with an id of a tenant is in it."""

import json
from dataclasses import asdict
from typing import Any

import msgspec
import pytest

from conveyor.engines.queue import CONTROL, Outgoing
from conveyor.model import IngestJob, JobId, RunId, TenantId
from tests.support.api import Answer, Api
from tests.support.owned import UNKNOWN, Owned, make_owned
from tests.support.route_table import Route, queries, routes

IDS = asdict(UNKNOWN)
# Bodies of routes that do not take an empty object.
BODIES = {"/v1/uploads/{upload_id}/complete": b'{"multipart_id": "some"}'}


def matrix() -> dict[Route, list[str]]:
    """The routes of tenants, with the query strings with which they name an id, in the path or in the query itself."""
    of_tenants = [route for route in routes() if route.needs_key and not route.needs_admin]
    paths = {route: [route.path + query for query in queries(route, IDS)] for route in of_tenants}
    # A cursor alone is a place in a listing of one's own: see below.
    named = {route: [path for path in paths[route] if "{" in path.partition("cursor=")[0]] for route in of_tenants}
    return {route: paths for route, paths in named.items() if paths}


MATRIX = matrix()


def test_the_matrix_is_made_of_all_routes() -> None:
    """Without a tenant's id in the matrix are only routes by a signed link, and those of administrators."""
    apart = {route.name for route in routes() if "{" in route.path and route not in MATRIX}
    assert apart == {
        "PUT /v1/uploads/{upload_id}/content",
        "GET /v1/bodies/{job_id}/{task_id}",
        "HEAD /v1/bodies/{job_id}/{task_id}",
        "GET /v1/extracted/{job_id}/{task_id}",
        "DELETE /v1/keys/{key_id}",
    }
    assert "GET /v1/dead-letters" in {route.name for route in MATRIX}
    print(f"{len(MATRIX)} routes, {sum(map(len, MATRIX.values()))} paths")


def comparable(answer: Answer) -> tuple[int, dict[str, str], Any]:
    headers = {name: value for name, value in answer.headers.items() if name not in {"date", "x-request-id"}}
    return answer.status, headers, answer.body


async def ask(api: Api, method: str, path: str, route: str = "") -> Answer:
    body = BODIES.get(route, b"{}")
    return await api.request(method, path, body=body if method in {"POST", "PUT", "PATCH"} else None)


@pytest.mark.parametrize("route", MATRIX, ids=lambda route: route.name)
async def test_foreign_is_the_same_as_unknown(server: Api, route: Route) -> None:
    intruder = await server.as_tenant("intruder")
    own = await make_owned(server, "acme")
    foreign_to_own = await make_owned(intruder, "intruder")
    for path in MATRIX[route]:
        unknown = comparable(await ask(intruder, route.method, UNKNOWN.path(path), route.path))
        foreign = comparable(await ask(intruder, route.method, own.path(path), route.path))
        assert foreign == unknown
        assert unknown[0] == 404
        # An answer to HEAD has no body.
        assert route.method == "HEAD" or json.loads(unknown[2])["code"] == "not_found"
        mixed = Owned(foreign_to_own.job_id, own.task_id, own.upload_id)
        if "{task_id}" in path.partition("cursor=")[0]:
            assert comparable(await ask(intruder, route.method, mixed.path(path), route.path)) == unknown
        assert (await server.get(f"/v1/jobs/{own.job_id}")).json["state"] == "running"
        if not route.is_endless:
            assert (await ask(server, route.method, own.path(path), route.path)).status in {200, 201, 202, 204, 409}, (
                path
            )


async def test_other_methods_tell_nothing(server: Api) -> None:
    intruder = await server.as_tenant("intruder")
    own = await make_owned(server, "acme")
    for path in {route.path for route in MATRIX}:
        for method in {"GET", "POST", "PUT", "PATCH", "DELETE"} - {
            each.method for each in routes() if each.path == path
        }:
            foreign = comparable(await ask(intruder, method, own.path(path)))
            assert foreign == comparable(await ask(intruder, method, UNKNOWN.path(path)))


async def test_a_link_is_the_same_for_everyone(server: Api) -> None:
    """Without its signature, a key does not help: not even the owner's."""
    own = await make_owned(server, "acme")
    path = own.path("/v1/uploads/{upload_id}/content")
    refused = comparable(await ask(server, "PUT", path))
    assert (refused[0], json.loads(refused[2])["code"]) == (403, "signature_refused")
    for api in (server, await server.as_tenant("intruder")):
        for each in (own, UNKNOWN):
            answer = await ask(api, "PUT", each.path("/v1/uploads/{upload_id}/content?signature=" + "0" * 64))
            assert comparable(answer) == refused


async def test_an_upload_is_good_for_its_tenant_only(server: Api) -> None:
    intruder = await server.as_tenant("intruder")
    own = await make_owned(server, "acme")
    foreign = comparable(await intruder.submit({"source": {"upload_id": own.upload_id}}))
    assert foreign == comparable(await intruder.submit({"source": {"upload_id": UNKNOWN.upload_id}}))
    assert foreign[0] == 404
    assert (await server.submit({"source": {"upload_id": own.upload_id}})).status == 201


async def test_a_job_in_a_body_is_ones_own(server: Api) -> None:
    intruder = await server.as_tenant("intruder")
    own = await make_owned(server, "acme")
    for path, named in (
        ("/v1/dead-letters/redrive", {"job_id": "{job_id}"}),
        ("/v1/jobs", {"tasks": ["http://example.com/"], "replaces": "{job_id}"}),
    ):
        sent = json.dumps(named)
        foreign = comparable(await intruder.post(path, sent.replace("{job_id}", own.job_id).encode()))
        assert foreign == comparable(await intruder.post(path, sent.replace("{job_id}", UNKNOWN.job_id).encode()))
        assert foreign[0] == 404


async def test_dead_letters_are_ones_own(server: Api) -> None:
    intruder = await server.as_tenant("intruder")
    for tenant in ("acme", "intruder", "acme"):
        message = IngestJob(TenantId(tenant), JobId("job_x"), RunId("run_x"))
        await server.system.queue.send(CONTROL, [Outgoing(msgspec.json.encode(message))])
        [delivery] = await server.system.queue.receive(CONTROL, 1, 30)
        await server.system.queue.dead_letter(CONTROL, [delivery.receipt], f"secret of {tenant}")
    theirs = [item["id"] for item in (await server.get("/v1/dead-letters")).json["items"]]
    listed = await intruder.get("/v1/dead-letters")
    assert [item["reason"] for item in listed.json["items"]] == ["secret of intruder"]
    assert b"acme" not in listed.body
    foreign = comparable(await intruder.post("/v1/dead-letters/redrive", {"ids": theirs}))
    assert foreign == comparable(await intruder.post("/v1/dead-letters/redrive", {"ids": ["998", "999"]}))
    assert json.loads(foreign[2]) == {"redriven": 0, "requeued": 0, "skipped": 2, "blocked": 0, "runs": []}
    assert len((await server.get("/v1/dead-letters")).json["items"]) == 2


async def test_keys_are_for_administrators(server: Api) -> None:
    admin = await server.as_tenant("local", admin=True)
    own_id = server.key.split("_")[1]
    for key_id in (own_id, admin.key.split("_")[1], "0" * 26, "x"):
        answer = await server.request("DELETE", f"/v1/keys/{key_id}")
        assert (answer.status, answer.json["code"]) == (403, "forbidden")
    assert (await server.get("/v1/jobs")).status == 200
    # An administrator's key is a tenant's key all the same: it sees no other's jobs.
    own = await make_owned(server, "acme")
    assert (await admin.get(f"/v1/jobs/{own.job_id}")).status == 404
    assert (await admin.request("DELETE", f"/v1/keys/{own_id}")).status == 204


async def test_a_foreign_cursor_shows_only_ones_own(server: Api) -> None:
    intruder = await server.as_tenant("intruder")
    theirs = [await make_owned(server, "acme") for _ in range(3)]
    mine = await make_owned(intruder, "intruder")
    listed = await intruder.get(f"/v1/jobs?cursor={theirs[-1].job_id}")
    assert {item["id"] for item in listed.json["items"]} <= {mine.job_id}
    page = await intruder.get(f"/v1/jobs/{mine.job_id}/results?cursor={theirs[0].task_id}")
    assert b"acme" not in page.body
    for answer in (listed, page, await intruder.get("/v1/jobs")):
        assert b"of acme" not in answer.body


async def test_the_tenant_is_the_keys_whatever_is_said(server: Api) -> None:
    intruder = await server.as_tenant("intruder")
    own = await make_owned(server, "acme")
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
    from tests.support.api import parsed, raw

    intruder = await server.as_tenant("intruder")
    request = (
        f"GET /v1/jobs HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {intruder.key}\r\n"
        f"authorization: Bearer {server.key}\r\nconnection: close\r\n\r\n"
    )
    assert parsed(await raw(server.address, request.encode())).status == 401
