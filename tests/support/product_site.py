"""A shop on a free loopback port: pages of products, with an ETag each. It counts requests, and answers 304 where the
page is still the one that the client has."""

import asyncio
from collections import Counter
from typing import Self


class ProductSite:
    """`/p/N` is the page of product N. `versions` changes pages; `requests` counts what was asked for."""

    def __init__(self) -> None:
        self.versions: Counter[int] = Counter()
        self.requests: Counter[int] = Counter()
        self.conditional: Counter[int] = Counter()
        # Products whose pages are answered 500; whose pages have no ETag; and that moved: their page is that of 1000
        # more.
        self.broken: set[int] = set()
        self.plain: set[int] = set()
        self.moved: set[int] = set()
        self._port = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def url(self, number: int) -> str:
        return f"http://127.0.0.1:{self._port}/p/{number}"

    def page(self, number: int) -> bytes:
        filler = f"<!-- {'shelf ' * 120}-->"
        price = 100 * number + self.versions[number]
        return (
            f"<html><h1>Product {number}</h1><p class=price>{price}</p>{filler}"
            f"<ul>{''.join(f'<li>offer {at}</li>' for at in range(number % 3))}</ul></html>"
        ).encode()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                writer.write(self._answer(head.decode()))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    def _answer(self, head: str) -> bytes:
        first, *lines = head.split("\r\n")
        number = int(first.split()[1].partition("?")[0].rpartition("/")[2])
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self.requests[number] += 1
        etag = f'"{number}-{self.versions[number]}"'
        known = headers.get("if-none-match")
        self.conditional[number] += known is not None
        if number in self.broken:
            return b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 5\r\n\r\nsorry"
        if number in self.moved:
            return f"HTTP/1.1 302 Found\r\nLocation: /p/{number + 1000}\r\nContent-Length: 0\r\n\r\n".encode()
        if known == etag and number not in self.plain:
            return f"HTTP/1.1 304 Not Modified\r\nETag: {etag}\r\n\r\n".encode()
        body = self.page(number)
        validator = "" if number in self.plain else f"ETag: {etag}\r\n"
        return (
            f"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\nX-Version: {self.versions[number]}\r\n"
            f"{validator}Content-Length: {len(body)}\r\n\r\n"
        ).encode() + body
