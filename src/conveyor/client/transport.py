"""Send requests, with retries, and decode answers: JSON, pages, and errors as exceptions.

A request that never reached the server is always retried. A request that may have reached it is retried only if it is
idempotent: GET, DELETE, PATCH, POST with an Idempotency-Key, PUT of an upload. So is a request that the server refuses
for now (429, 503), after its Retry-After, and one whose first attempt the server is still processing.

If the server has answered before, requests are retried for `patience` seconds; if it never has, only a few times.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from conveyor.client.http import ConnectionBroken, HttpRequest, HttpResponse, host_of
from conveyor.client.io import Io, ResponseStream
from conveyor.client.lists import plain_value
from conveyor.client.problem_errors import error_from_problem, retry_after_of, unexpected_answer
from conveyor.client.upload_file import FileBody
from conveyor.errors import ConveyorError, IdempotencyInFlight, ServerUnreachable
from conveyor.model import Page

Json = dict[str, Any]
Query = Mapping[str, str | int]
T = TypeVar("T")

_IDEMPOTENT = frozenset({"GET", "DELETE", "PATCH", "PUT"})
# Refused, and certainly not carried out.
_TOO_MANY = 429
_NO_CONTENT, _NOT_FOUND = 204, 404
# Also from a proxy while the server restarts.
_TEMPORARY = frozenset({502, 503, 504})
_FIRST_BACKOFF = 0.1
_MAX_BACKOFF = 5.0
# Retries of a connection to a server that has never answered.
_MAX_FIRST_RETRIES = 3


def path_of(*parts: str) -> str:
    """A path under /v1, with its parts escaped."""
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


class Transport:
    """Requests to one server with one key."""

    def __init__(self, io: Io, url: str, key: str | None, patience: float) -> None:
        host_of(url)
        self.io = io
        self.url = url.rstrip("/")
        self.patience = patience
        self._key = key
        self._has_answered = False

    async def send(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        body: object = None,
        idempotency_key: str | None = None,
        safe: bool = False,
    ) -> bytes:
        """Send a request and return the body of the answer. Raises the error of the server, or ServerUnreachable.
        `body` is encoded as JSON, unless it is bytes. `safe`: the request is idempotent."""
        headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
        if body is not None:
            headers["Content-Type"] = "application/json"
        content = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body, enc_hook=plain_value)
        request = self._request(method, path, headers, query, content)
        answer = await self.exchange(request, safe or method in _IDEMPOTENT or idempotency_key is not None)
        return answer.body

    async def get(self, path: str) -> HttpResponse:
        """Send a GET request and return the answer with its headers."""
        return await self.exchange(self._request("GET", path, {}), safe=True)

    async def json(self, method: str, path: str, **parts: Any) -> Json:
        """As `send`, and decode the JSON object."""
        return decode(await self.send(method, path, **parts), dict)

    async def listing(self, path: str, query: Query | None, item: type[T]) -> AsyncGenerator[T, None]:
        """Yield all items of a listing. Fetches pages on demand."""
        cursor: str | None = None
        while True:
            page_query = {**(query or {}), **({} if cursor is None else {"cursor": cursor})}
            page = decode(await self.send("GET", path, page_query), Page[item])  # type: ignore[valid-type]  # known at run time
            for row in page.items:
                yield row
            cursor = page.next_cursor
            if cursor is None:
                return

    async def put(self, method: str, url: str, headers: Mapping[str, str], body: FileBody) -> None:
        """Upload a file to a signed link, without the key."""
        await self.exchange(HttpRequest(method, url, headers, body=body), safe=True)

    @asynccontextmanager
    async def open(self, url: str, headers: Mapping[str, str]) -> AsyncIterator[ResponseStream]:
        """Open a streamed answer. Only opening is retried; a later failure raises ServerUnreachable. A link to another
        server is opened without the key."""
        request = self._request("GET", url, headers) if url.startswith("/") else HttpRequest("GET", url, headers)

        async def attempt() -> tuple[Any, ResponseStream]:
            context = self.io.open(request)
            stream = await context.__aenter__()
            if 200 <= stream.status < 300:
                return context, stream
            try:
                body = b"".join([piece async for piece in read_pieces(stream)])
            finally:
                await context.__aexit__(None, None, None)
            raise error_from_problem(stream.status, body, stream.headers)

        context, stream = await self._retry(attempt, safe=True)
        try:
            yield stream
        except ConnectionBroken as error:
            raise ServerUnreachable(f"The connection to {self.url} broke: {error.reason}.") from error
        finally:
            await context.__aexit__(None, None, None)

    async def exchange(self, request: HttpRequest, safe: bool) -> HttpResponse:
        """Send a request, with retries, and return a successful answer. A DELETE whose answer was lost, and whose retry
        finds nothing, was successful."""
        may_be_deleted = False

        async def attempt() -> HttpResponse:
            nonlocal may_be_deleted
            try:
                answer = await self.io.send(request)
            except ConnectionBroken as error:
                may_be_deleted = may_be_deleted or (error.sent and request.method == "DELETE")
                raise
            if answer.status == _NOT_FOUND and may_be_deleted:
                return HttpResponse(_NO_CONTENT, {}, b"")
            may_be_deleted = may_be_deleted or (answer.status in _TEMPORARY and request.method == "DELETE")
            if not 200 <= answer.status < 300:
                raise error_from_problem(answer.status, answer.body, answer.headers)
            return answer

        return await self._retry(attempt, safe)

    def _request(
        self, method: str, path: str, headers: Mapping[str, str], query: Query | None = None, body: bytes | None = None
    ) -> HttpRequest:
        parameters = {name: str(value) for name, value in (query or {}).items()}
        return HttpRequest(method, self.url + path, headers, parameters, body, self._key)

    async def _retry(self, attempt: Callable[[], Awaitable[T]], safe: bool) -> T:
        first_failure: float | None = None
        failure: ConveyorError
        attempts = 0
        while True:
            attempts += 1
            try:
                result = await attempt()
                self._has_answered = True
                return result
            except ConnectionBroken as error:
                is_retryable = (safe or not error.sent) and (self._has_answered or attempts <= _MAX_FIRST_RETRIES)
                failure, wait = self._unreachable(error), self._backoff(attempts)
            except ConveyorError as error:
                self._has_answered = True
                is_retryable = error.status == _TOO_MANY or isinstance(error, IdempotencyInFlight)
                is_retryable = is_retryable or (safe and error.status in _TEMPORARY)
                retry_after = retry_after_of(error)
                failure, wait = error, self._backoff(attempts) if retry_after is None else retry_after
            # Patience starts with the first failure: the upload before it may take long.
            first_failure = self.io.monotonic() if first_failure is None else first_failure
            if not is_retryable or self.io.monotonic() - first_failure + wait > self.patience:
                raise failure
            await self.io.pause(wait)

    def _backoff(self, attempts: int) -> float:
        delay = min(_MAX_BACKOFF, _FIRST_BACKOFF * 3.0 ** (attempts - 1))
        return delay * (0.5 + self.io.jitter() / 2)

    def _unreachable(self, error: ConnectionBroken) -> ServerUnreachable:
        if error.sent:
            failure = ServerUnreachable(f"The server at {self.url} did not answer: {error.reason}.")
        else:
            failure = ServerUnreachable(
                f"No Conveyor server answers at {self.url}. Start one with `conveyor up`, or set CONVEYOR_URL."
            )
        failure.__cause__ = error
        return failure


def decode(answer: bytes, shape: type[T]) -> T:
    """Decode the body of an answer."""
    try:
        return msgspec.json.decode(answer, type=shape)
    except msgspec.DecodeError:
        raise unexpected_answer(200) from None


async def read_pieces(stream: ResponseStream) -> AsyncIterator[bytes]:
    """Yield the body piece by piece. Raises ConnectionBroken."""
    while (piece := await stream.read()) is not None:
        yield piece
