"""The routes of the API, read from the app: a new route is in the tests of all routes by itself."""

import re
from functools import cache
from typing import Any, NamedTuple

from litestar.handlers import HTTPRouteHandler
from litestar.routes import HTTPRoute

from conveyor.api.auth import admin_guard, key_guard
from conveyor.api.dependencies import RENAMED
from conveyor.api.openapi_document import exact
from conveyor.api.router import _described, application

# Values for query parameters that hold no id, by name.
VALUES = {
    "all_tenants": "false",
    "change": "fixed",
    "created_after": "2026-01-02T03:04:05Z",
    "created_before": "2036-01-02T03:04:05Z",
    "error_code": "timeout",
    "expires": "1",
    "http_status": "200",
    "kind": "fetch",
    "limit": "2",
    "partial": "true",
    "run": "1",
    "state": "active",
    # Only a filter: jobs of a schedule of another tenant, or of none, are none.
    "schedule_id": "schedule_" + "0" * 26,
    "signature": "0" * 64,
    "status": "succeeded",
    "tag": "some",
    "tenant": "acme",
    "text": "example",
    "verify": "true",
    "with": "1",
}
REQUIRED = frozenset({"change", "text", "with"})
# Cursors that are no ids.
_CURSORS = ("1", "000000-000000000001.1", "0" * 26)


class Route(NamedTuple):
    """One method of a path. `query` has the names of its parameters."""

    method: str
    path: str
    query: tuple[str, ...]
    needs_key: bool
    needs_admin: bool
    is_endless: bool

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"


@cache
def routes() -> list[Route]:
    """All routes; deletions last, so that one system can serve them all in this order."""
    found = [
        _route(path, method, handler)
        for path in application().routes
        if isinstance(path, HTTPRoute)
        for handler in path.route_handlers
        for method in handler.http_methods - {"OPTIONS"}
    ]
    return sorted(found, key=lambda each: (each.method == "DELETE", each.path, each.method))


@cache
def document() -> dict[str, Any]:
    """The OpenAPI document."""
    return exact(_described().openapi_schema.to_schema())


def _route(path: HTTPRoute, method: str, handler: HTTPRouteHandler) -> Route:
    # Litestar wraps a guard that is not a coroutine.
    guards = [getattr(guard, "func", guard) for guard in handler.resolve_guards()]
    apart = {*path.path_parameters, *handler.resolve_dependencies(), "request", "scope"}
    query = tuple(RENAMED.get(name, name) for name in handler.parsed_fn_signature.parameters if name not in apart)
    is_endless = handler.media_type == "text/event-stream"
    return Route(method, path.path_format, query, key_guard in guards, admin_guard in guards, is_endless)


def queries(route: Route, ids: dict[str, str]) -> list[str]:
    """Query strings for a route: none, and each of its parameters by itself, with templates of `ids` where one fits."""
    required = "".join(f"&{name}={VALUES[name]}" for name in route.query if name in REQUIRED)
    single = [f"&{name}={_value(route, name, ids)}" for name in route.query if name not in REQUIRED]
    return [f"?{(required + each)[1:]}" if required + each else "" for each in ["", *single]]


def _value(route: Route, name: str, ids: dict[str, str]) -> str:
    if name != "cursor":
        return VALUES.get(name, f"{{{'task_id' if name == 'task' else name}}}")
    parameters = document()["paths"][route.path]["get"]["parameters"]
    pattern = next(each["schema"]["pattern"] for each in parameters if each["name"] == "cursor")
    fitting = [f"{{{each}}}" for each, value in ids.items() if re.fullmatch(pattern, value)]
    return [*fitting, *(value for value in _CURSORS if re.fullmatch(pattern, value))][0]
