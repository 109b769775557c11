"""HTTP on the wire, with caps before there is a request: how long a head may be, and how long it may take.

httptools parses a head of any size and uvicorn waits for it for ever; both are ways to hold memory and sockets
without a key.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 200
HEAD_SECONDS = 20.0

_REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: application/problem+json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
)
_PROBLEM = (
    b'{"type":"urn:conveyor:problem:head_too_large","title":"Request Header Fields Too Large","status":431,'
    b'"code":"head_too_large","detail":"The request line and headers are too large."}'
)


class CappedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which gives up on a head that is too large or too slow."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Bytes of the head that is arriving; None while a body is, or nothing.
        self._head: int | None = None
        self._refused = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if self._head is not None:
            self._head += len(data)
            if self._head > MAX_HEAD_BYTES:
                self._refuse()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head = 0
        if self._timer is None:
            self._expect_head()

    def on_headers_complete(self) -> None:
        self._head = None
        self._unset_timer()
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self._refuse()
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            super().on_message_complete()

    def _expect_head(self) -> None:
        self._timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _unset_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def _refuse(self) -> None:
        self._refused = True
        self._unset_timer()
        if not self.transport.is_closing():
            self.transport.write(_REFUSAL % (len(_PROBLEM), _PROBLEM))
            self.transport.close()
