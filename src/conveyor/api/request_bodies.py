"""Request bodies. Gets a request, reads its body while counting and hashing, hands back the bytes and a fingerprint.

The cap counts bytes as they arrive: a length is only a promise, and a chunked body makes none. What is over the cap
is not read here; `protocol` drops it.
"""

import asyncio
from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any, NamedTuple

from litestar import Request

from conveyor.api.request_budget import in_hand
from conveyor.errors import BadInput, BodyTooLarge, UnsupportedMediaType

# Longest silence, and longest time in all: a body that drips holds a connection and memory.
IDLE_SECONDS = 30.0
TOTAL_SECONDS = 600.0


class Body(NamedTuple):
    """A body that arrived whole. The fingerprint is over method, path and every byte of it."""

    data: bytearray
    fingerprint: str


def require_json(request: Request[Any, Any, Any]) -> None:
    """Take JSON, as it is, in UTF-8."""
    media_type, options = request.content_type
    is_json = media_type == "application/json" or (
        media_type.startswith("application/") and media_type.endswith("+json")
    )
    if not is_json or options.get("charset", "utf-8").lower() not in {"utf-8", "utf8"}:
        raise UnsupportedMediaType
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("The body must not be compressed: send it without `Content-Encoding`.")


async def read_body(
    request: Request[Any, Any, Any], limit: int, idle: float = IDLE_SECONDS, total: float = TOTAL_SECONDS
) -> Body:
    """The whole body, or BodyTooLarge as soon as it is."""
    if (announced_length(request) or 0) > limit:
        raise _too_large(limit)
    held = in_hand(request.scope)
    if held is not None:
        held.enter(announced_length(request) or 0)
    data = bytearray()
    digest = sha256(f"{request.method} {request.scope['path']}\n".encode())
    try:
        async with asyncio.timeout(total):
            async for piece in pieces(request, idle):
                if held is not None:
                    held.take(len(piece))
                digest.update(piece)
                data += piece
                if len(data) > limit:
                    raise _too_large(limit)
    except TimeoutError:
        raise _too_slow() from None
    return Body(data, digest.hexdigest())


async def pieces(request: Request[Any, Any, Any], idle: float = IDLE_SECONDS) -> AsyncIterator[bytes]:
    """The body as it arrives, however long; the caller counts."""
    more = True
    while more:
        message = await _next_message(request, idle)
        if message["type"] != "http.request":
            raise BadInput("The connection closed before the body was whole.")
        yield message.get("body", b"")
        more = message.get("more_body", False)


async def _next_message(request: Request[Any, Any, Any], idle: float) -> Any:
    try:
        async with asyncio.timeout(idle):
            return await request.receive()
    except TimeoutError:
        raise _too_slow() from None


def announced_length(request: Request[Any, Any, Any]) -> int | None:
    """The length that the client promises; None for a chunked body."""
    announced = request.headers.get("content-length", "")
    return int(announced[:20]) if announced.isdecimal() else None


def _too_slow() -> BadInput:
    return BadInput("The body did not arrive in time.")


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request body is larger than {limit} bytes.", limit=limit)
