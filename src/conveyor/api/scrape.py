"""The metrics port of roles that serve no API: /metrics and /healthz only."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus

from conveyor.api.edge import HEADERS, Receive, Scope, Send
from conveyor.api.metrics_route import is_metrics_token
from conveyor.api.server import Application, serve_app
from conveyor.auth.keys import bearer_token
from conveyor.errors import Unauthorized
from conveyor.settings import Settings
from conveyor.telemetry.exposition import exposition

_TEXT = "text/plain; charset=utf-8"


# The name of a role of this process that has failed for long.
FailingRole = Callable[[], str | None]


@asynccontextmanager
async def serve_metrics(settings: Settings, failing_role: FailingRole = lambda: None) -> AsyncIterator[None]:
    """Serve CONVEYOR_METRICS_PORT while the block runs; without one, do nothing. /healthz is 503 while a role fails."""
    if settings.metrics_port == 0:
        yield
        return
    stop, ready = asyncio.Event(), asyncio.Event()
    app = _application(settings, failing_role)
    serving = asyncio.create_task(
        serve_app(app, settings, settings.metrics_host, settings.metrics_port, stop, lambda _: ready.set()),
        name="scrape",
    )
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    try:
        if serving.done():
            serving.result()
        yield
    finally:
        stop.set()
        await asyncio.gather(serving, return_exceptions=True)


def _application(settings: Settings, failing_role: FailingRole) -> Application:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        status, body, media_type = _answer(settings, failing_role, scope)
        headers = {
            **HEADERS,
            b"content-type": media_type.encode(),
            b"content-length": b"%d" % len(body),
            **({b"www-authenticate": b"Bearer"} if status == HTTPStatus.UNAUTHORIZED else {}),
        }
        await send({"type": "http.response.start", "status": status, "headers": list(headers.items())})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    return answer


def _answer(settings: Settings, failing_role: FailingRole, scope: Scope) -> tuple[int, bytes, str]:
    if scope["method"] not in ("GET", "HEAD"):
        return HTTPStatus.METHOD_NOT_ALLOWED, b"", _TEXT
    if scope["path"] == "/healthz":
        failing = failing_role()
        if failing is not None:
            return HTTPStatus.SERVICE_UNAVAILABLE, f"every tick of {failing} fails\n".encode(), _TEXT
        return HTTPStatus.OK, b"ok\n", _TEXT
    if scope["path"] != "/metrics":
        return HTTPStatus.NOT_FOUND, b"", _TEXT
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    if settings.metrics_token is not None and not _is_allowed(settings, headers.get(b"authorization")):
        return HTTPStatus.UNAUTHORIZED, b"", _TEXT
    return HTTPStatus.OK, *exposition(headers.get(b"accept", ""))


def _is_allowed(settings: Settings, authorization: str | None) -> bool:
    try:
        return is_metrics_token(settings, bearer_token(authorization))
    except Unauthorized:
        return False
