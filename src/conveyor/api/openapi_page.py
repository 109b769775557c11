"""The OpenAPI description of the routes, for people and for client generators. It needs no key: it holds no tenant's
data."""

from collections.abc import Callable
from functools import cache

from litestar import Litestar, Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import OpenAPIConfig
from litestar.openapi.spec import Components, SecurityScheme
from litestar.serialization import encode_json

from conveyor import __version__
from conveyor.api.openapi_document import exact

OPENAPI = OpenAPIConfig(
    title="Conveyor",
    version=__version__,
    components=Components(security_schemes={"key": SecurityScheme(type="http", scheme="bearer")}),
    use_handler_docstrings=True,
)


def openapi_route(described: Callable[[], Litestar]) -> HTTPRouteHandler:
    """The route that serves the description of `described`, which is built on the first request."""

    @cache
    def text() -> bytes:
        return encode_json(exact(described().openapi_schema.to_schema()))

    @get("/v1/openapi.json", include_in_schema=False, sync_to_thread=True)
    def openapi() -> Response[bytes]:
        return Response(text(), media_type="application/json")

    return openapi
