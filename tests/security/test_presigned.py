"""Signed requests of the object store: what they allow, and nothing else. Then the whole way of a list and of a body.

Two stores are asked: ministack, which also checks hashes and honours If-None-Match, and rclone, which is the stricter
judge of signatures.
"""

import asyncio
import base64
import dataclasses
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import botocore.auth
import pytest

from conveyor.client import Client
from conveyor.engines.aws_credentials import AwsCredentials
from conveyor.engines.blobs import Presigned
from conveyor.engines.object_blobs import ObjectBlobs, ObjectEngine
from conveyor.settings import Settings
from conveyor.states import RunState
from conveyor.system import System, open_system
from tests.servers import rclone, s3
from tests.servers.aws import REGION
from tests.support.api import Answer, Api, client, raw
from tests.support.clocks import JumpingClock
from tests.support.working import ended, working

DATA = b"http://example.com/1\nhttp://example.com/2\n"
OTHER = b"http://example.net/1\nhttp://example.net/2\n"
KEY = "uploads/acme/upload_1"


def digest(data: bytes) -> str:
    return sha256(data).hexdigest()


def checksum(data: bytes) -> str:
    return base64.b64encode(sha256(data).digest()).decode()


class Store(NamedTuple):
    """Where requests go, and what it leaves to others to check."""

    blobs: ObjectBlobs
    name: str

    async def send(self, request: Presigned, body: bytes | None = None, **changed: Any) -> Answer:
        headers = {**request.headers, **changed.get("headers", {})}
        headers = {name: value for name, value in headers.items() if value is not None}
        if body is not None and "headers" not in changed:
            headers["Content-Length"] = str(len(body))
        async with client() as http:
            asked = http.request(changed.get("method", request.method), changed.get("url", request.url))
            asked = asked.headers(headers)
            response = await (asked if body is None else asked.body_bytes(body)).build().send()
            got = {name.lower(): value for name, value in response.headers.items()}
            return Answer(response.status, got, bytes(await response.bytes()))


# Only the one knows hashes and conditions, only the other minds all that is not signed.
ministack = pytest.mark.parametrize("store", ["ministack"], indirect=True)
strict = pytest.mark.parametrize("store", ["rclone"], indirect=True)


@pytest.fixture(params=["ministack", "rclone"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    clock = JumpingClock()
    if request.param == "ministack":
        async with s3.open_engine(tmp_path, clock) as engine:
            yield Store(engine.blobs, request.param)
    else:
        prefix = digest(str(tmp_path).encode())[:16]
        url = f"s3://{rclone.BUCKET}/{prefix}?region={REGION}&endpoint={rclone.rclone()}"
        async with ObjectEngine.open(url, clock) as engine:
            yield Store(engine.blobs, request.param)


async def signed_put(store: Store, data: bytes = DATA, seconds: float = 3600) -> Presigned:
    signed = await store.blobs.presigned_put(KEY, len(data), digest(data), seconds)
    assert signed is not None
    return signed


async def signed_get(store: Store, seconds: float = 3600) -> Presigned:
    await store.blobs.put(KEY, DATA)
    signed = await store.blobs.presigned_get(KEY, seconds, "application/octet-stream", "list.txt")
    assert signed is not None
    return signed


def with_query(url: str, **changed: str | None) -> str:
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name, value in changed.items():
        key = name.replace("_", "-")
        query.pop(key, None)
        if value is not None:
            query[key] = value
    return urlunsplit(parts._replace(query=urlencode(query)))


def query_of(url: str, name: str) -> str:
    return dict(parse_qsl(urlsplit(url).query))[name]


def moved(url: str, old: str, new: str) -> str:
    assert old in url
    return url.replace(old, new, 1)


@pytest.fixture
def two_hours_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signing has its time from the library."""
    at = datetime.now(UTC).replace(tzinfo=None) - timedelta(hours=2)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda remove_tzinfo=True: at)


class TestPut:
    async def test_it_stores_what_was_announced(self, store: Store) -> None:
        signed = await signed_put(store)
        assert signed.method == "PUT"
        assert (await store.send(signed, DATA)).status == 200
        assert await store.blobs.get(KEY) == DATA

    async def test_all_that_is_promised_is_signed(self, store: Store) -> None:
        signed = await signed_put(store)
        names = query_of(signed.url, "X-Amz-SignedHeaders").split(";")
        assert names == [
            "content-length",
            "content-type",
            "host",
            "if-none-match",
            "x-amz-checksum-sha256",
            "x-amz-sdk-checksum-algorithm",
        ]
        assert query_of(signed.url, "X-Amz-Expires") == "3600"

    @pytest.mark.parametrize("body", [DATA[:-1], DATA + b"x", b"", DATA * 1000], ids=["less", "more", "none", "much"])
    async def test_another_size_is_refused(self, store: Store, body: bytes) -> None:
        answer = await store.send(await signed_put(store), body)
        assert answer.status in {400, 403}, answer.body
        assert await store.blobs.size(KEY) is None

    async def test_no_length_is_refused(self, store: Store) -> None:
        signed = await signed_put(store)
        parts = urlsplit(signed.url)
        assert parts.hostname is not None and parts.port is not None
        lines = [f"PUT {parts.path}?{parts.query} HTTP/1.1", f"Host: {parts.netloc}", "Transfer-Encoding: chunked"]
        lines += [f"{name}: {value}" for name, value in signed.headers.items() if name != "Content-Length"]
        head = "\r\n".join([*lines, "Connection: close", "", ""]).encode()
        received = await raw((parts.hostname, parts.port), head, b"%x\r\n%s\r\n0\r\n\r\n" % (len(DATA), DATA))
        assert b" 403 " in received.split(b"\r\n")[0] or b" 411 " in received.split(b"\r\n")[0], received[:200]
        assert await store.blobs.size(KEY) is None

    @ministack
    async def test_other_bytes_of_the_same_size_are_refused(self, store: Store) -> None:
        """Where a store takes them all the same, the ingest finds that this is not the list that was announced."""
        answer = await store.send(await signed_put(store), OTHER)
        assert answer.status == 400, answer.body
        assert await store.blobs.size(KEY) is None

    @pytest.mark.parametrize(
        "headers",
        [
            {"x-amz-checksum-sha256": checksum(OTHER)},
            {"x-amz-checksum-sha256": None},
            {"x-amz-sdk-checksum-algorithm": None},
            {"If-None-Match": None},
            {"Content-Type": "text/html"},
            {"Content-Type": None},
        ],
        ids=["hash", "no hash", "unknown hash", "again", "type", "no type"],
    )
    async def test_another_header_is_refused(self, store: Store, headers: dict[str, str | None]) -> None:
        answer = await store.send(await signed_put(store), OTHER, headers=headers)
        assert answer.status == 403, answer.body
        assert await store.blobs.size(KEY) is None

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ("upload_1", "upload_2"),
            ("acme", "other"),
            ("uploads/acme/upload_1", "results/acme/job_1/body_1"),
            ("acme/upload_1", "acme/x/../upload_2"),
            ("acme/upload_1", "acme/%2e%2e/other/upload_1"),
            ("conveyor-tests", "conveyor-other"),
        ],
    )
    async def test_another_key_is_refused(self, store: Store, old: str, new: str) -> None:
        signed = await signed_put(store)
        answer = await store.send(signed, DATA, url=moved(signed.url, old, new))
        assert answer.status in {400, 403, 404}, answer.body
        assert [info async for info in store.blobs.listing("")] == []

    @pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "POST"])
    async def test_another_method_is_refused(self, store: Store, method: str) -> None:
        await store.blobs.put(KEY, OTHER)
        signed = await signed_put(store)
        body = None if method in {"GET", "HEAD", "DELETE"} else DATA
        answer = await store.send(signed, body, method=method, headers={"Content-Length": None} if body is None else {})
        assert answer.status in {400, 403, 405}, answer.body
        assert OTHER not in answer.body
        assert await store.blobs.get(KEY) == OTHER

    @pytest.mark.parametrize(
        "change",
        [
            lambda url: with_query(url, X_Amz_Signature="0" * 64),
            lambda url: url[:-1] + ("0" if url[-1] != "0" else "1"),
            lambda url: with_query(url, X_Amz_Expires="604800"),
            lambda url: with_query(url, X_Amz_Date="20990101T000000Z"),
            lambda url: with_query(url, X_Amz_SignedHeaders="host"),
            lambda url: with_query(url, X_Amz_Credential="other/20260101/eu-central-1/s3/aws4_request"),
            lambda url: with_query(url, X_Amz_Security_Token="anything"),
            lambda url: with_query(url, acl=""),
        ],
        ids=["zeros", "one digit", "longer", "later", "fewer headers", "other key", "token", "acl"],
    )
    async def test_a_changed_link_is_refused(self, store: Store, change: Callable[[str], str]) -> None:
        signed = await signed_put(store)
        answer = await store.send(signed, DATA, url=change(signed.url))
        assert answer.status in {400, 403}, answer.body
        assert await store.blobs.size(KEY) is None

    @strict
    @pytest.mark.parametrize(
        "change",
        [
            lambda url: with_query(url, X_Amz_Signature=None),
            lambda url: urlunsplit(urlsplit(url)._replace(query="")),
        ],
        ids=["no signature", "bare"],
    )
    async def test_a_link_without_its_signature_is_refused(self, store: Store, change: Callable[[str], str]) -> None:
        signed = await signed_put(store)
        answer = await store.send(signed, DATA, url=change(signed.url))
        assert answer.status in {400, 403}, answer.body
        assert await store.blobs.size(KEY) is None

    @strict
    async def test_a_header_that_was_not_signed_is_refused(self, store: Store) -> None:
        answer = await store.send(await signed_put(store), DATA, headers={"x-amz-acl": "public-read"})
        assert answer.status == 403, answer.body
        assert await store.blobs.size(KEY) is None

    @pytest.mark.usefixtures("two_hours_ago")
    async def test_it_ends(self, store: Store) -> None:
        answer = await store.send(await signed_put(store, seconds=3600), DATA)
        assert answer.status in {400, 403}, answer.body
        assert await store.blobs.size(KEY) is None

    @pytest.mark.usefixtures("two_hours_ago")
    async def test_it_holds_until_then(self, store: Store) -> None:
        assert (await store.send(await signed_put(store, seconds=3 * 3600), DATA)).status == 200

    async def test_it_is_good_once(self, store: Store) -> None:
        signed = await signed_put(store)
        assert (await store.send(signed, DATA)).status == 200
        again = await store.send(signed, DATA)
        assert again.status == 412 or store.name == "rclone", again.body
        assert await store.blobs.get(KEY) == DATA, "where it is not, it can only write the same"

    @ministack
    async def test_it_does_not_replace_what_is_there(self, store: Store) -> None:
        await store.blobs.put(KEY, OTHER)
        assert (await store.send(await signed_put(store), DATA)).status == 412
        assert await store.blobs.get(KEY) == OTHER

    async def test_it_is_not_longer_than_a_signature_may_be(self, store: Store) -> None:
        signed = await signed_put(store, seconds=30 * 86_400)
        assert query_of(signed.url, "X-Amz-Expires") == "604800"

    async def test_a_list_that_is_too_large_for_one_put_goes_through_the_api(self, store: Store) -> None:
        assert await store.blobs.presigned_put(KEY, 5 * 1024**3, digest(DATA), 60) is not None
        assert await store.blobs.presigned_put(KEY, 5 * 1024**3 + 1, digest(DATA), 60) is None


class TestGet:
    async def test_it_reads_one_object_as_an_attachment(self, store: Store) -> None:
        signed = await signed_get(store)
        answer = await store.send(signed)
        assert (answer.status, answer.body) == (200, DATA)
        if store.name == "ministack":
            assert answer.headers["content-type"] == "application/octet-stream"
            assert answer.headers["content-disposition"] == 'attachment; filename="list.txt"'

    async def test_the_name_is_only_a_name(self, store: Store) -> None:
        await store.blobs.put(KEY, DATA)
        signed = await store.blobs.presigned_get(KEY, 60, "application/octet-stream", 'a"; filename=b\r\nX: y/../ü')
        assert signed is not None
        wanted = query_of(signed.url, "response-content-disposition")
        assert wanted == 'attachment; filename="a___filename_b__X__y_..__"'
        assert (await store.send(signed)).status == 200

    @pytest.mark.parametrize(
        "change",
        [
            lambda url: with_query(url, response_content_type="text/html"),
            lambda url: with_query(url, response_content_type=None),
            lambda url: with_query(url, response_content_disposition=None),
            lambda url: with_query(url, response_content_disposition="inline"),
            lambda url: with_query(url, X_Amz_Expires="604800"),
            lambda url: with_query(url, X_Amz_Signature="f" * 64),
            lambda url: with_query(url, versionId="null"),
            lambda url: moved(url, "upload_1", "upload_2"),
            lambda url: moved(url, "/uploads/acme/upload_1", "/"),
        ],
        ids=["type", "no type", "no name", "inline", "longer", "signature", "version", "key", "listing"],
    )
    async def test_a_changed_link_is_refused(self, store: Store, change: Callable[[str], str]) -> None:
        signed = await signed_get(store)
        await store.blobs.put("uploads/acme/upload_2", DATA)
        answer = await store.send(signed, url=change(signed.url))
        assert answer.status in {400, 403}, answer.body
        assert DATA not in answer.body

    @pytest.mark.parametrize("method", ["PUT", "DELETE", "POST"])
    async def test_another_method_is_refused(self, store: Store, method: str) -> None:
        answer = await store.send(await signed_get(store), OTHER, method=method)
        assert answer.status in {400, 403, 405}
        assert await store.blobs.get(KEY) == DATA

    @pytest.mark.usefixtures("two_hours_ago")
    async def test_it_ends(self, store: Store) -> None:
        answer = await store.send(await signed_get(store, seconds=3600))
        assert answer.status in {400, 403}
        assert DATA not in answer.body

    async def test_a_signature_by_another_secret_is_refused(
        self, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        signed = await signed_get(store)
        parts = urlsplit(signed.url)
        bucket, prefix = parts.path.strip("/").split("/")[:2]
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
        # The process keeps the credentials that it has found.
        monkeypatch.setattr("conveyor.engines.s3.aws_credentials", AwsCredentials)
        endpoint = f"{parts.scheme}://{parts.netloc}"
        url = f"s3://{bucket}/{prefix}?region={REGION}&endpoint={endpoint}"
        async with ObjectEngine.open(url, JumpingClock()) as engine:
            forged = await engine.blobs.presigned_get(KEY, 60, "application/octet-stream", "x")
        assert forged is not None
        assert (await store.send(forged)).status == 403


class TestTheWay:
    """A list to the store and a body from it, without either passing through the API."""

    @pytest.fixture
    async def system(self, settings: Settings, clock: JumpingClock, tmp_path: Path) -> AsyncIterator[System]:
        async with s3.open_engine(tmp_path, clock) as engine, open_system(settings, clock) as opened:
            yield dataclasses.replace(opened, blobs=engine.blobs)

    async def promise(self, server: Api, data: bytes = DATA) -> dict[str, Any]:
        answer = await server.post("/v1/uploads", {"size": len(data), "sha256": digest(data)})
        assert answer.status == 201, answer.body
        given: dict[str, Any] = answer.json
        return given

    async def stored(self, server: Api, given: dict[str, Any]) -> dict[str, Any]:
        shown: dict[str, Any] = (await server.get(f"/v1/uploads/{given['upload_id']}")).json
        return shown

    async def send(self, given: dict[str, Any], data: bytes) -> int:
        async with client() as http:
            asked = http.request(given["method"], given["url"]).headers(given["headers"]).body_bytes(data)
            return (await asked.build().send()).status

    async def test_a_list_goes_straight_to_the_store(self, server: Api) -> None:
        given = await self.promise(server)
        assert "X-Amz-Signature" in given["url"]
        assert (await self.stored(server, given))["stored"] is False
        job = {"source": {"upload_id": given["upload_id"]}}
        early = await server.submit(job)
        assert (early.status, early.json["code"]) == (409, "upload_conflict")
        assert await self.send(given, DATA) == 200
        shown = await self.stored(server, given)
        assert shown["stored"] is True
        assert "url" not in shown
        assert (await server.submit(job)).status == 201
        assert (await server.system.records.access.upload(given["upload_id"])).stored_at is not None  # type: ignore[union-attr]

    async def test_a_new_link_is_given_until_it_is_stored(self, server: Api) -> None:
        given = await self.promise(server)
        shown = await self.stored(server, given)
        assert (shown["method"], shown["headers"]) == (given["method"], given["headers"])
        assert urlsplit(shown["url"]).path == urlsplit(given["url"]).path
        assert await self.send(shown, DATA) == 200

    async def test_only_the_tenant_is_given_one(self, server: Api) -> None:
        given = await self.promise(server)
        other = await server.as_tenant("other")
        assert (await other.get(f"/v1/uploads/{given['upload_id']}")).status == 404
        assert (await other.submit({"source": {"upload_id": given["upload_id"]}})).status == 404

    async def test_a_list_of_another_size_makes_no_job(self, server: Api) -> None:
        """However it came there."""
        given = await self.promise(server)
        await server.system.blobs.put(f"uploads/acme/{given['upload_id']}", DATA + b"x")
        assert (await server.submit({"source": {"upload_id": given["upload_id"]}})).status == 409

    async def test_a_list_with_another_hash_is_not_run(self, server: Api, system: System) -> None:
        given = await self.promise(server)
        await system.blobs.put(f"uploads/acme/{given['upload_id']}", OTHER)
        answer = await server.submit({"source": {"upload_id": given["upload_id"]}})
        assert answer.status == 202
        async with working(system):
            shown = await ended(server, answer.json["id"])
        assert shown["state"] == RunState.FAILED
        assert "has changed since it was accepted" in shown["reason"]
        assert shown["run"]["total"] == 0

    async def test_the_client_sends_it_there(self, server: Api, tmp_path: Path) -> None:
        path = tmp_path / "list.txt"
        path.write_bytes(DATA)

        def upload() -> str:
            with Client(server.url, server.key) as given:
                first = given.upload(path, idempotency_key="once")
                assert given.upload(path, idempotency_key="once") == first, "a second try finds it stored"
                return first.upload_id

        upload_id = await asyncio.to_thread(upload)
        assert await server.system.blobs.get(f"uploads/acme/{upload_id}") == DATA

    async def test_a_body_comes_straight_from_the_store(self, server: Api, system: System) -> None:
        spec = {"kind": "fetch", "tasks": ["http://example.com/a.html"], "result_layout": "object"}
        job = (await server.submit(spec)).json["id"]
        async with working(system):
            await ended(server, job)
        (task,) = (await server.get(f"/v1/jobs/{job}/results")).json["items"]
        one = (await server.get(f"/v1/jobs/{job}/tasks/{task['task_id']}")).json
        for link in (task["body_url"], one["body_url"]):
            assert query_of(link, "X-Amz-Expires") == "86400"
            async with client() as http:
                response = await http.get(link).build().send()
                body = bytes(await response.bytes())
            assert digest(body) == task["sha256"]
            assert response.headers["content-type"] == "application/octet-stream"
            assert response.headers["content-disposition"].startswith('attachment; filename="0000000_')
        through = await server.get(f"/v1/jobs/{job}/tasks/{task['task_id']}/body")
        assert digest(through.body) == task["sha256"]

    async def test_a_packed_body_comes_through_the_api(self, server: Api, system: System) -> None:
        spec = {"kind": "fetch", "tasks": ["http://example.com/a.html"], "result_layout": "packed"}
        job = (await server.submit(spec)).json["id"]
        async with working(system):
            await ended(server, job)
        (task,) = (await server.get(f"/v1/jobs/{job}/results")).json["items"]
        assert task["body_url"].startswith(f"/v1/bodies/{job}/{task['task_id']}?")
        assert digest((await server.get(task["body_url"])).body) == task["sha256"]
