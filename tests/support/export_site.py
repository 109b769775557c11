"""An API that makes files on request, as a target site."""

import asyncio
import gzip
import json
from typing import Any

from tests.support.file_site import MIB, Behaviour, FileSite
from tests.support.target_site import Seen

SIZE = MIB + 17


class ExportSite(FileSite):
    """POST /exports makes one; GET /exports/<id> says how far it is; /files/<id>?link=<n> is the file."""

    def __init__(self, ready_after: int = 2) -> None:
        super().__init__(Behaviour(SIZE))
        self.ready_after = ready_after
        self.made: dict[str, str] = {}
        self.polls = 0
        self.calls: list[Seen] = []
        # Answers to give instead, each once: to calls, and to links.
        self.failures: list[tuple[int, str]] = []
        self.final = "done"
        self.links = 0
        # A link is good until this many bytes were sent; then a fresh one is needed.
        self.lapse: set[int] = set()
        self.idempotent = True
        self.bodies: list[Any] = []
        # Every response says 503.
        self.is_down = False
        # The links lead here.
        self.files: str | None = None
        # Encode responses to calls, although calls forbid it.
        self.encodes = False

    async def _answer(self, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        if self.is_down:
            self._head(writer, 503, "Content-Length: 0\r\n")
            return True
        if seen.path.startswith("/files/"):
            if int(seen.query("link")) in self.lapse:
                self._head(writer, 403, "Content-Length: 0\r\n")
                return True
            return await super()._answer(seen, writer)
        self.calls.append(seen)
        if self.failures:
            status, headers = self.failures.pop(0)
            self._head(writer, status, f"{headers}Content-Length: 0\r\n")
            return True
        if seen.path == "/exports":
            return self._json(writer, self._create(seen))
        self.polls += 1
        state = self.final if self.polls > self.ready_after else "working"
        self.links += 1
        path = f"/files/{seen.path.split('/')[2]}?link={self.links}"
        link = self.url(path) if self.files is None else f"{self.files}{path}"
        return self._json(writer, {"export": {"status": state, "files": [{"href": link}]}})

    def _create(self, seen: Seen) -> dict[str, Any]:
        self.bodies.append(json.loads(seen.body) if seen.body else None)
        key = seen.headers["idempotency-key"] if self.idempotent else str(len(self.calls))
        return {"data": {"id": self.made.setdefault(key, f"ex/{len(self.made) + 1}")}}

    def _json(self, writer: asyncio.StreamWriter, value: Any) -> bool:
        data = json.dumps(value).encode()
        fields = "Content-Type: application/json\r\n"
        if self.encodes:
            data = gzip.compress(data[:10]) + gzip.compress(data[10:])
            fields += "Content-Encoding: x-gzip\r\n"
        self._head(writer, 200, f"{fields}Content-Length: {len(data)}\r\n")
        writer.write(data)
        return True

    def described(self, **changed: Any) -> dict[str, Any]:
        return {
            "create": {
                "url": self.url("/exports?kind={input.kind}"),
                "headers": {"X-Task": "{task_id}"},
                "body": {"from": "{input.from}", "note": "for {input.kind}", "all": True, "days": "{input.days}"},
            },
            "id": "$.data.id",
            "status": {"url": self.url("/exports/{id}"), "headers": {"Authorization": "Bearer of the API"}},
            "state": "/export/status",
            "ready": ["done"],
            "failed": ["broken"],
            "download": "$.export.files[0].href",
            "poll": {"first": 5, "rate": 2, "cap": 60, "timeout": 1000},
            **changed,
        }
