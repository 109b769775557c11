"""Reading an answer. Gets a response whose body is still on the wire, hands on its parts, none larger than allowed."""

from datetime import UTC
from email.utils import parsedate_to_datetime
from http import HTTPStatus

from pyreqwest.response import Response

from conveyor.process.executors.failures import Failure
from conveyor.process.executors.redirects import BadRedirect

PIECE = 256 * 1024


async def read_body(response: Response, method: str, limit: int) -> bytes:
    """The decoded body. Raises Failure once it is known to be larger than `limit`; the connection is then dropped."""
    declared = header(response, "content-length")
    if declared is None or method == "HEAD":
        return await _read_counted(response, limit)
    # The client takes the header away from a body that it decodes, and holds one that it does not to its word.
    if int(declared) > limit:
        raise too_large(response, limit)
    return (await response.bytes()).to_bytes()


async def _read_counted(response: Response, limit: int) -> bytes:
    pieces = []
    size = 0
    reader = response.body_reader
    # read() fills a piece; read_chunk() would hand out compressed bodies in 4 KiB bits.
    while (piece := await reader.read(PIECE)) is not None:
        size += len(piece)
        if size > limit:
            raise too_large(response, limit)
        pieces.append(piece)
    return pieces[0].to_bytes() if len(pieces) == 1 else b"".join(pieces)


def too_large(response: Response, limit: int) -> Failure:
    return Failure("body_too_large", f"the body is larger than {limit} bytes", response.status)


def header(response: Response, name: str) -> str | None:
    """The first value of a header; None also for one that the client can not read, because it is not ASCII."""
    try:
        return response.get_header(name)
    except ValueError:
        return None


def headers(response: Response) -> list[tuple[str, str]]:
    """All headers in order. Names whose values are not ASCII are kept with an empty value."""
    try:
        return list(response.headers.items())
    except ValueError:
        names = dict.fromkeys(response.headers.keys())
        return [(name, value) for name in names for value in _values(response, name)]


def _values(response: Response, name: str) -> list[str]:
    try:
        return response.get_header_all(name)
    except ValueError:
        return [""]


def location(response: Response) -> str | None:
    """Where a redirect leads. Raises BadRedirect for a Location that the client can not read."""
    try:
        return response.get_header("location")
    except ValueError:
        raise BadRedirect("the Location of the redirect is not ASCII") from None


def retry_after(response: Response, now: float) -> float | None:
    """Seconds that the target asks us to wait: a number of them, or a date."""
    text = header(response, "retry-after")
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
