"""A site with one list, on a free loopback port. It serves ranges and checks conditions as a good server does, unless a
test says otherwise."""

import asyncio
import re
from hashlib import md5

from tests.support.target_site import Listener, Seen, answer, read_request

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
OLD = "Sun, 15 Nov 2026 11:00:00 GMT"
DATE = "Sun, 15 Nov 2026 12:00:00 GMT"


class ListSite(Listener):
    """Serves the list under every path but /redirect."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data = data
        self.seen: list[Seen] = []
        # What it offers.
        self.ranges = True
        self.etag = True
        self.weak = False
        self.modified: str | None = None
        self.conditions = True
        # Answers to give first, instead.
        self.refusals: list[int] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/list.jsonl?signature=hidden"

    @property
    def tag(self) -> str:
        return f'"{md5(self.data, usedforsecurity=False).hexdigest()}"'

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            seen = await read_request(reader)
            self.seen.append(seen)
            self._answer(seen, writer)
            await writer.drain()

    def _answer(self, seen: Seen, writer: asyncio.StreamWriter) -> None:
        if self.refusals:
            answer(writer, status=self.refusals.pop(0))
            return
        if seen.path == "/redirect":
            answer(writer, status=302, Location=f"http://localhost:{self.port}/list.jsonl")
            return
        fields = {"Date": DATE, "Accept-Ranges": "bytes" if self.ranges else "none"}
        if self.etag:
            fields["ETag"] = f"W/{self.tag}" if self.weak else self.tag
        if self.modified is not None:
            fields["Last-Modified"] = self.modified
        wanted = seen.headers.get("if-match")
        since = seen.headers.get("if-unmodified-since")
        if self.conditions and (wanted not in (None, self.tag) or since not in (None, self.modified)):
            answer(writer, status=412)
            return
        asked = _RANGE.fullmatch(seen.headers.get("range", ""))
        if asked is None or not self.ranges:
            answer(writer, self.data, **fields)
            return
        start, end = int(asked[1]), min(int(asked[2]) + 1, len(self.data))
        if start >= len(self.data):
            answer(writer, status=416, **fields)
            return
        place = f"bytes {start}-{end - 1}/{len(self.data)}"
        answer(writer, self.data[start:end], status=206, **fields, Content_Range=place)
