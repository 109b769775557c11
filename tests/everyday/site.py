"""The site that the everyday load fetches from: several loopback addresses, each a host, and a ledger of every request.

A path is /JOB/INDEX/PAGE. `ok` answers a page, `flaky` a 503 and then the page, `missing` a 404, `broken` a 500. Slow
hosts answer late.
"""

import asyncio
import time
from collections import Counter, defaultdict
from hashlib import sha256
from typing import Self

FAST = ("127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5")
SLOW = ("127.0.0.6", "127.0.0.7")
# Seconds that a slow host takes, by the index of a task.
_LATE = (0.05, 0.1, 0.2, 0.4, 0.8)

_STATUSES = {"ok": 200, "missing": 404, "broken": 500}


def page_of(job: int, index: int) -> bytes:
    """What `ok` answers, and `flaky` the second time."""
    return b"job %d, page %d. %s" % (job, index, b"The belt carries one page after the other. " * (index % 40))


def digest_of(job: int, index: int) -> str:
    return sha256(page_of(job, index)).hexdigest()


class Ledger:
    """What one job asked the site for."""

    def __init__(self) -> None:
        self.requests: Counter[int] = Counter()
        self.answered: Counter[int] = Counter()
        self.in_flight = 0
        # How many requests the site had had, of all jobs, when the first of this one came.
        self.first = 0
        # When anything of it last happened here, and when a retry was last asked for.
        self.moved_at = 0.0
        self.retry_at = 0.0


class Site:
    """One server on each address, all on one port."""

    def __init__(self) -> None:
        self.jobs: defaultdict[int, Ledger] = defaultdict(Ledger)
        self.unexpected: list[str] = []
        self.moved_at = 0.0
        self.requests = 0
        self.port = 0
        self._servers: list[asyncio.Server] = []

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for host in (*FAST, *SLOW):
            slow = host in SLOW
            server = await loop.create_server(lambda slow=slow: Connection(self, slow), host, self.port, backlog=1024)  # type: ignore[misc]  # mypy infers no type for the default
            self.port = server.sockets[0].getsockname()[1]
            self._servers.append(server)
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()

    def url(self, host: str, job: int, index: int, page: str) -> str:
        return f"http://{host}:{self.port}/{job}/{index}/{page}"

    def moved(self, ledger: Ledger) -> None:
        self.moved_at = ledger.moved_at = time.monotonic()


class Connection(asyncio.Protocol):
    """One connection, kept open; requests are answered one at a time."""

    def __init__(self, site: Site, slow: bool) -> None:
        self._site = site
        self._slow = slow
        self._received = b""
        self._transport: asyncio.Transport | None = None
        self._answering: tuple[asyncio.TimerHandle, Ledger] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._answering is not None:
            handle, ledger = self._answering
            handle.cancel()
            ledger.in_flight -= 1
            self._answering = None

    def data_received(self, data: bytes) -> None:
        self._received += data
        while self._answering is None and b"\r\n\r\n" in self._received:
            head, _, self._received = self._received.partition(b"\r\n\r\n")
            self._take(head.split(b" ", 2)[1].decode("latin-1"))

    def _take(self, path: str) -> None:
        parts = path.strip("/").split("/")
        if len(parts) != 3 or not (parts[0] + parts[1]).isdigit():
            self._site.unexpected.append(path)
            self._send(404, b"")
            return
        job, index, page = int(parts[0]), int(parts[1]), parts[2]
        ledger = self._site.jobs[job]
        self._site.requests += 1
        ledger.first = ledger.first or self._site.requests
        ledger.requests[index] += 1
        status = _STATUSES.get(page) or (503 if ledger.requests[index] == 1 else 200)
        self._site.moved(ledger)
        if not self._slow:
            self._answer(ledger, job, index, status)
            return
        ledger.in_flight += 1
        late = asyncio.get_running_loop().call_later(_LATE[index % len(_LATE)], self._late, ledger, job, index, status)
        self._answering = (late, ledger)

    def _late(self, ledger: Ledger, job: int, index: int, status: int) -> None:
        self._answering = None
        ledger.in_flight -= 1
        self._site.moved(ledger)
        self._answer(ledger, job, index, status)
        self.data_received(b"")

    def _answer(self, ledger: Ledger, job: int, index: int, status: int) -> None:
        if status == 200:
            ledger.answered[index] += 1
        elif status >= 500:
            ledger.retry_at = time.monotonic()
        self._send(status, page_of(job, index) if status == 200 else b"no page")

    def _send(self, status: int, body: bytes) -> None:
        if self._transport is not None:
            head = f"HTTP/1.1 {status} Said\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n\r\n"
            self._transport.write(head.encode() + body)
