"""Authentication. A guard in front of every route under /v1 requires a key or a session; the tenant is the key's.

A browser sends its cookie with every request, also with those that another site triggers. So a request that
authenticates by cookie must come from the dashboard's own pages: the browser names the origin (`Sec-Fetch-Site`,
`Origin`), and a change must carry a header that other sites cannot send, because this server allows no CORS.
"""

from typing import Any
from urllib.parse import urlsplit

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from conveyor.api.dependencies import dependencies_of
from conveyor.auth.keys import authenticate, bearer_token
from conveyor.errors import CrossSite, Forbidden, InvalidKey, Unauthorized
from conveyor.model import ApiKey, TenantId

# Any value is accepted.
PROOF_HEADER = "x-conveyor-dashboard"

Connection = ASGIConnection[Any, Any, Any, Any]

_READS = frozenset({"GET", "HEAD"})


async def key_guard(connection: Connection, _: BaseRouteHandler) -> None:
    """Accept a request with a valid key, or with the cookie of a session."""
    await authenticate_request(connection)


async def authenticate_request(connection: Connection) -> None:
    """Note whose request this is. Raises Unauthorized."""
    connection.scope["auth"] = await _key_of(connection)
    if not authorization(connection):
        connection.scope["state"]["session"] = session_of(connection)


async def is_still_allowed(connection: Connection) -> bool:
    """Whether the key or the session of an accepted request is still valid: a stream may outlive it."""
    try:
        await _key_of(connection)
    except Unauthorized:
        return False
    return True


async def _key_of(connection: Connection) -> ApiKey:
    dependencies = dependencies_of(connection.scope)
    header = authorization(connection)
    session = None if header else session_of(connection)
    if session is None:
        return await authenticate_key(connection, bearer_token(header))
    check_site(connection)
    return await dependencies.sessions.authenticate(session)


async def authenticate_key(connection: Connection, text: str) -> ApiKey:
    """The key for this text. Raises InvalidKey, and TooManyFailedKeys if the client presented too many invalid ones."""
    dependencies = dependencies_of(connection.scope)
    failed_keys, address = dependencies.failed_keys, client_address(connection)
    failed_keys.check(address, text)
    try:
        key = await authenticate(dependencies.keys, dependencies.system.clock, text)
    except InvalidKey:
        failed_keys.failed(address)
        raise
    failed_keys.succeeded(text)
    return key


def client_address(connection: Connection) -> str:
    """The address that the request came from."""
    client = connection.scope["client"]
    return client[0] if client else ""


def authorization(connection: Connection) -> str | None:
    """The Authorization header. Raises InvalidKey if there are several."""
    headers = connection.headers.getall("authorization", [])
    if len(headers) > 1:
        # A proxy in front of us may pick another one than we would.
        raise InvalidKey("The request has more than one Authorization header. Send exactly one.")
    return headers[0] if headers else None


def admin_guard(connection: Connection, _: BaseRouteHandler) -> None:
    """Runs after the key guard: accepts only an administrator's key."""
    if not connection.scope["auth"].admin:
        raise Forbidden


def tenant_of(request: Request[Any, ApiKey, Any]) -> TenantId:
    """The tenant of a request that passed the guard."""
    return request.auth.tenant


def session_of(connection: Connection) -> str | None:
    """The session token in the request's cookie."""
    return connection.cookies.get(cookie_name(connection))


def cookie_name(connection: Connection) -> str:
    """All ports of a host share cookies, so the name contains the port."""
    port = _port(connection.headers.get("host", ""))
    return "conveyor_session" if port is None else f"conveyor_session_{port}"


def check_site(connection: Connection) -> None:
    """Raise CrossSite unless the request comes from a page of this origin. A read may also come from the address
    bar."""
    scope: Any = connection.scope
    reads = scope["method"] in _READS
    site = connection.headers.get("sec-fetch-site", "same-origin")
    origin = connection.headers.get("origin")
    if site not in ("same-origin", "none") or (site == "none" and not reads):
        raise CrossSite
    if origin is not None and _authority(origin) != connection.headers.get("host"):
        raise CrossSite
    if not reads and PROOF_HEADER not in connection.headers:
        raise CrossSite(f"A change by session cookie requires a header. Send `{PROOF_HEADER}`.")


def _authority(origin: str) -> str | None:
    """Host and port of an origin; None if it is not a URL."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _port(host: str) -> int | None:
    try:
        return urlsplit(f"//{host}").port
    except ValueError:
        return None
