"""An export API for tests. An export is ready at the third poll.

POST /exports {"month": "2026-10"}    {"export": {"id": "exp_1"}}
GET  /exports/exp_1                   {"export": {"state": "working"}}, then {"state": "done", "link": …}
GET  /files/exp_1.csv                 the file
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ROWS = 20_000
# By Idempotency-Key: a repeated request returns the same export.
exports: dict[str, str] = {}
months: dict[str, str] = {}
polls: dict[str, int] = {}


class ExportApi(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        export_id = exports.setdefault(self.headers["Idempotency-Key"], f"exp_{len(exports) + 1}")
        months[export_id] = request["month"]
        self.answer(201, {"export": {"id": export_id}})

    def do_GET(self) -> None:
        kind, name = self.path.strip("/").split("/")
        if kind == "files":
            self.send_file(months[name.removesuffix(".csv")])
        elif self.headers["Authorization"] != "Bearer secret":
            self.answer(401, {"error": "no key"})
        else:
            polls[name] = polls.get(name, 0) + 1
            link = f"http://{self.headers['Host']}/files/{name}.csv"
            done = {"state": "done", "link": link}
            self.answer(200, {"export": done if polls[name] >= 3 else {"state": "working"}})

    def send_file(self, month: str) -> None:
        body = "".join(["day,orders\n", *(f"{month}-{row % 28 + 1:02},{row}\n" for row in range(ROWS))]).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/csv")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{month}"')
        self.end_headers()
        self.wfile.write(body)

    def answer(self, status: int, document: Any) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), ExportApi).serve_forever()
