"""A gateway for tests: GET /fetch?key=secret&url=URL answers with a page that names the URL.

For one URL in five, the first request gets a 503 with Retry-After.
"""

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

requested: set[str] = set()


class Gateway(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        url = query.get("url", [""])[0]
        if query.get("key") != ["secret"]:
            self.answer(401, "no key")
        elif url not in requested and sum(url.encode()) % 5 == 0:
            requested.add(url)
            self.answer(503, "busy", {"Retry-After": "0"})
        else:
            name = urlsplit(url).path.rpartition("/")[2]
            self.answer(200, f"<title>Product {name}</title><p>{url}</p>")

    def answer(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for header, value in (headers or {}).items():
            self.send_header(header, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Gateway).serve_forever()
