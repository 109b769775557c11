"""Who asks. A guard before every route under /v1: no key and no session, no answer; and the tenant is that of the key,
whatever is asked.

A browser sends its cookie with whatever a page makes it send. So a request that counts by its cookie must come from
the dashboard's own pages: browsers say where from (`Sec-Fetch-Site`, `Origin`), and a change must carry a header that
no other site can send, because nobody here would allow it to.
"""

from typing import Any
from urllib.parse import urlsplit

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from conveyor.api.dependencies import parts_of
from conveyor.auth.keys import authenticate, bearer
from conveyor.errors import CrossSite, Forbidden, InvalidKey
from conveyor.model import ApiKey, TenantId

# Any value will do.
PROOF_HEADER = "x-conveyor-dashboard"

Connection = ASGIConnection[Any, Any, Any, Any]

_READS = frozenset({"GET", "HEAD"})


async def key_guard(connection: Connection, _: BaseRouteHandler) -> None:
    """Lets a request pass with a key that may be used now, or with the cookie of a session."""
    parts = parts_of(connection.scope)
    given = authorization(connection)
    session = None if given else session_of(connection)
    if session is None:
        connection.scope["auth"] = await authenticate(parts.keys, parts.system.clock, bearer(given))
        return
    check_site(connection)
    connection.scope["auth"] = await parts.sessions.authenticate(session)
    connection.scope["state"]["session"] = session


def authorization(connection: Connection) -> str | None:
    """The header of that name. Raises InvalidKey if there are several."""
    given = connection.headers.getall("authorization", [])
    if len(given) > 1:
        # Which of them counts would be a guess, and someone before us may guess differently.
        raise InvalidKey("More than one Authorization header was given.")
    return given[0] if given else None


def admin_guard(connection: Connection, _: BaseRouteHandler) -> None:
    """Behind the guard for keys: lets only an administrator's pass."""
    if not connection.scope["auth"].admin:
        raise Forbidden


def tenant_of(request: Request[Any, ApiKey, Any]) -> TenantId:
    """The tenant, once the guard has let the request pass."""
    return request.auth.tenant


def session_of(connection: Connection) -> str | None:
    """The token of the session that a browser shows."""
    return connection.cookies.get(cookie_name(connection))


def cookie_name(connection: Connection) -> str:
    """Cookies of one host are shared by all its ports: servers beside each other need names of their own."""
    port = _port(connection.headers.get("host", ""))
    return "conveyor_session" if port is None else f"conveyor_session_{port}"


def check_site(connection: Connection) -> None:
    """Raise CrossSite unless the request comes from a page of this very origin; a read may be the user's own, too."""
    scope: Any = connection.scope
    reads = scope["method"] in _READS
    site = connection.headers.get("sec-fetch-site", "same-origin")
    origin = connection.headers.get("origin")
    if site not in ("same-origin", "none") or (site == "none" and not reads):
        raise CrossSite
    if origin is not None and urlsplit(origin).netloc != connection.headers.get("host"):
        raise CrossSite
    if not reads and PROOF_HEADER not in connection.headers:
        raise CrossSite(f"A change in a session must carry the header `{PROOF_HEADER}`.")


def _port(host: str) -> int | None:
    try:
        return urlsplit(f"//{host}").port
    except ValueError:
        return None
