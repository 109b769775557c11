"""The outermost layer: every answer, whoever makes it, leaves through here with its headers and its line in the log."""

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import structlog

from conveyor.api.request_budget import RequestBudget, hand
from conveyor.clock import Clock
from conveyor.telemetry import metrics
from conveyor.telemetry.traces import called_by

log = structlog.get_logger()

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

# An answer may set its own instead; the dashboard does, and a result body.
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
    """The client's id for the request, if it is harmless, or one of ours; set when the request arrived."""
    return str(scope["state"].get("request_id", ""))


class EdgeExchange:
    """One request and its answer, as seen from outside."""

    def __init__(self, clock: Clock, intake: RequestBudget, scope: Scope, send: Send) -> None:
        self._clock = clock
        self._scope = scope
        self._send = send
        self._started = clock.monotonic()
        self._status = 0
        self._ended = False
        scope.setdefault("state", {})["request_id"] = _given_id(scope) or clock.new_id("req")
        structlog.contextvars.bind_contextvars(request_id=request_id(scope))
        called_by(_header(scope, b"traceparent").decode("latin-1"))
        self._held = hand(scope, intake)

    async def run(self, app: Callable[[Any, Receive, Send], Awaitable[None]], receive: Receive) -> None:
        """Let `app` answer. What breaks while it streams can no longer be told: the connection is cut."""
        try:
            await app(self._scope, receive, self.send)
        except Exception:
            log.exception("answer broke off", request_id=request_id(self._scope))
            if not self._status:
                raise
        finally:
            self._held.leave()
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
        # Of a request that no route takes, the path is anybody's invention.
        route = self._scope.get("path_template") or ("dashboard" if 200 <= self._status < 400 else "unmatched")
        metrics.REQUESTS.add(1, self._scope.get("method", ""), route, f"{self._status // 100}xx")
        metrics.REQUEST_SECONDS.observe(self._clock.monotonic() - self._started, route)

    def _log(self) -> None:
        # The raw path: percent signs keep line breaks and escapes out of the log. The query is left out, since
        # people put keys there.
        path = self._scope.get("raw_path", b"").partition(b"?")[0].decode("ascii", "replace")[:_SHOWN]
        write = log.debug if path in _QUIET else log.info
        key = self._scope.get("auth")
        write(
            "request",
            request_id=request_id(self._scope),
            method=self._scope.get("method"),
            path=path,
            status=self._status,
            whole=self._ended,
            tenant=key.tenant if key else None,
            seconds=round(self._clock.monotonic() - self._started, 4),
        )


def _given_id(scope: Scope) -> str | None:
    given = _header(scope, b"x-request-id")
    return given.decode() if _REQUEST_ID.fullmatch(given) else None


def _header(scope: Scope, wanted: bytes) -> bytes:
    found: bytes = next((value for name, value in scope["headers"] if name == wanted), b"")
    return found
