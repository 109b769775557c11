"""HTTP on the wire, with caps where there is no request for the application to see: how long a head may be, how long
it may take, and how long a body may go on that was answered already.

httptools parses a head of any size and uvicorn waits for it for ever; both are ways to hold memory and sockets
without a key. A refused body is dropped for some seconds rather than cut off at once: a client that is still sending
would get a reset instead of the answer that tells it why.
"""

import asyncio
from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from conveyor.api.edge import HEADERS

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 200
HEAD_SECONDS = 20.0
LINGER_SECONDS = 5.0


class CappedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which gives up on a head that is too large or too slow."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Bytes of the head that is arriving; None while a body is, or nothing.
        self._head: int | None = None
        self._began = False
        self._refused = False
        # A request's head has come, and not yet the end of its body.
        self._incoming = False
        # Runs while a head is expected, and while a body is dropped.
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
        # A head that began in this data is counted from the next on: what stood before it is not its own.
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
        """What uvicorn calls for bytes that are no HTTP."""
        self._refuse(HTTPStatus.BAD_REQUEST, "malformed_http", "The bytes on this connection are not valid HTTP.")

    def _refuse_head(self) -> None:
        detail = f"The request line and headers are larger than {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers."
        self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "head_too_large", detail)

    def _refuse(self, status: HTTPStatus, code: str, detail: str) -> None:
        """There is no request that the application could answer."""
        self._refused = True
        self._unset_timer()
        if self.transport.is_closing():
            return
        problem = {"type": f"urn:conveyor:problem:{code}", "title": status.phrase, "status": status.value}
        body = msgspec.json.encode({**problem, "code": code, "detail": detail})
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
        self._timer = self.loop.call_later(seconds, self._give_up)

    def _unset_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()
