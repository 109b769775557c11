"""Lists that are too large for one request to the store: sent in parts, straight to it, and checked by the ingest."""

import dataclasses
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from conveyor import AsyncClient, Client
from conveyor.engines import s3 as s3_engine
from conveyor.engines import s3_parts
from conveyor.engines.blobs import StoresParts
from conveyor.engines.object_blobs import ObjectEngine
from conveyor.lists.multipart_uploads import CompletionSpec, MultipartUploads, PartsSpec
from conveyor.settings import Settings
from conveyor.system import System, open_system
from tests.flow.test_list_sources import dying_at
from tests.flow.test_sdk import blocking
from tests.servers import rclone, s3
from tests.servers.aws import REGION
from tests.support.api import Api, client
from tests.support.clocks import JumpingClock
from tests.support.working import ended, working

MIB = 1024 * 1024
PART = 5 * MIB
LINE = b'"%s"\n' % (b"x" * 997)
DATA = LINE * 12_000
COUNT = -(-len(DATA) // PART)

pytestmark = pytest.mark.server


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As large as S3 lets the smallest be."""
    monkeypatch.setattr(s3_engine, "MAX_IN_ONE_PUT", 6 * MIB)
    monkeypatch.setattr(s3_parts, "PART_BYTES", PART)


@pytest.fixture(params=["ministack", "rclone"])
async def system(
    request: pytest.FixtureRequest, settings: Settings, clock: JumpingClock, tmp_path: Path
) -> AsyncIterator[System]:
    async with open_system(settings, clock) as opened:
        if request.param == "ministack":
            async with s3.open_engine(tmp_path, clock) as engine:
                yield dataclasses.replace(opened, blobs=engine.blobs)
            return
        prefix = sha256(str(tmp_path).encode()).hexdigest()[:16]
        url = f"s3://{rclone.BUCKET}/{prefix}?region={REGION}&endpoint={rclone.rclone()}"
        async with ObjectEngine.open(url, clock) as engine:
            yield dataclasses.replace(opened, blobs=engine.blobs)


async def promise(server: Api, data: bytes = DATA) -> str:
    made = await server.post("/v1/uploads", {"size": len(data), "sha256": sha256(data).hexdigest()})
    assert made.status == 201, made.body
    assert made.json["part_bytes"] == PART
    upload_id: str = made.json["upload_id"]
    return upload_id


async def ask(server: Api, upload_id: str, **body: Any) -> dict[str, Any]:
    answer = await server.post(f"/v1/uploads/{upload_id}/parts", body)
    assert answer.status == 200, answer.body
    links: dict[str, Any] = answer.json
    return links


async def send(part: dict[str, Any], data: bytes) -> int:
    async with client() as http:
        request = http.request(part["method"], part["url"]).headers(part["headers"]).body_bytes(data)
        return (await request.build().send()).status


def piece(number: int, data: bytes = DATA) -> bytes:
    return data[(number - 1) * PART : number * PART]


async def send_all(server: Api, upload_id: str, data: bytes = DATA) -> str:
    links = await ask(server, upload_id, numbers=list(range(1, COUNT + 1)))
    for part in links["parts"]:
        assert part["size"] == len(piece(part["number"]))
        assert await send(part, piece(part["number"], data)) == 200
    multipart_id: str = links["multipart_id"]
    return multipart_id


async def complete(server: Api, upload_id: str, multipart_id: str) -> Any:
    return await server.post(f"/v1/uploads/{upload_id}/complete", {"multipart_id": multipart_id})


# rclone answers a range of an object that was made of parts with 200, which no reader accepts.
readable = pytest.mark.parametrize("system", ["ministack"], indirect=True)


@readable
async def test_a_list_is_sent_in_parts_and_run(server: Api, system: System) -> None:
    upload_id = await promise(server)
    links = await ask(server, upload_id, numbers=[])
    assert (links["count"], links["part_bytes"], links["stored"], links["parts"]) == (COUNT, PART, [], [])
    multipart_id = await send_all(server, upload_id)
    again = await ask(server, upload_id, multipart_id=multipart_id)
    assert again["stored"] == list(range(1, COUNT + 1))
    early = await server.submit({"kind": "python", "handler": "any", "source": {"upload_id": upload_id}})
    assert (early.status, early.json["code"]) == (409, "upload_conflict")
    for _ in range(2):
        done = await complete(server, upload_id, multipart_id)
        assert (done.status, done.json["stored"]) == (200, True), done.body
    assert await system.blobs.size(f"uploads/acme/{upload_id}") == len(DATA)
    made = await server.submit({"kind": "python", "handler": "any", "source": {"upload_id": upload_id}})
    async with working(system):
        shown = await ended(server, made.json["id"])
    assert (shown["state"], shown["run"]["total"]) == ("completed", 12_000)
    stored = await server.post(f"/v1/uploads/{upload_id}/parts", {"numbers": [1]})
    assert (stored.status, stored.json["code"]) == (409, "upload_conflict")


@readable
async def test_the_ingest_compares_the_hash(server: Api, system: System) -> None:
    upload_id = await promise(server)
    other = DATA[:-10] + b"z" * 8 + DATA[-2:]
    multipart_id = await send_all(server, upload_id, other)
    assert (await complete(server, upload_id, multipart_id)).status == 200
    made = await server.submit({"kind": "python", "handler": "any", "source": {"upload_id": upload_id}})
    async with working(system):
        shown = await ended(server, made.json["id"])
    assert (shown["state"], shown["reason_code"], shown["run"]["total"]) == ("failed", "list_changed", 0)


async def test_parts_that_are_missing(server: Api) -> None:
    upload_id = await promise(server)
    links = await ask(server, upload_id, numbers=[1])
    assert await send(links["parts"][0], piece(1)) == 200
    refused = await complete(server, upload_id, links["multipart_id"])
    assert (refused.status, refused.json["code"]) == (400, "upload_refused")
    assert "2, 3" in refused.json["detail"]


async def test_what_is_refused(server: Api) -> None:
    upload_id = await promise(server)
    for numbers in ([0], [COUNT + 1], [1] * 101):
        answer = await server.post(f"/v1/uploads/{upload_id}/parts", {"numbers": numbers})
        assert (answer.status, answer.json["code"]) == (400, "invalid_field")
    unknown = await complete(server, upload_id, "unknown")
    assert (unknown.status, unknown.json["code"]) == (409, "upload_conflict"), unknown.body
    other = await server.as_tenant("other")
    assert (await other.post(f"/v1/uploads/{upload_id}/parts", {})).status == 404
    assert (await complete(other, upload_id, "unknown")).status == 404
    small = await server.post("/v1/uploads", {"size": 5, "sha256": "0" * 64})
    assert small.json["part_bytes"] is None
    refused = await server.post(f"/v1/uploads/{small.json['upload_id']}/parts", {})
    assert (refused.status, refused.json["code"]) == (409, "upload_conflict")


async def test_the_client_sends_it(server: Api, system: System, tmp_path: Path) -> None:
    path = tmp_path / "list.jsonl"
    path.write_bytes(DATA)
    progress: list[tuple[int, int | None]] = []

    def use(client: Client) -> list[str]:
        first = client.upload(path, idempotency_key="once", progress=lambda *seen: progress.append(seen))
        return [first.upload_id, client.upload(path, idempotency_key="once").upload_id]

    first, again = await blocking(server, use)
    assert first == again
    assert await system.blobs.get(f"uploads/acme/{first}") == DATA
    assert progress[-1] == (len(DATA), len(DATA))
    assert progress == sorted(progress)
    async with AsyncClient(server.url, server.key) as client:
        upload = await client.upload(path)
    assert await system.blobs.size(f"uploads/acme/{upload.upload_id}") == len(DATA)


@pytest.mark.parametrize("point", ["blob.begin_parts.before", "blob.begin_parts.after"])
async def test_a_crash_while_it_is_begun(server: Api, system: System, point: str) -> None:
    upload_id = await promise(server)
    upload = await system.records.access.upload(upload_id)
    assert upload is not None
    with dying_at(point):
        await MultipartUploads(system).parts(upload, PartsSpec())
    multipart_id = await send_all(server, upload_id)
    assert (await complete(server, upload_id, multipart_id)).status == 200
    assert await system.blobs.size(upload.key) == len(DATA)


@pytest.mark.parametrize(
    "point",
    ["blob.complete_parts.before", "blob.complete_parts.after", "upload.complete.before", "upload.complete.after"],
)
async def test_a_crash_while_it_is_completed(server: Api, system: System, point: str) -> None:
    upload_id = await promise(server)
    multipart_id = await send_all(server, upload_id)
    upload = await system.records.access.upload(upload_id)
    assert upload is not None

    with dying_at(point):
        await MultipartUploads(system).complete(upload, CompletionSpec(multipart_id))
    done = await complete(server, upload_id, multipart_id)
    assert (done.status, done.json["stored"]) == (200, True), done.body
    assert await system.blobs.size(upload.key) == len(DATA)


async def test_a_directory_takes_the_list_in_one_request(settings: Settings, clock: JumpingClock) -> None:
    async with open_system(settings, clock) as system:
        assert not isinstance(system.blobs, StoresParts)
