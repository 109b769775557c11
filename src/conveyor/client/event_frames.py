"""Parse server-sent events from a stream of bytes."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import NamedTuple

from conveyor.errors import ConveyorError

MEDIA_TYPE = "text/event-stream"
# Maximum length of a line or an event.
_MAX_BYTES = 16 * 1024 * 1024


class Frame(NamedTuple):
    """One event. `retry` is how long to wait before reconnecting, in milliseconds."""

    event: str
    data: str
    id: str | None
    retry: int | None


async def frames_of(pieces: AsyncIterator[bytes]) -> AsyncGenerator[Frame, None]:
    """Yield complete frames. Comments, which keep the connection alive, are skipped."""
    fields: dict[str, str] = {}
    size = 0
    async for line in _lines(pieces):
        size += len(line)
        if size > _MAX_BYTES:
            raise ConveyorError(f"The server sent an event larger than {_MAX_BYTES:,} bytes.")
        if line:
            _add_field(line.decode(errors="replace"), fields)
            continue
        if fields:
            yield _frame(fields)
        fields, size = {}, 0


def _add_field(line: str, fields: dict[str, str]) -> None:
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
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")
        if len(rest) > _MAX_BYTES:
            raise ConveyorError(f"The server sent an event larger than {_MAX_BYTES:,} bytes.")
