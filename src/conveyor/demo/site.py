"""The demo's target site: quick, slow, flaky, redirecting and failing pages, over plain asyncio.

Run as `python -m conveyor.demo.site [--port N]`; prints its port on standard output once it listens, and ends
when its standard input does, so that it never outlives the process that started it.

    /quick/N     a page of 2 KB
    /slow/N      the same after 200 to 400 ms
    /flaky/N     first 503 with Retry-After: 1 (even N) or a cut connection (odd N), then the page
    /redirect/N  302 to /quick/N
    /missing/N   404
    /broken/N    500, always
    /big/N       a page of 256 KB
"""

import argparse
import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

_PAGE_BYTES = 2048
_BIG_BYTES = 256 * 1024
_SLOWEST = 0.4
_QUICKEST = 0.2
_LONGEST_HEAD = 64 * 1024
_FILLER = b"The belt carries one page after the other. "

_REASONS = {
    200: "OK",
    302: "Found",
    404: "Not Found",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
_HEADS = {
    status: f"HTTP/1.1 {status} {reason}\r\nContent-Type: text/html; charset=utf-8\r\n".encode()
    for status, reason in _REASONS.items()
}


class SiteResponse(NamedTuple):
    """What a page answers: after `delay` seconds, or, with `cut`, by closing the connection."""

    status: int
    body: bytes
    headers: bytes = b""
    delay: float = 0.0
    cut: bool = False


def _page(kind: str, number: str, size: int = _PAGE_BYTES) -> bytes:
    head = f"<!doctype html><title>{kind} {number}</title><h1>{kind} page {number}</h1>\n<p>".encode()
    return (head + _FILLER * (size // len(_FILLER) + 1))[:size]


class Site:
    """The pages. Remembers which flaky ones were tried."""

    def __init__(self) -> None:
        self._tried: set[str] = set()
        self._pages: dict[str, Callable[[str], SiteResponse]] = {
            "quick": lambda number: SiteResponse(200, _page("quick", number)),
            "slow": self._slow,
            "flaky": self._flaky,
            "redirect": lambda number: SiteResponse(302, b"", b"Location: /quick/" + number.encode() + b"\r\n"),
            "missing": lambda number: SiteResponse(404, _page("missing", number, 256)),
            "broken": lambda number: SiteResponse(500, _page("broken", number, 256)),
            "big": lambda number: SiteResponse(200, _page("big", number, _BIG_BYTES)),
        }

    def answer(self, path: str) -> SiteResponse:
        kind, _, number = path.partition("?")[0].lstrip("/").partition("/")
        page = self._pages.get(kind)
        return page(number) if page and number else SiteResponse(404, b"There is no such page.\n")

    def _slow(self, number: str) -> SiteResponse:
        # From the number, not from chance: two runs of the demo take the same time.
        share = (int(number) * 37 % 101) / 100 if number.isdigit() else 0.5
        return SiteResponse(200, _page("slow", number), delay=_QUICKEST + (_SLOWEST - _QUICKEST) * share)

    def _flaky(self, number: str) -> SiteResponse:
        if number in self._tried:
            return SiteResponse(200, _page("flaky", number))
        self._tried.add(number)
        if number[-1] in "13579":
            return SiteResponse(503, b"", cut=True)
        return SiteResponse(503, b"Busy. Come back in a second.\n", b"Retry-After: 1\r\n")


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection with keep-alive. Requests are answered one at a time, in order."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._busy = False
        # Bytes of a request body that are still to be thrown away.
        self._skip = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._next()

    def _next(self) -> None:
        while self._transport is not None and not self._busy:
            if self._skip:
                skipped = min(self._skip, len(self._received))
                self._received, self._skip = self._received[skipped:], self._skip - skipped
                if self._skip:
                    return
            head, end, rest = self._received.partition(b"\r\n\r\n")
            if not end:
                if len(head) > _LONGEST_HEAD:
                    self._transport.close()
                return
            self._received = rest
            self._request(head)

    def _request(self, head: bytes) -> None:
        line, _, fields = head.partition(b"\r\n")
        parts = line.split(b" ")
        if len(parts) != 3:
            self._cut()
            return
        lowered = fields.lower()
        self._skip = _content_length(lowered)
        answer = self._site.answer(parts[1].decode("latin-1"))
        close = b"connection: close" in lowered
        send_body = parts[0] != b"HEAD"
        if answer.delay:
            self._busy = True
            asyncio.get_running_loop().call_later(answer.delay, self._late, answer, send_body, close)
        else:
            self._send(answer, send_body, close)

    def _late(self, answer: SiteResponse, send_body: bool, close: bool) -> None:
        self._busy = False
        self._send(answer, send_body, close)
        self._next()

    def _send(self, answer: SiteResponse, send_body: bool, close: bool) -> None:
        if self._transport is None:
            return
        if answer.cut:
            self._cut()
            return
        length = b"Content-Length: %d\r\n\r\n" % len(answer.body)
        self._transport.write(_HEADS[answer.status] + answer.headers + length + (answer.body if send_body else b""))
        if close:
            self._transport.close()

    def _cut(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def _content_length(lowered: bytes) -> int:
    _, found, rest = lowered.partition(b"content-length:")
    digits = rest.partition(b"\r\n")[0].strip()
    return int(digits) if found and digits.isdigit() else 0


async def serve(port: int, on_ready: Callable[[int], None], ended: asyncio.Event) -> None:
    """Listen on loopback until `ended` is set."""
    site = Site()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(site), "127.0.0.1", port, backlog=1024)
    on_ready(server.sockets[0].getsockname()[1])
    await ended.wait()
    server.close()


async def _serve_until_input_ends(port: int) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def watch() -> None:
        # Not sys.stdin.buffer: its lock, held in a read, breaks the interpreter's end.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        loop.call_soon_threadsafe(ended.set)

    # A daemon: blocked in a read, it must not keep the process alive after Ctrl-C.
    threading.Thread(target=watch, daemon=True).start()
    await serve(port, lambda bound: print(bound, flush=True), ended)


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m conveyor.demo.site", description="The demo's target site.")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes a free one")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve_until_input_ends(parser.parse_args(arguments).port))


if __name__ == "__main__":
    main()
