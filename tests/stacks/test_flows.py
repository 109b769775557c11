"""What a user does, on every stack: the same requests, the same answers."""

import asyncio
import io
import json
import socket
import time
import zipfile
from collections import Counter
from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any

import pytest

from conveyor.engines.queue import run_queue
from conveyor.errors import EngineFailed
from conveyor.ingest import ingester
from conveyor.model import JobId, TenantId
from conveyor.recover.retention import SETTLE_SECONDS, Retention
from conveyor.system import System
from tests.servers import sources
from tests.support.api import Api, client, staged
from tests.support.clocks import JumpingClock
from tests.support.list_site import ListSite
from tests.support.target_site import Site

ENDED = {"completed", "failed", "cancelled"}
FEW = 200
MANY = 11_000

pytestmark = pytest.mark.timeout(300)


async def ended(api: Api, job_id: str) -> Any:
    while (job := (await api.get(f"/v1/jobs/{job_id}")).json)["state"] not in ENDED:  # noqa: ASYNC110  (a client polls)
        await asyncio.sleep(0.05)
    return job


async def results(api: Api, job_id: str, query: str = "") -> list[Any]:
    items: list[Any] = []
    cursor = ""
    while True:
        page = await api.get(f"/v1/jobs/{job_id}/results?limit=1000{query}{cursor}")
        assert page.status == 200, page.body
        items += page.json["items"]
        if page.json["next_cursor"] is None:
            return items
        cursor = f"&cursor={page.json['next_cursor']}"


async def check_counted(system: System, job_id: str, total: int) -> None:
    """The kept counts are the rows', and nothing waits any more."""
    job = await system.records.jobs.job(TenantId("acme"), JobId(job_id))
    assert job is not None
    kept, truth = await system.tasks.counts(job.key), await system.tasks.recount(job.key)
    assert kept == truth
    assert truth.ended == total
    assert (await system.queue.depth(run_queue(job.run.run_id))).ready == 0


async def test_a_small_job_is_there_at_once_and_ends(api: Api, site: Site, system: System) -> None:
    tasks = [site.url(f"/ok?size={10 + n}") for n in range(30)] + [site.url("/status/404"), site.url("/flaky/1/x")]
    made = await api.submit({"tasks": tasks, "name": "small", "attempts": 3, "backoff": {"base": 0.01}})
    assert made.status == 201, made.body
    job_id = made.json["id"]
    assert made.json["task_shard_count"] == 1
    assert len(await results(api, job_id)) == 32
    job = await ended(api, job_id)
    assert job["state"] == "completed"
    assert job["run"]["counts"]["succeeded"] == 31
    assert job["run"]["counts"]["failed"] == 1
    assert Counter(item["status"] for item in await results(api, job_id)) == {"succeeded": 31, "failed": 1}
    (failed,) = await results(api, job_id, "&status=failed")
    assert failed["error"]["code"] == "http_404"
    body = await api.get(f"/v1/jobs/{job_id}/tasks/{(await by_index(api, job_id))[5]['task_id']}/body")
    if body.status in {302, 303, 307}:
        async with client() as http:
            answer = await http.get(body.headers["location"]).build().send()
            assert (answer.status, bytes(await answer.bytes())) == (200, (b"ok" * 8)[:15])
    else:
        assert (body.status, len(body.body)) == (200, 15)
    await check_counted(system, job_id, 32)


async def by_index(api: Api, job_id: str) -> dict[int, Any]:
    return {item["index"]: item for item in await results(api, job_id)}


async def test_a_staged_list_is_ingested_run_and_listed(api: Api, system: System, stack: str) -> None:
    upload_id = await staged(api, b"".join(b'{"n": %d}\n' % n for n in range(MANY)))
    spec = {
        "kind": "python",
        "handler": "tests.echo",
        "source": {"upload_id": upload_id, "format": "jsonl"},
        "concurrency": 8,
    }
    made = await api.submit(spec)
    assert made.status == 202, made.body
    job = await ended(api, made.json["id"])
    assert (job["state"], job["run"]["total"]) == ("completed", MANY), job
    assert job["task_shard_count"] == (8 if stack == "aws" else 1)
    items = await results(api, job["id"])
    order = "task_id" if stack == "aws" else "index"
    assert [item[order] for item in items] == sorted(item[order] for item in items)
    assert sorted(item["index"] for item in items) == list(range(MANY))
    assert {item["status"] for item in items} == {"succeeded"}
    await check_counted(system, job["id"], MANY)


async def test_an_ingest_waits_for_an_engine_that_is_away(
    api: Api, system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingester, "_OUTAGE_DELAY", 0.01)
    put, away = system.tasks.put, 8

    async def put_later(*given: Any) -> None:
        nonlocal away
        if away > 0:
            away -= 1
            raise EngineFailed("The engine is away.")
        await put(*given)

    monkeypatch.setattr(system.tasks, "put", put_later)
    data = b"".join(b'{"n": %d}\n' % n for n in range(FEW))
    source = {"url": sources.put(f"{api.key[:8]}/away.jsonl", data)}
    made = await api.submit({"kind": "python", "handler": "tests.echo", "source": source})
    assert made.status == 202, made.body
    job = await ended(api, made.json["id"])
    assert (job["state"], job["run"]["total"], away) == ("completed", FEW, 0), job
    assert (await system.queue.dead_letters(None, 10)).items == []
    await check_counted(system, job["id"], FEW)


async def test_a_small_stored_list_is_written_whole(api: Api, site: Site, system: System) -> None:
    data = "".join(f"{site.url(f'/ok?size={n}')}\n" for n in (1, 2, 3)).encode()
    made = await api.submit({"source": {"upload_id": await staged(api, data)}})
    assert made.status == 201, made.body
    assert (made.json["task_shard_count"], made.json["run"]["total"]) == (1, 3)
    assert len(await results(api, made.json["id"])) == 3
    job = await ended(api, made.json["id"])
    assert (job["state"], job["run"]["counts"]["succeeded"]) == ("completed", 3)
    await check_counted(system, job["id"], 3)


@pytest.mark.parametrize("place", ["bucket", "url", "url without ranges"])
async def test_a_list_is_read_where_it_is(api: Api, system: System, place: str) -> None:
    data = b"".join(b'{"n": %d}\n' % n for n in range(FEW))
    async with ListSite(data) as site:
        site.ranges = place == "url"
        url = sources.put(f"{api.key[:8]}/list.jsonl", data) if place == "bucket" else site.url
        spec = {"kind": "python", "handler": "tests.echo", "source": {"url": url}, "concurrency": 8}
        made = await api.submit(spec)
        assert made.status == 202, made.body
        job = await ended(api, made.json["id"])
    assert (job["state"], job["run"]["total"]) == ("completed", FEW), job
    items = await results(api, job["id"])
    assert sorted((item["index"], item["input"]["n"]) for item in items) == [(n, n) for n in range(FEW)]
    await check_counted(system, job["id"], FEW)
    other = await api.as_tenant("beta")
    refused = await other.submit({"source": {"url": f"s3://{sources.BUCKET}/list.jsonl"}})
    assert (refused.status, refused.json["code"]) == (403, "source_refused")


async def test_an_open_job(api: Api, site: Site, system: System) -> None:
    made = await api.submit({"mode": "open"})
    assert made.status == 202, made.body
    job_id = made.json["id"]
    for batch in range(3):
        tasks = [site.url(f"/ok?n={batch}-{n}") for n in range(50)]
        for _ in range(2):
            added = await api.post(
                f"/v1/jobs/{job_id}/tasks", {"tasks": tasks}, headers={"idempotency-key": f"batch-{batch}"}
            )
            assert added.status == 202, added.body
    closed = await api.post(f"/v1/jobs/{job_id}/close")
    assert closed.status in {200, 202}, closed.body
    job = await ended(api, job_id)
    assert (job["state"], job["run"]["counts"]["succeeded"]) == ("completed", 150)
    await check_counted(system, job_id, 150)


async def test_a_request_is_answered_once(api: Api, site: Site) -> None:
    spec = {"tasks": [site.url("/ok")]}
    first = await api.submit(spec, headers={"idempotency-key": "k"})
    again = await api.submit(spec, headers={"idempotency-key": "k"})
    assert (first.status, first.body) == (again.status, again.body)
    other = await api.submit({"tasks": [site.url("/status/404")]}, headers={"idempotency-key": "k"})
    assert other.status == 409
    assert len((await api.get("/v1/jobs")).json["items"]) == 1


async def test_a_dead_letter_is_sent_back(api: Api, system: System) -> None:
    """The list goes away, the ingest is given up; the list comes back, and it goes on."""
    data = b'{"n": 1}\n{"n": 2}\n'
    upload_id = await staged(api, data)
    upload = await system.records.access.upload(upload_id)
    assert upload is not None
    # A list that went straight to the store is looked for at the first submit.
    await system.records.access.mark_stored(upload_id)
    await system.blobs.delete([upload.key])
    spec = {"kind": "python", "handler": "tests.echo", "source": {"upload_id": upload_id, "format": "jsonl"}}
    made = await api.submit(spec)
    assert made.status == 202, made.body
    job = await ended(api, made.json["id"])
    assert (job["state"], job["reason_code"]) == ("failed", "list_missing")
    letters = (await api.get("/v1/dead-letters")).json["items"]
    assert len(letters) == 1
    await system.blobs.put(upload.key, data)
    back = await api.post("/v1/dead-letters/redrive", {"ids": [letters[0]["id"]]})
    assert back.status == 200, back.body
    job = await ended(api, job["id"])
    while job["state"] == "failed":
        job = await ended(api, job["id"])
    assert (job["state"], job["run"]["counts"]["succeeded"]) == ("completed", 2)


async def test_exhausted_retries_are_parked_and_redriven(api: Api, site: Site) -> None:
    """By id, by error code, then all that is left."""
    tasks = [site.url(f"/flaky/2/{n}") for n in range(3)] + [site.url("/status/504"), site.url("/status/404")]
    options = {"attempts": 2, "backoff": {"base": 0.01}, "on_exhausted": "dead_letter", "breaker": {"enabled": False}}
    job_id = (await api.submit({"tasks": tasks, **options})).json["id"]
    job = await ended(api, job_id)
    assert (job["state"], job["run"]["counts"]["failed"]) == ("completed", 5)

    async def parked(query: str = "") -> dict[int, Any]:
        items = (await api.get(f"/v1/dead-letters?limit=1000{query}")).json["items"]
        return {item["index"]: item for item in items}

    async def redrive(body: Any) -> Any:
        done = await api.post("/v1/dead-letters/redrive", body)
        assert done.status == 200, done.body
        await ended(api, job_id)
        return done.json["redriven"]

    letters = await parked()
    assert set(letters) == {0, 1, 2, 3}
    assert set(await parked("&error_code=http_504")) == {3}
    assert await redrive({"ids": [letters[1]["id"]]}) == 1
    assert set(await parked()) == {0, 2, 3}
    assert await redrive({"error_code": letters[0]["error_code"]}) == 2
    assert set(await parked(f"&job_id={job_id}")) == {3}
    assert await redrive({"all": True}) == 1
    (left,) = (await parked()).values()
    assert left["id"] == f"{job_id}:4:3"
    items = await results(api, job_id, "&run=latest-per-task")
    assert Counter(item["status"] for item in items) == {"succeeded": 3, "failed": 2}


async def test_an_export(api: Api, site: Site) -> None:
    made = await api.submit({"tasks": [site.url(f"/ok?size={n}") for n in range(1, 101)]})
    job = await ended(api, made.json["id"])
    begun = await api.post(f"/v1/jobs/{job['id']}/exports", {"format": "zip"})
    assert begun.status == 202, begun.body
    export = begun.json
    while export["state"] not in {"ready", "failed"}:
        await asyncio.sleep(0.05)
        export = (await api.get(f"/v1/exports/{begun.json['id']}")).json
    assert export["state"] == "ready", export
    (part,) = export["parts"]
    async with client() as http:
        url = part["url"] if part["url"].startswith("http") else api.url + part["url"]
        request = http.get(url)
        if url.startswith(api.url):
            request = request.headers({"authorization": f"Bearer {api.key}"})
        answer = await request.build().send()
        data = bytes(await answer.bytes())
    assert sha256(data).hexdigest() == part["sha256"]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        manifest = [json.loads(line) for line in archive.read("manifest.jsonl").splitlines()]
        assert len(manifest) == 100
        for line in manifest:
            assert sha256(archive.read(line["file"])).hexdigest() == line["sha256"]


async def test_a_job_that_is_deleted_leaves_nothing(api: Api, system: System, site: Site) -> None:
    made = await api.submit({"tasks": [site.url(f"/ok?size={n}") for n in range(1, 21)]})
    job = await ended(api, made.json["id"])
    found = await system.records.jobs.job(TenantId("acme"), JobId(job["id"]))
    assert found is not None
    gone = await api.request("DELETE", f"/v1/jobs/{job['id']}")
    assert gone.status in {202, 204}
    assert (await api.get(f"/v1/jobs/{job['id']}")).status == 404

    async def keys() -> AsyncIterator[str]:
        async for blob in system.blobs.listing("results/"):
            yield blob.key

    async def left() -> bool:
        blobs = [key async for key in keys() if job["id"] in key]
        return bool(blobs) or (await system.tasks.recount(found.key)).ended > 0

    # A retention of our own, later by what it leaves workers to hear of it.
    later = JumpingClock()
    later.advance(SETTLE_SECONDS + 1)
    engines = (system.records, system.tasks, system.queue, system.coordinator, system.blobs)
    retention = Retention(*engines, later)
    while await left():
        await retention.run_once()


async def test_a_job_goes_on_at_once_after_a_reset(api: Api) -> None:
    """Its host is down, and it says so; the host is back, and its breaker is reset."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        target = f"http://127.0.0.1:{port}"
        job_ids = []
        for options in ({}, {"upstream": "erp"}):
            tasks = [f"{target}/ok?n={n}" for n in range(150)]
            spec = {"tasks": tasks, "backoff": {"base": 0.1}, "attempts": 20, "concurrency": 8, "chunk_size": 25}
            job_ids.append((await api.submit({**spec, **options})).json["id"])
        waits = [await waiting(api, job_id) for job_id in job_ids]
        assert [(wait["code"], wait["target"], wait["error"]) for wait in waits] == [
            ("breaker", target, "connect_failed"),
            ("breaker", "upstream:erp", "connect_failed"),
        ]
        listed = (await api.get("/v1/breakers")).json["items"]
        assert [item["target"] for item in listed] == [target, "upstream:erp"]
        # Some tasks of each are parked by now.
        await asyncio.sleep(3)
    site = Site()
    site.port = port
    async with site:
        began = time.monotonic()
        reset = await api.post("/v1/breakers/reset", {"targets": [target, "upstream:erp"]})
        assert len(reset.json["reset"]) == 2
        for job_id in job_ids:
            job = await ended(api, job_id)
            assert job["run"]["counts"]["succeeded"] == 150
            assert job["waiting"] is None
        # The breakers would have been open for half a minute.
        assert time.monotonic() - began < 20
    assert (await api.get("/v1/breakers")).json["items"] == []


async def waiting(api: Api, job_id: str) -> Any:
    while (wait := (await api.get(f"/v1/jobs/{job_id}")).json["waiting"]) is None:  # noqa: ASYNC110  (a client polls)
        await asyncio.sleep(0.05)
    return wait
