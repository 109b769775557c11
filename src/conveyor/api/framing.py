"""The framing of request bodies: where a body ends, and which bytes of a chunked one are its own.

The HTTP parser hands the trailers of a chunked body over as headers, without a limit, and skips chunk extensions of any
length. So the lines between chunks are checked here, before the parser gets them: each is a size and nothing else, and
no trailer follows the last one.
"""

import re
from typing import Protocol

from conveyor.errors import MalformedHttp

# Sixteen digits and a line break.
_MAX_LINE = 18
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})\r\n")
_END = b"\r\n"


class BodyFraming(Protocol):
    """Follows one body through the pieces in which it arrives."""

    def piece_end(self, data: bytes, start: int) -> int:
        """The end of the next piece of the body in `data`; `start` if the body is complete. Raises MalformedHttp."""


class LengthFraming:
    """A body whose length was announced."""

    def __init__(self, length: int) -> None:
        self._left = length

    def piece_end(self, data: bytes, start: int) -> int:
        end = min(len(data), start + self._left)
        self._left -= end - start
        return end


class ChunkedFraming:
    """A chunked body."""

    def __init__(self) -> None:
        self._line = b""
        # Bytes of the current chunk that have not arrived, with its line break.
        self._left = 0
        self._is_last = False

    def piece_end(self, data: bytes, start: int) -> int:
        if self._left:
            end = min(len(data), start + self._left)
            self._left -= end - start
            return end
        end = data.find(b"\n", start) + 1 or len(data)
        self._line += data[start:end]
        if len(self._line) > _MAX_LINE or self._line.endswith(b"\n"):
            self._read_line()
        return end

    def _read_line(self) -> None:
        line, self._line = self._line, b""
        if self._is_last:
            if line != _END:
                raise MalformedHttp("The chunked body has trailers. Send all headers before the body.")
            return
        size = _SIZE.fullmatch(line)
        if size is None:
            wrong = "a chunk with an extension" if b";" in line else "a chunk with an invalid size"
            raise MalformedHttp(f"The chunked body has {wrong}. Send each size as hexadecimal digits alone.")
        self._is_last = int(size[1], 16) == 0
        self._left = 0 if self._is_last else int(size[1], 16) + len(_END)


def framing_of(headers: list[tuple[bytes, bytes]]) -> BodyFraming:
    """The framing of the body behind these headers, whose names are in lower case."""
    for name, value in headers:
        if name == b"transfer-encoding":
            return ChunkedFraming()
        if name == b"content-length":
            return LengthFraming(int(value))
    return LengthFraming(0)
