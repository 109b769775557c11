"""Every route of the API behind the policy of its role: each with ids of what is there, and each with all of its query
parameters. A new route is in it by itself, and needs a body here if it changes something."""

import json
from dataclasses import asdict, replace
from typing import Any

from tests.stacks.policy_flows import HANDLER, ended, until
from tests.support.api import Answer, Api, staged
from tests.support.gated_fleet import RunningFleet
from tests.support.owned import Owned
from tests.support.product_site import ProductSite
from tests.support.receiver import Receiver
from tests.support.route_table import Route, queries, routes
from tests.support.target_site import Site

_PROOF = {"x-conveyor-dashboard": "1"}
_READS = frozenset({"GET", "HEAD"})
# Of an open job, which is made for each.
_OF_AN_OPEN_JOB = frozenset(
    {
        "PATCH /v1/jobs/{job_id}",
        "POST /v1/jobs/{job_id}/cancel",
        "POST /v1/jobs/{job_id}/close",
        "POST /v1/jobs/{job_id}/pause",
        "POST /v1/jobs/{job_id}/resume",
        "POST /v1/jobs/{job_id}/tasks",
    }
)
_BODIES: dict[str, Any] = {
    "PATCH /v1/jobs/{job_id}": {"concurrency": 2},
    "PATCH /v1/schedules/{schedule_id}": {"name": "other"},
    "PATCH /v1/webhooks/{webhook_id}": {"description": "other"},
    "POST /v1/breakers/reset": {"all_tenants": True},
    "POST /v1/dead-letters/redrive": {"all": True},
    "POST /v1/jobs": {**HANDLER, "tasks": [1]},
    "POST /v1/jobs/{job_id}/duplicate": {},
    "POST /v1/jobs/{job_id}/exports": {"format": "csv"},
    "POST /v1/jobs/{job_id}/rerun": {"select": {"status": ["succeeded"]}},
    "POST /v1/jobs/{job_id}/tasks": {"tasks": [1]},
    "POST /v1/keys": {"tenant": "routes"},
    "POST /v1/lists/preview": {"text": "https://example.com/\n"},
    "POST /v1/schedules": {"cron": "0 0 1 1 *", "job": {"tasks": ["https://example.com/"]}},
    "POST /v1/uploads": {"size": 1, "sha256": "0" * 64},
    "POST /v1/webhooks": {"url": "https://example.com/"},
}
# What they need is in a flow of its own, and no other answer can be had with these ids.
_ELSEWHERE = {
    "GET /v1/stream": "it does not end",
    "GET /v1/jobs/{job_id}/stream": "it does not end",
    "POST /v1/uploads/{upload_id}/parts": "upload_in_parts",
    "POST /v1/uploads/{upload_id}/complete": "upload_in_parts",
    "PUT /v1/uploads/{upload_id}/content": "only lists in a directory have it",
    **dict.fromkeys(
        (
            "POST /v1/sign-in",
            "POST /v1/sign-in/links",
            "GET /v1/session",
            "POST /v1/session/admin",
            "DELETE /v1/session/admin",
            "DELETE /v1/session",
        ),
        "_sessions",
    ),
}


async def every_route(fleet: RunningFleet, site: Site) -> None:
    api = await fleet.api.as_tenant("routes", admin=True)
    async with ProductSite() as shop, Receiver() as receiver:
        owned = await _everything(api, shop, receiver)
        links = await _links(api, owned)
        for route in routes():
            if route.name in _ELSEWHERE:
                continue
            if route.path in links:
                answers = [await api.request(route.method, links[route.path], auth=False)]
            elif route.method in _READS:
                answers = [await _asked(api, route, query, owned) for query in queries(route, _ids(owned))]
            else:
                answers = [await _changed(api, route, await _fresh(api, route, owned))]
            refused = [each for each in answers if each.status >= 400 and b"bad_cursor" not in each.body]
            assert refused == [], (route.name, refused)
    await _sessions(api)
    for job in (await api.get("/v1/jobs?state=active&limit=100")).json["items"]:
        assert (await api.post(f"/v1/jobs/{job['id']}/cancel")).status in {200, 202}
        await ended(api, job["id"])


async def _sessions(api: Api) -> None:
    """A session of the dashboard, its rights of an administrator, and its end."""
    link = (await api.post("/v1/sign-in/links")).json["path"].rpartition("/")[2]
    signed = await api.post("/v1/sign-in", {"link": link}, auth=False, headers=_PROOF)
    cookie = {"cookie": signed.headers["set-cookie"].partition(";")[0], **_PROOF}
    for method, path, body in (
        ("GET", "/v1/session", None),
        ("POST", "/v1/session/admin", json.dumps({"key": api.key}).encode()),
        ("DELETE", "/v1/session/admin", None),
        ("DELETE", "/v1/session", None),
    ):
        answer = await api.request(method, path, body=body, auth=False, headers=cookie)
        assert answer.status < 300, (method, path, answer)


async def _everything(api: Api, shop: ProductSite, receiver: Receiver) -> Owned:
    """A job with a rerun, extracted results and an export; an upload, a schedule, an endpoint with a delivery."""
    webhook_id = (await api.post("/v1/webhooks", {"url": receiver.url()})).json["id"]
    made = await api.submit({"tasks": [shop.url(1), shop.url(2)], "extract": "tests.product"})
    job_id = made.json["id"]
    await ended(api, job_id)
    assert (await api.post(f"/v1/jobs/{job_id}/rerun", {"select": {"status": ["succeeded"]}})).status == 202
    await ended(api, job_id)
    export_id = (await api.post(f"/v1/jobs/{job_id}/exports", {"format": "csv"})).json["id"]

    async def ready() -> Any:
        return (await api.get(f"/v1/exports/{export_id}")).json

    async def deliveries() -> Any:
        return (await api.get(f"/v1/webhooks/{webhook_id}/deliveries")).json["items"]

    await until(ready, lambda shown: shown["state"] == "ready")
    sent = await until(deliveries)
    [first, *_] = (await api.get(f"/v1/jobs/{job_id}/results")).json["items"]
    schedule = {"cron": "0 0 1 1 *", "job": {"tasks": [shop.url(1)]}}
    return Owned(
        job_id,
        first["task_id"],
        await staged(api, b"https://example.com/\n"),
        export_id,
        webhook_id=webhook_id,
        delivery_id=sent[0]["id"],
        schedule_id=(await api.post("/v1/schedules", schedule)).json["id"],
    )


async def _links(api: Api, owned: Owned) -> dict[str, str]:
    """The routes that are asked by their signed links."""
    task = (await api.get(owned.path("/v1/jobs/{job_id}/tasks/{task_id}"))).json
    return {
        "/v1/bodies/{job_id}/{task_id}": task["body_url"].removeprefix(api.url),
        "/v1/extracted/{job_id}/{task_id}": task["extracted_url"].removeprefix(api.url),
    }


def _ids(owned: Owned) -> dict[str, str]:
    return {name: str(value) for name, value in asdict(owned).items()}


async def _asked(api: Api, route: Route, query: str, owned: Owned) -> Answer:
    return await api.request(route.method, owned.path(route.path + query))


async def _fresh(api: Api, route: Route, owned: Owned) -> Owned:
    """With an open job for a route that changes one, and what is to be deleted made anew."""
    if route.name not in _OF_AN_OPEN_JOB:
        return owned
    opened = (await api.submit({**HANDLER, "mode": "open"})).json["id"]
    if route.path.endswith("/resume"):
        await api.post(f"/v1/jobs/{opened}/pause")
    return replace(owned, job_id=opened)


async def _changed(api: Api, route: Route, owned: Owned) -> Answer:
    path = owned.path(route.path)
    if "{key_id}" in path:
        made = await api.post("/v1/keys", _BODIES["POST /v1/keys"])
        path = path.replace("{key_id}", made.json["key_id"])
    body = _BODIES.get(route.name)
    return await api.request(route.method, path, body=None if body is None else json.dumps(body).encode())
