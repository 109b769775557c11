"""The HTTP protocol, with limits that apply before the application sees a request: the number of connections, the size
of a head, the time that it may take, the framing of a body, and the time that a body may continue after its response.

httptools parses a head of any size, and uvicorn waits for it without a timeout; both would let a client without a key
occupy memory and sockets. So the parser gets its bytes in pieces: the lines of a head, then what `framing` allows of a
body, and nothing of the next request before this one has its response. The body of a refused request is discarded for
some seconds rather than cut off at once: a client that is still sending would get a reset instead of the response.
"""

import asyncio
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from conveyor.api.addressing import Addressing
from conveyor.api.connection_limit import SPARE_HEAD_SECONDS, ConnectionLimit, overloaded
from conveyor.api.edge import HEADERS
from conveyor.api.framing import BodyFraming, framing_of
from conveyor.api.joined_writes import JoinedWrites
from conveyor.errors import BadInput, ConveyorError, HeadTooLarge, MalformedHttp, Overloaded

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 200
HEAD_SECONDS = 20.0
LINGER_SECONDS = 5.0
LINGER_BYTES = 1024 * 1024
# A client has to read all that waits for it, or at least UNREAD_BYTES, within UNREAD_SECONDS.
UNREAD_SECONDS = 60.0
UNREAD_BYTES = 60 * 1024

_HEAD_END = b"\r\n\r\n"


class CappedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which refuses a head that is too large or too slow."""

    def __init__(self, addressing: Addressing, limit: ConnectionLimit, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._addressing = addressing
        self._limit = limit
        # It is above the limit of connections, and answers health checks only.
        self._is_spare = False
        # Bytes of the head that is arriving.
        self._head_bytes = 0
        # Of the body that is arriving; None between a body and the next head's end.
        self._framing: BodyFraming | None = None
        # Bytes behind a request that has no response yet.
        self._unread = b""
        # A head that offered an upgrade, without the offer.
        self._declined = b""
        self._refused = False
        # Bytes that arrived after the refusal.
        self._discarded = 0
        # Runs while a head is expected, and while a body is discarded.
        self._timer: asyncio.TimerHandle | None = None
        # Bytes of responses that the client has to have taken at the next look.
        self._due = 0
        self._looks: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._writes: Any = JoinedWrites(transport, self.loop)
        self._limit.open += 1
        self._is_spare = self._limit.is_reached
        if self._limit.is_exceeded:
            overloaded()
            self._refused = True
            transport.abort()
            return
        self._close_after(SPARE_HEAD_SECONDS if self._is_spare else HEAD_SECONDS)
        self._look_at_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit.open -= 1
        self._unset_timer()
        if self._looks is not None:
            self._looks.cancel()
        self._limit.end_waiting(self)
        super().connection_lost(exc)

    @property
    def unread_bytes(self) -> int:
        count: int = self._writes.untaken
        return count

    def cut_off(self) -> None:
        self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit.begin_waiting(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._limit.end_waiting(self)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._discarded += len(data)
            if self._discarded > LINGER_BYTES:
                self._close_connection()
            return
        self._unread += data
        self._parse_unread()

    def _parse_unread(self) -> None:
        data, self._unread = self._unread, b""
        start = 0
        while start < len(data) and not self._refused and not self.transport.is_closing():
            if self._framing is None and self._is_answering():
                # Reading goes on after the response. A queue of parsed requests would take many times these bytes.
                self._unread = data[start:]
                self.flow.pause_reading()
                return
            end = self._head_end(data, start) if self._framing is None else self._body_end(self._framing, data, start)
            if not self._refused:
                super().data_received(data[start:end])
                self._decline_upgrade()
            start = end

    def _is_answering(self) -> bool:
        # uvicorn declares it otherwise.
        return self.cycle is not None and not self.cycle.response_complete  # type: ignore[redundant-expr]

    def _head_end(self, data: bytes, start: int) -> int:
        """The end of a head that is all there, or else of the next line: a head ends with a line, so what follows it is
        never part of the piece."""
        whole = _whole_head(data, start) if self._head_bytes == 0 else 0
        end = whole or data.find(b"\n", start) + 1 or len(data)
        self._head_bytes += end - start
        if self._timer is None:
            self._close_after(HEAD_SECONDS)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        return end

    def _body_end(self, framing: BodyFraming, data: bytes, start: int) -> int:
        try:
            end = framing.piece_end(data, start)
        except MalformedHttp as error:
            self._refuse(error)
            return len(data)
        if end == start:
            # The parser expects more of this body.
            self._refuse(MalformedHttp())
        return end

    def _decline_upgrade(self) -> None:
        """Parse a head that offers an upgrade again without the offer: behind one, the parser takes the body for
        another request."""
        head, self._declined = self._declined, b""
        if head:
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            super().data_received(head)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._declined = _without_upgrade(self.parser, self.url, self.headers)
            return
        self._head_bytes = 0
        self._unset_timer()
        if len(self.headers) > MAX_HEADERS:
            self._refuse_head()
            return
        try:
            self._addressing.check(self.parser.get_http_version(), self.url, self.scope)
            if self._is_spare:
                self._limit.check(self.url)
        except (BadInput, Overloaded) as error:
            self._refuse(error)
            return
        super().on_headers_complete()
        self.cycle.transport = self._writes
        if self._is_spare:
            self.cycle.keep_alive = False
        self._framing = framing_of(self.headers)

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._declined:
            return
        self._framing = None
        self._unset_timer()
        if not self._refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._writes.flush()
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._framing is not None:
            self._close_after(LINGER_SECONDS)
        if self._unread:
            self._parse_unread()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this for malformed HTTP."""
        self._refuse(MalformedHttp())

    def _refuse_head(self) -> None:
        detail = f"The head of the request is too large. Send at most {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers."
        self._refuse(HeadTooLarge(detail))

    def _refuse(self, error: ConveyorError) -> None:
        """Respond in place of the application, unless it has begun to; then the connection ends with its response."""
        self._refused = True
        self._unset_timer()
        if self.transport.is_closing():
            return
        # Between two requests, the cycle is that of the first, which has its response.
        if self._framing is None or not self.cycle.response_started:
            self._writes.write(_refusal(error))
            self._writes.flush()
        elif not self.cycle.response_complete:
            self.cycle.keep_alive = False
            return
        if self._is_answering():
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write_eof()
        self.flow.resume_reading()
        self._close_after(LINGER_SECONDS)

    def _close_after(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._close_connection)

    def _look_at_reader(self) -> None:
        """Abort the connection if the client does not read: a response that waits keeps its memory and its place, also
        when the connection is closing. Look again later."""
        if self._writes.taken < self._due:
            self.transport.abort()
            return
        self._due = self._writes.taken + min(self._writes.untaken, UNREAD_BYTES)
        self._looks = self.loop.call_later(UNREAD_SECONDS, self._look_at_reader)

    def _unset_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_connection(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()


def _whole_head(data: bytes, start: int) -> int:
    """The end of a head that begins here; 0 if it is not among these bytes, or a line ends in a way of its own, behind
    which the parser might see another end."""
    end = data.find(_HEAD_END, start) + len(_HEAD_END)
    if end < len(_HEAD_END) or data.count(b"\n", start, end) != data.count(b"\r\n", start, end):
        return 0
    return end


def _without_upgrade(parser: Any, url: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    start = b"%b %b HTTP/%b" % (parser.get_method(), url, parser.get_http_version().encode())
    lines = [name + b": " + value for name, value in headers if name != b"upgrade"]
    return b"\r\n".join([start, *lines, b"", b""])


def _refusal(error: ConveyorError) -> bytes:
    """The whole response to a request that does not reach the application."""
    status = HTTPStatus(error.status)
    problem = {"type": f"urn:conveyor:problem:{error.code}", "title": status.phrase, "status": status.value}
    body = msgspec.json.encode({**problem, "code": error.code, "detail": error.message})
    headers = {
        **HEADERS,
        b"content-type": b"application/problem+json",
        b"content-length": b"%d" % len(body),
        b"connection": b"close",
    }
    if "retry_after" in error.details:
        headers[b"retry-after"] = b"%d" % error.details["retry_after"]
    lines = [b"HTTP/1.1 %d %s" % (status.value, status.phrase.encode())]
    lines += [name + b": " + value for name, value in headers.items()]
    return b"\r\n".join([*lines, b"", body])
