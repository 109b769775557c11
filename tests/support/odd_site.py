"""A site that answers each path with an oddity: the bytes of its answers are written out here, and go on the wire as
they are."""

import asyncio
import gzip
import socket
import struct
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import brotli

from tests.support.zstd_library import zstd

PAGE = b"<p>An odd p\xc3\xa4ge.</p>\n" * 40
_OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n"
_CLOSE = b"Connection: close\r\n"
# After these bytes the connection is reset, not closed.
RESET = b"\x00RESET"
# Before the byte that follows the site waits for a moment.
_PAUSE = b"\x00PAUSE"
_PAUSE_SECONDS = 0.02


def whole(body: bytes = PAGE, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    lines = b"".join(header + b"\r\n" for header in headers)
    return b"HTTP/1.1 " + status + b"\r\n" + lines + b"Content-Length: %d\r\n" % len(body) + _CLOSE + b"\r\n" + body


def coded(coding: bytes, body: bytes) -> bytes:
    return whole(body, b"Content-Type: text/html", b"Content-Encoding: " + coding)


def chunks(body: bytes, size: int = 100, form: bytes = b"%x") -> bytes:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(form % len(piece) + b"\r\n" + piece + b"\r\n" for piece in pieces)


def moved(status: int, location: bytes) -> bytes:
    return whole(b"moved", b"Location: " + location, status=b"%d Moved" % status)


def cookies(*set_cookies: bytes) -> bytes:
    """A redirect with these cookies to a page that shows which of them came back."""
    headers = [b"Set-Cookie: " + each for each in set_cookies]
    return whole(b"", b"Location: /cookies-of-the-request", *headers, status=b"302 Found")


def _raw_deflate(data: bytes) -> bytes:
    made = zlib.compressobj(wbits=-15)
    return made.compress(data) + made.flush()


_CHUNKED = _OK + _CLOSE + b"Transfer-Encoding: chunked\r\n\r\n"
_GZIP = gzip.compress(PAGE, mtime=0)

ANSWERS: dict[str, bytes] = {
    # Lengths.
    "plain": whole(),
    "no-length": _OK + _CLOSE + b"\r\n" + PAGE,
    "length-too-long": _OK + b"Content-Length: 5000\r\n\r\n" + PAGE,
    "length-too-short": _OK + _CLOSE + b"Content-Length: 100\r\n\r\n" + PAGE,
    "length-twice": _OK + _CLOSE + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "length-list": _OK + _CLOSE + b"Content-Length: 5, 5\r\n\r\nhello",
    "lengths-differ": _OK + _CLOSE + b"Content-Length: 5\r\nContent-Length: 7\r\n\r\nhello!!",
    "length-no-number": _OK + _CLOSE + b"Content-Length: abc\r\n\r\nhello",
    "length-negative": _OK + _CLOSE + b"Content-Length: -5\r\n\r\nhello",
    "length-zero": whole(b""),
    "huge": whole(bytes(range(256)) * 40_000),
    # Chunks.
    "chunked": _CHUNKED + chunks(PAGE) + b"0\r\n\r\n",
    "chunked-single-bytes": _CHUNKED + chunks(PAGE[:200], 1) + b"0\r\n\r\n",
    "chunked-upper-zeros": _CHUNKED + chunks(PAGE, 200, b"000%X") + b"0000\r\n\r\n",
    "chunked-extensions": _CHUNKED + chunks(PAGE, 100, b'%x;name="a;b"') + b"0;last\r\n\r\n",
    "chunked-trailers": _CHUNKED + chunks(PAGE) + b"0\r\nX-Trailer: yes\r\n\r\n",
    "chunked-and-length": _CHUNKED.replace(_CLOSE, _CLOSE + b"Content-Length: 3\r\n") + chunks(PAGE) + b"0\r\n\r\n",
    "chunked-cut": _CHUNKED + chunks(PAGE),
    "chunked-cut-inside": _CHUNKED + b"400\r\n" + PAGE[:100],
    "chunked-no-number": _CHUNKED + b"xyz\r\n" + PAGE,
    "chunked-empty": _CHUNKED + b"0\r\n\r\n",
    # Codings.
    "gzip": coded(b"gzip", _GZIP),
    "x-gzip": coded(b"x-gzip", _GZIP),
    "gzip-upper-case": coded(b"GZIP", _GZIP),
    "gzip-chunked": _CHUNKED.replace(_CLOSE, _CLOSE + b"Content-Encoding: gzip\r\n") + chunks(_GZIP, 7) + b"0\r\n\r\n",
    "gzip-two-members": coded(b"gzip", gzip.compress(PAGE[:100], mtime=0) + gzip.compress(PAGE[100:], mtime=0)),
    "gzip-then-garbage": coded(b"gzip", _GZIP + b"garbage"),
    "gzip-cut": coded(b"gzip", _GZIP[:-20]),
    "gzip-wrong-sum": coded(b"gzip", _GZIP[:-8] + b"\x00" * 8),
    "gzip-is-a-lie": coded(b"gzip", PAGE),
    "gzip-of-nothing": coded(b"gzip", b""),
    "deflate": coded(b"deflate", zlib.compress(PAGE)),
    "deflate-raw": coded(b"deflate", _raw_deflate(PAGE)),
    "br": coded(b"br", brotli.compress(PAGE)),
    "zstd": coded(b"zstd", zstd.compress(PAGE)),
    "gzip-twice": coded(b"gzip, gzip", gzip.compress(_GZIP, mtime=0)),
    "br-then-gzip": coded(b"br, gzip", gzip.compress(brotli.compress(PAGE), mtime=0)),
    "codings-in-two-headers": whole(
        gzip.compress(brotli.compress(PAGE), mtime=0), b"Content-Encoding: br", b"Content-Encoding: gzip"
    ),
    "identity": coded(b"identity", PAGE),
    "unknown-coding": coded(b"rot13", PAGE),
    "transfer-gzip": _OK + _CLOSE + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + chunks(_GZIP) + b"0\r\n\r\n",
    # Charsets: bytes stay as they are.
    "charset-lie": whole("häßlich".encode("latin-1"), b"Content-Type: text/html; charset=utf-8"),
    "charset-utf-16": whole("häßlich".encode("utf-16"), b"Content-Type: text/html; charset=utf-16"),
    "charset-unknown": whole(PAGE, b"Content-Type: text/html; charset=nonsense"),
    "bom": whole(b"\xef\xbb\xbf" + PAGE, b"Content-Type: text/plain"),
    "crlf": whole(b"a\r\nb\nc\rd\x00e", b"Content-Type: text/plain"),
    # Heads.
    "continue-first": b"HTTP/1.1 100 Continue\r\n\r\n" + whole(),
    "early-hints-first": b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>; rel=preload\r\n\r\n" * 3 + whole(),
    "no-reason": _OK.replace(b" OK", b"", 1) + _CLOSE + b"Content-Length: 5\r\n\r\nhello",
    "http-1.0": _OK.replace(b"1.1", b"1.0", 1) + b"\r\n" + PAGE,
    "http-0.9": PAGE,
    "line-feeds-only": whole().replace(b"\r\n", b"\n"),
    "header-twice": whole(PAGE, b"X-Two: 1", b"X-Two: 2", b"Set-Cookie: a=1", b"Set-Cookie: b=2"),
    "header-empty": whole(PAGE, b"X-Empty:", b"X-Spaces:     "),
    "header-bytes": whole(PAGE, b"X-Bytes: h\xe4\xdflich", b"X-Utf: h\xc3\xa4"),
    "header-folded": whole(PAGE, b"X-Folded: one\r\n two"),
    "header-no-colon": whole(PAGE, b"nonsense"),
    "header-space-before-colon": whole(PAGE, b"X-Space : 1"),
    "header-large": whole(PAGE, b"X-Large: " + b"a" * 60_000),
    "headers-many": whole(PAGE, *(b"X-%d: 1" % number for number in range(90))),
    "nothing": b"",
    "reset-in-head": _OK + RESET,
    "reset-in-body": _OK + b"Content-Length: 5000\r\n\r\n" + PAGE + RESET,
    "slow": _OK + _CLOSE + b"Content-Length: 20\r\n\r\n" + b"".join(_PAUSE + b"x" for _ in range(20)),
    # Statuses.
    "204": b"HTTP/1.1 204 No Content\r\n" + _CLOSE + b"\r\n",
    "204-with-a-body": b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n" + _CLOSE + b"\r\nhello",
    "205": whole(b"", status=b"205 Reset Content"),
    "206-unasked": whole(PAGE[:10], b"Content-Range: bytes 0-9/1000", status=b"206 Partial Content"),
    "299": whole(PAGE, status=b"299 Odd"),
    "304": b"HTTP/1.1 304 Not Modified\r\n" + _CLOSE + b"\r\n",
    "404": whole(PAGE, status=b"404 Not Found"),
    "500": whole(PAGE, status=b"500 Broken"),
    "599": whole(PAGE, status=b"599 Odd"),
    "999": whole(PAGE, status=b"999 Odd"),
    # Redirects and cookies.
    **{f"moved-{status}": moved(status, b"/plain") for status in (301, 302, 303, 307, 308)},
    "moved-relative": moved(302, b"plain"),
    "moved-query-only": moved(302, b"?done"),
    "moved-with-a-fragment": moved(302, b"/plain#part"),
    "moved-with-a-space": moved(302, b"/with space"),
    "moved-with-utf-8": moved(302, "/sch\u00f6n".encode()),
    "moved-nowhere": whole(PAGE, status=b"302 Found"),
    "moved-to-itself": moved(302, b"/moved-to-itself"),
    "moved-to-ftp": moved(302, b"ftp://127.0.0.1/a"),
    "moved-300": whole(PAGE, status=b"300 Multiple Choices"),
    "moved-with-a-cookie": whole(b"", b"Location: /has-cookie", b"Set-Cookie: seen=1; Path=/", status=b"302 Found"),
    "cookies-two": cookies(b"a=1; Path=/", b"b=2; Path=/; HttpOnly; SameSite=Strict"),
    "cookie-set-twice": cookies(b"a=1; Path=/", b"a=2; Path=/"),
    "cookie-of-another-path": cookies(b"a=1; Path=/elsewhere"),
    "cookie-of-no-path": cookies(b"a=1"),
    "cookie-of-another-domain": cookies(b"a=1; Path=/; Domain=example.com"),
    "cookie-expired": cookies(b"a=1; Path=/; Expires=Thu, 01 Jan 1970 00:00:00 GMT"),
    "cookie-of-no-age": cookies(b"a=1; Path=/; Max-Age=0"),
    "cookie-taken-back": cookies(b"a=1; Path=/", b"a=; Path=/; Max-Age=0"),
    "cookie-quoted": cookies(b'a="1 2"; Path=/'),
    "cookie-with-equals": cookies(b"a=b=c; Path=/"),
    "cookie-without-a-value": cookies(b"a=; Path=/"),
    "cookie-over-two-hops": whole(b"", b"Location: /cookies-two", b"Set-Cookie: first=0; Path=/", status=b"302 Found"),
}

# What is behind redirects.
_BEHIND = {"with%20space": whole(b"space"), "sch%c3%b6n": whole(b"utf-8")}
_LINGER = struct.pack("ii", 1, 0)


@asynccontextmanager
async def odd_site() -> AsyncIterator[str]:
    """Its address."""
    server = await asyncio.start_server(_serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        path, _, query = head.split(" ")[1].removeprefix("/").partition("?")
        is_reset = await _answer(path, query, head, writer)
        if is_reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def _answer(path: str, query: str, head: str, writer: asyncio.StreamWriter) -> bool:
    """Send it. Whether the connection is to be reset."""
    if path == "has-cookie":
        sent = whole(b"cookie" if "seen=1" in head else b"no cookie")
    elif path == "cookies-of-the-request":
        lines = [line.partition(":")[2] for line in head.split("\r\n") if line.lower().startswith("cookie:")]
        # In whatever order they come.
        sent = whole("; ".join(sorted(each.strip() for line in lines for each in line.split(";"))).encode())
    elif query == "done":
        sent = whole(b"done")
    else:
        sent = ANSWERS.get(path) or _BEHIND.get(
            path.lower(), b"" if path == "nothing" else whole(status=b"404 Not Found")
        )
    for piece in _pieces(sent.removesuffix(RESET)):
        if len(piece) == 1:
            await asyncio.sleep(_PAUSE_SECONDS)
        writer.write(piece)
        await writer.drain()
    return sent.endswith(RESET)


def _pieces(sent: bytes) -> Iterator[bytes]:
    return iter(sent.split(_PAUSE))
