"""The target site of the demo: quick, slow, flaky, redirecting and failing pages, over plain asyncio.

Run as `python -m conveyor.demo.site [--port N]`. Prints its port on standard output once it listens, and exits when its
standard input closes, so that it never outlives the process that started it.

    /quick/N     a page of 2 KB
    /slow/N      the same after 200 to 400 ms
    /flaky/N     first 503 with Retry-After: 1 (even N) or a broken connection (odd N), then the page
    /redirect/N  302 to /quick/N
    /missing/N   404
    /broken/N    500, always
    /big/N       a page of 256 KB
    /product/N   a product with a price; one in ten has a sale price
"""

import argparse
import asyncio
import contextlib
import os
import stat
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

_PAGE_BYTES = 2048
_BIG_BYTES = 256 * 1024
_MAX_DELAY = 0.4
_MIN_DELAY = 0.2
_MAX_HEAD_BYTES = 64 * 1024
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
    """The answer of a page, after `delay` seconds. `cut`: close the connection instead."""

    status: int
    body: bytes
    headers: bytes = b""
    delay: float = 0.0
    cut: bool = False


def _page(kind: str, number: str, size: int = _PAGE_BYTES) -> bytes:
    head = f"<!doctype html><title>{kind} {number}</title><h1>{kind} page {number}</h1>\n<p>".encode()
    return (head + _FILLER * (size // len(_FILLER) + 1))[:size]


def _product(number: str) -> bytes:
    price = int(number) % 1000 + 0.95 if number.isdigit() else 0.0
    kind = "sale" if number.endswith("0") else "price"
    head = f'<!doctype html><title>Shop</title><h1>Product {number}</h1>\n<span class="{kind}">{price}</span>\n<p>'
    return (head.encode() + _FILLER * (_PAGE_BYTES // len(_FILLER)))[:_PAGE_BYTES]


class Site:
    """The pages. Remembers which flaky pages were requested."""

    def __init__(self) -> None:
        self._requested: set[str] = set()
        self._pages: dict[str, Callable[[str], SiteResponse]] = {
            "quick": lambda number: SiteResponse(200, _page("quick", number)),
            "slow": self._slow,
            "flaky": self._flaky,
            "redirect": lambda number: SiteResponse(302, b"", b"Location: /quick/" + number.encode() + b"\r\n"),
            "missing": lambda number: SiteResponse(404, _page("missing", number, 256)),
            "broken": lambda number: SiteResponse(500, _page("broken", number, 256)),
            "big": lambda number: SiteResponse(200, _page("big", number, _BIG_BYTES)),
            "product": lambda number: SiteResponse(200, _product(number)),
        }

    def answer(self, path: str) -> SiteResponse:
        kind, _, number = path.partition("?")[0].lstrip("/").partition("/")
        page = self._pages.get(kind)
        return page(number) if page and number else SiteResponse(404, b"Page not found.\n")

    def _slow(self, number: str) -> SiteResponse:
        # Derived from the number, so that each run of the demo takes the same time.
        share = (int(number) * 37 % 101) / 100 if number.isdigit() else 0.5
        return SiteResponse(200, _page("slow", number), delay=_MIN_DELAY + (_MAX_DELAY - _MIN_DELAY) * share)

    def _flaky(self, number: str) -> SiteResponse:
        if number in self._requested:
            return SiteResponse(200, _page("flaky", number))
        self._requested.add(number)
        if number[-1] in "13579":
            return SiteResponse(503, b"", cut=True)
        return SiteResponse(503, b"Busy. Retry in a second.\n", b"Retry-After: 1\r\n")


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection with keep-alive. Answers requests one at a time, in order."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._busy = False
        # Bytes of a request body that are still to be skipped.
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
                if len(head) > _MAX_HEAD_BYTES:
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
            asyncio.get_running_loop().call_later(answer.delay, self._send_late, answer, send_body, close)
        else:
            self._send(answer, send_body, close)

    def _send_late(self, answer: SiteResponse, send_body: bool, close: bool) -> None:
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
    _, separator, rest = lowered.partition(b"content-length:")
    digits = rest.partition(b"\r\n")[0].strip()
    return int(digits) if separator and digits.isdigit() else 0


async def serve(port: int, on_ready: Callable[[int], None], stopped: asyncio.Event) -> None:
    """Listen on loopback until `stopped` is set."""
    site = Site()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(site), "127.0.0.1", port, backlog=1024)
    on_ready(server.sockets[0].getsockname()[1])
    await stopped.wait()
    server.close()


async def _serve_until_input_ends(port: int) -> None:
    """Who started it for a while holds a pipe to it. In a terminal or in the background it serves until Ctrl-C."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def watch() -> None:
        # Not sys.stdin.buffer: a read holds its lock, and the interpreter then fails at exit.
        while os.read(0, 4096):
            pass
        loop.call_soon_threadsafe(stopped.set)

    if stat.S_ISFIFO(mode := os.fstat(0).st_mode) or stat.S_ISSOCK(mode):
        # A daemon: a blocked read must not keep the process alive after Ctrl-C.
        threading.Thread(target=watch, daemon=True).start()
    await serve(port, lambda bound: print(bound, flush=True), stopped)


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until Ctrl-C, or until standard input closes, if that is a pipe."""
    parser = argparse.ArgumentParser(
        prog="python -m conveyor.demo.site", description="Serve the target site of the demo."
    )
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 picks a free one")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve_until_input_ends(parser.parse_args(arguments).port))


if __name__ == "__main__":
    main()
