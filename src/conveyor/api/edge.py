"""The outermost layer: adds security headers and a request id to every response, logs it and counts it."""

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import structlog

from conveyor.api.request_budget import RequestBudget, attach_reservation
from conveyor.clock import Clock
from conveyor.telemetry import metrics
from conveyor.telemetry.traces import called_by

log = structlog.get_logger()

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

# A response may override them; the dashboard and result bodies do.
HEADERS: dict[bytes, bytes] = {
    b"x-content-type-options": b"nosniff",
    b"cache-control": b"no-store",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
    b"referrer-policy": b"no-referrer",
    b"x-frame-options": b"DENY",
}
_REQUEST_ID = re.compile(rb"[0-9A-Za-z._-]{1,100}")
_QUIET = frozenset({"/healthz", "/readyz", "/metrics"})
_SHOWN = 200


def request_id(scope: Any) -> str:
    """The request id: the client's own if it is well-formed, otherwise a generated one."""
    return str(scope["state"].get("request_id", ""))


class EdgeExchange:
    """One request and its response."""

    def __init__(self, clock: Clock, budget: RequestBudget, scope: Scope, send: Send) -> None:
        self._clock = clock
        self._scope = scope
        self._send = send
        self._started = clock.monotonic()
        self._status = 0
        self._ended = False
        scope.setdefault("state", {})["request_id"] = _client_id(scope) or clock.new_id("req")
        structlog.contextvars.bind_contextvars(request_id=request_id(scope))
        called_by(_header(scope, b"traceparent").decode("latin-1"))
        self._reservation = attach_reservation(scope, budget)

    async def run(self, app: Callable[[Any, Receive, Send], Awaitable[None]], receive: Receive, stopped: bytes) -> None:
        """Run `app`. If it fails while it streams, the status is already sent, so the connection is cut. `stopped` is
        the problem for a request that an engine has not answered when the server stops."""
        try:
            await app(self._scope, receive, self.send)
        except asyncio.CancelledError:
            if self._status:
                raise
            # The server would send an error of its own, which says that Conveyor failed.
            headers = [(b"content-type", b"application/problem+json"), (b"retry-after", b"1")]
            await self.send({"type": "http.response.start", "status": 503, "headers": headers})
            await self.send({"type": "http.response.body", "body": stopped})
        except Exception:
            log.exception("response aborted", request_id=request_id(self._scope))
            if not self._status:
                raise
        finally:
            self._reservation.leave()
            self._count()
            self._log()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message["headers"] = self._with_headers(list(message.get("headers", ())))
        elif not message.get("more_body", False):
            self._ended = True
        await self._send(message)

    def _with_headers(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        present = {name.lower() for name, _ in headers}
        headers.extend((name, value) for name, value in HEADERS.items() if name not in present)
        headers.append((b"x-request-id", request_id(self._scope).encode()))
        return headers

    def _count(self) -> None:
        # Without a route, the path is arbitrary, and must not become a label.
        route = self._scope.get("path_template") or ("dashboard" if 200 <= self._status < 400 else "unmatched")
        metrics.REQUESTS.add(1, self._scope.get("method", ""), route, f"{self._status // 100}xx")
        metrics.REQUEST_SECONDS.observe(self._clock.monotonic() - self._started, route)

    def _log(self) -> None:
        # The raw path, because percent-encoding keeps line breaks and escapes out of the log; without the query,
        # because clients put keys there.
        path = self._scope.get("raw_path", b"").partition(b"?")[0].decode("ascii", "replace")[:_SHOWN]
        write = log.debug if path in _QUIET else log.info
        key = self._scope.get("auth")
        write(
            "request",
            request_id=request_id(self._scope),
            method=self._scope.get("method"),
            path=path,
            status=self._status,
            complete=self._ended,
            tenant=key.tenant if key else None,
            seconds=round(self._clock.monotonic() - self._started, 4),
        )


def _client_id(scope: Scope) -> str | None:
    header = _header(scope, b"x-request-id")
    return header.decode() if _REQUEST_ID.fullmatch(header) else None


def _header(scope: Scope, header: bytes) -> bytes:
    value: bytes = next((value for name, value in scope["headers"] if name == header), b"")
    return value
