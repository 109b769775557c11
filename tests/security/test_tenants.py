"""Tenants are apart. The routes are read from the app: a route with an id that is not tried here fails the test."""

import json
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgspec
import pytest

from conveyor.api.router import application
from conveyor.engines.queue import CONTROL, Outgoing
from conveyor.model import BodyRef, IngestJob, JobId, ResultDetail, RunId, TaskEnd, TenantId, task_id
from conveyor.notify.dispatcher import OutboxDispatcher
from conveyor.states import TaskStatus
from conveyor.system import System
from tests.support.api import Answer, Api
from tests.support.export_jobs import exporter

URL = "http://example.com/"

# Each route with an id and each of its methods, with the parameters that carry an id beside its path.
MATRIX: dict[tuple[str, str], tuple[str, ...]] = {
    ("GET", "/v1/jobs/{job_id}"): ("", "?verify=true"),
    ("GET", "/v1/jobs/{job_id}/results"): (
        "",
        "?status=succeeded",
        "?cursor={task_id}",
        "?run=1",
        "?run=latest-per-task",
    ),
    ("GET", "/v1/jobs/{job_id}/tasks/{task_id}"): ("",),
    ("GET", "/v1/jobs/{job_id}/tasks/{task_id}/body"): ("",),
    ("GET", "/v1/jobs/{job_id}/events"): ("", "?task={task_id}", "?cursor=1"),
    ("GET", "/v1/jobs/{job_id}/export"): ("", "?partial=true"),
    ("GET", "/v1/jobs/{job_id}/statistics"): ("", "?run=1"),
    ("GET", "/v1/jobs/{job_id}/search"): ("?text=example",),
    ("GET", "/v1/jobs/{job_id}/invalid"): ("", "?cursor=000000-000000000001.1"),
    ("POST", "/v1/jobs/{job_id}/tasks"): ("",),
    ("POST", "/v1/jobs/{job_id}/close"): ("",),
    ("POST", "/v1/jobs/{job_id}/rerun"): ("",),
    ("PATCH", "/v1/jobs/{job_id}"): ("",),
    ("POST", "/v1/jobs/{job_id}/pause"): ("",),
    ("POST", "/v1/jobs/{job_id}/resume"): ("",),
    ("POST", "/v1/jobs/{job_id}/cancel"): ("",),
    ("GET", "/v1/uploads/{upload_id}"): ("",),
    ("POST", "/v1/uploads/{upload_id}/parts"): ("",),
    ("POST", "/v1/uploads/{upload_id}/complete"): ("",),
    ("POST", "/v1/jobs/{job_id}/exports"): ("",),
    ("GET", "/v1/jobs/{job_id}/exports"): ("", "?cursor={export_id}"),
    ("GET", "/v1/exports/{export_id}"): ("",),
    ("GET", "/v1/exports/{export_id}/manifest"): ("",),
    ("GET", "/v1/exports/{export_id}/parts/{number}"): ("",),
    ("DELETE", "/v1/exports/{export_id}"): ("",),
    ("GET", "/v1/jobs/{job_id}/deliveries"): ("", "?cursor={delivery_id}"),
    ("GET", "/v1/jobs/{job_id}/callbacks"): ("",),
    ("GET", "/v1/webhooks/{webhook_id}"): ("",),
    ("PATCH", "/v1/webhooks/{webhook_id}"): ("",),
    ("POST", "/v1/webhooks/{webhook_id}/rotate"): ("",),
    ("GET", "/v1/webhooks/{webhook_id}/deliveries"): ("", "?cursor={delivery_id}"),
    ("GET", "/v1/webhooks/deliveries/{delivery_id}"): ("",),
    ("POST", "/v1/webhooks/deliveries/{delivery_id}/redeliver"): ("",),
    ("DELETE", "/v1/webhooks/{webhook_id}"): ("",),
    ("GET", "/v1/schedules/{schedule_id}"): ("",),
    ("PATCH", "/v1/schedules/{schedule_id}"): ("",),
    ("DELETE", "/v1/schedules/{schedule_id}"): ("",),
    # Last: what is deleted can not be looked at any more.
    ("DELETE", "/v1/jobs/{job_id}"): ("",),
}
# For its owner it goes on as long as the job does.
WITHOUT_END = {("GET", "/v1/jobs/{job_id}/stream")}
# The right to it is the signature in the link, whoever asks.
BY_LINK = {("PUT", "/v1/uploads/{upload_id}/content")}
# For administrators, who see every tenant's.
BY_ADMINISTRATORS = {("DELETE", "/v1/keys/{key_id}")}
# Routes that name no id in their path.
WITHOUT_ID = {
    "/healthz",
    "/readyz",
    "/metrics",
    "/v1/openapi.json",
    "/v1/jobs",
    "/v1/uploads",
    "/v1/dead-letters",
    "/v1/dead-letters/redrive",
    "/v1/keys",
    "/v1/webhooks",
    "/v1/webhooks/secret",
    "/v1/schedules",
    "/v1/stream",
    "/v1/breakers",
    "/v1/breakers/reset",
    "/v1/lanes",
    "/v1/workers",
    "/v1/session",
    "/v1/sign-in",
    "/v1/sign-in/links",
}


@dataclass(frozen=True)
class Owned:
    """A job of a tenant, with a task that has a body, and an export; and an upload."""

    job_id: str
    task_id: str
    upload_id: str
    export_id: str = "export_" + "0" * 26
    number: str = "1"
    webhook_id: str = "webhook_" + "0" * 26
    delivery_id: str = "webhook_" + "0" * 26 + ":evt_" + "0" * 26
    schedule_id: str = "schedule_" + "0" * 26

    def path(self, route: str, query: str) -> str:
        path = route + query
        for name in (
            "job_id",
            "task_id",
            "upload_id",
            "export_id",
            "number",
            "webhook_id",
            "delivery_id",
            "schedule_id",
        ):
            path = path.replace(f"{{{name}}}", getattr(self, name))
        return path


UNKNOWN = Owned("job_" + "0" * 26, "0" * 64, "upload_" + "0" * 26)


async def make_job(api: Api, tenant: str) -> Owned:
    answer = await api.submit({"tasks": [URL, URL], "name": f"of {tenant}"})
    job = await api.system.records.jobs.job(TenantId(tenant), JobId(answer.json["id"]))
    assert job is not None
    body = f"secret of {tenant}".encode()
    key = f"results/{job.job_id}"
    await api.system.blobs.put(key, body)
    detail = ResultDetail(body=BodyRef(key, len(body), sha256(body).hexdigest()))
    end = TaskEnd(0, TaskStatus.SUCCEEDED, 1, 200, None, msgspec.json.encode(detail).decode(), 1.0)
    await api.system.tasks.finish(job.key, [end])
    upload_id = await api.upload(f"http://{tenant}.example/\n".encode())
    export_id = (await api.post(f"/v1/jobs/{job.job_id}/exports", {"partial": True})).json["id"]
    while await exporter(api.system).tick() == 0.0:
        pass
    webhook_id = (await api.post("/v1/webhooks", {"url": f"https://{tenant}.example/"})).json["id"]
    await OutboxDispatcher(api.system.settings, api.system.records, api.system.tasks, api.system.clock).run_once()
    sent = (await api.get(f"/v1/webhooks/{webhook_id}/deliveries")).json["items"][0]["id"]
    template = {"cron": "0 0 * * *", "job": {"tasks": [URL]}, "name": f"of {tenant}"}
    schedule_id = (await api.post("/v1/schedules", template)).json["id"]
    return Owned(
        job.job_id,
        task_id(job.run.run_id, 0),
        upload_id,
        export_id,
        webhook_id=webhook_id,
        delivery_id=sent,
        schedule_id=schedule_id,
    )


def routes(system: System) -> dict[str, set[str]]:
    return {route.path_format: set(route.methods) - {"OPTIONS"} for route in application().routes}


async def test_the_matrix_has_every_route(system: System) -> None:
    found = routes(system)
    with_id = {(method, path) for path, methods in found.items() if "{" in path for method in methods}
    assert with_id == set(MATRIX) | WITHOUT_END | BY_LINK | BY_ADMINISTRATORS
    assert {path for path in found if "{" not in path} == WITHOUT_ID


def comparable(answer: Answer) -> tuple[int, dict[str, str], Any]:
    headers = {name: value for name, value in answer.headers.items() if name not in {"date", "x-request-id"}}
    return answer.status, headers, answer.body


async def ask(api: Api, method: str, path: str) -> Answer:
    body = b'{"multipart_id": "some"}' if path.endswith("/complete") else b"{}"
    return await api.request(method, path, body=body if method in {"POST", "PUT", "PATCH"} else None)


@pytest.mark.parametrize(("method", "route"), MATRIX)
async def test_foreign_is_the_same_as_unknown(server: Api, method: str, route: str) -> None:
    intruder = await server.as_tenant("intruder")
    own = await make_job(server, "acme")
    foreign_to_own = await make_job(intruder, "intruder")
    for query in MATRIX[method, route]:
        unknown = comparable(await ask(intruder, method, UNKNOWN.path(route, query)))
        foreign = comparable(await ask(intruder, method, own.path(route, query)))
        assert foreign == unknown
        assert unknown[0] == 404
        assert json.loads(unknown[2])["code"] == "not_found"
        mixed = Owned(foreign_to_own.job_id, own.task_id, own.upload_id)
        if "{task_id}" in route + query and "cursor" not in query:
            assert comparable(await ask(intruder, method, mixed.path(route, query))) == unknown
        assert (await server.get(f"/v1/jobs/{own.job_id}")).json["state"] == "running"
        assert (await ask(server, method, own.path(route, query))).status in {200, 202, 204, 409}


@pytest.mark.parametrize(("method", "route"), WITHOUT_END)
async def test_nobody_follows_anothers(server: Api, method: str, route: str) -> None:
    intruder = await server.as_tenant("intruder")
    own = await make_job(server, "acme")
    foreign = comparable(await ask(intruder, method, own.path(route, "")))
    assert foreign == comparable(await ask(intruder, method, UNKNOWN.path(route, "")))
    assert foreign[0] == 404


async def test_other_methods_tell_nothing(server: Api) -> None:
    intruder = await server.as_tenant("intruder")
    own = await make_job(server, "acme")
    for _, route in MATRIX:
        for method in {"GET", "POST", "PUT", "PATCH", "DELETE"} - routes(server.system)[route]:
            foreign = comparable(await ask(intruder, method, own.path(route, "")))
            assert foreign == comparable(await ask(intruder, method, UNKNOWN.path(route, "")))


async def test_a_link_is_the_same_for_everyone(server: Api) -> None:
    """Without its signature, a key does not help: not even the owner's."""
    own = await make_job(server, "acme")
    path = own.path("/v1/uploads/{upload_id}/content", "")
    refused = comparable(await ask(server, "PUT", path))
    assert (refused[0], json.loads(refused[2])["code"]) == (403, "signature_refused")
    for api in (server, await server.as_tenant("intruder")):
        for each in (own, UNKNOWN):
            answer = await ask(api, "PUT", each.path("/v1/uploads/{upload_id}/content", "?signature=" + "0" * 64))
            assert comparable(answer) == refused


async def test_an_upload_is_good_for_its_tenant_only(server: Api) -> None:
    intruder = await server.as_tenant("intruder")
    own = await make_job(server, "acme")
    foreign = comparable(await intruder.submit({"source": {"upload_id": own.upload_id}}))
    assert foreign == comparable(await intruder.submit({"source": {"upload_id": UNKNOWN.upload_id}}))
    assert foreign[0] == 404
    assert (await server.submit({"source": {"upload_id": own.upload_id}})).status == 201


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
    assert json.loads(foreign[2]) == {"redriven": 0, "skipped": 2, "runs": []}
    assert len((await server.get("/v1/dead-letters")).json["items"]) == 2


async def test_keys_are_for_administrators(server: Api) -> None:
    admin = await server.as_tenant("local", admin=True)
    own_id = server.key.split("_")[1]
    for key_id in (own_id, admin.key.split("_")[1], "0" * 26, "x"):
        answer = await server.request("DELETE", f"/v1/keys/{key_id}")
        assert (answer.status, answer.json["code"]) == (403, "forbidden")
    assert (await server.get("/v1/jobs")).status == 200
    # An administrator's key is a tenant's key all the same: it sees no other's jobs.
    own = await make_job(server, "acme")
    assert (await admin.get(f"/v1/jobs/{own.job_id}")).status == 404
    assert (await admin.request("DELETE", f"/v1/keys/{own_id}")).status == 204


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
    from tests.support.api import parsed, raw

    intruder = await server.as_tenant("intruder")
    request = (
        f"GET /v1/jobs HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {intruder.key}\r\n"
        f"authorization: Bearer {server.key}\r\nconnection: close\r\n\r\n"
    )
    assert parsed(await raw(server.address, request.encode())).status == 401
