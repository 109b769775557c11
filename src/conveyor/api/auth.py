"""Who asks. A guard before every route under /v1: no key, no answer; and the tenant is the key's, whatever is asked."""

from typing import Any

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.types import Guard

from conveyor.clock import Clock
from conveyor.errors import Forbidden, InvalidKey
from conveyor.keys import KeySource, authenticate, bearer
from conveyor.model import ApiKey, TenantId


def key_guard(source: KeySource, clock: Clock) -> Guard:
    """A guard that lets a request pass with a key that may be used now."""

    async def guard(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        given = connection.headers.getall("authorization", [])
        if len(given) > 1:
            # Which of them counts would be a guess, and someone before us may guess differently.
            raise InvalidKey("More than one Authorization header was given.")
        connection.scope["auth"] = await authenticate(source, clock, bearer(given[0] if given else None))

    return guard


def admin_guard(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    """Behind the guard for keys: lets only an administrator's pass."""
    if not connection.scope["auth"].admin:
        raise Forbidden


def tenant_of(request: Request[Any, ApiKey, Any]) -> TenantId:
    """The tenant, once the guard has let the request pass."""
    return request.auth.tenant
