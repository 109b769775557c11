"""One HTTP exchange over pyreqwest: a request out, an answer back, whole or in pieces. No retries, no JSON.

What goes wrong on the way is Broken, which says whether the server may have seen the request.
"""

import asyncio
import atexit
import ipaddress
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple
from urllib.parse import urlsplit

from pyreqwest.client import Client, ClientBuilder, SyncClientBuilder
from pyreqwest.exceptions import BuilderError, ConnectTimeoutError, DetailedPyreqwestError, PyreqwestError
from pyreqwest.request import RequestBuilder, StreamRequest
from pyreqwest.response import Response

from conveyor import __version__
from conveyor.client.upload_file import FileBody, open_list, read_list
from conveyor.errors import InvalidSetting

_CONNECT = timedelta(seconds=10)
# Between two reads: an export takes as long as it takes, but never this long without a byte.
_READ = timedelta(seconds=60)
# Not empty once this process has had a connection.
_used: list[bool] = []
# A forked process has none of its parent's threads.
os.register_at_fork(after_in_child=_used.clear)
# The answer to an upload comes when all of it was sent, at no less than this many bytes a second.
_SLOWEST = 32 * 1024


@dataclass(frozen=True)
class HttpRequest:
    """What is to be sent. A file is read anew by each try."""

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes | FileBody | None = None
    # Never shown: it is a secret.
    key: str | None = field(default=None, repr=False)


class HttpResponse(NamedTuple):
    """What came back. Header names are lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Broken(Exception):
    """There is no answer, or not all of it. `sent`: the server may have seen the request."""

    def __init__(self, why: str, sent: bool) -> None:
        super().__init__(why)
        self.why = why
        self.sent = sent


class Incoming:
    """An answer whose body is still to come."""

    def __init__(self, request: StreamRequest, response: Response) -> None:
        self._request = request
        self._reader = response.body_reader
        self.status = response.status
        self.headers = _headers(response)

    async def read(self) -> bytes | None:
        """The next piece, None at the end. Raises Broken."""
        try:
            piece = await self._reader.read_chunk()
        except (PyreqwestError, OSError) as error:
            raise _broken(error) from error
        return None if piece is None else bytes(piece)

    async def close(self) -> None:
        """Let go of it, wherever it is."""
        await self._request.__aexit__(None, None, None)


class Http:
    """Connections, kept for the next request. They belong to the event loop that uses them first."""

    def __init__(self) -> None:
        self._clients: dict[tuple[bool, bool], Client] = {}

    async def send(self, request: HttpRequest) -> HttpResponse:
        """The answer, whole. Raises Broken."""
        builder = self._builder(request)
        if isinstance(request.body, FileBody):
            # A read timeout would count from the first byte sent: such a request has one for all of it instead.
            builder = builder.timeout(_READ + timedelta(seconds=request.body.size / _SLOWEST))
            builder = builder.header("Content-Length", str(request.body.size)).body_stream(_pieces(request.body))
        elif request.body is not None:
            builder = builder.body_bytes(request.body)
        try:
            response = await builder.build().send()
            return HttpResponse(response.status, _headers(response), bytes(await response.bytes()))
        except (PyreqwestError, OSError) as error:
            raise _broken(error) from error

    async def begin(self, request: HttpRequest) -> Incoming:
        """The answer, as soon as its head is there. Raises Broken."""
        # As it comes: by itself it would wait for the first 64 KiB.
        opened = self._builder(request).streamed_read_buffer_limit(0).build_streamed()
        try:
            return Incoming(opened, await opened.__aenter__())
        except (PyreqwestError, OSError) as error:
            raise _broken(error) from error

    async def close(self) -> None:
        """Let go of all connections."""
        clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            await client.close()

    def _builder(self, request: HttpRequest) -> RequestBuilder:
        client = self._client(host_of(request.url), isinstance(request.body, FileBody))
        try:
            builder = client.request(request.method, request.url).headers(dict(request.headers))
            if request.query:
                builder = builder.query(dict(request.query))
            if request.key:
                builder = builder.header("Authorization", f"Bearer {request.key}", is_sensitive=True)
        except (BuilderError, ValueError) as error:
            raise InvalidSetting(f"The key or the URL {request.url} can not be sent: {error}") from None
        return builder

    def _client(self, host: str, uploads: bool) -> Client:
        kind = (is_loopback(host), uploads)
        if kind not in self._clients:
            builder = ClientBuilder().follow_redirects(False).connect_timeout(_CONNECT)
            builder = builder.user_agent(f"conveyor-python/{__version__}")
            if not uploads:
                builder = builder.read_timeout(_READ)
            # The proxy of the environment has no way to this machine's own loopback.
            self._clients[kind] = (builder.no_proxy() if kind[0] else builder).build()
            _used[:] = [True]
        return self._clients[kind]


@atexit.register
def _settle() -> None:
    """pyreqwest has one thread, which wakes the event loop when an answer is there. If the interpreter ends while it
    still does, the process is aborted. A request that blocks goes through the same thread, behind all of that."""
    if _used:
        with suppress(PyreqwestError):
            SyncClientBuilder().no_proxy().connect_timeout(_CONNECT).build().get("http://127.0.0.1:0/").build().send()


def host_of(url: str) -> str:
    """The host of a server's address. Raises InvalidSetting if it is none."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise InvalidSetting(f"CONVEYOR_URL must be an http or https address, not {url!r}")
    return parts.hostname


def is_loopback(host: str) -> bool:
    """Whether it is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _pieces(body: FileBody) -> AsyncIterator[bytes]:
    file = await asyncio.to_thread(open_list, body.path)
    try:
        sent = 0
        while sent < body.size:
            piece = await asyncio.to_thread(read_list, file, body, sent)
            sent += len(piece)
            if body.progress is not None:
                body.progress(sent, body.size)
            yield piece
    finally:
        file.close()


def _headers(response: Response) -> dict[str, str]:
    return {name.lower(): value for name, value in response.headers.items()}


def _broken(error: Exception) -> Broken:
    causes = (error.details["causes"] or []) if isinstance(error, DetailedPyreqwestError) else []
    told = [str(error), *(cause["message"] for cause in causes)]
    # A ConnectError is also a connection that broke after the request went out; its causes tell.
    never = isinstance(error, ConnectTimeoutError) or "client error (Connect)" in told
    return Broken(told[-1], sent=not never)
