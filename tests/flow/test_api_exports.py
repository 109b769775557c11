"""Exports through the API: asked for, shown, downloaded by range, listed, deleted."""

import io
import json
import zipfile
from hashlib import sha256
from typing import Any

import msgspec
import pytest

from conveyor.api.schemas.export_shapes import ExportManifestShape, ExportShape
from conveyor.engines.blobs import Presigned
from conveyor.settings import Settings
from tests.support.api import Answer, Api
from tests.support.export_jobs import exporter, stored_job
from tests.support.working import all_items, ended, until, working


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return msgspec.structs.replace(settings, export_piece_bytes=64 * 1024)


async def new_job(api: Api, count: int = 3000) -> str:
    return (await stored_job(api.system, count)).job_id


async def ready(api: Api, job_id: str, **spec: Any) -> dict[str, Any]:
    answer = await api.post(f"/v1/jobs/{job_id}/exports", spec)
    assert answer.status == 202, answer.body
    role = exporter(api.system)
    while await role.tick() == 0.0:
        pass
    shown: dict[str, Any] = (await api.get(answer.headers["location"])).json
    assert shown["state"] == "ready"
    return shown


def shaped(value: Any, shape: type[msgspec.Struct]) -> None:
    msgspec.convert(value, shape)


async def test_the_whole_way(server: Api) -> None:
    """With every role at work, as `conveyor up` has them."""
    async with working(server.system):
        urls = [f"http://example.com/{number}" for number in range(300)]
        job_id = (await server.submit({"tasks": urls})).json["id"]
        assert (await ended(server, job_id))["state"] == "completed"
        asked = await server.post(f"/v1/jobs/{job_id}/exports", {})
        assert (asked.status, asked.headers["location"]) == (202, f"/v1/exports/{asked.json['id']}")
        assert (asked.json["state"], asked.json["parts"]) == ("queued", [])
        shaped(asked.json, ExportShape)

        async def look() -> dict[str, Any]:
            return dict((await server.get(asked.headers["location"])).json)

        shown = await until(look, lambda seen: seen["state"] == "ready")
    shaped(shown, ExportShape)
    assert shown["progress"]["tasks"] == shown["progress"]["total"] == 300
    assert shown["counts"] | {"body_bytes": 0} == {
        "tasks": 300, "pending": 0, "succeeded": 300, "failed": 0, "cancelled": 0, "bodies": 300, "body_bytes": 0,
        "damaged": 0,
    }  # fmt: skip
    [part] = shown["parts"]
    assert (part["name"], part["url"]) == (f"{job_id}.zip", f"/v1/exports/{shown['id']}/parts/1")
    data = await server.get(part["url"])
    assert (data.status, len(data.body), sha256(data.body).hexdigest()) == (200, part["size"], part["sha256"])
    assert data.headers["etag"] == f'"{part["sha256"]}"'
    assert data.headers["content-disposition"] == f'attachment; filename="{job_id}.zip"'
    assert data.headers["content-type"] == "application/zip"
    with zipfile.ZipFile(io.BytesIO(data.body)) as archive:
        assert archive.testzip() is None
        assert len(archive.namelist()) == 301
    events = [event["event"] for event in await all_items(server, f"/v1/jobs/{job_id}/events")]
    assert events.count("export.ready") == 1


async def test_ranges(server: Api) -> None:
    shown = await ready(server, await new_job(server), compression="none")
    [part] = shown["parts"]
    data = (await server.get(part["url"])).body
    assert len(data) > 500_000, "several pieces"

    async def asked(value: str, **more: str) -> Answer:
        return await server.get(part["url"], headers={"range": value, **more})

    for start, end in ((0, 10), (65_530, 65_600), (100_000, 400_000), (len(data) - 5, len(data))):
        answer = await asked(f"bytes={start}-{end - 1}")
        assert (answer.status, answer.body) == (206, data[start:end])
        assert answer.headers["content-range"] == f"bytes {start}-{end - 1}/{len(data)}"
        assert answer.headers["content-length"] == str(end - start)
    assert (await asked("bytes=200000-")).body == data[200_000:]
    assert (await asked("bytes=-77")).body == data[-77:]
    assert (await asked("bytes=5-9", **{"if-range": f'"{part["sha256"]}"'})).status == 206
    other = await asked("bytes=5-9", **{"if-range": '"another"'})
    assert (other.status, other.body) == (200, data)
    beyond = await asked(f"bytes={len(data)}-")
    assert (beyond.status, beyond.json["code"]) == (416, "range_not_satisfiable")


async def test_parts_and_their_manifest(server: Api) -> None:
    job_id = await new_job(server)
    shown = await ready(server, job_id, format="jsonl", compression="gzip", bodies="base64", part_bytes=100_000)
    assert len(shown["parts"]) > 1
    assert [part["name"] for part in shown["parts"]][:2] == [f"{job_id}-0001.jsonl.gz", f"{job_id}-0002.jsonl.gz"]
    manifest = (await server.get(f"/v1/exports/{shown['id']}/manifest")).json
    shaped(manifest, ExportManifestShape)
    assert manifest["counts"]["tasks"] == sum(part["tasks"] for part in manifest["parts"]) == 3000
    for part, listed in zip(shown["parts"], manifest["parts"], strict=True):
        data = await server.get(part["url"])
        assert data.headers["content-type"] == "application/gzip"
        assert "content-encoding" not in data.headers
        assert sha256(data.body).hexdigest() == listed["sha256"] == part["sha256"]
    for number in (0, len(shown["parts"]) + 1):
        answer = await server.get(f"/v1/exports/{shown['id']}/parts/{number}")
        assert (answer.status, answer.json["code"]) == (404, "not_found")
    assert (await server.get(f"/v1/exports/{shown['id']}/parts/x")).status == 404


async def test_before_it_is_ready(server: Api) -> None:
    job_id = await new_job(server, 10)
    export_id = (await server.post(f"/v1/jobs/{job_id}/exports", {})).json["id"]
    answer = await server.get(f"/v1/exports/{export_id}/manifest")
    assert (answer.status, answer.json["code"]) == (409, "conflict")
    assert (await server.get(f"/v1/exports/{export_id}/parts/1")).status == 404


async def test_under_a_key_it_is_made_once(server: Api) -> None:
    job_id = await new_job(server, 10)
    path, headers = f"/v1/jobs/{job_id}/exports", {"idempotency-key": "once"}
    first = await server.post(path, {"format": "csv"}, headers=headers)
    again = await server.post(path, {"format": "csv"}, headers=headers)
    assert (again.status, again.body) == (202, first.body)
    assert again.headers["idempotency-replayed"] == "true"
    other = await server.post(path, {"format": "zip"}, headers=headers)
    assert (other.status, other.json["code"]) == (409, "idempotency_key_reused")
    refused = await server.post(path, {"format": "csv", "bodies": "text"}, headers={"idempotency-key": "two"})
    assert refused.status == 400
    assert (await server.post(path, {"format": "csv"}, headers={"idempotency-key": "two"})).status == 202
    items = await all_items(server, path, limit=1)
    assert len(items) == 2
    assert first.json["id"] == items[0]["id"]
    for item in items:
        shaped(item, ExportShape)
    assert (await server.get(f"{path}?cursor=nonsense")).json["code"] == "bad_cursor"


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        ({"format": "tar"}, "invalid_field"),
        ({"format": "csv", "bodies": "file"}, "invalid_field"),
        ({"compression": "gzip"}, "invalid_field"),
        ({"select": {"status": "x"}}, "invalid_field"),
        ({"select": {"status": 1}}, "invalid_field"),
        ({"select": {"nonsense": 1}}, "unknown_field"),
        ({"select": {"run": "x"}}, "invalid_field"),
        ({"part_bytes": 1}, "invalid_field"),
        ({"part_bytes": "1G"}, "invalid_field"),
        ({"nonsense": 1}, "unknown_field"),
        (b"{", "malformed_json"),
        ([], "invalid_field"),
    ],
)
async def test_bad_input(server: Api, spec: Any, code: str) -> None:
    answer = await server.post(f"/v1/jobs/{await new_job(server, 3)}/exports", spec)
    assert (answer.status, answer.json["code"]) == (400, code), answer.body


async def test_a_job_that_goes_on(server: Api) -> None:
    job_id = (await server.submit({"tasks": ["http://example.com/"]})).json["id"]
    answer = await server.post(f"/v1/jobs/{job_id}/exports", {})
    assert (answer.status, answer.json["code"]) == (409, "conflict")
    shown = await ready(server, job_id, partial=True, format="jsonl")
    assert shown["counts"]["pending"] == 1


async def test_deleted(server: Api) -> None:
    job_id = await new_job(server, 10)
    shown = await ready(server, job_id)
    path = f"/v1/exports/{shown['id']}"
    assert (await server.request("DELETE", path)).status == 204
    for method, rest in (("GET", ""), ("GET", "/manifest"), ("GET", "/parts/1"), ("DELETE", "")):
        answer = await server.request(method, path + rest)
        assert (answer.status, answer.json["code"]) == (404, "not_found")
    assert (await server.get(f"/v1/jobs/{job_id}/exports")).json["items"] == []
    gone = await ready(server, job_id)
    await server.request("DELETE", f"/v1/jobs/{job_id}")
    assert (await server.get(f"/v1/exports/{gone['id']}")).status == 404
    assert (await server.get(gone["parts"][0]["url"])).status == 404
    assert (await server.post(f"/v1/jobs/{job_id}/exports", {})).status == 404


async def test_a_store_that_signs(server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def signed(key: str, seconds: float, content_type: str, filename: str) -> Presigned:
        return Presigned(f"https://store.example/{filename}", "GET", {})

    monkeypatch.setattr(server.system.blobs, "presigned_get", signed)
    job_id = await new_job(server)
    shown = await ready(server, job_id, compression="none")
    assert shown["parts"][0]["url"] == f"https://store.example/{job_id}.zip"
    data = await server.get(f"/v1/exports/{shown['id']}/parts/1")
    assert sha256(data.body).hexdigest() == shown["parts"][0]["sha256"], "the API has it too"


async def test_the_archive_at_once_is_the_same(server: Api) -> None:
    job_id = await new_job(server)
    shown = await ready(server, job_id, compression="none")
    offline = zipfile.ZipFile(io.BytesIO((await server.get(shown["parts"][0]["url"])).body))
    at_once = zipfile.ZipFile(io.BytesIO((await server.get(f"/v1/jobs/{job_id}/export")).body))
    assert offline.read("manifest.jsonl") == at_once.read("manifest.jsonl")
    assert [(info.filename, info.CRC) for info in offline.infolist()] == [
        (info.filename, info.CRC) for info in at_once.infolist()
    ]
    first = json.loads(offline.read("manifest.jsonl").splitlines()[0])
    assert list(first) == [
        "index", "task_id", "input", "status", "http_status", "attempts", "file", "size", "sha256", "content_type",
        "error", "final_url", "id", "tag", "data", "extracted", "unchanged",
    ]  # fmt: skip
