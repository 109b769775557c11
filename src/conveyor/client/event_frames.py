"""Server-sent events: from bytes as they come to frames."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import NamedTuple

from conveyor.errors import ConveyorError

MEDIA_TYPE = "text/event-stream"
# A line or a frame that is longer is no event.
_LONGEST = 16 * 1024 * 1024


class Frame(NamedTuple):
    """One event; without data it only says how long to wait before coming again, in milliseconds."""

    event: str
    data: str
    id: str | None
    retry: int | None


async def frames_of(pieces: AsyncIterator[bytes]) -> AsyncGenerator[Frame, None]:
    """The frames that are whole. Comments, which keep the line alive, are passed over."""
    fields: dict[str, str] = {}
    size = 0
    async for line in _lines(pieces):
        size += len(line)
        if size > _LONGEST:
            raise ConveyorError("The server sends an event without end.")
        if line:
            _take(line.decode(errors="replace"), fields)
            continue
        if fields:
            yield _frame(fields)
        fields, size = {}, 0


def _take(line: str, fields: dict[str, str]) -> None:
    name, _, value = line.partition(":")
    value = value.removeprefix(" ")
    if name == "data" and name in fields:
        fields[name] += "\n" + value
    elif name:
        fields[name] = value


def _frame(fields: dict[str, str]) -> Frame:
    retry = fields.get("retry", "")
    wait = int(retry) if retry.isascii() and retry.isdigit() else None
    return Frame(fields.get("event", "message"), fields.get("data", ""), fields.get("id"), wait)


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.removesuffix(b"\r")
        if len(rest) > _LONGEST:
            raise ConveyorError("The server sends an event without end.")
