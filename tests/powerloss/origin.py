"""Where downloads of the recorded lives come from: files whose bytes follow from their URL, over connections that are
cut, from targets that fail first, have no ranges or do not say how long a file is."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from hashlib import sha256
from typing import Any
from urllib.parse import urlsplit

from conveyor.clock import Clock
from conveyor.egress.failures import Failure
from conveyor.egress.redirects import OutgoingRequest
from conveyor.process.executors.download.download_executor import DownloadExecutor
from tests.machine.targets import Answer, answer_requests

# The path of a URL is /LIFE/HOW/NUMBER.
WAYS = ("whole", "cut", "failing", "unknown", "nameless")
_CHUNK = 16 * 1024
_CUT_AFTER = 5
_MAX_CHUNKS = 18


def file_at(url: str) -> bytes:
    """The bytes of a file: some fit into one piece, some are a whole number of pieces."""
    seed = sha256(url.encode()).digest()
    size = seed[0] % _MAX_CHUNKS * _CHUNK + (seed[1] * 31 if seed[2] % 3 else 0)
    block = b"".join(sha256(seed + bytes([number])).digest() for number in range(128))
    return (block * (size // len(block) + 1))[:size]


class PowerlossOrigin:
    """Answers the requests of one life, without a pause each at once. `first` has the byte at which each file was
    asked for first."""

    def __init__(self, clock: Clock, pause: float) -> None:
        self._clock = clock
        self._pause = pause
        self._asked: Counter[str] = Counter()
        self.first: dict[str, int] = {}

    def serve(self, executor: DownloadExecutor) -> None:
        answer_requests(executor, self._begin)

    async def _begin(self, stack: AsyncExitStack, request: OutgoingRequest, hop: Any, patience: float) -> Answer:
        url = str(request.url)
        asked = dict(request.headers).get("range")
        start = 0 if asked is None else int(asked.removeprefix("bytes=").removesuffix("-"))
        self.first.setdefault(url, start)
        self._asked[url] += 1
        await self._clock.sleep(self._pause)
        how = urlsplit(url).path.split("/")[2]
        if how == "failing" and self._asked[url] == 1 and self._pause:
            return Answer(503, {}, self._chunks(b"", is_cut=False))
        data = file_at(url)
        headers = {"content-type": "application/octet-stream"}
        if how != "nameless":
            headers["etag"] = '"one"'
        if how != "unknown":
            headers["content-length"] = str(len(data) - start)
        if start:
            headers["content-range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        rest = data[start:]
        is_cut = how in ("cut", "failing") and len(rest) > _CUT_AFTER * _CHUNK
        chunks = self._chunks(rest[: _CUT_AFTER * _CHUNK] if is_cut else rest, is_cut=is_cut)
        return Answer(206 if start else 200, headers, chunks)

    async def _chunks(self, data: bytes, *, is_cut: bool) -> AsyncIterator[bytes]:
        for start in range(0, len(data), _CHUNK):
            await self._clock.sleep(self._pause)
            yield data[start : start + _CHUNK]
        if is_cut:
            raise Failure("read_failed", "as it was told")
