"""GET /metrics: the metrics of this process, for an administrator's key or CONVEYOR_METRICS_TOKEN. They cover all
tenants and name none."""

import hmac
from typing import Any

from litestar import Request, Response, get
from litestar.handlers import BaseRouteHandler

from conveyor.api.auth import Connection, authenticate_key, authorization
from conveyor.api.dependencies import dependencies_of
from conveyor.auth.keys import bearer_token
from conveyor.errors import Forbidden
from conveyor.settings import Settings
from conveyor.telemetry.exposition import exposition


def is_metrics_token(settings: Settings, text: str) -> bool:
    """Whether `text` is CONVEYOR_METRICS_TOKEN."""
    token = settings.metrics_token
    return token is not None and hmac.compare_digest(text.encode(), token.encode())


async def _guard(connection: Connection, _: BaseRouteHandler) -> None:
    """Require an administrator's key or the metrics token; a dashboard session is not enough."""
    dependencies = dependencies_of(connection.scope)
    text = bearer_token(authorization(connection))
    if is_metrics_token(dependencies.system.settings, text):
        return
    key = await authenticate_key(connection, text)
    if not key.admin:
        raise Forbidden
    connection.scope["auth"] = key


@get(
    "/metrics",
    guards=[_guard],
    summary="Scrape metrics",
    security=[{"key": []}],
    media_type="text/plain",
)
async def show_metrics(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Metrics of this process in the format of Prometheus. Each process has its own."""
    body, media_type = exposition(request.headers.get("accept", ""))
    return Response(body, media_type=media_type)
