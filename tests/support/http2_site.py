"""A site on loopback that speaks HTTP/2 with clients that offer it in the TLS handshake, and HTTP/1.1 with others."""

import asyncio
from urllib.parse import parse_qs, urlsplit

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamEnded, StreamReset, WindowUpdated
from h2.exceptions import StreamClosedError

from tests.support.certificates import server_context
from tests.support.target_site import Site

H2 = "h2"


class Http2Site(Site):
    """Pages over HTTP/2: /ok?size=, /latin1, /reset?coding=, which ends a response in its middle, as all paths in
    `cut` do, and /refuse, which ends it before it begins. All pages of Site over HTTP/1.1."""

    def __init__(self, *protocols: str) -> None:
        super().__init__(tls=True)
        self.context = server_context(*(protocols or (H2, "http/1.1")))
        # The protocol of each connection, and the headers of each request over HTTP/2.
        self.spoken: list[str | None] = []
        self.requests: list[dict[str, str]] = []
        self.cut = {"/reset"}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        protocol = writer.get_extra_info("ssl_object").selected_alpn_protocol()
        self.spoken.append(protocol)
        if protocol != H2:
            await super().serve(reader, writer)
            return
        await _Http2Connection(self, reader, writer).serve()


def _query(path: str, name: str, default: str) -> str:
    return parse_qs(urlsplit(path).query).get(name, [default])[0]


class _Http2Connection:
    def __init__(self, site: Http2Site, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._site = site
        self._reader = reader
        self._writer = writer
        self._state = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        self._asked: dict[int, dict[str, str]] = {}
        # What is left to send of each response.
        self._bodies: dict[int, bytes] = {}

    async def serve(self) -> None:
        self._state.initiate_connection()
        await self._flush()
        while received := await self._reader.read(65536):
            for event in self._state.receive_data(received):
                match event:
                    case RequestReceived(stream_id=stream, headers=headers):
                        assert stream is not None
                        assert headers is not None
                        self._asked[stream] = {str(name): str(value) for name, value in headers}
                    case DataReceived(stream_id=stream, flow_controlled_length=length):
                        assert stream is not None
                        self._state.acknowledge_received_data(length or 0, stream)
                    case StreamEnded(stream_id=stream):
                        assert stream is not None
                        self._answer(stream)
                    case StreamReset(stream_id=stream):
                        assert stream is not None
                        self._bodies.pop(stream, None)
                    case WindowUpdated():
                        pass
            self._send_bodies()
            await self._flush()

    def _answer(self, stream: int) -> None:
        headers = self._asked[stream]
        self._site.requests.append(headers)
        target = urlsplit(headers[":path"])
        if target.path == "/refuse":
            self._state.reset_stream(stream)
            return
        size = int(_query(headers[":path"], "size", "2"))
        body = (b"ok" * size)[:size]
        fields: list[tuple[str | bytes, str | bytes]] = [(":status", "200"), ("content-type", "text/plain")]
        if target.path == "/latin1":
            fields.append(("x-name", "Zoë".encode("latin-1")))
        elif target.path in self._site.cut:
            fields.append(("content-length", str(2 * size or 100)))
            fields.append(("content-encoding", _query(headers[":path"], "coding", "identity")))
        else:
            fields.append(("content-length", str(size)))
        self._state.send_headers(stream, fields)
        self._bodies[stream] = body

    def _send_bodies(self) -> None:
        for stream, body in list(self._bodies.items()):
            try:
                self._bodies[stream] = self._send(stream, body)
            except StreamClosedError:
                self._bodies[stream] = b""
            if not self._bodies[stream]:
                del self._bodies[stream]

    def _send(self, stream: int, body: bytes) -> bytes:
        while body:
            room = min(self._state.local_flow_control_window(stream), self._state.max_outbound_frame_size)
            if room <= 0:
                return body
            self._state.send_data(stream, body[:room])
            body = body[room:]
        path = self._asked[stream][":path"]
        if urlsplit(path).path in self._site.cut:
            # By default without an error.
            self._state.reset_stream(stream, int(_query(path, "code", "0")))
        else:
            self._state.end_stream(stream)
        return b""

    async def _flush(self) -> None:
        self._writer.write(self._state.data_to_send())
        await self._writer.drain()
