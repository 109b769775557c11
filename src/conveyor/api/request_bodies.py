"""Reads request bodies: counts and hashes the bytes, and returns them with a fingerprint.

The limit applies to the bytes that arrive, because Content-Length may be wrong or absent. Bytes above the limit are not
read here; `protocol` discards them.
"""

import asyncio
from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any, NamedTuple

from litestar import Request

from conveyor.api.request_budget import reservation_of
from conveyor.coordination.time_limits import call_within
from conveyor.errors import BadInput, BodyTooLarge, UnsupportedMediaType

# A slow body occupies a connection and memory. So it may fall at most this many seconds behind the minimum rate, in
# bytes a second; a pause counts as falling behind.
LAG_SECONDS = 15.0
MIN_RATE = 1024
# Maximum time for a body; for one that comes without a key, which has a few bytes.
TOTAL_SECONDS = 600.0
KEYLESS_SECONDS = 10.0


class Body(NamedTuple):
    """A complete body. The fingerprint covers method, path and all bytes."""

    data: bytearray
    fingerprint: str


def require_json(request: Request[Any, Any, Any]) -> None:
    """Raise UnsupportedMediaType unless the body is uncompressed JSON in UTF-8."""
    media_type, options = request.content_type
    is_json = media_type == "application/json" or (
        media_type.startswith("application/") and media_type.endswith("+json")
    )
    if not is_json or options.get("charset", "utf-8").lower() not in {"utf-8", "utf8"}:
        raise UnsupportedMediaType
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("The body is compressed. Send it without `Content-Encoding`.")


async def read_body(
    request: Request[Any, Any, Any], limit: int, lag: float = LAG_SECONDS, total: float = TOTAL_SECONDS
) -> Body:
    """The complete body. Raises BodyTooLarge as soon as the limit is passed."""
    if (announced_length(request) or 0) > limit:
        raise _too_large(limit)
    # Without a key, a request reserves nothing: anyone could use up the budget of those that have one.
    has_key = request.scope.get("auth") is not None
    reservation = reservation_of(request.scope) if has_key else None
    if reservation is not None:
        reservation.enter(announced_length(request) or 0)
    data = bytearray()
    digest = sha256(f"{request.method} {request.scope['path']}\n".encode())

    async def read() -> None:
        async for piece in pieces(request, lag):
            if reservation is not None:
                reservation.take(len(piece))
            digest.update(piece)
            data.extend(piece)
            if len(data) > limit:
                raise _too_large(limit)

    try:
        await call_within(total if has_key else min(total, KEYLESS_SECONDS), read())
    except TimeoutError:
        raise _too_slow() from None
    return Body(data, digest.hexdigest())


async def pieces(request: Request[Any, Any, Any], lag: float = LAG_SECONDS) -> AsyncIterator[bytes]:
    """The body as it arrives, without a limit: the caller counts. Raises BadInput if it falls behind the minimum
    rate."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + lag
    more = True
    while more:
        message = await _next_message(request, deadline - loop.time())
        if message["type"] != "http.request":
            raise BadInput("The connection closed before the body was complete. Send the request again.")
        piece = message.get("body", b"")
        arrived = loop.time()
        deadline = min(deadline + len(piece) / MIN_RATE, arrived + lag)
        yield piece
        # The client is not behind by the time that the caller took.
        deadline += loop.time() - arrived
        more = message.get("more_body", False)


async def _next_message(request: Request[Any, Any, Any], seconds: float) -> Any:
    try:
        return await call_within(seconds, _message(request))
    except TimeoutError:
        raise _too_slow() from None


async def _message(request: Request[Any, Any, Any]) -> Any:
    return await request.receive()


def announced_length(request: Request[Any, Any, Any]) -> int | None:
    """The Content-Length of the request; None for a chunked body."""
    announced = request.headers.get("content-length", "")
    return int(announced[:20]) if announced.isdecimal() else None


def _too_slow() -> BadInput:
    return BadInput("The body did not arrive in time. Send it faster, or upload the list.")


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request body is larger than {limit} bytes. Split it, or upload the list.", limit=limit)
