"""A target site on a free loopback port, over plain sockets, so that it can misbehave as real ones do: it cuts, stalls,
redirects, lies and bombs. It is a proxy and a gateway too, and it remembers what it was asked.

`Canary` is a listener that nobody should reach.
"""

import asyncio
import gzip
import json
import random
import ssl
import tempfile
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import cache
from typing import NamedTuple, Self
from urllib.parse import parse_qs, unquote, urlsplit

MIB = 1024 * 1024

# Made for these tests and good for nothing else: site.example and other.example, valid for a hundred years.
AUTHORITY = b"""\
-----BEGIN CERTIFICATE-----
MIIBqzCCAVGgAwIBAgIURjor2sUeSJGgeAQp/0Y8COwnSWwwCgYIKoZIzj0EAwIw
IjEgMB4GA1UEAwwXQ29udmV5b3IgdGVzdCBhdXRob3JpdHkwIBcNMjYxMTE1MjAz
NjI1WhgPMjEyNjEwMjIyMDM2MjVaMCIxIDAeBgNVBAMMF0NvbnZleW9yIHRlc3Qg
YXV0aG9yaXR5MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE9ryh0o3ekHD2Jffy
c2BYAWpQXofX8s5Qk/tRV+XmxwMtB4fT2TH69LWckAuCtUsvefRRB0lCC41cgtGu
GMBJQ6NjMGEwHQYDVR0OBBYEFBd/LqXLlkSJbmKGsbtU5XYOlCTdMB8GA1UdIwQY
MBaAFBd/LqXLlkSJbmKGsbtU5XYOlCTdMA8GA1UdEwEB/wQFMAMBAf8wDgYDVR0P
AQH/BAQDAgIEMAoGCCqGSM49BAMCA0gAMEUCIQDMzJW4h4TrbOdlJCpMflvR0ngU
dYuz596JJrVjKTCicAIgYNYd2ONqzsasyvZo+3y/TflZCDFwRSejF0Ko4QZgUtI=
-----END CERTIFICATE-----
"""
CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIB2TCCAX+gAwIBAgIUIp0Caz9bES0mh914rAgjbp+908AwCgYIKoZIzj0EAwIw
IjEgMB4GA1UEAwwXQ29udmV5b3IgdGVzdCBhdXRob3JpdHkwIBcNMjYxMTE1MjAz
NjI1WhgPMjEyNTA2MDkyMDM2MjVaMBcxFTATBgNVBAMMDHNpdGUuZXhhbXBsZTBZ
MBMGByqGSM49AgEGCCqGSM49AwEHA0IABAS5mnx+0640T22BCMkdTEuGhbbsUqfy
pu/RgIfIfShQrc+TlaebZaZfpP7WoaVlpxaoAlO9Ttl3LuVhnlHXHJKjgZswgZgw
JgYDVR0RBB8wHYIMc2l0ZS5leGFtcGxlgg1vdGhlci5leGFtcGxlMAwGA1UdEwEB
/wQCMAAwCwYDVR0PBAQDAgeAMBMGA1UdJQQMMAoGCCsGAQUFBwMBMB0GA1UdDgQW
BBTctwhJsU/0hacBwp/0NCAV4vGJ7DAfBgNVHSMEGDAWgBQXfy6ly5ZEiW5ihrG7
VOV2DpQk3TAKBggqhkjOPQQDAgNIADBFAiAMKP/fB7OCAlpJC68yE2y98YCoqPl9
KgdKAdXm0NNLBwIhAJV8YQwRlxeFBjkf4oi+wMCHK4MxmeqIO6Isl8XYNS3b
-----END CERTIFICATE-----
"""
PRIVATE_KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgYyD3YavLM8U1Wsec
gUAPombDCJFw8r1oyPj52CKNtpKhRANCAAQEuZp8ftOuNE9tgQjJHUxLhoW27FKn
8qbv0YCHyH0oUK3Pk5Wnm2WmX6T+1qGlZacWqAJTvU7Zdy7lYZ5R1xyS
-----END PRIVATE KEY-----
"""


class Seen(NamedTuple):
    """A request as it came in."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    def query(self, name: str, default: str = "") -> str:
        return parse_qs(urlsplit(self.target).query).get(name, [default])[0]


Page = Callable[["Site", Seen, asyncio.StreamWriter], Awaitable[None]]
PAGES: dict[str, Page] = {}


def page(name: str) -> Callable[[Page], Page]:
    def keep(function: Page) -> Page:
        PAGES[name] = function
        return function

    return keep


class Listener:
    """A server that closes with all its connections, on a free port unless `port` is set before it opens."""

    def __init__(self, host: str = "127.0.0.1", *, tls: bool = False) -> None:
        self.host = host
        self.tls = tls
        # Another than that of these tests, if it is set before the server opens.
        self.context = tls_context() if tls else None
        self.port = 0
        self.connections = 0
        self._open: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, self.host, self.port, ssl=self.context)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        await self._server.wait_closed()
        await asyncio.sleep(0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self.serve(reader, writer)
            writer.close()
        except (OSError, EOFError, asyncio.CancelledError):
            # What the other side did not take is not worth waiting for.
            writer.transport.abort()
        finally:
            self._open.discard(task)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError


class Canary(Listener):
    """Counts who comes, and says nothing that would be an error."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\nsecret")
        await writer.drain()


class Site(Listener):
    """The site. `tunnel_to` is the port on this host to which CONNECT leads, whatever it asks for."""

    def __init__(self, host: str = "127.0.0.1", *, tls: bool = False, tunnel_to: int | None = None) -> None:
        super().__init__(host, tls=tls)
        self.tunnel_to = tunnel_to
        self.seen: list[Seen] = []
        self.visits: Counter[str] = Counter()
        self.asked = asyncio.Event()
        # Status and body of robots.txt.
        self.robots = (404, b"")
        # Requests under way, and the most there ever were.
        self.at_once = self.most_at_once = 0
        # Bytes of a body that the other side let us write.
        self.written = 0

    def url(self, path: str = "/", host: str | None = None) -> str:
        return f"{'https' if self.tls else 'http'}://{host or self.host}:{self.port}{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            seen = await read_request(reader)
            self.seen.append(seen)
            self.visits[seen.path] += 1
            self.asked.set()
            if seen.method == "CONNECT":
                await self.tunnel(reader, writer)
                return
            name = seen.path.strip("/").split("/")[0] or "ok"
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            try:
                await PAGES.get(name, unknown)(self, seen, writer)
            finally:
                self.at_once -= 1
            await writer.drain()

    async def tunnel(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.tunnel_to is None:
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
            return
        there_reader, there_writer = await asyncio.open_connection(self.host, self.tunnel_to)
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        try:
            await asyncio.gather(relay(reader, there_writer), relay(there_reader, writer))
        finally:
            there_writer.close()


async def relay(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while piece := await source.read(65536):
        sink.write(piece)
        await sink.drain()
    sink.close()


async def read_request(reader: asyncio.StreamReader) -> Seen:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    line, *fields = head.split("\r\n")[:-2]
    method, target, _ = line.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
    return Seen(method, target, headers, await reader.readexactly(int(headers.get("content-length", 0))))


def answer(
    writer: asyncio.StreamWriter, body: bytes = b"", status: int = 200, *, length: int | None = None, **headers: str
) -> None:
    """A whole answer; the keyword content_type is the header Content-Type."""
    named = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    size = len(body) if length is None else length
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {size}\r\n{named}\r\n".encode() + body)


def chunked(writer: asyncio.StreamWriter, *pieces: bytes, end: bool = True, headers: str = "") -> None:
    writer.write(f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n{headers}\r\n".encode())
    for piece in pieces:
        writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
    if end:
        writer.write(b"0\r\n\r\n")


async def pour(site: Site, writer: asyncio.StreamWriter, size: int) -> None:
    """Write until the other side has had enough."""
    while site.written < size and not writer.is_closing():
        writer.write(b"x" * 65536)
        await writer.drain()
        site.written += 65536


@page("ok")
async def ok(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    size = int(seen.query("size", "2"))
    answer(writer, (b"ok" * size)[:size], content_type="text/plain")


@page("chunked")
async def in_chunks(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    chunked(writer, b"one ", b"two ", b"three")


@page("until-close")
async def until_close(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.0 200 OK\r\n\r\nall of it")
    writer.close()


@page("echo")
async def echo(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    said = {"method": seen.method, "target": seen.target, "headers": seen.headers, "body": seen.body.decode("latin-1")}
    body = b"" if seen.method == "HEAD" else json.dumps(said).encode()
    answer(writer, body, length=len(body) or 77, content_type="application/json")


@page("status")
async def status(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    code = int(seen.path.split("/")[2])
    headers = {"retry_after": after} if (after := seen.query("retry-after")) else {}
    answer(writer, b"" if code == 204 else b"the page of an error", code, **headers)


@page("flaky")
async def flaky(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    """503 as often as the path says, then 200."""
    broken = site.visits[seen.path] <= int(seen.path.split("/")[2])
    answer(writer, b"not yet" if broken else b"ok", 503 if broken else 200)


async def unknown(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    answer(writer, b"", 404)


@page("redirect")
async def redirect(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    answer(writer, b"elsewhere", int(seen.query("status", "302")), location=seen.query("to"))


@page("robots.txt")
async def robots(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    """An agent that is called like a URL is led there."""
    agent = unquote(seen.headers["user-agent"])
    if "://" in agent:
        answer(writer, b"", 302, location=agent)
    else:
        status, body = site.robots
        answer(writer, body, status)


@page("chain")
async def chain(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    left = int(seen.path.split("/")[2])
    if left:
        answer(writer, b"", 302, location=f"/chain/{left - 1}")
    else:
        answer(writer, b"end of the chain")


@page("loop")
async def loop(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    answer(writer, b"", 302, location=seen.path)


@page("nowhere")
async def nowhere(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    answer(writer, b"a redirect without a Location", 302)


@page("foreign-letters")
async def foreign_letters(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    """Headers that are not ASCII, as some servers send them; with status 302 the Location is one of them."""
    code = int(seen.query("status", "200"))
    answer(writer, b"ok", code, location="/caf\xe9", x_name="caf\xe9", set_cookie="a=1\r\nSet-Cookie: b=2")


@page("latin-letters")
async def latin_letters(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    """The same in latin-1, and beside values that look like the escapes of such bytes."""
    code = int(seen.query("status", "200"))
    fields = "Content-Type: text/caf\xe9\r\nContent-Length: 2\r\nLocation: /caf\xe9\r\nX-Empty:\r\n"
    fields += 'X-Name: caf\xe9 \\xe9 "\\"\r\nX-Name: plain\r\nX-Name: \xa0\xff\r\n'
    writer.write(f"HTTP/1.1 {code} X\r\n{fields}\r\nok".encode("latin-1"))


@page("caf%C3%A9")
@page("caf%E9")
async def cafe(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    answer(writer, seen.path.encode())


@page("consent")
async def consent(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    """Redirects until its cookies return, over another page: as sites do that ask for consent."""
    cookies = dict(part.split("=", 1) for part in seen.headers.get("cookie", "").split("; ") if part)
    if cookies.get("consent") == "yes" and cookies.get("region") == "eu":
        answer(writer, seen.headers["cookie"].encode())
    elif seen.path.startswith("/consent/given"):
        answer(writer, b"", 302, location="/consent", set_cookie="consent=yes; Path=/")
    else:
        cookie = "region=eu; Path=/consent; HttpOnly\r\nSet-Cookie: once=1; Path=/elsewhere"
        answer(writer, b"", 302, location="/consent/given", set_cookie=cookie)


@page("gzip")
async def compressed(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    answer(writer, gzip.compress(b"hello " * 1000), content_encoding="gzip", content_type="text/plain")


@page("bad-gzip")
async def bad_gzip(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    answer(writer, b"this is not gzip", content_encoding="gzip")


@page("cut-gzip")
async def cut_gzip(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    answer(writer, gzip.compress(noise(int(seen.query("size"))))[:-20], content_encoding="gzip")


@page("late-bad-gzip")
async def late_bad_gzip(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    packed = bytearray(gzip.compress(noise(400_000)))
    packed[200_000:200_100] = bytes(100)
    answer(writer, bytes(packed), content_encoding="gzip")


def noise(size: int) -> bytes:
    return random.Random(1).randbytes(size)


@page("bomb")
async def bomb(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    answer(writer, the_bomb(), content_encoding="gzip")


@cache
def the_bomb() -> bytes:
    """A gibibyte of zeros, in a mebibyte: one block over and over. Nobody gets to the checksum that it lacks."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(MIB)) + packer.flush(zlib.Z_FULL_FLUSH)
    return b"\x1f\x8b\x08" + bytes(7) + block * 1024


@page("big")
async def big(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    size = int(seen.query("size"))
    writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode())
    await pour(site, writer, size)


@page("endless")
async def endless(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    """No length, no end."""
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
    await pour(site, writer, 1024 * MIB)


@page("slow")
async def slow(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    """Never answers."""
    await asyncio.Event().wait()


@page("late")
async def late(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    """Answers after some milliseconds: /late/20."""
    await asyncio.sleep(int(seen.path.split("/")[2]) / 1000)
    answer(writer, b"late")


@page("slow-body")
async def slow_body(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    """Half of the body, more than the client takes in one go, and never the rest."""
    answer(writer, b"x" * 100_000, length=200_000)
    await writer.drain()
    await asyncio.Event().wait()


@page("slow-chain")
async def slow_chain(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    """Redirects to itself without end, each a bit late."""
    await asyncio.sleep(0.05)
    answer(writer, b"", 302, location=f"/slow-chain?{site.visits[seen.path]}")


@page("cut")
async def cut(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    answer(writer, b"only the beginning", length=1000)
    await writer.drain()
    writer.close()


@page("cut-late")
async def cut_late(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    answer(writer, b"x" * 100_000, length=200_000)
    await writer.drain()
    writer.close()


@page("cut-chunk")
async def cut_chunk(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    chunked(writer, b"only the beginning", end=False)
    await writer.drain()
    writer.close()


@page("cut-head")
async def cut_head(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nConten")
    await writer.drain()
    writer.close()


@page("hang-up")
async def hang_up(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    writer.close()


@page("garbage")
async def garbage(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x00\x01 this is no HTTP\r\n\r\n")


@page("gateway")
async def gateway(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    """An API gateway: /gateway?key=...&url=... It answers for the target, or passes on what the target would say."""
    wanted = seen.query("url")
    said = parse_qs(urlsplit(wanted).query)
    if "to" in said:
        answer(writer, b"", 302, location=said["to"][0])
    else:
        answer(writer, f"through the gateway: {wanted}".encode())


def tls_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(CERTIFICATE + PRIVATE_KEY)
        file.flush()
        context.load_cert_chain(file.name)
    return context
