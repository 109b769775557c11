"""A site with one large file, on a free loopback port, over plain sockets: it serves ranges as a good server does, and
cuts, stalls and lies about them where a test says so. It counts the bytes that it sent."""

import asyncio
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256

from tests.support.target_site import Listener, Seen, read_request

MIB = 1024 * 1024
_BLOCK = 64 * 1024
_NOISE = random.Random(7).randbytes(_BLOCK)
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


def content(size: int, start: int = 0, seed: int = 0) -> Iterator[bytes]:
    """The bytes of the file from `start` on, made as they are asked for."""
    at = start
    while at < size:
        block = at // _BLOCK
        whole = (seed * 1_000_003 + block).to_bytes(8, "big") + _NOISE[8:]
        piece = whole[at - block * _BLOCK : min(_BLOCK, size - block * _BLOCK)]
        yield piece
        at += len(piece)


def digest(size: int, seed: int = 0) -> str:
    found = sha256()
    for piece in content(size, seed=seed):
        found.update(piece)
    return found.hexdigest()


@dataclass
class Behaviour:
    """How the file is served. The lies are told to requests for a range only."""

    size: int = 4 * MIB
    seed: int = 0
    etag: str | None = '"one"'
    modified: str | None = None
    # Positions in the file at which a connection is cut, each once.
    cuts: list[int] = field(default_factory=list)
    # Cut without the rest of what is under way (RST), or politely (FIN).
    reset: bool = False
    # Bytes a second; 0: as fast as it goes.
    rate: int = 0
    # Stop sending, once, at this position, without closing.
    stall_at: int | None = None
    # Send no Content-Length, but chunks.
    chunked: bool = False
    encoding: str | None = None
    # Answers to give instead, to requests that come in: status and headers, each once, before any other.
    refusals: list[tuple[int, str]] = field(default_factory=list)
    # ignore, wrong_start, short, star, other_etag, other_total, longer, 416, multipart, gzip, empty
    range_lie: str | None = None
    # Another version, with another ETag, for each request.
    changes: bool = False
    # Requests for a range that are lied to; after that it is honest.
    lies: int = 1_000_000


class FileSite(Listener):
    """Serves the file under every path but /redirect/..., which leads to the rest of it."""

    def __init__(self, behaviour: Behaviour, host: str = "127.0.0.1") -> None:
        super().__init__(host)
        self.file = behaviour
        self.seen: list[Seen] = []
        self.sent = 0
        self.statuses: list[int] = []
        # When requests arrived, how many ran at once at most, and how long each takes at least.
        self.times: list[float] = []
        self.most_at_once = self._at_once = 0
        self.seconds = 0.0

    @property
    def open_connections(self) -> int:
        return len(self._open)

    def url(self, path: str = "/file.bin", host: str | None = None) -> str:
        return f"http://{host or self.host}:{self.port}{path}"

    def ranges(self) -> list[str | None]:
        return [seen.headers.get("range") for seen in self.seen]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            seen = await read_request(reader)
            self.seen.append(seen)
            self.times.append(time.monotonic())
            if seen.path.startswith("/redirect/"):
                self._head(writer, 302, f"Location: {seen.target.removeprefix('/redirect')}\r\nContent-Length: 0\r\n")
                await writer.drain()
                continue
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            try:
                if self.seconds:
                    await asyncio.sleep(self.seconds)
                if not await self._answer(seen, writer):
                    return
            finally:
                self._at_once -= 1

    async def _answer(self, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        file = self.file
        if file.refusals:
            status, headers = file.refusals.pop(0)
            self._head(writer, status, f"{headers}Content-Length: 0\r\n")
            return True
        if file.changes:
            file.etag = f'"{len(self.seen)}"'
        asked = _RANGE.fullmatch(seen.headers.get("range", ""))
        condition = seen.headers.get("if-range")
        if asked and condition in {None, file.etag, file.modified}:
            return await self._answer_range(int(asked[1]), writer)
        return await self._whole(writer)

    async def _whole(self, writer: asyncio.StreamWriter) -> bool:
        file = self.file
        length = "Transfer-Encoding: chunked\r\n" if file.chunked else f"Content-Length: {file.size}\r\n"
        self._head(writer, 200, length + self._fields())
        return await self._send(writer, 0, file.size, chunked=file.chunked)

    async def _answer_range(self, start: int, writer: asyncio.StreamWriter) -> bool:
        file = self.file
        lie = file.range_lie if file.lies > 0 else None
        file.lies -= 1
        end, total = file.size, str(file.size)
        shown = start
        if lie == "ignore":
            return await self._whole(writer)
        if lie == "416":
            self._head(writer, 416, f"Content-Range: bytes */{file.size}\r\nContent-Length: 0\r\n")
            return True
        if lie == "multipart":
            self._head(writer, 206, "Content-Type: multipart/byteranges; boundary=x\r\nContent-Length: 5\r\n")
            writer.write(b"--x--")
            return True
        if lie == "wrong_start":
            start = shown = max(0, start - 1000)
        elif lie == "short":
            end = min(end, start + (end - start + 1) // 2)
        elif lie == "star":
            total = "*"
        elif lie == "other_total":
            total = str(file.size + 1)
        fields = self._fields() if lie != "other_etag" else 'ETag: "two"\r\n'
        if lie == "gzip":
            fields += "Content-Encoding: gzip\r\n"
        said = 0 if lie == "empty" else end - start
        if lie == "longer":
            # In chunks, so that nothing but the range says where it ends.
            self._head(writer, 206, f"Content-Range: bytes {shown}-{end - 2}/{total}\r\nTransfer-Encoding: chunked\r\n")
            return await self._send(writer, start, end, chunked=True)
        head = f"Content-Range: bytes {shown}-{end - 1}/{total}\r\nContent-Length: {said}\r\n{fields}"
        self._head(writer, 206, head)
        return True if lie == "empty" else await self._send(writer, start, end, chunked=False)

    def _fields(self) -> str:
        file = self.file
        fields = "Content-Type: application/zip\r\nAccept-Ranges: bytes\r\nDate: Sun, 15 Nov 2026 12:00:00 GMT\r\n"
        fields += f"ETag: {file.etag}\r\n" if file.etag else ""
        fields += f"Last-Modified: {file.modified}\r\n" if file.modified else ""
        return fields + (f"Content-Encoding: {file.encoding}\r\n" if file.encoding else "")

    def _head(self, writer: asyncio.StreamWriter, status: int, fields: str) -> None:
        self.statuses.append(status)
        writer.write(f"HTTP/1.1 {status} X\r\n{fields}\r\n".encode())

    async def _send(self, writer: asyncio.StreamWriter, start: int, end: int, *, chunked: bool) -> bool:
        """False if the connection is to be closed."""
        file = self.file
        # What is on the way when a reader dies was sent for nothing; large buffers would make much of it.
        writer.transport.set_write_buffer_limits(high=_BLOCK)
        began, first = time.monotonic(), self.sent
        at = start
        for piece in content(end, start, file.seed):
            stop = next((cut for cut in file.cuts if at < cut <= at + len(piece)), None)
            part = piece if stop is None else piece[: stop - at]
            writer.write(b"%x\r\n%s\r\n" % (len(part), part) if chunked else part)
            self.sent += len(part)
            await writer.drain()
            at += len(part)
            if stop is not None:
                file.cuts.remove(stop)
                if file.reset:
                    writer.transport.abort()
                else:
                    writer.close()
                return False
            if file.stall_at is not None and at >= file.stall_at:
                file.stall_at = None
                await asyncio.Event().wait()
            if file.rate:
                due = began + (self.sent - first) / file.rate
                await asyncio.sleep(max(0.0, due - time.monotonic()))
        if chunked:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True
