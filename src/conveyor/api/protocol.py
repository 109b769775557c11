"""The HTTP protocol, with limits that apply before the application sees a request: the size of a head, the time that it
may take, and the time that a body may continue after its response.

httptools parses a head of any size, and uvicorn waits for it without a timeout; both would let a client without a key
occupy memory and sockets. The body of a refused request is discarded for some seconds rather than cut off at once: a
client that is still sending would get a reset instead of the response.
"""

import asyncio
from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from conveyor.api.edge import HEADERS
from conveyor.errors import ConveyorError, HeadTooLarge, MalformedHttp

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 200
HEAD_SECONDS = 20.0
LINGER_SECONDS = 5.0


class CappedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which refuses a head that is too large or too slow."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Bytes of the head that is arriving; None while none is.
        self._head: int | None = None
        self._began = False
        self._refused = False
        # The head of a request has arrived, but not yet the end of its body.
        self._incoming = False
        # Runs while a head is expected, and while a body is discarded.
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._close_after(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._began = False
        super().data_received(data)
        # A head that began in this data is counted from the next data on: the bytes before it belong to another
        # request.
        if self._head is not None and not self._began:
            self._head += len(data)
            if self._head > MAX_HEAD_BYTES:
                self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head, self._began = 0, True
        if self._timer is None:
            self._close_after(HEAD_SECONDS)

    def on_headers_complete(self) -> None:
        self._head = None
        self._unset_timer()
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self._refuse_head()
            return
        self._incoming = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._incoming = False
        self._unset_timer()
        if not self._refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._incoming and not self.transport.is_closing():
            self._close_after(LINGER_SECONDS)

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this for malformed HTTP."""
        self._refuse(MalformedHttp())

    def _refuse_head(self) -> None:
        detail = f"The head of the request is too large. Send at most {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers."
        self._refuse(HeadTooLarge(detail))

    def _refuse(self, error: ConveyorError) -> None:
        """Respond in place of the application, which has no request to answer."""
        self._refused = True
        self._unset_timer()
        if self.transport.is_closing():
            return
        status = HTTPStatus(error.status)
        problem = {"type": f"urn:conveyor:problem:{error.code}", "title": status.phrase, "status": status.value}
        body = msgspec.json.encode({**problem, "code": error.code, "detail": error.message})
        headers = {
            **HEADERS,
            b"content-type": b"application/problem+json",
            b"content-length": b"%d" % len(body),
            b"connection": b"close",
        }
        lines = [b"HTTP/1.1 %d %s" % (status.value, status.phrase.encode())]
        lines += [name + b": " + value for name, value in headers.items()]
        self.transport.write(b"\r\n".join([*lines, b"", body]))
        self.transport.close()

    def _close_after(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._close_connection)

    def _unset_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_connection(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()
