"""Responses. Reads the body of a response, decoded and within limits, and the Retry-After header."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from datetime import UTC
from email.utils import parsedate_to_datetime
from http import HTTPStatus

from pyreqwest.bytes import Bytes
from pyreqwest.response import Response

from conveyor.egress.body_budget import SMALL, BodyBudget
from conveyor.egress.decoding import PIECE, BodyDecoder, codings_of
from conveyor.egress.failures import Failure
from conveyor.egress.heads import ResponseHead

_BODILESS = frozenset({HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED})


def is_small_and_plain(head: ResponseHead, method: str, limit: int) -> bool:
    """Whether the body, as nearly every one, needs no decoder and no budget: `response.bytes()` is what `read_body`
    would return, without another coroutine."""
    fields = head.fields
    length = declared_length(head)
    if length is None or "content-encoding" in fields or "transfer-encoding" in fields or method == "HEAD":
        return False
    return length <= min(SMALL, limit)


def declared_length(head: ResponseHead) -> int | None:
    """What Content-Length declares; None if there is none. The client has checked it, and enforces it over HTTP/1.1."""
    text = head.fields.get("content-length")
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        # A list of equal numbers (RFC 9112, 6.3), which the client accepts.
        first = text.partition(",")[0].strip()
        return int(first) if first.isdecimal() else None


def check_length(head: ResponseHead, method: str, size: int) -> None:
    """Raise Failure if the body, as it was sent, has another length than its head declares. Over HTTP/2 the client
    takes a response that the server ends early, without an error, for a whole one."""
    # Over HTTP/1.1 Transfer-Encoding counts, whatever length is declared beside it (RFC 9112, 6.3).
    if method == "HEAD" or head.status in _BODILESS or "transfer-encoding" in head.fields:
        return
    declared = declared_length(head)
    if declared is not None and size != declared:
        raise Failure("read_failed", f"the body has {size} bytes of {declared}", head.status)


async def read_body(
    response: Response, head: ResponseHead, method: str, limit: int, budget: BodyBudget | None = None
) -> bytes:
    """The decoded body. Raises Failure as soon as it is larger than `limit`, which closes the connection, or if it is
    not complete."""
    codings = codings_of(head)
    if codings:
        return await _read_decoded(response, head, method, codings, limit, budget)
    length = declared_length(head)
    if length is None or method == "HEAD":
        return await _read_counted(response, limit, budget)
    if length > limit:
        raise _too_large(limit, head.status)
    async with AsyncExitStack() as stack:
        if length > SMALL and budget is not None:
            await stack.enter_async_context(budget.taking(length))
        body = (await response.bytes()).to_bytes()
    check_length(head, method, len(body))
    return body


async def raw_pieces(response: Response, head: ResponseHead, method: str = "GET") -> AsyncIterator[bytes]:
    """The body as it was sent, piece by piece. Raises Failure if it is not complete."""
    size = 0
    # read() fills a piece; read_chunk() returns what one read of the socket brought.
    while (piece := await response.body_reader.read(PIECE)) is not None:
        size += len(piece)
        yield piece.to_bytes()
    check_length(head, method, size)


async def decode_pieces(pieces: AsyncIterator[bytes], codings: Sequence[str], max_bytes: int) -> AsyncIterator[bytes]:
    """The decoded body, piece by piece; the reader counts `max_bytes`. Raises Failure."""
    decoder = BodyDecoder(codings, max_bytes)
    async for encoded in pieces:
        for decoded in decoder.decode(encoded):
            if decoded:
                yield decoded
            # One piece of a body may decode to thousands.
            await asyncio.sleep(0)
    decoder.finish()


async def _read_decoded(
    response: Response, head: ResponseHead, method: str, codings: Sequence[str], limit: int, budget: BodyBudget | None
) -> bytes:
    encoded = raw_pieces(response, head, method)
    length = declared_length(head)
    if length is not None and length < PIECE:
        # Most bodies: one piece, encoded and decoded.
        sent = (await response.bytes()).to_bytes()
        check_length(head, method, len(sent))
        body = _decode_small(sent, codings, limit)
        if body is not None:
            return body
        encoded = _only_piece(sent)
    pieces: list[bytes] = []
    size = 0
    async with AsyncExitStack() as stack:
        async for piece in decode_pieces(encoded, codings, limit):
            size += len(piece)
            if size > limit:
                raise _too_large(limit, response.status)
            pieces.append(piece)
            if budget is not None and size > SMALL:
                await stack.enter_async_context(budget.taking(limit))
                budget = None
        return b"".join(pieces)


def _decode_small(sent: bytes, codings: Sequence[str], limit: int) -> bytes | None:
    """The decoded body, or None if it has more than one piece or more than `limit` bytes."""
    decoder = BodyDecoder(codings, limit)
    pieces = decoder.decode(sent)
    body = next(pieces, b"")
    if len(body) > limit or next(pieces, None) is not None:
        return None
    decoder.finish()
    return body


async def _only_piece(piece: bytes) -> AsyncIterator[bytes]:
    yield piece


async def _read_counted(response: Response, limit: int, budget: BodyBudget | None) -> bytes:
    pieces: list[Bytes] = []
    size = await _read_on(response, pieces, 0, min(limit, SMALL) if budget is not None else limit, limit)
    if budget is not None and size > SMALL:
        async with budget.taking(limit):
            await _read_on(response, pieces, size, limit, limit)
    return b"".join(pieces)


async def _read_on(response: Response, pieces: list[Bytes], size: int, pause: int, limit: int) -> int:
    """Read to the end, or until more than `pause` bytes are read; returns how many."""
    reader = response.body_reader
    while size <= pause and (piece := await reader.read(PIECE)) is not None:
        size += len(piece)
        if size > limit:
            raise _too_large(limit, response.status)
        pieces.append(piece)
    return size


def _too_large(limit: int, status: int) -> Failure:
    return Failure("body_too_large", f"the body is larger than {limit} bytes", status)


def retry_after(text: str | None, now: float) -> float | None:
    """The wait in seconds that a Retry-After header asks for, as a number or a date; None without a valid one."""
    if text is None:
        return None
    text = text.strip()
    if text.isdecimal() and text.isascii():
        return float(text[:12])
    try:
        at = parsedate_to_datetime(text)
        return max(0.0, (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - now)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def phrase(status: int) -> str:
    """A status with its phrase, such as 404 Not Found."""
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)
