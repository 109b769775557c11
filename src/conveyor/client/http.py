"""One HTTP exchange over pyreqwest, with the response in memory or as a stream. No retries, no JSON.

Any failure of the connection is raised as ConnectionBroken, which says whether the server may have seen the request.
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
# Maximum time between two reads: a download may take long, but not without any bytes.
_READ = timedelta(seconds=60)
# Not empty once this process has opened a connection.
_used: list[bool] = []
# A forked process has none of its parent's threads.
os.register_at_fork(after_in_child=_used.clear)
# Minimum rate of an upload, in bytes per second; the answer comes only after the whole upload.
_MIN_UPLOAD_RATE = 32 * 1024


@dataclass(frozen=True)
class HttpRequest:
    """A request. Each attempt reads a file body from the start."""

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes | FileBody | None = None
    # A secret: never shown.
    key: str | None = field(default=None, repr=False)


class HttpResponse(NamedTuple):
    """A complete response. Header names are lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class ConnectionBroken(Exception):
    """The connection failed before the response was complete. `sent`: the server may have seen the request."""

    def __init__(self, reason: str, sent: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.sent = sent


class StreamedResponse:
    """A response whose body is read piece by piece."""

    def __init__(self, request: StreamRequest, response: Response) -> None:
        self._request = request
        self._reader = response.body_reader
        self.status = response.status
        self.headers = _headers(response)

    async def read(self) -> bytes | None:
        """Read the next piece; None at the end. Raises ConnectionBroken."""
        try:
            piece = await self._reader.read_chunk()
        except (PyreqwestError, OSError) as error:
            raise _broken(error) from error
        return None if piece is None else bytes(piece)

    async def close(self) -> None:
        """Close the response, even before its end."""
        await self._request.__aexit__(None, None, None)


class Http:
    """A pool of connections. It belongs to the event loop that uses it first."""

    def __init__(self) -> None:
        self._clients: dict[tuple[bool, bool], Client] = {}

    async def send(self, request: HttpRequest) -> HttpResponse:
        """Send a request and return the complete response. Raises ConnectionBroken."""
        builder = self._builder(request)
        if isinstance(request.body, FileBody):
            # The read timeout would start with the first byte sent, so an upload has one timeout for the whole request.
            builder = builder.timeout(_READ + timedelta(seconds=request.body.size / _MIN_UPLOAD_RATE))
            builder = builder.header("Content-Length", str(request.body.size)).body_stream(_pieces(request.body))
        elif request.body is not None:
            builder = builder.body_bytes(request.body)
        try:
            response = await builder.build().send()
            return HttpResponse(response.status, _headers(response), bytes(await response.bytes()))
        except (PyreqwestError, OSError) as error:
            raise _broken(error) from error

    async def begin(self, request: HttpRequest) -> StreamedResponse:
        """Send a request and return the response once its headers arrive. Raises ConnectionBroken."""
        # Without a buffer: by default it would wait for the first 64 KiB.
        opened = self._builder(request).streamed_read_buffer_limit(0).build_streamed()
        try:
            return StreamedResponse(opened, await opened.__aenter__())
        except (PyreqwestError, OSError) as error:
            raise _broken(error) from error

    async def close(self) -> None:
        """Close all connections."""
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
            raise InvalidSetting(f"Invalid API key or URL {request.url}: {error}") from None
        return builder

    def _client(self, host: str, uploads: bool) -> Client:
        kind = (is_loopback(host), uploads)
        if kind not in self._clients:
            builder = ClientBuilder().follow_redirects(False).connect_timeout(_CONNECT)
            builder = builder.user_agent(f"conveyor-python/{__version__}")
            if not uploads:
                builder = builder.read_timeout(_READ)
            # A proxy from the environment cannot reach the loopback of this machine.
            self._clients[kind] = (builder.no_proxy() if kind[0] else builder).build()
            _used[:] = [True]
        return self._clients[kind]


@atexit.register
def _flush_thread() -> None:
    """Wait for the thread of pyreqwest before the interpreter exits. The thread wakes the event loop when a response
    arrives; if that happens during the exit, the process aborts. A blocking request queues behind its pending work."""
    if _used:
        with suppress(PyreqwestError):
            SyncClientBuilder().no_proxy().connect_timeout(_CONNECT).build().get("http://127.0.0.1:0/").build().send()


def host_of(url: str) -> str:
    """The host of a server URL. Raises InvalidSetting if the URL is invalid."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise InvalidSetting(f"Invalid CONVEYOR_URL {url!r}. Use an http or https URL.")
    return parts.hostname


def is_loopback(host: str) -> bool:
    """Whether the host is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _pieces(body: FileBody) -> AsyncIterator[bytes]:
    file = await asyncio.to_thread(open_list, body)
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


def _broken(error: Exception) -> ConnectionBroken:
    causes = (error.details["causes"] or []) if isinstance(error, DetailedPyreqwestError) else []
    messages = [str(error), *(cause["message"] for cause in causes)]
    # A ConnectError may also be a connection that broke after the request was sent; only its causes tell.
    is_unsent = isinstance(error, ConnectTimeoutError) or "client error (Connect)" in messages
    return ConnectionBroken(messages[-1], sent=not is_unsent)
