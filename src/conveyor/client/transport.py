"""One request and its answer, over pyreqwest: retries where they are safe, and our exceptions.

A request that never reached the server (the connection was not made) is always tried again. One that may have
reached it is tried again only when doing it twice changes nothing: GET, DELETE and PATCH, POST under an
Idempotency-Key, and the PUT of an upload. So is one whose first try, cut off on its way, the server is still carrying out.
"""

import ipaddress
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
from pyreqwest.client import SyncClient, SyncClientBuilder
from pyreqwest.exceptions import BuilderError, ConnectTimeoutError, DetailedPyreqwestError, PyreqwestError
from pyreqwest.request import SyncRequestBuilder, SyncStreamRequest
from pyreqwest.response import SyncResponse

from conveyor.client.problems import problem
from conveyor.errors import ConveyorError, IdempotencyInFlight, InvalidSetting, ServerUnreachable

Query = Mapping[str, str | int]
Pause = Callable[[float], object]
T = TypeVar("T")

_PAUSES = (0.1, 0.3, 0.9)
_CONNECT = timedelta(seconds=10)
# Between two reads: an export takes as long as it takes, but never this long without a byte.
_READ = timedelta(seconds=60)
# The answer to an upload comes when all of it was sent, at no less than this many bytes a second.
_SLOWEST = 32 * 1024
_IDEMPOTENT = frozenset({"GET", "DELETE", "PATCH"})


def _wait(seconds: float) -> None:
    threading.Event().wait(seconds)


class Transport:
    """A server and a key. Not for use by several threads at once."""

    def __init__(self, url: str, key: str | None, pause: Pause = _wait) -> None:
        self.url = url.rstrip("/")
        self._key = key
        self.pause = pause
        self._client = _client(self.url, _READ)

    def close(self) -> None:
        self._client.close()

    def send(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        body: object = None,
        idempotency_key: str | None = None,
    ) -> bytes:
        """The body of a successful answer; else the server's error, or ServerUnreachable."""

        def once() -> bytes:
            builder = self._request(method, path, query)
            if body is not None:
                builder = builder.header("Content-Type", "application/json").body_bytes(msgspec.json.encode(body))
            if idempotency_key is not None:
                builder = builder.header("Idempotency-Key", idempotency_key)
            response = builder.build().send()
            answer = bytes(response.bytes())
            _check(response, answer)
            return answer

        return self._try(once, safe=method in _IDEMPOTENT or idempotency_key is not None)

    def put(self, url: str, headers: Mapping[str, str], size: int, pieces: Callable[[], Iterable[bytes]]) -> None:
        """Send a body in pieces to a link that is a right of its own: the key stays here. `pieces` are asked for anew
        by each try."""
        # Its read timeout would count from the first byte sent: such a client has one timeout for all of it instead.
        client = _client(url, None)

        def once() -> None:
            builder = client.put(url).timeout(_READ + timedelta(seconds=size / _SLOWEST))
            for name, value in {**headers, "Content-Length": str(size)}.items():
                builder = builder.header(name, value)
            response = builder.body_stream(pieces()).build().send()
            _check(response, bytes(response.bytes()))

        with closing(client):
            self._try(once, safe=True)

    @contextmanager
    def stream(self, path: str) -> Iterator[Iterator[bytes]]:
        """The pieces of a body as they come. The request is tried again until its first byte, not after."""

        def once() -> tuple[SyncStreamRequest, SyncResponse]:
            request = self._request("GET", path, None).build_streamed()
            return request, request.__enter__()

        request, response = self._try(once, safe=True)
        try:
            if response.status >= 300:
                _check(response, bytes(response.bytes()))
            yield self._pieces(response)
        finally:
            request.__exit__(None, None, None)

    @contextmanager
    def open(self, url: str, headers: Mapping[str, str]) -> Iterator[tuple[int, Iterator[bytes]]]:
        """As `stream`, with headers of one's own, and the status. A link to elsewhere is a right of its own: the key
        stays here."""
        elsewhere = None if url.startswith("/") else _client(url, _READ)

        def once() -> tuple[SyncStreamRequest, SyncResponse]:
            builder = self._request("GET", url, None) if elsewhere is None else elsewhere.get(url)
            for name, value in headers.items():
                builder = builder.header(name, value)
            request = builder.build_streamed()
            return request, request.__enter__()

        try:
            request, response = self._try(once, safe=True)
            try:
                if response.status >= 300:
                    _check(response, bytes(response.bytes()))
                yield response.status, self._pieces(response)
            finally:
                request.__exit__(None, None, None)
        finally:
            if elsewhere is not None:
                elsewhere.close()

    def _pieces(self, response: SyncResponse) -> Iterator[bytes]:
        reader = response.body_reader
        try:
            while (piece := reader.read_chunk()) is not None:
                yield bytes(piece)
        except (PyreqwestError, OSError) as error:
            raise ServerUnreachable(f"The connection to {self.url} broke while it sent.") from error

    def _request(self, method: str, path: str, query: Query | None) -> SyncRequestBuilder:
        try:
            builder = self._client.request(method, self.url + path)
            if query:
                builder = builder.query({name: str(value) for name, value in query.items()})
            if self._key:
                builder = builder.header("Authorization", f"Bearer {self._key}", is_sensitive=True)
        except (BuilderError, ValueError) as error:
            raise InvalidSetting(f"The key or the URL {self.url} can not be sent: {error}") from None
        return builder

    def _try(self, once: Callable[[], T], safe: bool) -> T:
        for pause in (*_PAUSES, None):
            try:
                return once()
            except IdempotencyInFlight:
                if pause is None:
                    raise
            except (PyreqwestError, OSError) as error:
                if pause is None or not (safe or _never_sent(error)):
                    raise _unreachable(self.url, error) from error
            self.pause(pause)
        raise AssertionError("the last try returns or raises")


def _unreachable(url: str, error: Exception) -> ConveyorError:
    if _never_sent(error):
        return ServerUnreachable(
            f"No Conveyor server answers at {url}. Start one with `conveyor up`, or set CONVEYOR_URL."
        )
    return ServerUnreachable(f"The server at {url} did not answer: {_causes(error)[-1]}.")


def _never_sent(error: Exception) -> bool:
    """pyreqwest's ConnectError is also a connection that broke after the request went out; its causes tell."""
    return isinstance(error, ConnectTimeoutError) or "client error (Connect)" in _causes(error)


def _causes(error: Exception) -> list[str]:
    causes = (error.details["causes"] or []) if isinstance(error, DetailedPyreqwestError) else []
    return [str(error), *(cause["message"] for cause in causes)]


def _client(url: str, read_timeout: timedelta | None) -> SyncClient:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise InvalidSetting(f"CONVEYOR_URL must be an http or https address, not {url!r}")
    builder = SyncClientBuilder().follow_redirects(False).connect_timeout(_CONNECT)
    if read_timeout is not None:
        builder = builder.read_timeout(read_timeout)
    # The proxy of the environment has no way to this machine's own loopback.
    return (builder.no_proxy() if _is_loopback(parts.hostname) else builder).build()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check(response: SyncResponse, answer: bytes) -> None:
    if not 200 <= response.status < 300:
        raise problem(response.status, answer)
