"""The files of the dashboard. Read once, served from memory to GET and HEAD; every other path is the API's.

All that a page may load comes from here, and all that it may talk to is this API, or the store that its uploads go
straight to. No page has a script or a style in itself, so that nothing that came in with a name, an address or a body
can become one.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import structlog

from conveyor.engines.blobs import Blobs
from conveyor.errors import ConveyorError

log = structlog.get_logger()

PREFIX = "/dashboard/"

_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_INDEX = "index.html"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src {connect}; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'; require-trusted-types-for 'script'; trusted-types"
    " 'none'"
)
_PROBE_SECONDS = 60.0

Send = Callable[[Any], Awaitable[None]]


class StaticFile(NamedTuple):
    """A file as it is served."""

    body: bytes
    media_type: str
    etag: str


class Files:
    """An ASGI app in front of the API, which takes what is its own."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._files = _read(files("conveyor.dashboard") / "static")
        self._policy: bytes | None = None

    async def answer(self, scope: MutableMapping[str, Any], send: Send) -> bool:
        """Answer a request for one of the files. False if it is for something else."""
        file = self._files.get(scope["path"]) if scope["method"] in ("GET", "HEAD") else None
        if file is None:
            return False
        asked = next((value for name, value in scope["headers"] if name == b"if-none-match"), b"")
        fresh = asked.decode("latin-1") == file.etag
        body = b"" if fresh or scope["method"] == "HEAD" else file.body
        headers = [
            (b"content-type", file.media_type.encode()),
            (b"content-security-policy", await self._headed()),
            # Asked for again each time, and not sent again: a new version of the server is a new dashboard at once.
            (b"cache-control", b"no-cache"),
            (b"etag", file.etag.encode()),
            (b"cross-origin-opener-policy", b"same-origin"),
            (b"cross-origin-resource-policy", b"same-origin"),
        ]
        if not fresh:
            headers.append((b"content-length", str(len(file.body)).encode()))
        await send({"type": "http.response.start", "status": 304 if fresh else 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        return True

    async def _headed(self) -> bytes:
        """The policy, with the place that lists are sent to, if that is not here: as a link of the store says it."""
        if self._policy is not None:
            return self._policy
        try:
            signed = await self._blobs.presigned_put("uploads/none", 1, "0" * 64, _PROBE_SECONDS)
        except ConveyorError as error:
            log.warning("the dashboard can not upload now: the store signs no link", error=str(error))
            return _policy("'self'")
        link = urlsplit("" if signed is None else signed.url)
        self._policy = _policy("'self'" if signed is None else f"'self' {link.scheme}://{link.netloc}")
        return self._policy


def _policy(connect: str) -> bytes:
    return _POLICY.format(connect=connect).encode()


def _read(root: Traversable) -> dict[str, StaticFile]:
    """By path: everything under the root, and the first page at / too."""
    found = {PREFIX + name: _file(name, each.read_bytes()) for name, each in _walk(root, "")}
    found["/"] = found.pop(PREFIX + _INDEX)
    return found


def _walk(folder: Traversable, prefix: str) -> list[tuple[str, Traversable]]:
    found: list[tuple[str, Traversable]] = []
    for each in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if each.is_dir():
            found += _walk(each, f"{prefix}{each.name}/")
        elif "." + each.name.rpartition(".")[2] in _TYPES:
            found.append((prefix + each.name, each))
    return found


def _file(name: str, body: bytes) -> StaticFile:
    return StaticFile(body, _TYPES["." + name.rpartition(".")[2]], f'"{sha256(body).hexdigest()[:32]}"')
