"""Serves the static files of the dashboard from memory, its modules joined into one. Every other path belongs to the
API.

By the content security policy, pages load files only from here, and connect only to this API and to the object store
that takes uploads. Pages contain no inline scripts or styles, so that untrusted names, URLs and bodies cannot inject
any.
"""

import gzip
from collections.abc import Awaitable, Callable, MutableMapping
from functools import cached_property
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import structlog

from conveyor.dashboard.bundle import bundle
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
_MAIN = PREFIX + "main.js"
_APP = PREFIX + "app.js"
# Smaller ones fit into a packet anyway.
_LEAST_GZIP = 1400
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src {connect}; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'; require-trusted-types-for 'script'; trusted-types"
    " 'none'"
)
_PROBE_SECONDS = 60.0

Send = Callable[[Any], Awaitable[None]]


class StaticFile(NamedTuple):
    """A file, ready to serve."""

    body: bytes
    media_type: str
    etag: str
    # Empty if that is not worth it.
    gzip: bytes = b""


class Files:
    """Serves the dashboard's files in front of the API."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._policy: bytes | None = None

    @cached_property
    def _files(self) -> dict[str, StaticFile]:
        """Read and joined when the first is asked for: a process that serves no page spends no time on them."""
        return _read(files("conveyor.dashboard") / "static")

    async def answer(self, scope: MutableMapping[str, Any], send: Send) -> bool:
        """Respond to a request for a file. Returns False for any other request."""
        path = scope["path"]
        if scope["method"] not in ("GET", "HEAD") or not (path == "/" or path.startswith(PREFIX)):
            return False
        file = self._files.get(path)
        if file is None:
            return False
        sent = {name: value.decode("latin-1") for name, value in scope["headers"]}
        is_small = bool(file.gzip) and "gzip" in sent.get(b"accept-encoding", "")
        # A version of its own has a tag of its own.
        etag = f'{file.etag[:-1]}-gzip"' if is_small else file.etag
        whole = file.gzip if is_small else file.body
        fresh = sent.get(b"if-none-match") == etag
        body = b"" if fresh or scope["method"] == "HEAD" else whole
        headers = [
            (b"content-type", file.media_type.encode()),
            (b"content-security-policy", await self._policy_header()),
            # Browsers revalidate each time, so that a new server version shows its own dashboard at once.
            (b"cache-control", b"no-cache"),
            (b"etag", etag.encode()),
            (b"vary", b"accept-encoding"),
            (b"cross-origin-opener-policy", b"same-origin"),
            (b"cross-origin-resource-policy", b"same-origin"),
        ]
        if is_small and not fresh:
            headers.append((b"content-encoding", b"gzip"))
        if not fresh:
            headers.append((b"content-length", str(len(whole)).encode()))
        await send({"type": "http.response.start", "status": 304 if fresh else 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        return True

    async def _policy_header(self) -> bytes:
        """The policy, with the origin of the object store that takes uploads, if there is one."""
        if self._policy is not None:
            return self._policy
        try:
            signed = await self._blobs.presigned_put("uploads/none", 1, "0" * 64, _PROBE_SECONDS)
        except ConveyorError as error:
            log.warning("upload link not signed", error=str(error))
            return _policy("'self'")
        link = urlsplit("" if signed is None else signed.url)
        self._policy = _policy("'self'" if signed is None else f"'self' {link.scheme}://{link.netloc}")
        return self._policy


def _policy(connect: str) -> bytes:
    return _POLICY.format(connect=connect).encode()


def _read(root: Traversable) -> dict[str, StaticFile]:
    """All files under the root, by path; the index page is at /."""
    by_path = {PREFIX + name: _file(name, entry.read_bytes()) for name, entry in _walk(root, "")}
    index = by_path.pop(PREFIX + _INDEX)
    by_path["/"] = _file(_INDEX, index.body.replace(_MAIN.encode(), _APP.encode()))
    modules = {path: file.body.decode() for path, file in by_path.items() if path.endswith(".js")}
    by_path[_APP] = _file(_APP, bundle(modules, _MAIN).encode())
    return by_path


def _walk(folder: Traversable, prefix: str) -> list[tuple[str, Traversable]]:
    entries: list[tuple[str, Traversable]] = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            entries += _walk(entry, f"{prefix}{entry.name}/")
        elif "." + entry.name.rpartition(".")[2] in _TYPES:
            entries.append((prefix + entry.name, entry))
    return entries


def _file(name: str, body: bytes) -> StaticFile:
    # Pages do not ask for single modules.
    is_asked = len(body) >= _LEAST_GZIP and (name == _APP or not name.endswith(".js"))
    small = gzip.compress(body, mtime=0) if is_asked else b""
    return StaticFile(body, _TYPES["." + name.rpartition(".")[2]], f'"{sha256(body).hexdigest()[:32]}"', small)
