"""Requests that no polite client sends: bodies without end, without length, without hurry; heads that lie."""

import asyncio
import contextlib
import json
import time
from typing import Any

import pytest
from litestar import Request

from conveyor.api import protocol
from conveyor.api.request_bodies import read_body
from conveyor.errors import BadInput, BodyTooLarge
from conveyor.settings import Settings
from tests.machine.loop import VirtualLoop
from tests.support.api import Api, new_server, parsed, raw

CAP = 100_000
SPEC = json.dumps({"tasks": ["http://example.com/"]}).encode()


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return Settings.load({}, data=settings.data, max_request_bytes=CAP)


def head(api: Api, *headers: str, key: bool = True) -> bytes:
    lines = ["POST /v1/jobs HTTP/1.1", "host: localhost", "content-type: application/json", *headers]
    if key:
        lines.append(f"authorization: Bearer {api.key}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def jobs(api: Api) -> int:
    return len((await api.get("/v1/jobs")).json["items"])


async def test_a_chunked_body_is_accepted(server: Api) -> None:
    pieces = [chunk(SPEC[:5]), chunk(SPEC[5:]), b"0\r\n\r\n"]
    answer = parsed(await raw(server.address, head(server, "transfer-encoding: chunked", "connection: close"), *pieces))
    assert answer.status == 201


async def test_a_body_of_exactly_the_cap_is_accepted(server: Api) -> None:
    body = SPEC + b" " * (CAP - len(SPEC))
    assert (await server.submit(body)).status == 201
    assert (await server.submit(body + b" ")).status == 413


async def test_a_chunked_body_without_end_is_answered_and_cut_off(server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LINGER_SECONDS", 0.3)
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(head(server, "transfer-encoding: chunked"))
    started = time.monotonic()
    with pytest.raises(ConnectionError):
        while time.monotonic() - started < 30:
            writer.write(chunk(b" " * 50_000))
            await writer.drain()
    assert time.monotonic() - started < 10
    writer.close()
    del reader
    assert await jobs(server) == 0


async def test_a_chunked_body_over_the_cap(server: Api) -> None:
    """The whole of it is sent, and the answer is still heard; the connection goes on."""
    body = b"".join(chunk(SPEC + b" " * CAP) for _ in range(20)) + b"0\r\n\r\n"
    second = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    received = await raw(server.address, head(server, "transfer-encoding: chunked"), body, second)
    answer = parsed(received)
    assert (answer.status, answer.headers["content-type"]) == (413, "application/problem+json")
    assert b'"code":"body_too_large"' in received
    assert b"HTTP/1.1 200" in received
    assert await jobs(server) == 0


@pytest.mark.parametrize("length", [CAP + 1, 10**12, 10**18])
async def test_a_length_over_the_cap_is_refused_unread(server: Api, length: int) -> None:
    received = await raw(server.address, head(server, f"content-length: {length}", "expect: 100-continue"))
    assert b"100 Continue" not in received
    answer = parsed(received)
    assert (answer.status, answer.json["code"], answer.json["limit"]) == (413, "body_too_large", CAP)
    assert answer.headers["connection"] == "close"


async def test_without_a_key_no_body_is_read(server: Api) -> None:
    received = await raw(server.address, head(server, "content-length: 50000", "expect: 100-continue", key=False))
    assert b"100 Continue" not in received
    answer = parsed(received)
    assert (answer.status, answer.headers["connection"]) == (401, "close")


async def test_a_slow_body_is_waited_for(server: Api) -> None:
    pieces = [SPEC[at : at + 1] for at in range(len(SPEC))]
    request = head(server, f"content-length: {len(SPEC)}", "connection: close")
    assert parsed(await raw(server.address, request, *pieces, pause=0.005)).status == 201


async def test_a_body_that_is_broken_off_writes_nothing(server: Api) -> None:
    _, writer = await asyncio.open_connection(*server.address)
    writer.write(head(server, f"content-length: {len(SPEC)}") + SPEC[:-1])
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    for _ in range(5):
        assert await jobs(server) == 0


def request_of(*messages: dict[str, Any], then: float = 0.0) -> Request[Any, Any, Any]:
    """A request whose body arrives as these messages, `then` seconds apart; after them, nothing."""
    waiting = list(messages)

    async def receive() -> Any:
        await asyncio.sleep(then)
        if waiting:
            return waiting.pop(0)
        return await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "path": "/v1/jobs", "headers": [], "state": {}}
    return Request(scope, receive)  # type: ignore[arg-type]


def piece(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_silence_ends_the_wait() -> None:
    with pytest.raises(BadInput, match="in time"):
        await read_body(request_of(piece(b"a")), 100, lag=0.02)


async def test_dripping_ends_the_wait_too() -> None:
    drops = [piece(b"a")] * 100
    with pytest.raises(BadInput, match="in time"):
        await read_body(request_of(*drops, then=0.005), 100, lag=10.0, total=0.05)


def slow(count: int, each: int, pause: float, has_key: bool = True) -> float:
    """Seconds after which a body of pieces with these bytes, this far apart, is given up; negative if it is read."""
    parts = [*[piece(b"a" * each)] * count, piece(b"", more=False)]

    async def reading() -> float:
        request = request_of(*parts, then=pause)
        request.scope["auth"] = "a key" if has_key else None
        try:
            await read_body(request, count * each)
        except BadInput:
            return asyncio.get_running_loop().time()
        return -asyncio.get_running_loop().time()

    with contextlib.closing(VirtualLoop()) as loop:
        return loop.run_until_complete(reading())


async def a_slow_body_is_given_up_within_seconds() -> None:
    assert 0 < await asyncio.to_thread(slow, 40, 1, 14.0) <= 30
    assert 0 < await asyncio.to_thread(slow, 1000, 500, 1.0) <= 60
    # Speed at the beginning is no credit for the rest.
    assert 0 < await asyncio.to_thread(slow, 3, 1_000_000, 16.0) <= 30
    assert 0 < await asyncio.to_thread(slow, 40, 2000, 1.0, has_key=False) <= 10


async def test_a_slow_body_is_given_up_within_seconds() -> None:
    await a_slow_body_is_given_up_within_seconds()


async def test_a_body_at_the_minimum_rate_is_read() -> None:
    assert await asyncio.to_thread(slow, 100, 1100, 1.0) < 0
    assert await asyncio.to_thread(slow, 20, 14_500, 14.0) < 0


async def requests_without_a_key_take_no_places() -> None:
    async with new_server(max_requests=2) as api:
        lines = ["POST /v1/sign-in HTTP/1.1", "host: localhost", "content-type: application/json", "content-length: 50"]
        begun = ("\r\n".join([*lines, "x-conveyor-dashboard: 1"]) + "\r\n\r\n{").encode()
        writers = [(await asyncio.open_connection(*api.address))[1] for _ in range(5)]
        for writer in writers:
            writer.write(begun)
            await writer.drain()
        # The server reads what came first, first.
        for _ in range(3):
            assert (await api.get("/healthz")).status == 200
        submitted = await api.submit(SPEC)
        for writer in writers:
            writer.close()
        assert submitted.status == 201


async def test_requests_without_a_key_take_no_places() -> None:
    await requests_without_a_key_take_no_places()


async def test_nothing_is_read_past_the_cap() -> None:
    request = request_of(piece(b"a" * 60), piece(b"a" * 60), piece(b"never read"))
    with pytest.raises(BodyTooLarge):
        await read_body(request, 100)
    assert (await request.receive())["body"] == b"never read"


async def test_the_fingerprint_is_of_the_bytes_not_of_the_pieces() -> None:
    whole = await read_body(request_of(piece(b"abcdef", more=False)), 100)
    parts = await read_body(request_of(piece(b"abc"), piece(b""), piece(b"def"), piece(b"", more=False)), 100)
    other = await read_body(request_of(piece(b"abcdeg", more=False)), 100)
    assert whole == parts
    assert whole.fingerprint != other.fingerprint


INNER = b"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def smuggled(api: Api) -> bytes:
    """A whole request, put where a body is."""
    return INNER + f"authorization: Bearer {api.key}\r\ncontent-length: {len(SPEC)}\r\n\r\n".encode() + SPEC


SMUGGLING = [
    ["content-length: 6", "transfer-encoding: chunked"],
    ["transfer-encoding: chunked", "content-length: 6"],
    ["content-length: 6", "content-length: 7"],
    ["content-length: 6, 7"],
    ["content-length: -6"],
    ["content-length: +6"],
    ["content-length: 0x6"],
    ["content-length : 6"],
    ["transfer-encoding: xchunked"],
    ["transfer-encoding: chunked, identity"],
    ["transfer-encoding : chunked"],
    ["transfer-encoding:\x0bchunked"],
    ["x: a\x00b"],
    ["x: a\rb"],
]


@pytest.mark.parametrize("headers", SMUGGLING, ids=str)
async def test_a_lying_head_carries_no_second_request(server: Api, headers: list[str]) -> None:
    body = b"0\r\n\r\n" + smuggled(server)
    received = await raw(server.address, head(server, *headers, "connection: close") + body)
    assert b" 201 " not in received
    assert b"HTTP/1.1 5" not in received
    if received:
        answer = parsed(received)
        assert 400 <= answer.status < 500
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json["code"]
    assert await jobs(server) == 0


@pytest.mark.parametrize(
    "body",
    [b"zz\r\n", b"-5\r\nabcde\r\n", b"5;\x00\r\nabcde\r\n", b"fffffffffffffffff\r\n", b"5\r\nabcdeX\r\n"],
    ids=str,
)
async def test_chunks_that_lie(server: Api, body: bytes) -> None:
    received = await raw(
        server.address, head(server, "transfer-encoding: chunked", "connection: close") + body + b"0\r\n\r\n"
    )
    assert b" 201 " not in received
    assert b"HTTP/1.1 5" not in received
    assert await jobs(server) == 0
    assert (await server.get("/healthz")).status == 200


@pytest.mark.parametrize(
    "noise",
    [b"\x00" * 100, b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"{}"],
    ids=str,
)
async def test_no_http_at_all(server: Api, noise: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.2)
    received = await raw(server.address, noise)
    if received:
        assert parsed(received).status == 400
        assert parsed(received).json["code"] == "malformed_http"
    assert (await server.get("/healthz")).status == 200


async def test_a_million_headers(server: Api) -> None:
    lines = b"".join(b"x-%d: y\r\n" % number for number in range(1000))
    received = await raw(server.address, b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n", *[lines] * 1000)
    if received:
        assert parsed(received).status == 431
    assert (await server.get("/healthz")).status == 200


@pytest.mark.parametrize(
    "start",
    [b"GET /healthz HTTP/1.1\r\nx: ", b"GET /", b"GET /healthz HTTP/1.1\r\n"],
    ids=["header", "path", "header name"],
)
async def test_a_head_without_end(server: Api, start: bytes) -> None:
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(start)
    sent = 0
    try:
        for _ in range(1000):
            writer.write(b"a" * 65_536)
            await writer.drain()
            sent += 65_536
    except ConnectionError:
        pass
    assert sent < 50_000_000
    writer.close()
    del reader
    assert (await server.get("/healthz")).status == 200


async def test_a_head_in_one_piece_over_the_cap(server: Api) -> None:
    received = await raw(
        server.address, b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 70_000 + b"\r\n\r\n"
    )
    assert parsed(received).status == 431
    assert parsed(received).json["code"] == "head_too_large"


async def test_a_slow_head_is_given_up(server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.1)
    for sent in (b"", b"GET /healthz HTTP/1.1\r\nx: "):
        started = time.monotonic()
        assert await raw(server.address, sent) == b""
        assert time.monotonic() - started < 5


async def test_requests_on_one_connection_after_a_large_body(server: Api) -> None:
    """The end of a body and the next head may come in one piece; the cap of heads does not count the body."""
    body = SPEC + b" " * (CAP - len(SPEC))
    first = head(server, f"content-length: {len(body)}") + body
    second = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    received = await raw(server.address, first + second)
    assert b"HTTP/1.1 201" in received
    assert b"HTTP/1.1 200" in received


async def test_an_upgrade_is_not_taken(server: Api) -> None:
    received = await raw(
        server.address,
        b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        patience=0.5,
    )
    assert b"101 " not in received


class Large:
    """A cap as it is by default, for bodies of many megabytes."""

    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return Settings.load({}, data=settings.data, max_inline_tasks=200_000)


class TestLarge(Large):
    """Bodies of many megabytes, and what they do to everybody else."""

    @pytest.mark.parametrize(
        ("body", "code"),
        [
            (b'{"tasks": [' + b"[" * 8_000_000 + b"]" * 8_000_000 + b"]}", "malformed_json"),
            (b'{"tasks": [' + b"[],".join([b""] * 2_000_000) + b"[]]}", "too_many_tasks"),
            (b'{"tasks": [' + b",".join([b"[" * 900 + b"]" * 900] * 5_000) + b"]}", "invalid_tasks"),
            (b'{"tasks": ["' + b"a" * 16_000_000 + b'"]}', "invalid_tasks"),
            (b'{"tasks": [' + b'"\\u00e9",' * 1_000_000 + b'""]}', "too_many_tasks"),
            (b'{"name": ' + b"9" * 16_000_000 + b"}", "invalid_field"),
            (b'{"priority": ' + b"9" * 16_000_000 + b"}", "invalid_field"),
            (b"[" * 16_000_000, "invalid_field"),
            (b" " * 16_000_000, "malformed_json"),
        ],
        ids=["deep", "wide", "deep and wide", "long", "escapes", "digits", "number", "open", "blank"],
    )
    async def test_bombs(self, server: Api, body: bytes, code: str) -> None:
        started = time.monotonic()
        answer = await server.submit(body)
        assert answer.json["code"] == code
        assert answer.status in {400, 413}
        assert time.monotonic() - started < 15
        assert await jobs(server) == 0

    async def test_a_large_job_does_not_hold_up_the_others(self, server: Api) -> None:
        pad = "x" * 150
        body = json.dumps({"tasks": [f"http://example.com/{pad}/{number}" for number in range(100_000)]}).encode()
        assert len(body) > 15_000_000
        submitting = asyncio.create_task(server.submit(body))
        longest = 0.0
        while not submitting.done():
            started = time.monotonic()
            assert (await server.get("/healthz")).status == 200
            longest = max(longest, time.monotonic() - started)
        answer = await submitting
        assert (answer.status, answer.json["state"]) == (202, "ingesting")
        assert longest < 2.0
