"""A transport that joins the writes of a response: head and body of a small one leave in one packet, by one system
call."""

import asyncio
from typing import Any

# Above this, writes go out at once: a long body must meet the flow control of its connection.
_MAX_BYTES = 16 * 1024


class JoinedWrites:
    """The transport of one connection, for uvicorn's responses. What waits is written when the response is complete, or
    else as soon as the loop has nothing better to do."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._waiting: list[bytes] = []
        self._size = 0
        self._written = 0

    @property
    def taken(self) -> int:
        """How many bytes of responses have left this process."""
        return self._written - self._transport.get_write_buffer_size()

    @property
    def untaken(self) -> int:
        """How many bytes wait for the client to read."""
        return self._transport.get_write_buffer_size()

    def write(self, data: bytes) -> None:
        if not self._waiting:
            self._loop.call_soon(self.flush)
        self._waiting.append(data)
        self._size += len(data)
        if self._size > _MAX_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if self._waiting:
            waiting, self._waiting, size, self._size = self._waiting, [], self._size, 0
            if not self._transport.is_closing():
                self._written += size
                self._transport.write(b"".join(waiting))

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
