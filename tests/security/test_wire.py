"""HTTP that no polite client speaks, byte by byte: framing that hides something, requests in heaps."""

import asyncio
import json
import re

import pytest

from conveyor.api import protocol
from tests.support.api import Answer, Api, new_server, parsed, raw

SPEC = json.dumps({"tasks": ["http://example.com/"]}).encode()
HEALTH = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


def head(target: str, *headers: str, method: str = "POST", host: str = "localhost") -> bytes:
    lines = [f"{method} {target} HTTP/1.1", f"host: {host}", "content-type: application/json", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def chunked(api: Api, *headers: str, path: str = "/v1/jobs") -> bytes:
    """The head of a submission, and its body but for the end."""
    start = head(path, "transfer-encoding: chunked", f"authorization: Bearer {api.key}", *headers)
    return start + b"%x\r\n%s\r\n" % (len(SPEC), SPEC)


def answers(received: bytes) -> list[int]:
    """The statuses of all answers."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]


def problem(received: bytes) -> Answer:
    assert received, "no answer"
    answer = parsed(received)
    assert answer.headers["content-type"] == "application/problem+json"
    return answer


async def jobs(api: Api) -> int:
    return len((await api.get("/v1/jobs")).json["items"])


async def a_trailer_is_no_header() -> None:
    async with new_server() as api:
        start = head("/v1/jobs", "transfer-encoding: chunked") + b"%x\r\n%s\r\n0\r\n" % (len(SPEC), SPEC)
        for trailers in (b"authorization: Bearer %b\r\n" % api.key.encode(), b"x: y\r\n"):
            received = await raw(api.address, start + trailers + b"a: b\r\n\r\n" + HEALTH)
            assert 201 not in answers(received)
            assert 200 not in answers(received)
        refused = problem(await raw(api.address, chunked(api) + b"0\r\nx: y\r\n\r\n"))
        assert (refused.status, refused.json["code"]) == (400, "malformed_http")
        assert "trailers" in refused.json["detail"]
        assert await jobs(api) == 0


async def trailers_without_end_are_cut_off() -> None:
    """Many lines, or one line without end; without a key."""
    async with new_server() as api:
        begun = head("/v1/sign-in", "transfer-encoding: chunked", "x-conveyor-dashboard: 1") + b"1\r\n{\r\n0\r\n"
        for trailers in ((b"x: " + b"y" * 1000 + b"\r\n") * 10, b"x: " + b"y" * 10_000):
            refused = problem(await raw(api.address, begun + trailers))
            assert "trailers" in refused.json["detail"]


async def chunk_extensions_are_refused() -> None:
    async with new_server() as api:
        for line in (b"5;a=b\r\n", b"5;" + b"a" * 100_000, b"5 ;\r\n", b"0;a\r\n"):
            start = head("/v1/jobs", "transfer-encoding: chunked", f"authorization: Bearer {api.key}")
            refused = problem(await raw(api.address, start + line))
            assert (refused.status, refused.json["code"]) == (400, "malformed_http")
            assert "extension" in refused.json["detail"]
        assert await jobs(api) == 0


async def test_a_head_that_ends_in_another_packet_ends_there() -> None:
    """What follows its last line is a body, also where it has the bytes of another end of a head."""
    async with new_server() as api:
        whole = head("/v1/jobs", "transfer-encoding: chunked", f"authorization: Bearer {api.key}")
        body = b"%x\r\n%s\r\n0\r\nx: y\r\n\r\n" % (len(SPEC), SPEC)
        first = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
        for cut in (2, 3, 4, len(whole) - 5):
            reader, writer = await asyncio.open_connection(*api.address)
            # The server has the beginning of the second head when the first request has its answer.
            writer.write(first + whole[:-cut])
            await reader.readuntil(b"\r\n\r\n")
            writer.write(whole[-cut:] + body)
            received = await reader.read()
            writer.close()
            assert b"trailers" in received
            assert 201 not in answers(received)
        assert await jobs(api) == 0


async def test_lines_that_end_without_a_carriage_return_hide_nothing() -> None:
    async with new_server() as api:
        hidden = head("/v1/jobs", f"content-length: {len(SPEC)}", f"authorization: Bearer {api.key}") + SPEC
        for end in (b"\n\n", b"\n\r\n", b"\r\n\n"):
            received = await raw(api.address, b"POST /healthz HTTP/1.1\r\nhost: localhost" + end + hidden)
            assert 201 not in answers(received)[:1]
            assert len(answers(received)) <= 2


async def test_a_trailer_is_no_header() -> None:
    await a_trailer_is_no_header()


async def test_trailers_without_end_are_cut_off() -> None:
    await trailers_without_end_are_cut_off()


async def test_chunk_extensions_are_refused() -> None:
    await chunk_extensions_are_refused()


# Those that something parses.
HEADERS = [
    *("accept", "accept-encoding", "authorization", "connection", "content-encoding", "content-type"),
    *("cookie", "expect", "if-none-match", "if-range", "idempotency-key", "last-event-id"),
    *("origin", "prefer", "range", "sec-fetch-site", "traceparent", "x-content-sha256"),
    *("x-conveyor-dashboard", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-request-id"),
]
OF_CHANGES = {"content-encoding", "content-type", "expect", "origin", "sec-fetch-site", "x-forwarded-host"}
VALUES = [
    *(
        "http://[::1",
        "http://[",
        "[",
        "]",
        "//[x",
        "http://a:b",
        "http://a:99999999999",
        "null",
        "%",
        "%ff",
        "\xff\xfe",
        "",
        " ",
    ),
    *(
        '"',
        "a=b; c",
        'a="\\377"; =; ;;',
        ";;;",
        "=?utf-8?b?",
        "text/plain; charset=\xe9",
        "application/json; charset",
        "*/*;q=x",
    ),
    *(
        "bytes=-",
        "bytes=9-1",
        "bytes=0-0,2-3",
        "bytes=" + "9" * 400,
        "-1",
        "9" * 5000,
        "00-" + "f" * 32 + "-" + "0" * 16 + "-zz",
    ),
    *("Bearer ", "Bearer \xe9", "Basic =", "Bearer cv_" + "a" * 26 + "_" + "g" * 64, "job_" + "0" * 26, "\xb2"),
]


def odd_requests(host: str, cookie: str) -> list[bytes]:
    """A request of each kind for every header and value."""
    made = []
    for name in HEADERS:
        for value in VALUES:
            odd = f"{name}: {value}".encode("latin-1")
            page = [b"GET /v1/jobs HTTP/1.1", f"host: {host}".encode(), cookie.encode()]
            entry = [b"POST /v1/sign-in HTTP/1.1", b"host: localhost", b"content-length: 2", b"x-conveyor-dashboard: 1"]
            made.append(b"\r\n".join([*page, odd, b"", b""]))
            if name in OF_CHANGES:
                made.append(b"\r\n".join([*entry, b"content-type: application/json", odd, b"", b"{}"]))
    return made


async def no_header_is_our_failure() -> None:
    async with new_server() as api:
        signed_in = await api.post("/v1/sign-in", {"key": api.key}, auth=False, headers={"x-conveyor-dashboard": "1"})
        requests = odd_requests(
            api.url.removeprefix("http://"), "cookie: " + signed_in.headers["set-cookie"].partition(";")[0]
        )
        for request in requests:
            received = await raw(api.address, request.replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
            assert answers(received), request
            assert max(answers(received)) < 500, request


async def test_no_header_is_our_failure() -> None:
    await no_header_is_our_failure()


async def test_a_chunked_body_in_any_pieces(server: Api) -> None:
    """Framing does not depend on where the network cuts."""
    whole = chunked(server, "connection: close") + b"0\r\n\r\n"
    head_length = whole.index(b"\r\n\r\n") + 4
    for cut in range(head_length - 3, len(whole)):
        assert answers(await raw(server.address, whole[:cut], whole[cut:], pause=0.0001)) == [201]


async def test_leading_zeros_of_a_chunk_have_an_end(server: Api) -> None:
    start = head("/v1/jobs", "transfer-encoding: chunked", f"authorization: Bearer {server.key}")
    refused = problem(await raw(server.address, start + b"0" * 100))
    assert (refused.status, refused.json["code"]) == (400, "malformed_http")


async def test_requests_in_a_heap_are_answered_in_order(server: Api) -> None:
    submit = chunked(server) + b"0\r\n\r\n"
    received = await raw(server.address, (submit + head("/no", method="GET")) * 20 + HEALTH)
    assert answers(received) == [201, 404] * 20 + [200]
    assert await jobs(server) == 20


async def test_an_offer_to_upgrade_does_not_change_the_framing(server: Api) -> None:
    offer = ("connection: upgrade, http2-settings", "upgrade: h2c", "http2-settings: AAMAAABkAARAAAAAAAIAAAAA")
    submit = head("/v1/jobs", f"content-length: {len(SPEC)}", f"authorization: Bearer {server.key}", *offer) + SPEC
    assert answers(await raw(server.address, submit + HEALTH)) == [201, 200]
    body = b"GET /v1/jobs HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %b\r\n\r\n" % server.key.encode()
    hidden = head("/healthz", f"content-length: {len(body)}", *offer, method="GET")
    assert answers(await raw(server.address, hidden, body, HEALTH, pause=0.01)) == [200, 200]


async def test_a_refusal_does_not_break_into_a_response(server: Api) -> None:
    """What follows a request is refused after the request has its response, and not in its place."""
    received = await raw(server.address, head("/v1/jobs", f"authorization: Bearer {server.key}", method="GET") + b"\0")
    assert answers(received) == [200, 400]


async def test_line_breaks_before_a_request_are_no_way_to_stay(server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.1)
    received = await raw(server.address, HEALTH.replace(b"connection: close\r\n", b"") + b"\r\n", patience=5)
    assert answers(received) == [200]


def addressed(*lines: str, start: str = "GET / HTTP/1.1") -> bytes:
    return "\r\n".join([start, *lines, "connection: close", "", ""]).encode("latin-1")


MALFORMED = [
    (addressed(), "missing"),
    (addressed("host: localhost", "host: localhost"), "more than one"),
    (addressed("host: a", "host: localhost"), "more than one"),
    (addressed("host: "), "invalid"),
    (addressed("host: a b"), "invalid"),
    (addressed("host: user@localhost"), "invalid"),
    (addressed("host: localhost:port"), "invalid"),
    (addressed("host: [::1"), "invalid"),
    (addressed("host: localhost/x"), "invalid"),
    (addressed("host: localhost", start="GET http://example.com/ HTTP/1.1"), "another host"),
    (addressed("host: localhost", start="GET / HTTP/0.9"), ""),
    (b"GET /healthz\r\n\r\n", ""),
    (addressed("host: localhost", "transfer-encoding: gzip, chunked", start="POST /v1/jobs HTTP/1.1"), "not supported"),
    (addressed("host: localhost", "transfer-encoding: gzip", start="POST /v1/jobs HTTP/1.1"), ""),
    (addressed("host: localhost", "transfer-encoding: chunked", start="POST /v1/jobs HTTP/1.0"), "not supported"),
]


async def test_malformed_heads_are_refused(server: Api) -> None:
    for sent, why in MALFORMED:
        refused = problem(await raw(server.address, sent))
        assert (refused.status, refused.json["code"]) == (400, "malformed_http"), sent
        assert why in refused.json["detail"], sent


async def test_http_1_0_needs_no_host(server: Api) -> None:
    assert answers(await raw(server.address, b"GET /healthz HTTP/1.0\r\n\r\n")) == [200]


async def other_names_are_refused_on_loopback() -> None:
    async with new_server() as api:
        for host in (
            "example.com",
            "example.com:80",
            "127.0.0.1.example.com",
            "localhost.example.com",
            "10.0.0.1",
            "[::2]",
        ):
            refused = problem(await raw(api.address, addressed(f"host: {host}")))
            assert (refused.status, refused.json["code"]) == (421, "host_refused"), host
            for path in ("/v1/openapi.json", "/v1/jobs"):
                assert answers(await raw(api.address, addressed(f"host: {host}", start=f"GET {path} HTTP/1.1"))) == [
                    421
                ]
            for path in ("/healthz", "/readyz?x"):
                status = answers(await raw(api.address, addressed(f"host: {host}", start=f"GET {path} HTTP/1.1")))
                assert status in ([200], [400])


async def test_other_names_are_refused_on_loopback() -> None:
    await other_names_are_refused_on_loopback()


async def test_loopback_names_are_answered_to(server: Api) -> None:
    for host in (
        "localhost",
        "LOCALHOST:1",
        "127.0.0.1",
        "127.9.9.9:8080",
        "[::1]",
        "[::1]:80",
        "a.localhost",
        "localhost.",
    ):
        assert answers(await raw(server.address, addressed(f"host: {host}"))) == [200], host


async def test_listed_names_are_answered_to() -> None:
    async with new_server(allowed_hosts="jobs.example.com *.example.org", host="0.0.0.0") as api:
        for host in ("jobs.example.com", "Jobs.Example.com:443", "a.example.org", "localhost"):
            assert answers(await raw(api.address, addressed(f"host: {host}"))) == [200], host
        for host in ("example.com", "example.org", "a.b.example.org", "a.jobs.example.com"):
            assert answers(await raw(api.address, addressed(f"host: {host}"))) == [421], host


async def test_any_name_is_answered_to_elsewhere() -> None:
    for settings in ({"host": "0.0.0.0"}, {"allowed_hosts": "*"}):
        async with new_server(**settings) as api:
            assert answers(await raw(api.address, addressed("host: example.com"))) == [200]
