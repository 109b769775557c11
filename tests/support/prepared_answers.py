"""A real HTTP server that gives prepared answers, in order, and keeps what it was asked; and time that only passes when
somebody waits."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from conveyor.client.io import AsyncIo, BlockingIo


@dataclass
class Said:
    """An answer to give; without a status, the connection is cut. A `length` above that of the body cuts it."""

    status: int | None = 200
    body: bytes = b"{}"
    length: int | None = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Asked:
    """A request that came. Header names are lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Server:
    """What it will say, and what it was asked."""

    url: str = ""
    answers: list[Said] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)

    @property
    def routes(self) -> list[tuple[str, str]]:
        return [(asked.method, asked.path) for asked in self.asked]


@contextmanager
def serving() -> Iterator[Server]:
    told = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            announced = int(self.headers.get("content-length", 0))
            body = self.rfile.read(announced)
            if len(body) < announced:
                self.close_connection = True
                return
            headers = {name.lower(): value for name, value in self.headers.items()}
            told.asked.append(Asked(self.command, self.path, headers, body))
            said = told.answers.pop(0)
            self.close_connection = True
            if said.status is None:
                return
            self.send_response(said.status)
            self.send_header("Connection", "close")
            for name, value in said.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(said.length if said.length is not None else len(said.body)))
            self.end_headers()
            self.wfile.write(said.body)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer

        def log_message(self, format: str, *args: object) -> None: ...

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    told.url = f"http://127.0.0.1:{httpd.server_port}"
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield told
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


class Hurried(BlockingIo):
    """Waits for nobody, and says for how long it would have."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    async def pause(self, seconds: float) -> None:
        if seconds:
            self.pauses.append(seconds)

    def monotonic(self) -> float:
        return sum(self.pauses)

    def jitter(self) -> float:
        return 1.0


class HurriedAsync(AsyncIo):
    """The same, on a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    async def pause(self, seconds: float) -> None:
        await super().pause(0)
        if seconds:
            self.pauses.append(seconds)

    def monotonic(self) -> float:
        return sum(self.pauses)
