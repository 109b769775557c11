"""Uploads over HTTP: a link that takes one list, once, and nothing else; and what comes to those who bend it."""

import asyncio
import re
import tracemalloc
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conveyor.api.request_bodies import pieces
from conveyor.api.schemas.list_shapes import UploadShape
from conveyor.auth.signing import signing_key
from conveyor.errors import BadInput, InvalidSetting
from conveyor.lists.uploads import UploadView
from conveyor.recover.retention import SETTLE_SECONDS, Removed, Retention
from conveyor.settings import Settings
from conveyor.system import System, open_system
from tests.support.api import Answer, Api, new_server, parsed, raw
from tests.support.clocks import JumpingClock
from tests.support.working import until

LIST = b"http://example.com/1\nhttp://example.com/2\n"
DAY = 86_400.0


def digest(data: bytes) -> str:
    return sha256(data).hexdigest()


async def promise(api: Api, data: bytes = LIST) -> dict[str, Any]:
    answer = await api.post("/v1/uploads", {"size": len(data), "sha256": digest(data)})
    assert answer.status == 201, answer.body
    promised: dict[str, Any] = answer.json
    return promised


def kept(system: System) -> list[str]:
    """Every file under the blobs, drafts too."""
    root = system.settings.data / "blobs"
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


async def check_nothing_kept(api: Api, promised: dict[str, Any]) -> None:
    assert kept(api.system) == []
    assert (await api.get(f"/v1/uploads/{promised['upload_id']}")).json["stored"] is False


def refusal(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.json["code"]


class TestPromise:
    async def test_what_a_client_is_told(self, server: Api, clock: JumpingClock) -> None:
        answer = await server.post("/v1/uploads", {"size": len(LIST), "sha256": digest(LIST).upper()})
        assert answer.status == 201
        view = msgspec.json.decode(answer.body, type=UploadView)
        assert answer.headers["location"] == f"/v1/uploads/{view.upload_id}"
        assert view.url.startswith(f"{server.url}/v1/uploads/{view.upload_id}/content?signature=")
        assert re.fullmatch(r"[0-9a-f]{64}", view.url.rpartition("=")[2])
        assert (view.method, view.headers["X-Content-Sha256"]) == ("PUT", digest(LIST))
        shown = (await server.get(f"/v1/uploads/{view.upload_id}")).json
        msgspec.convert(shown, UploadShape)
        assert shown == {
            "upload_id": view.upload_id,
            "size": len(LIST),
            "sha256": digest(LIST),
            "stored": False,
            "expires_at": view.expires_at,
        }
        assert kept(server.system) == []

    @pytest.mark.parametrize(
        ("field", "body"),
        [
            ("size", {"size": 0}),
            ("size", {"size": -1}),
            ("size", {"size": 8 * 1024**3 + 1}),
            ("size", {"size": 10**30}),
            ("size", {"size": 1.5}),
            ("size", {"size": True}),
            ("size", {"size": "7"}),
            ("sha256", {"sha256": ""}),
            ("sha256", {"sha256": "0" * 63}),
            ("sha256", {"sha256": "0" * 65}),
            ("sha256", {"sha256": "g" * 64}),
            ("sha256", {"sha256": "0" * 63 + "\n"}),
            ("sha256", {"sha256": "\u0660" * 64}),
            ("key", {"key": "uploads/other/x"}),
            ("upload_id", {"upload_id": "x"}),
            ("tenant", {"tenant": "other"}),
        ],
        ids=str,
    )
    async def test_what_is_not_taken(self, server: Api, field: str, body: dict[str, Any]) -> None:
        answer = await server.post("/v1/uploads", {"size": 7, "sha256": "0" * 64, **body})
        assert answer.status == 400
        assert answer.json["code"] in {"invalid_field", "unknown_field"}
        assert answer.json["field"] == field

    async def test_fields_that_are_missing(self, server: Api) -> None:
        for body in ({}, {"size": 7}, {"sha256": "0" * 64}, []):
            assert refusal(await server.post("/v1/uploads", body)) == (400, "invalid_field")

    @pytest.mark.parametrize("host", ["evil.example/x?", "a b", "x@y", "a\tb", "", "x" * 300, 'a"b', "<b>"])
    async def test_a_host_that_is_none_is_not_in_the_link(self, server: Api, host: str) -> None:
        body = msgspec.json.encode({"size": 7, "sha256": "0" * 64})
        head = (
            f"POST /v1/uploads HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"authorization: Bearer {server.key}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        answer = parsed(await raw(server.address, head.encode() + body))
        assert answer.status in {201, 400}
        if answer.status == 201:
            assert answer.json["url"].startswith(f"{server.url}/v1/uploads/upload_")

    @pytest.mark.parametrize("host", ["example.com", "EXAMPLE.com:8443", "[::1]:80", "10.0.0.1"])
    async def test_the_link_is_on_the_host_that_was_asked(self, host: str) -> None:
        body = msgspec.json.encode({"size": 7, "sha256": "0" * 64})
        async with new_server(allowed_hosts="*") as server:
            head = (
                f"POST /v1/uploads HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\nconnection: close\r\n"
                f"authorization: Bearer {server.key}\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            answer = parsed(await raw(server.address, head.encode() + body))
        assert answer.json["url"].startswith(f"http://{host}/v1/uploads/upload_")


class TestFill:
    async def test_a_list_is_stored_and_a_job_is_made_of_it(self, server: Api) -> None:
        promised = await promise(server)
        answer = await server.put(promised["url"], LIST, promised["headers"])
        assert (answer.status, answer.body) == (204, b"")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert (await server.get(f"/v1/uploads/{promised['upload_id']}")).json["stored"] is True
        assert kept(server.system) == [f"uploads/acme/{promised['upload_id']}"]
        assert await server.system.blobs.get(f"uploads/acme/{promised['upload_id']}") == LIST
        job = await server.submit({"source": {"upload_id": promised["upload_id"]}})
        assert (job.status, job.json["state"]) == (201, "running")

    async def test_a_job_of_a_list_that_was_not_sent(self, server: Api) -> None:
        promised = await promise(server)
        answer = await server.submit({"source": {"upload_id": promised["upload_id"]}})
        assert refusal(answer) == (409, "upload_conflict")

    async def test_it_takes_a_list_once(self, server: Api) -> None:
        promised = await promise(server)
        assert (await server.put(promised["url"], LIST)).status == 204
        for data in (LIST, LIST.replace(b"1", b"3")):
            assert refusal(await server.put(promised["url"], data)) == (409, "upload_conflict")
        await server.submit({"source": {"upload_id": promised["upload_id"]}})
        assert refusal(await server.put(promised["url"], LIST)) == (409, "upload_conflict")
        assert await server.system.blobs.get(f"uploads/acme/{promised['upload_id']}") == LIST

    async def test_one_of_many_at_once_stores_it(self, server: Api) -> None:
        data = LIST * 20_000
        promised = await promise(server, data)
        answers = await asyncio.gather(*(server.put(promised["url"], data) for _ in range(10)))
        assert sorted(answer.status for answer in answers) == [204] + [409] * 9
        assert await server.system.blobs.get(f"uploads/acme/{promised['upload_id']}") == data
        assert kept(server.system) == [f"uploads/acme/{promised['upload_id']}"]

    async def test_right_and_wrong_lists_at_once(self, server: Api) -> None:
        data = LIST * 20_000
        wrong = data[:-2] + b"X\n"
        promised = await promise(server, data)
        answers = await asyncio.gather(
            *(server.put(promised["url"], each) for each in [wrong, data, wrong, data, wrong, data])
        )
        assert sorted(answer.status for answer in answers).count(204) == 1
        assert {answer.status for answer in answers[::2]} <= {400, 409}
        assert await server.system.blobs.get(f"uploads/acme/{promised['upload_id']}") == data

    async def test_links_survive_a_restart(self, server: Api, settings: Settings) -> None:
        assert server.system.signing_key == signing_key(settings)


class TestSignatures:
    async def test_every_other_signature_is_refused(self, server: Api) -> None:
        promised, other = await promise(server), await promise(server)
        url, _, signature = promised["url"].rpartition("=")
        flipped = ("1" if signature[0] == "0" else "0") + signature[1:]
        for given in (
            "",
            "0" * 64,
            flipped,
            signature[:-1],
            signature + "0",
            signature.upper(),
            other["url"].rpartition("=")[2],
            "%00" + signature,
            "%C3%A9" * 32,
            "%ED%A0%80",
            "x" * 10_000,
        ):
            answer = await server.put(f"{url}={given}", LIST)
            assert refusal(answer) == (403, "signature_refused"), given
            assert answer.headers["content-type"] == "application/problem+json"
        base = url.partition("?")[0]
        assert refusal(await server.put(base, LIST)) == (403, "signature_refused")
        assert (await server.put(f"{base}?signature={signature}&x=1", LIST)).status == 400
        await check_nothing_kept(server, promised)
        assert (await server.put(promised["url"], LIST)).status == 204

    async def test_a_signature_is_for_one_upload(self, server: Api) -> None:
        one, two = await promise(server), await promise(server)
        swapped = one["url"].replace(one["upload_id"], two["upload_id"])
        assert refusal(await server.put(swapped, LIST)) == (403, "signature_refused")
        await check_nothing_kept(server, two)

    async def test_two_signatures(self, server: Api) -> None:
        promised = await promise(server)
        answer = await server.put(f"{promised['url']}&signature={'0' * 64}", LIST)
        assert answer.status in {400, 403}
        await check_nothing_kept(server, promised)

    async def test_a_signature_in_a_header_is_none(self, server: Api) -> None:
        promised = await promise(server)
        url, _, signature = promised["url"].partition("?signature=")
        answer = await server.put(url, LIST, {"signature": signature, "authorization": f"Bearer {server.key}"})
        assert refusal(answer) == (403, "signature_refused")

    async def test_another_secret_makes_other_signatures(self, server: Api, tmp_path: Path) -> None:
        promised = await promise(server)
        (server.system.settings.data / "signing.key").unlink()
        assert signing_key(server.system.settings) != server.system.signing_key
        async with open_system(Settings.load({}, data=tmp_path / "other")) as other:
            assert other.signing_key != server.system.signing_key
        assert (await server.put(promised["url"], LIST)).status == 204

    @pytest.mark.parametrize(
        "path",
        [
            "/v1/uploads/../../../etc/passwd/content",
            "/v1/uploads/%2e%2e%2f%2e%2e%2fowned/content",
            "/v1/uploads/..%2f{id}/content",
            "/v1/uploads/{id}%2f..%2fx/content",
            "/v1/uploads/{id}%00/content",
            "/v1/uploads/{id}/content/../../x/content",
            "/v1/uploads/{upper}/content",
            "/v1/uploads/{id}/content/x",
            "/v1/uploads/.tmp/content",
        ],
    )
    async def test_path_tricks(self, server: Api, path: str) -> None:
        promised = await promise(server)
        data = server.system.settings.data
        before = {each for each in data.parent.rglob("*") if each.is_file()}
        path = path.replace("{id}", promised["upload_id"]).replace("{upper}", promised["upload_id"].upper())
        head = (
            f"PUT {path}?signature={promised['url'].rpartition('=')[2]} HTTP/1.1\r\nhost: localhost\r\n"
            f"connection: close\r\ncontent-length: {len(LIST)}\r\n\r\n"
        )
        answer = parsed(await raw(server.address, head.encode() + LIST))
        assert answer.status in {400, 403, 404, 405}
        assert {each for each in data.parent.rglob("*") if each.is_file()} == before
        await check_nothing_kept(server, promised)


class TestExpiry:
    async def test_a_link_ends(self, server: Api, clock: JumpingClock) -> None:
        promised, stored = await promise(server), await promise(server)
        await server.put(stored["url"], LIST)
        clock.advance(DAY - 5)
        late = await promise(server)
        assert (await server.put(late["url"], LIST)).status == 204
        clock.advance(6)
        for each in (promised, stored):
            assert refusal(await server.put(each["url"], LIST)) == (403, "signature_refused")
            assert refusal(await server.get(f"/v1/uploads/{each['upload_id']}")) == (404, "not_found")
            spec = {"source": {"upload_id": each["upload_id"]}}
            assert refusal(await server.submit(spec)) == (404, "not_found")
        assert await retention(server.system).run_once() == Removed(), "who saw it before may be making a job of it"
        clock.advance(SETTLE_SECONDS)
        assert await retention(server.system).run_once() == Removed(uploads=2)
        assert kept(server.system) == [f"uploads/acme/{late['upload_id']}"]

    async def test_a_link_that_ends_while_the_list_comes(self, server: Api, clock: JumpingClock) -> None:
        promised = await promise(server)
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(put_head(promised, f"content-length: {len(LIST)}") + LIST[:10])
        await writer.drain()
        await wait_for_draft(server.system)
        clock.advance(DAY + SETTLE_SECONDS + 1)
        assert (await retention(server.system).run_once()).uploads == 1
        writer.write(LIST[10:])
        answer = parsed(await reader.read())
        writer.close()
        assert refusal(answer) == (403, "signature_refused")
        assert kept(server.system) == []

    async def test_a_job_keeps_its_list(self, server: Api, clock: JumpingClock) -> None:
        upload_id = await server.upload(LIST)
        job = await server.submit({"source": {"upload_id": upload_id}, "retention_days": 3})
        for days in (20, 2):
            clock.advance(days * DAY)
            await retention(server.system).run_once()
            assert kept(server.system) == [f"uploads/acme/{upload_id}"]
            assert (await server.get(f"/v1/uploads/{upload_id}")).status == 200
            await server.post(f"/v1/jobs/{job.json['id']}/cancel")
        # The job, and then the list that nothing refers to any more.
        for _ in range(2):
            clock.advance(2 * DAY)
            while await retention(server.system).run_once() != Removed():
                pass
        assert kept(server.system) == []


class TestOtherLists:
    async def test_another_size_is_refused_unread(self, server: Api) -> None:
        promised = await promise(server)
        for size in (len(LIST) - 1, len(LIST) + 1, 0, 10**15):
            head = put_head(promised, f"content-length: {size}", "expect: 100-continue")
            received = await raw(server.address, head, patience=2.0)
            assert b"100 Continue" not in received
            assert refusal(parsed(received)) == (400, "upload_refused")
        await check_nothing_kept(server, promised)

    async def test_another_hash(self, server: Api) -> None:
        promised = await promise(server)
        answer = await server.put(promised["url"], LIST[:-2] + b"3\n")
        assert refusal(answer) == (400, "upload_refused")
        await check_nothing_kept(server, promised)
        assert (await server.put(promised["url"], LIST)).status == 204

    async def test_another_hash_that_is_said_is_refused_unread(self, server: Api) -> None:
        promised = await promise(server)
        for said in ("0" * 64, "", "nonsense", "é"):
            head = put_head(
                promised, f"content-length: {len(LIST)}", f"x-content-sha256: {said}", "expect: 100-continue"
            )
            received = await raw(server.address, head, patience=2.0)
            assert b"100 Continue" not in received
            assert refusal(parsed(received)) == (400, "upload_refused")
        assert (await server.put(promised["url"], LIST, {"X-Content-Sha256": digest(LIST).upper()})).status == 204

    async def test_a_chunked_list(self, server: Api) -> None:
        promised = await promise(server)
        body = b"".join(chunk(LIST[at : at + 7]) for at in range(0, len(LIST), 7)) + b"0\r\n\r\n"
        answer = parsed(await raw(server.address, put_head(promised, "transfer-encoding: chunked") + body))
        assert answer.status == 204
        assert await server.system.blobs.get(f"uploads/acme/{promised['upload_id']}") == LIST

    @pytest.mark.parametrize("data", [b"", LIST[:-1], LIST + b"\n", LIST * 2], ids=["none", "less", "more", "double"])
    async def test_a_chunked_list_of_another_size(self, server: Api, data: bytes) -> None:
        promised = await promise(server)
        body = (chunk(data) if data else b"") + b"0\r\n\r\n"
        answer = parsed(await raw(server.address, put_head(promised, "transfer-encoding: chunked") + body))
        assert refusal(answer) == (400, "upload_refused")
        await check_nothing_kept(server, promised)

    async def test_a_chunked_list_without_end_is_not_read_to_it(self, server: Api) -> None:
        promised = await promise(server)
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(put_head(promised, "transfer-encoding: chunked").replace(b"connection: close\r\n", b""))
        sent = 0
        answering = asyncio.create_task(reader.read(4096))
        while not answering.done() and sent < 500_000_000:
            writer.write(chunk(b"x" * 100_000))
            await writer.drain()
            sent += 100_000
            await asyncio.sleep(0)
        assert refusal(parsed(await answering)) == (400, "upload_refused")
        assert sent < 50_000_000
        writer.close()
        await check_nothing_kept(server, promised)

    async def test_a_list_that_is_broken_off(self, server: Api) -> None:
        promised = await promise(server)
        _, writer = await asyncio.open_connection(*server.address)
        writer.write(put_head(promised, f"content-length: {len(LIST)}") + LIST[:10])
        await writer.drain()
        await wait_for_draft(server.system)
        writer.transport.abort()
        await until(lambda: found(kept(server.system)), lambda left: not left)
        await check_nothing_kept(server, promised)
        assert (await server.put(promised["url"], LIST)).status == 204

    async def test_a_list_that_drips_is_given_up(self) -> None:
        class Silent:
            """A request whose body stops coming."""

            received = 0

            async def receive(self) -> dict[str, Any]:
                self.received += 1
                if self.received > 2:
                    await asyncio.sleep(60)
                return {"type": "http.request", "body": b"x", "more_body": True}

        got = bytearray()
        with pytest.raises(BadInput, match="did not arrive in time"):
            async for piece in pieces(Silent(), lag=0.05):  # type: ignore[arg-type]
                got += piece
        assert got == b"xx"

    async def test_memory_does_not_grow_with_the_list(self, server: Api) -> None:
        piece = b"http://example.com/" + b"x" * 65_516 + b"\n"
        count = 800
        promised_for = digest(piece * count)
        body = {"size": len(piece) * count, "sha256": promised_for}
        promised = (await server.post("/v1/uploads", body)).json
        reader, writer = await asyncio.open_connection(*server.address)
        tracemalloc.start()
        try:
            writer.write(put_head(promised, f"content-length: {len(piece) * count}"))
            for _ in range(count):
                writer.write(piece)
                await writer.drain()
            answer = parsed(await reader.read(4096))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            writer.close()
        assert answer.status == 204
        assert peak < 12 * 1024 * 1024


class TestSecret:
    def test_it_is_made_once_and_for_its_owner_only(self, tmp_path: Path) -> None:
        settings = Settings.load({}, data=tmp_path)
        made = signing_key(settings)
        assert len(made) == 32
        assert signing_key(settings) == made
        assert [path.name for path in tmp_path.iterdir()] == ["signing.key"]
        assert (tmp_path / "signing.key").stat().st_mode & 0o777 == 0o600

    def test_what_a_crash_left_is_written_over(self, tmp_path: Path) -> None:
        (tmp_path / "signing.key.new").write_text("half")
        assert len(signing_key(Settings.load({}, data=tmp_path))) == 32
        assert [path.name for path in tmp_path.iterdir()] == ["signing.key"]

    def test_the_operators_own(self, tmp_path: Path) -> None:
        settings = Settings.load({"CONVEYOR_SIGNING_KEY": "s" * 32}, data=tmp_path)
        assert signing_key(settings) == b"s" * 32
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(InvalidSetting, match="at least 32"):
            Settings.load({"CONVEYOR_SIGNING_KEY": "s" * 31})

    @pytest.mark.parametrize("text", ["", "short", "é" * 64, "0" * 63])
    def test_a_damaged_one_is_not_used(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "signing.key").write_text(text)
        with pytest.raises(InvalidSetting, match="corrupt"):
            signing_key(Settings.load({}, data=tmp_path))


def put_head(promised: dict[str, Any], *headers: str) -> bytes:
    path = "/v1/" + promised["url"].partition("/v1/")[2]
    return (
        "\r\n".join([f"PUT {path} HTTP/1.1", "host: localhost", "connection: close", *headers]) + "\r\n\r\n"
    ).encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def retention(system: System) -> Retention:
    return Retention(system.records, system.tasks, system.queue, system.coordinator, system.blobs, system.clock)


async def wait_for_draft(system: System) -> None:
    """Until the server has begun to take a list in."""
    await until(lambda: found(kept(system)))


async def found(names: list[str]) -> list[str]:
    return names
