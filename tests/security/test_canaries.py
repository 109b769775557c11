"""A canary in every place that takes a secret, through jobs that succeed and fail, exports, webhooks, schedules and the
dashboard: the canaries arrive where they are for, and are seen nowhere else."""

import base64
import gzip
import io
import json
import re
import zipfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from conveyor.embedded import Embedded
from conveyor.settings import Settings
from conveyor.system import open_system
from conveyor.telemetry.logs import configure_log
from tests.flow.test_traces import Collector
from tests.security.test_shown_secrets import HIDDEN
from tests.support.api import Api, serving
from tests.support.export_site import ExportSite
from tests.support.list_site import ListSite
from tests.support.owned import Owned
from tests.support.places import quick_place
from tests.support.receiver import Receiver, answering
from tests.support.route_table import queries, routes
from tests.support.target_site import Site
from tests.support.working import all_items, ended, until

TOLD_ON_PURPOSE = {"/v1/webhooks/secret"}
PROOF = {"x-conveyor-dashboard": "1"}


def canary(place: str) -> str:
    return f"canary{place}5ecret"


class Sites(NamedTuple):
    """All that the server calls."""

    target: Site
    lists: ListSite
    exports: ExportSite
    receiver: Receiver
    collector: Collector

    def requests(self) -> str:
        """Every request that arrived, as text."""
        seen = [*self.target.seen, *self.lists.seen, *self.exports.calls, *(told.seen for told in self.receiver.told)]
        return "\n".join(str(each) for each in seen)


def specs(sites: Sites) -> dict[str, dict[str, Any]]:
    """One job for each way in which a job takes secrets. The first has a task that fails."""
    headers = {"Authorization": f"Bearer {canary('taskauth')}", "Cookie": canary("taskcookie")}
    target = sites.target
    calls = sites.exports.described(
        create={
            "url": f"{sites.exports.url('/exports')}?k={canary('exportquery')}",
            "headers": {"X-Plain": canary("exportheader")},
            "body": {"pass": canary("exportbody")},
        }
    )
    return {
        "plain": {
            "tasks": [
                {"url": target.url("/ok"), "headers": headers},
                {"url": target.url("/status?code=404"), "headers": headers},
                {"url": target.url("/hang_up"), "headers": headers},
            ],
            "headers": {"Authorization": canary("jobauth"), "X-Plain": canary("jobplain")},
            "on_exhausted": "dead_letter",
            "notify": [{"type": "webhook", "url": f"{sites.receiver.url()}?t={canary('notifyquery')}"}],
        },
        "gateway": {
            "tasks": ["http://page.example/"],
            "gateway": {
                "url": f"{target.url('/gateway')}?key={canary('gatewayquery')}&url={{url}}",
                "headers": {"X-Plain": canary("gatewayheader")},
            },
        },
        "pool": {
            "tasks": ["http://page.example/", "http://page.example/2"],
            "gateway": {
                "pool": [
                    {
                        "url": f"{target.url('/gateway')}?key={canary('poolquery')}&url={{url}}",
                        "headers": {"X-Plain": canary("poolheader")},
                        "weight": 2,
                    }
                ],
                "sticky": "host",
            },
        },
        "list": {
            "source": {
                "url": f"http://127.0.0.1:{sites.lists.port}/list.jsonl?s={canary('sourcequery')}",
                "headers": {"X-Plain": canary("sourceheader")},
            },
        },
        "export": {"kind": "export_download", "tasks": [{"kind": "a", "from": "b", "days": 1}], "export": calls},
    }


# Sent to a site, and in the request that arrived there.
SENT = (
    "taskauth",
    "taskcookie",
    "jobplain",
    "notifyquery",
    "hookquery",
    "gatewayquery",
    "gatewayheader",
    "poolquery",
    "poolheader",
    "sourcequery",
    "sourceheader",
    "exportquery",
    "exportheader",
    "exportbody",
)
SIGNING_KEY = "signingkeysigningkeysigningkey"
METRICS_TOKEN = "metricstokenmetricstoken"
# Sent nowhere. The job's Authorization gives way to the task's.
KEPT = ("jobauth", SIGNING_KEY, METRICS_TOKEN)


async def run_all(api: Api, sites: Sites) -> tuple[str, list[Owned]]:
    """Every job to its end, with an export and a schedule, and an endpoint whose deliveries fail once: its secret, and
    the ids."""
    upload_id = await api.upload(b"http://example.com/\n")
    hook = await api.post("/v1/webhooks", {"url": f"{sites.receiver.url('/other')}?t={canary('hookquery')}"})
    done = []
    for name, spec in specs(sites).items():
        made = await api.submit({"attempts": 1, "name": name, **spec})
        assert made.status in {201, 202}, made.body
        job_id = made.json["id"]
        await ended(api, job_id)
        form = {"plain": "zip", "gateway": "csv"}.get(name, "jsonl")
        export_id = (await api.post(f"/v1/jobs/{job_id}/exports", {"format": form})).json["id"]

        async def ready(path: str = f"/v1/exports/{export_id}") -> str:
            return str((await api.get(path)).json["state"])

        assert await until(ready, lambda state: state in {"ready", "failed"}) == "ready"
        timetable = {"cron": "0 0 1 1 *", "job": {"attempts": 1, **spec}}
        schedule = await api.post("/v1/schedules", timetable)
        assert schedule.status == 201, schedule.body
        task_id = (await all_items(api, f"/v1/jobs/{job_id}/results"))[0]["task_id"]
        owned = Owned(job_id, task_id, upload_id, export_id)
        done.append(replace(owned, webhook_id=hook.json["id"], schedule_id=schedule.json["id"]))
    deliveries = f"/v1/webhooks/{hook.json['id']}/deliveries"

    async def delivered() -> list[dict[str, Any]]:
        return await all_items(api, deliveries)

    shown = await until(delivered, lambda items: items and all(item["status"] == "delivered" for item in items))
    return hook.json["secret"], [replace(each, delivery_id=shown[0]["id"]) for each in done]


async def everything_shown(api: Api, admin: Api, owned: list[Owned]) -> dict[str, bytes]:
    """Every GET of the API with every parameter, for each job; and the files of the dashboard."""
    pages: dict[str, bytes] = {}
    for route in routes():
        if route.method != "GET" or route.path in TOLD_ON_PURPOSE or not (route.needs_key or route.path == "/metrics"):
            continue
        for ids in owned:
            for query in [""] if route.is_endless else queries(route, vars(ids)):
                path = ids.path(route.path + query)
                if path == "/v1/stream" or path in pages:
                    continue
                answer = await (admin if route.needs_admin or route.path == "/metrics" else api).get(path)
                # A task that failed has no body.
                assert answer.status == (404 if b"no_body" in answer.body else 200), (path, answer)
                pages[path] = str(answer.headers).encode() + opened(answer.body)
    for ids in owned:
        lines = await api.get(f"/v1/jobs/{ids.job_id}/results", headers={"accept": "application/x-ndjson"})
        pages[f"lines of {ids.job_id}"] = lines.body
    for path in ("/", "/dashboard/app.js"):
        page = await api.get(path, auth=False)
        assert page.status == 200
        pages[path] = page.body
    return pages


def opened(body: bytes) -> bytes:
    """What is inside of an archive."""
    if body.startswith(b"PK"):
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            return b"".join(name.encode() + archive.read(name) for name in archive.namelist())
    return gzip.decompress(body) if body.startswith(b"\x1f\x8b") else body


def forms(secret: str) -> Iterator[bytes]:
    """A secret as it is, and in the codings in which it could slip through."""
    yield secret.encode()
    yield base64.b64encode(secret.encode()).rstrip(b"=")[:-1]
    yield secret.encode().hex().encode()


@pytest.mark.slow
async def test_no_canary_is_seen(capfd: pytest.CaptureFixture[str]) -> None:
    configure_log("debug", form="json")
    async with AsyncExitStack() as stack:
        place = stack.enter_context(quick_place())
        sites = Sites(
            await stack.enter_async_context(Site()),
            await stack.enter_async_context(ListSite(b"")),
            await stack.enter_async_context(ExportSite()),
            await stack.enter_async_context(Receiver()),
            await stack.enter_async_context(Collector()),
        )
        sites.lists.data = json.dumps({"url": sites.target.url("/ok")}).encode() + b"\n"
        sites.exports.failures = [(401, "")] * 9
        sites.receiver.acts = [answering(500)]
        settings = Settings.load(
            {},
            data=place,
            allow_private_targets=True,
            fetchers=0,
            signing_key=canary(SIGNING_KEY),
            metrics_token=canary(METRICS_TOKEN),
            otlp_endpoint=f"http://127.0.0.1:{sites.collector.port}",
            trace_ratio=1.0,
        )
        async with open_system(settings) as system, serving(system) as api, Embedded(system).running():
            admin = await api.as_tenant("acme", admin=True)
            secrets = [key.key.rpartition("_")[2] for key in (api, admin)]
            signed_in = await api.post("/v1/sign-in", {"key": api.key}, auth=False, headers=PROOF)
            secrets.append(signed_in.headers["set-cookie"].partition("=")[2].partition(";")[0])
            secrets.append((await api.post("/v1/sign-in/links")).json["path"].rpartition("=")[2])
            secrets.append((await api.get("/v1/webhooks/secret")).json["secret"])
            secret, owned = await run_all(api, sites)
            secrets.append(secret)
            pages = await everything_shown(api, admin, owned)
        spans = b"".join(span.SerializeToString() for span in sites.collector.spans)
    arrived = sites.requests()
    assert [place for place in SENT if canary(place) not in arrived] == []
    said = capfd.readouterr()
    pages |= {"log": said.err.encode() + said.out.encode(), "traces": spans}
    pages["payloads"] = b"".join(told.seen.body for told in sites.receiver.told)
    assert b"run moved" in pages["log"] and len(spans) > 1000 and len(pages) > 100
    assert HIDDEN.encode() in pages[f"/v1/jobs/{owned[0].job_id}"]
    secrets += [canary(place) for place in (*SENT, *KEPT)]
    assert all(len(secret) > 15 for secret in secrets)
    print(f"{len(secrets)} secrets, {len(pages)} pages")
    for path, page in pages.items():
        found = [secret for secret in secrets for form in forms(secret) if form in page]
        assert not found, (path, found, re.findall(rb".{0,200}" + re.escape(found[0].encode()), page)[:1])
