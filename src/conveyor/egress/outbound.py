"""Requests that Conveyor makes for a user outside of tasks: webhooks, and lists behind URLs. They use the
stack of the executors: the guard, its checked addresses, and the clients pinned to them.

Failures are raised as OutboundFailed, with a code and without the URL: queries and paths contain secrets.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import NamedTuple

import msgspec
from pyreqwest.exceptions import PyreqwestError
from pyreqwest.http import Url
from pyreqwest.response import Response

from conveyor import __version__
from conveyor.egress.clients import Clients
from conveyor.egress.failures import Failure, failure_of, is_connecting
from conveyor.egress.heads import ResponseHead, read_ascii_head
from conveyor.egress.redirects import (
    REDIRECT_STATUSES,
    BadRedirect,
    OutgoingRequest,
    follow_redirect,
    headers_to_send,
)
from conveyor.egress.routes import route_of
from conveyor.egress.target_guard import BadUrl, DnsFailed, TargetGuard, TargetRefused, parse_url

USER_AGENT = f"conveyor/{__version__}"
CONNECT_SECONDS = 10.0

_PIECE = 64 * 1024
# For the body of an answer that nobody reads.
_BODY_SECONDS = 1.0
# Delivery logs and schedules tell fewer failures apart than tasks do.
_BROADER = {"connect_timeout": "timeout", "decode_failed": "read_failed", "internal": "read_failed"}

Pairs = Sequence[tuple[str, str]]


class OutboundFailed(Exception):
    """A request without an answer."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class PostReply(NamedTuple):
    """The answer to a POST: its status, its Retry-After, and the beginning of its body, as far as it came in time."""

    status: int
    retry_after: str | None
    body: bytes = b""


class Outbound:
    """Sends requests. One per event loop; it closes its guard. `root_certificate` are certificates, as PEM, to trust
    besides the public authorities."""

    def __init__(self, guard: TargetGuard, *, root_certificate: bytes | None = None) -> None:
        self._guard = guard
        # Streaming: a list is read for as long as it takes, and nobody reads the answer to a webhook.
        self._clients = Clients(guard.clock, USER_AGENT, root_certificate, streaming=True)
        self._route = route_of(None, self._clients, guard, trusted=False)

    async def close(self) -> None:
        await self._clients.close()
        await self._guard.close()

    async def post(self, url: str, headers: Pairs, body: bytes, timeout: float) -> PostReply:
        """The head of the answer decides, even if its body fails; a redirect is an answer like any other."""
        answer: PostReply | None = None
        try:
            async with self._open(OutgoingRequest("POST", _parse(url), tuple(headers), body), timeout) as response:
                answer = PostReply(response.status, (await self._read_head(response)).fields.get("retry-after"))
                # Read, so that the connection can be reused; a longer or slower body is not worth that.
                async with asyncio.timeout(_BODY_SECONDS):
                    answer = answer._replace(body=bytes(await response.body_reader.read(_PIECE) or b""))
        except OutboundFailed:
            if answer is None:
                raise
        assert answer is not None
        return answer

    @asynccontextmanager
    async def get(
        self, url: str, headers: Pairs, timeout: float, redirects: int, on_each_hop: Pairs = ()
    ) -> AsyncIterator[tuple[Response, ResponseHead]]:
        """The answer and its head, with its body unread, after at most `redirects` redirects. The guard checks each
        hop. `timeout` is for each request, body included. `on_each_hop` are headers without secrets, which follow
        redirects to other origins."""
        request = OutgoingRequest("GET", _parse(url), (*headers, *on_each_hop))
        origin = request.url.origin_ascii
        for _ in range(redirects + 1):
            async with self._open(request, timeout) as response:
                head = await self._read_head(response)
                if head.status not in REDIRECT_STATUSES or "location" not in head.fields:
                    yield response, head
                    return
                request = follow_redirect(request, head)
                # Stricter than for tasks: no header of the schedule reaches another origin.
                own = tuple(headers) if request.url.origin_ascii == origin else ()
                request = msgspec.structs.replace(request, headers=(*own, *on_each_hop))
        raise OutboundFailed("too_many_redirects", f"more than {redirects} redirects")

    async def _read_head(self, response: Response) -> ResponseHead:
        return read_ascii_head(response) or await self._clients.read_head(response)

    @asynccontextmanager
    async def _open(self, request: OutgoingRequest, timeout: float) -> AsyncIterator[Response]:
        try:
            async with asyncio.timeout(timeout), self._send(request, timeout) as response:
                yield response
        except (PyreqwestError, Failure, BadUrl, TargetRefused, DnsFailed, BadRedirect) as error:
            failure = failure_of(error, self._route.gateway_codes)
            raise OutboundFailed(_BROADER.get(failure.code, failure.code), failure.message) from None
        except TimeoutError:
            raise OutboundFailed("timeout", f"it took longer than {timeout:g} seconds") from None

    @asynccontextmanager
    async def _send(self, request: OutgoingRequest, timeout: float) -> AsyncIterator[Response]:
        hop = self._route.ready(request, CONNECT_SECONDS) or await self._route.hop(request, CONNECT_SECONDS, timeout)
        builder = hop.client.request(request.method, hop.url).timeout(timedelta(seconds=timeout))
        builder = builder.headers([*headers_to_send(request), *hop.headers])
        # No buffer: the head is an answer before any of the body has arrived.
        builder = (builder if request.body is None else builder.body_bytes(request.body)).streamed_read_buffer_limit(0)
        try:
            async with builder.build_streamed() as response:
                yield response
        except PyreqwestError as error:
            if hop.pinned is not None and is_connecting(error):
                self._guard.avoid(*hop.pinned)
            raise


def _parse(url: str) -> Url:
    try:
        return parse_url(url)
    except BadUrl as error:
        raise OutboundFailed(error.code, error.message) from None
