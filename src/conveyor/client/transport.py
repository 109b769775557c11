"""Requests and their answers: our exceptions, JSON, pages, and another try where that is safe.

A request that never reached the server (the connection was not made) is always tried again. One that may have reached
it is tried again only when doing it twice changes nothing: GET, DELETE and PATCH, POST under an Idempotency-Key, PUT
of an upload. So is one that the server refuses for now (429, 503), after the time that it asks for, and one whose first
try, cut off on its way, it is still carrying out.

A server that has answered before is given `patience` seconds to come back; one that never did, a moment.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from conveyor.client.http import Broken, HttpRequest, HttpResponse, host_of
from conveyor.client.io import Io, Opened
from conveyor.client.lists import plain_value
from conveyor.client.problem_errors import not_conveyor, problem, wait_of
from conveyor.client.upload_file import FileBody
from conveyor.errors import ConveyorError, IdempotencyInFlight, ServerUnreachable
from conveyor.model import Page

Json = dict[str, Any]
Query = Mapping[str, str | int]
T = TypeVar("T")

_IDEMPOTENT = frozenset({"GET", "DELETE", "PATCH", "PUT"})
# Refused, and certainly not done.
_TOO_MANY = 429
# From whoever stands before the server too, while it is started anew.
_FOR_NOW = frozenset({502, 503, 504})
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
# For a server that has never answered.
_FIRST_TRIES = 3


def path_of(*parts: str) -> str:
    """A path under /v1; no part can leave its place."""
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


class Transport:
    """A server and a key."""

    def __init__(self, io: Io, url: str, key: str | None, patience: float) -> None:
        host_of(url)
        self.io = io
        self.url = url.rstrip("/")
        self.patience = patience
        self._key = key
        self._met = False

    async def send(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        body: object = None,
        idempotency_key: str | None = None,
        safe: bool = False,
    ) -> bytes:
        """The body of a successful answer; else the server's error, or ServerUnreachable. `body` is made JSON, unless
        it is bytes. `safe`: sent twice, it does what it does once."""
        headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
        if body is not None:
            headers["Content-Type"] = "application/json"
        sent = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body, enc_hook=plain_value)
        request = self._request(method, path, headers, query, sent)
        answer = await self.exchange(request, safe or method in _IDEMPOTENT or idempotency_key is not None)
        return answer.body

    async def get(self, path: str) -> HttpResponse:
        """A successful answer, with its headers."""
        return await self.exchange(self._request("GET", path, {}), safe=True)

    async def json(self, method: str, path: str, **parts: Any) -> Json:
        """As `send`; the JSON object that it answers."""
        return decoded(await self.send(method, path, **parts), dict)

    async def listing(self, path: str, query: Query | None, item: type[T]) -> AsyncGenerator[T, None]:
        """All items of a listing, page after page, read as they are taken."""
        cursor: str | None = None
        while True:
            asked = {**(query or {}), **({} if cursor is None else {"cursor": cursor})}
            page = decoded(await self.send("GET", path, asked), Page[item])  # type: ignore[valid-type]  # known when it runs
            for each in page.items:
                yield each
            cursor = page.next_cursor
            if cursor is None:
                return

    async def put(self, method: str, url: str, headers: Mapping[str, str], body: FileBody) -> None:
        """Send a file to a link that is a right of its own: the key stays here."""
        await self.exchange(HttpRequest(method, url, headers, body=body), safe=True)

    @asynccontextmanager
    async def open(self, url: str, headers: Mapping[str, str]) -> AsyncIterator[Opened]:
        """An answer as it comes. Tried again until it begins, not after: whoever reads gets ServerUnreachable. A link
        to elsewhere is a right of its own: the key stays here."""
        request = self._request("GET", url, headers) if url.startswith("/") else HttpRequest("GET", url, headers)

        async def once() -> tuple[Any, Opened]:
            opening = self.io.open(request)
            opened = await opening.__aenter__()
            if 200 <= opened.status < 300:
                return opening, opened
            try:
                body = b"".join([piece async for piece in pieces_of(opened)])
            finally:
                await opening.__aexit__(None, None, None)
            raise problem(opened.status, body, opened.headers)

        opening, opened = await self._tried(once, safe=True)
        try:
            yield opened
        except Broken as error:
            raise ServerUnreachable(f"The connection to {self.url} broke while it sent: {error.why}.") from error
        finally:
            await opening.__aexit__(None, None, None)

    async def exchange(self, request: HttpRequest, safe: bool) -> HttpResponse:
        """The answer, if it is a success."""

        async def once() -> HttpResponse:
            answer = await self.io.send(request)
            if not 200 <= answer.status < 300:
                raise problem(answer.status, answer.body, answer.headers)
            return answer

        return await self._tried(once, safe)

    def _request(
        self, method: str, path: str, headers: Mapping[str, str], query: Query | None = None, body: bytes | None = None
    ) -> HttpRequest:
        asked = {name: str(value) for name, value in (query or {}).items()}
        return HttpRequest(method, self.url + path, headers, asked, body, self._key)

    async def _tried(self, once: Callable[[], Awaitable[T]], safe: bool) -> T:
        began: float | None = None
        failed: ConveyorError
        tries = 0
        while True:
            tries += 1
            try:
                result = await once()
                self._met = True
                return result
            except Broken as error:
                again = (safe or not error.sent) and (self._met or tries <= _FIRST_TRIES)
                failed, wait = self._unreachable(error), self._backoff(tries)
            except ConveyorError as error:
                self._met = True
                again = error.status == _TOO_MANY or isinstance(error, IdempotencyInFlight)
                again = again or (safe and error.status in _FOR_NOW)
                asked = wait_of(error)
                failed, wait = error, self._backoff(tries) if asked is None else asked
            # From the first failure on: what is sent before may be large.
            began = self.io.monotonic() if began is None else began
            if not again or self.io.monotonic() - began + wait > self.patience:
                raise failed
            await self.io.pause(wait)

    def _backoff(self, tries: int) -> float:
        longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 3.0 ** (tries - 1))
        return longest * (0.5 + self.io.jitter() / 2)

    def _unreachable(self, error: Broken) -> ServerUnreachable:
        if error.sent:
            failed = ServerUnreachable(f"The server at {self.url} did not answer: {error.why}.")
        else:
            failed = ServerUnreachable(
                f"No Conveyor server answers at {self.url}. Start one with `conveyor up`, or set CONVEYOR_URL."
            )
        failed.__cause__ = error
        return failed


def decoded(answer: bytes, shape: type[T]) -> T:
    """An answer's body as such a value."""
    try:
        return msgspec.json.decode(answer, type=shape)
    except msgspec.DecodeError:
        raise not_conveyor(200) from None


async def pieces_of(opened: Opened) -> AsyncIterator[bytes]:
    """The body, as it comes. Raises Broken."""
    while (piece := await opened.read()) is not None:
        yield piece
