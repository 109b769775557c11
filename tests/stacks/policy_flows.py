"""What users, operators and the roles themselves do to AWS: each flow is a function of a running fleet."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from hashlib import sha256
from typing import Any, TypeVar

import msgspec
import pytest

from conveyor import AsyncClient
from conveyor.accept.schedules import Schedules, ScheduleSpec
from conveyor.auth.keys import revoke
from conveyor.clock import SystemClock
from conveyor.engines import s3 as s3_engine
from conveyor.engines import s3_parts
from conveyor.model import TenantId
from conveyor.recover.monitor import monitor_of
from conveyor.recover.retention import Retention
from conveyor.recover.task_mover import TaskMover
from conveyor.states import ENDED
from conveyor.system import engine_findings, migrate, open_system, step_functions_findings
from tests.servers import postgres, sources, sqs
from tests.servers.aws import CREDENTIALS, aws
from tests.servers.event_targets import shared_targets
from tests.stacks.test_notifications import LongAgo
from tests.support.api import Api, client, new_key, staged
from tests.support.clocks import JumpingClock
from tests.support.file_site import Behaviour, FileSite
from tests.support.gated_fleet import GatedFleet, RunningFleet
from tests.support.installations import verified
from tests.support.product_site import ProductSite
from tests.support.receiver import Receiver
from tests.support.state_machines import machine
from tests.support.target_site import Site
from tests.support.working import all_items

T = TypeVar("T")

HANDLER = {"kind": "python", "handler": "tests.echo"}
MIB = 1024 * 1024
_MONTH = 31 * 86_400.0
_PURGES = 3
_PATIENCE = 120.0
_LOOK_SECONDS = 0.25


async def doctor(fleet: GatedFleet) -> None:
    settings = fleet.settings["operator"]
    findings = await engine_findings(settings, SystemClock())
    findings += await step_functions_findings(settings.step_functions or "")
    problems = {name: problem for name, problem in findings if problem is not None}
    assert problems == {}, problems


async def keys(fleet: RunningFleet, site: Site) -> None:
    """As the operator makes, lists and revokes them."""
    system = fleet.systems["operator"]
    await new_key(system, "beta")
    (made,) = await system.records.access.keys(TenantId("beta"))
    await revoke(system.records.access, system.records.documents, system.clock, made.key_id)


async def submit(fleet: RunningFleet, site: Site) -> None:
    api = fleet.api
    tasks = [site.url(f"/ok?size={size}") for size in (1, 700, 5000)]
    spec = {"tasks": [*tasks, site.url("/flaky/1/x")], "attempts": 3, "backoff": {"base": 0.01}}
    made = await api.submit(spec, headers={"idempotency-key": "k"})
    assert made.status == 201, made.body
    job = await ended(api, made.json["id"])
    assert job["run"]["counts"]["succeeded"] == 4, job
    objects = await api.submit({"tasks": tasks, "result_layout": "object"})
    await ended(api, objects.json["id"])
    for job_id in (made.json["id"], objects.json["id"]):
        for item in (await api.get(f"/v1/jobs/{job_id}/results")).json["items"]:
            await _read(api, f"/v1/jobs/{job_id}/tasks/{item['task_id']}/body")
    await api.get(f"/v1/jobs/{job_id}/events")


async def upload_and_ingest(fleet: RunningFleet, site: Site) -> None:
    api = fleet.api
    lines = b"".join(b'{"n": %d}\n' % number for number in range(120)) + b"{broken\n"
    source = {"upload_id": await staged(api, lines), "format": "jsonl"}
    made = await api.submit({**HANDLER, "source": source}, headers={"prefer": "respond-async"})
    assert made.status == 202, made.body
    job = await ended(api, made.json["id"])
    assert job["run"]["counts"]["succeeded"] == 120, job
    assert (await api.get(f"/v1/jobs/{job['id']}/invalid")).status == 200


async def upload_in_parts(fleet: RunningFleet, site: Site) -> None:
    api, data = fleet.api, b"x" * (6 * MIB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s3_engine, "MAX_IN_ONE_PUT", MIB)
        patch.setattr(s3_parts, "PART_BYTES", 5 * MIB)
        promised = await api.post("/v1/uploads", {"size": len(data), "sha256": sha256(data).hexdigest()})
        upload = f"/v1/uploads/{promised.json['upload_id']}"
        links = (await api.post(f"{upload}/parts", {"numbers": [1, 2]})).json
        async with client() as http:
            for part in links["parts"]:
                start = (part["number"] - 1) * 5 * MIB
                request = http.request(part["method"], part["url"]).headers(part["headers"])
                sent = await request.body_bytes(data[start : start + part["size"]]).build().send()
                assert sent.status == 200
        done = await api.post(f"{upload}/complete", {"multipart_id": links["multipart_id"]})
        assert done.status == 200, done.body


async def aborted_upload(fleet: RunningFleet, site: Site) -> None:
    """An object of more than one part that breaks off, as a list and as an export."""

    class CutOff(Exception):
        pass

    async def pieces() -> AsyncIterator[bytes]:
        yield b"x" * (9 * MIB)
        raise CutOff

    for role in ("api", "sweep"):
        with pytest.raises(CutOff):
            await fleet.systems[role].blobs.put_stream(f"lists/acme/{role}", pieces())


async def open_job_and_control(fleet: RunningFleet, site: Site) -> None:
    api = fleet.api
    opened = (await api.submit({**HANDLER, "mode": "open"})).json["id"]
    for batch in range(2):
        added = await api.post(f"/v1/jobs/{opened}/tasks", {"tasks": [batch], "last_batch": batch == 1})
        assert added.status == 202, added.body
    await ended(api, opened)
    held = (await api.submit({**HANDLER, "mode": "open"})).json["id"]
    for change in ("pause", "resume", "cancel"):
        assert (await api.post(f"/v1/jobs/{held}/{change}")).status in {200, 202}
    await ended(api, held)


async def list_in_a_bucket(fleet: RunningFleet, site: Site) -> None:
    url = sources.put(f"{fleet.api.key[:8]}/list.jsonl", b"1\n2\n3\n")
    made = await fleet.api.submit({**HANDLER, "source": {"url": url}})
    assert made.status == 202, made.body
    assert (await ended(fleet.api, made.json["id"]))["run"]["counts"]["succeeded"] == 3


async def download(fleet: RunningFleet, site: Site) -> None:
    async with FileSite(Behaviour(600_000)) as files:
        made = await fleet.api.submit({"kind": "download", "tasks": [files.url()]})
        job = await ended(fleet.api, made.json["id"])
    assert job["run"]["counts"]["succeeded"] == 1, job


async def rerun(fleet: RunningFleet, site: Site) -> None:
    api = fleet.api
    made = await api.submit({"tasks": [site.url("/ok"), site.url("/status/404")]})
    await ended(api, made.json["id"])
    again = await api.post(f"/v1/jobs/{made.json['id']}/rerun", {"select": {"status": ["failed"]}})
    assert again.status == 202, again.body
    assert (await ended(api, made.json["id"]))["state"] == "completed"


async def extract(fleet: RunningFleet, site: Site) -> None:
    """With the bodies kept and dropped; and once more from those that were kept."""
    api = fleet.api
    async with ProductSite() as shop:
        tasks = [shop.url(number) for number in range(10)]
        dropped = await api.submit({"tasks": tasks, "extract": "tests.product", "keep_bodies": False})
        downloaded = await api.submit({"kind": "download", "tasks": tasks[:2], "extract": "tests.product"})
        kept = (await api.submit({"tasks": tasks, "extract": "tests.fussy"})).json["id"]
        for job_id in (dropped.json["id"], downloaded.json["id"], kept):
            await ended(api, job_id)
        for change in ({}, {"extract_only": True}):
            again = {"options": {"extract": "tests.product"}, **change}
            assert (await api.post(f"/v1/jobs/{kept}/rerun", again)).status == 202
            job = await ended(api, kept)
        assert job["counts"]["succeeded"] == len(tasks), job
        for item in (await api.get(f"/v1/jobs/{kept}/results")).json["items"]:
            await _read(api, item["extracted_url"])


async def changed_only(fleet: RunningFleet, site: Site) -> None:
    """In a rerun, from an earlier job, and by a schedule; and an export of what changed."""
    api = fleet.api
    async with ProductSite() as shop:
        # One has no ETag: bodies are compared.
        shop.plain = {4}
        tasks = [shop.url(number) for number in range(10)]
        job_id = (await api.submit({"tasks": tasks, "extract": "tests.product"})).json["id"]
        await ended(api, job_id)
        shop.versions.update([1])
        assert (await api.post(f"/v1/jobs/{job_id}/rerun", {"changed_only": True})).status == 202
        job = await ended(api, job_id)
        assert job["counts"]["unchanged"] == 9, job
        await _exported(fleet, job_id, {"format": "csv", "select": {"changed": True}})
        later = (await api.submit({"tasks": tasks, "changed_from": job_id})).json["id"]
        assert (await ended(api, later))["counts"]["unchanged"] == 10
        spec = {"cron": "0 0 1 1 *", "job": {"tasks": tasks}, "changed_only": True}
        made = (await api.post("/v1/schedules", spec)).json["id"]
        for number in range(1, 3):
            assert (await api.post(f"/v1/schedules/{made}/run")).status == 202

            async def fires() -> list[dict[str, Any]]:
                return (await api.get(f"/v1/schedules/{made}")).json["fires"]  # type: ignore[no-any-return]

            fired = await until(fires, lambda rows, number=number: len(rows) == number)
            assert [fire["error"] for fire in fired] == [None] * number
            jobs = [await ended(api, fire["job_id"]) for fire in fired]
        assert sorted(job["counts"]["unchanged"] for job in jobs) == [0, 10]


async def options_of_fetches(fleet: RunningFleet, site: Site) -> None:
    """A pace, robots.txt and a pool of gateways; what each host and each error came to; and the job once more."""
    api = fleet.api
    upload_id = await staged(api, "".join(f"{site.url(f'/ok?n={n}')}\n" for n in range(300)).encode())
    pool = [{"proxy": site.url("")}, {"url": site.url("/gateway?url={url}"), "weight": 2}]
    specs: list[dict[str, Any]] = [
        {"tasks": [site.url("/ok"), site.url("/status/404")], "pace": "auto", "robots": "obey"},
        {"tasks": [site.url("/ok")], "gateway": {"pool": pool, "sticky": "host"}, "attempts": 1},
        {"source": {"upload_id": upload_id, "format": "text"}, "pace": "auto"},
    ]
    for spec in specs:
        job_id = (await api.submit(spec)).json["id"]
        await ended(api, job_id)
        for view in ("hosts", "errors", "statistics"):
            shown = await api.get(f"/v1/jobs/{job_id}/{view}")
            assert shown.status == 200, shown.body
        twin = await api.post(f"/v1/jobs/{job_id}/duplicate", {})
        assert twin.status in {201, 202}, twin.body
        await ended(api, twin.json["id"])
    assert (await api.get("/v1/load")).status == 200


async def export(fleet: RunningFleet, site: Site) -> None:
    api = fleet.api
    made = await api.submit({"tasks": [site.url(f"/ok?size={size}") for size in (10, 3000)]})
    await ended(api, made.json["id"])
    await _exported(fleet, made.json["id"], {"format": "zip"})


async def export_into_a_bucket(fleet: RunningFleet, site: Site) -> None:
    """A client copies the parts with credentials of its own."""
    api = fleet.api
    made = await api.submit({"tasks": [site.url(f"/ok?size={size}") for size in (10, 3000)]})
    await ended(api, made.json["id"])
    sources.put("exists", b"")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL_S3": aws()}.items():
            patch.setenv(name, value)
        async with AsyncClient(api.url, key=api.key) as user:
            job = await user.job(made.json["id"])
            done = await job.export_to(f"s3://{sources.BUCKET}/{api.key[:8]}/out/", format="jsonl")
    assert len(done.urls) == 1, done


async def schedule(fleet: RunningFleet, site: Site) -> None:
    api, past = fleet.api, dataclasses.replace(fleet.systems["api"], clock=LongAgo())
    listed = sources.put(f"{api.key[:8]}/scheduled.jsonl", b"1\n")
    upload_id = await staged(api, f"{site.url('/ok')}\n".encode())
    jobs: list[dict[str, Any]] = [
        {"tasks": [site.url("/ok")]},
        {"source": {"upload_id": upload_id}},
        {"source": {"url": site.url("/told-list"), "format": "text"}},
        {**HANDLER, "source": {"url": listed}},
    ]
    for job in jobs:
        raw = msgspec.Raw(msgspec.json.encode(job))
        await Schedules(past).create(TenantId("acme"), ScheduleSpec("0 0 1 1 *", raw))

    async def shown() -> list[dict[str, Any]]:
        return await all_items(api, "/v1/schedules")

    found = await until(shown, lambda each: all(one["fires"] for one in each))
    fires = [fire for each in found for fire in each["fires"]]
    assert [fire["error"] for fire in fires if fire["error"]] == []
    for fire in fires:
        assert (await ended(api, fire["job_id"]))["state"] == "completed"


async def webhook(fleet: RunningFleet, site: Site) -> None:
    async with Receiver() as receiver:
        notify = [{"type": "webhook", "url": receiver.url()}]
        made = await fleet.api.submit({"tasks": [site.url("/ok")], "notify": notify})
        await _delivered(fleet, made.json["id"])


async def event_targets(fleet: RunningFleet, site: Site) -> None:
    targets = shared_targets()
    notify = [
        {"type": "start_execution", "state_machine_arn": targets.machine},
        {"type": "eventbridge", "event_bus_arn": targets.bus},
    ]
    made = await fleet.api.submit({"tasks": [site.url("/ok")], "notify": notify})
    await _delivered(fleet, made.json["id"])


async def dead_letters(fleet: RunningFleet, site: Site) -> None:
    """Of a task, and of an ingest whose list was lost."""
    api, records, blobs = fleet.api, fleet.systems["api"].records, fleet.systems["api"].blobs
    spec = {"tasks": [site.url("/status/504")], "attempts": 1, "on_exhausted": "dead_letter"}
    parked = (await api.submit(spec)).json["id"]
    await ended(api, parked)
    upload_id = await staged(api, b"1\n2\n")
    upload = await records.access.upload(upload_id)
    assert upload is not None
    await records.access.mark_stored(upload_id)
    await blobs.delete([upload.key])
    made = await api.submit({**HANDLER, "source": {"upload_id": upload_id, "format": "jsonl"}})
    assert (await ended(api, made.json["id"]))["reason_code"] == "list_missing"
    letters = await all_items(api, "/v1/dead-letters")
    assert {letter["job_id"] for letter in letters} == {parked, made.json["id"]}
    await blobs.put(upload.key, b"1\n2\n")
    back = await api.post("/v1/dead-letters/redrive", {"all": True})
    assert (back.status, back.json["redriven"]) == (200, 2), back.body

    async def shown() -> Any:
        return (await api.get(f"/v1/jobs/{made.json['id']}")).json

    await until(shown, lambda job: job["state"] == "completed")
    await ended(api, parked)


async def step_functions(fleet: RunningFleet, site: Site) -> None:
    """A state machine sends a job by queue and waits; the monitor, as a service and as a Lambda, sends heartbeats and
    the answer. A message that is not a job is answered by the intake, and goes to the dead letters of its queue."""
    place = fleet.systems["api"].settings.data.parent
    name = sqs.prefix_of(place)
    async with machine(aws(), name) as waiter:
        await waiter.make()
        good, bad = [await waiter.start({**HANDLER, "mode": "open"}) for _ in range(2)]
        refused = await waiter.start({"kind": "no such kind"})
        first, second = await until(lambda: _unfinished(fleet), lambda jobs: len(jobs) == 2)
        await monitor_of(dataclasses.replace(fleet.systems["monitor"], clock=_later(250.0))).run_once()
        added = await fleet.api.post(f"/v1/jobs/{first}/tasks", {"tasks": [1], "last_batch": True})
        assert added.status == 202, added.body
        # Without a task it fails.
        assert (await fleet.api.post(f"/v1/jobs/{second}/close")).status == 200
        ends = [(await waiter.ended(execution))["status"] for execution in (good, bad, refused)]
        assert sorted(ends) == ["FAILED", "FAILED", "SUCCEEDED"], ends


async def shared_queue(fleet: RunningFleet, site: Site) -> None:
    """More runs at a time than have a queue of their own."""
    jobs = [(await fleet.api.submit({**HANDLER, "tasks": [1, 2]})).json["id"] for _ in range(4)]
    for job_id in jobs:
        assert (await ended(fleet.api, job_id))["run"]["counts"]["succeeded"] == 2


async def delete(fleet: RunningFleet, site: Site) -> None:
    made = await fleet.api.submit({"tasks": [site.url("/ok?size=3000")]})
    await ended(fleet.api, made.json["id"])
    assert (await fleet.api.request("DELETE", f"/v1/jobs/{made.json['id']}")).status == 204


async def verify(fleet: RunningFleet, site: Site) -> None:
    """With an orphan, a day later: it is removed."""
    system = dataclasses.replace(fleet.systems["operator"], clock=_later(2 * 86_400.0))
    await verified(system, repair=True)


async def retention(fleet: RunningFleet, site: Site) -> None:
    """What has expired in a month: the jobs of all flows."""
    system = fleet.systems["sweep"]
    parts = (system.records, system.tasks, system.queue, system.coordinator, system.blobs)
    purge = Retention(*parts, _later(_MONTH))
    removed = [await purge.run_once() for _ in range(_PURGES)]
    assert sum(each.jobs for each in removed) > 10, removed
    assert sum(each.blobs for each in removed) > 10, removed


async def move_tasks(fleet: RunningFleet, site: Site) -> None:
    """The operator moves the tasks of finished jobs to Postgres, and deletes what they left."""
    made = await fleet.api.submit({"tasks": [site.url("/ok"), site.url("/status/404")]})
    await ended(fleet.api, made.json["id"])
    settings = fleet.systems["operator"].settings
    target = postgres.url_of(settings.data)
    both = msgspec.structs.replace(settings, data=settings.data / "moving", other_tasks=target)
    await migrate(both, SystemClock())
    async with open_system(both, SystemClock()) as system:
        mover = TaskMover(system, system.task_stores[target])
        # The job of this flow, too, once it is swept; those that a purge has begun with have no tasks.
        await until(mover.move, lambda totals: totals.tasks >= 2)
        await mover.clean()
    assert mover.totals.blocked == {}
    assert mover.totals.deleted > 2, mover.totals


Flow = Callable[[RunningFleet, Site], Awaitable[None]]
# Each with the roles that it needs beside a worker and an ingester.
FLOWS: tuple[tuple[Flow, tuple[str, ...]], ...] = (
    (keys, ()),
    (submit, ()),
    (upload_and_ingest, ()),
    (upload_in_parts, ()),
    (aborted_upload, ()),
    (open_job_and_control, ()),
    (list_in_a_bucket, ()),
    (download, ()),
    (rerun, ()),
    (extract, ()),
    (changed_only, ("sweep", "schedule")),
    (options_of_fetches, ("sweep",)),
    (export, ("sweep",)),
    (export_into_a_bucket, ("sweep",)),
    (schedule, ("schedule",)),
    (webhook, ("sweep",)),
    (event_targets, ("sweep",)),
    (dead_letters, ("sweep",)),
    (step_functions, ("sweep", "intake", "monitor")),
    (shared_queue, ("sweep",)),
    (delete, ()),
    (verify, ()),
    (retention, ()),
    # Last: the other roles do not open the engine that it moves to.
    (move_tasks, ("sweep",)),
)


async def until(look: Callable[[], Awaitable[T]], right: Callable[[T], object] = bool) -> T:
    """Look until it is right; rarely, because each look is a call of the API that is checked, too."""
    async with asyncio.timeout(_PATIENCE):
        while not right(seen := await look()):  # noqa: ASYNC110  (seen from outside)
            await asyncio.sleep(_LOOK_SECONDS)
    return seen


async def ended(api: Api, job_id: str) -> Any:
    async def look() -> Any:
        return (await api.get(f"/v1/jobs/{job_id}")).json

    return await until(look, lambda job: job["state"] in ENDED)


def _later(seconds: float) -> JumpingClock:
    clock = JumpingClock()
    clock.advance(seconds)
    return clock


async def _unfinished(fleet: RunningFleet) -> list[str]:
    jobs = await all_items(fleet.api, "/v1/jobs")
    return [job["id"] for job in jobs if job["state"] not in ENDED]


async def _read(api: Api, path: str) -> None:
    """A body from the API, or from where it sends its readers."""
    body = await api.get(path)
    if "location" in body.headers:
        await _got(body.headers["location"])
    else:
        assert body.status == 200, body.body


async def _got(url: str) -> None:
    async with client() as http:
        answer = await http.get(url).build().send()
        assert answer.status == 200, await answer.text()


async def _exported(fleet: RunningFleet, job_id: str, spec: dict[str, Any]) -> None:
    begun = (await fleet.api.post(f"/v1/jobs/{job_id}/exports", spec)).json

    async def shown() -> Any:
        return (await fleet.api.get(f"/v1/exports/{begun['id']}")).json

    ready = await until(shown, lambda found: found["state"] == "ready")
    await _got(ready["parts"][0]["url"])


async def _delivered(fleet: RunningFleet, job_id: str) -> None:
    async def deliveries() -> list[dict[str, Any]]:
        return await all_items(fleet.api, f"/v1/jobs/{job_id}/deliveries")

    await until(deliveries, lambda rows: rows and all(row["status"] == "delivered" for row in rows))
