"""Reading an answer. Gets a response whose body is still on the wire, hands on its parts, none larger than allowed."""

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
    """What comes before the body. `pairs` are all headers in order, `fields` the last of each name, in lower case."""

    status: int
    pairs: list[tuple[str, str]]
    fields: dict[str, str]


def read_head(response: Response) -> ResponseHead:
    """A value that is not ASCII, which the client can not read, is empty."""
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
    """Whether Content-Length promises a body within the limit. Raises Failure if it promises more.

    The client holds a body to its promise, and takes the header away from one that it decodes.
    """
    declared = head.fields.get("content-length")
    if declared is None or method == "HEAD":
        return False
    if int(declared) > limit:
        raise _too_large(limit, head.status)
    return True


async def read_declared(response: Response, head: ResponseHead, budget: BodyBudget) -> bytes:
    """A body whose length is promised, and within the limit."""
    length = int(head.fields["content-length"])
    if length <= SMALL:
        return (await response.bytes()).to_bytes()
    async with budget.taking(length):
        return (await response.bytes()).to_bytes()


async def read_counted(response: Response, limit: int, budget: BodyBudget | None = None) -> bytes:
    """The decoded body. Raises Failure as soon as it is larger than `limit`; the connection is then dropped."""
    pieces: list[Bytes] = []
    size = await _read_on(response, pieces, 0, min(limit, SMALL) if budget is not None else limit, limit)
    if budget is not None and size > SMALL:
        async with budget.taking(limit):
            await _read_on(response, pieces, size, limit, limit)
    return b"".join(pieces)


async def _read_on(response: Response, pieces: list[Bytes], size: int, pause: int, limit: int) -> int:
    """Read to the end, or until there is more than `pause`; returns how much there is."""
    reader = response.body_reader
    # read() fills a piece; read_chunk() would hand out compressed bodies in 4 KiB bits.
    while size <= pause and (piece := await reader.read(PIECE)) is not None:
        size += len(piece)
        if size > limit:
            raise _too_large(limit, response.status)
        pieces.append(piece)
    return size


def _too_large(limit: int, status: int) -> Failure:
    return Failure("body_too_large", f"the body is larger than {limit} bytes", status)


def retry_after(text: str | None, now: float) -> float | None:
    """Seconds that the target asks us to wait, by the value of Retry-After: a number of them, or a date."""
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
    """A status as a person reads it."""
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)
