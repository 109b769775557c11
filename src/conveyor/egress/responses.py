"""Responses. Reads the head and the body of a response, within limits, and the Retry-After header."""

from datetime import UTC
from email.utils import parsedate_to_datetime
from http import HTTPStatus

import msgspec
from pyreqwest.bytes import Bytes
from pyreqwest.response import Response

from conveyor.egress.body_budget import SMALL, BodyBudget
from conveyor.egress.failures import Failure

PIECE = 256 * 1024


class ResponseHead(msgspec.Struct, frozen=True, gc=False):
    """Status and headers. `pairs` are all headers in order, `fields` the last of each name, in lower case."""

    status: int
    pairs: list[tuple[str, str]]
    fields: dict[str, str]


def read_head(response: Response) -> ResponseHead:
    """The head of a response. A header that is not ASCII, which the client cannot read, is empty."""
    try:
        pairs = list(response.headers.items())
    except ValueError:
        names = dict.fromkeys(response.headers.keys())
        pairs = [(name, value) for name in names for value in _values(response, name)]
    return ResponseHead(response.status, pairs, dict(pairs))


def _values(response: Response, name: str) -> list[str]:
    try:
        return response.get_header_all(name)
    except ValueError:
        return [""]


def declares_at_most(head: ResponseHead, method: str, limit: int) -> bool:
    """Whether Content-Length declares a body within the limit. Raises Failure if it declares more.

    The client enforces the declared length, and removes the header from a body that it decodes.
    """
    declared = head.fields.get("content-length")
    if declared is None or method == "HEAD":
        return False
    if int(declared) > limit:
        raise _too_large(limit, head.status)
    return True


async def read_declared(response: Response, head: ResponseHead, budget: BodyBudget) -> bytes:
    """A body whose declared length is within the limit."""
    length = int(head.fields["content-length"])
    if length <= SMALL:
        return (await response.bytes()).to_bytes()
    async with budget.taking(length):
        return (await response.bytes()).to_bytes()


async def read_counted(response: Response, limit: int, budget: BodyBudget | None = None) -> bytes:
    """The decoded body. Raises Failure as soon as it is larger than `limit`, which closes the connection."""
    pieces: list[Bytes] = []
    size = await _read_on(response, pieces, 0, min(limit, SMALL) if budget is not None else limit, limit)
    if budget is not None and size > SMALL:
        async with budget.taking(limit):
            await _read_on(response, pieces, size, limit, limit)
    return b"".join(pieces)


async def _read_on(response: Response, pieces: list[Bytes], size: int, pause: int, limit: int) -> int:
    """Read to the end, or until more than `pause` bytes are read; returns how many."""
    reader = response.body_reader
    # read() fills a piece; read_chunk() would return decompressed bodies in pieces of 4 KiB.
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
