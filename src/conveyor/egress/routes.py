"""Routes: direct, through a proxy, or through an API gateway. A route gets the next request, lets the guard check its
target, and returns the client and the URL to send it to."""

from collections.abc import Hashable
from typing import Protocol
from urllib.parse import quote, unquote

import msgspec
from pyreqwest.client import Client
from pyreqwest.http import Url

from conveyor.egress import clients
from conveyor.egress.clients import Clients, ModeClients, Pin, TlsMode
from conveyor.egress.failures import PROXY_CREDENTIALS, Failure
from conveyor.egress.redirects import OutgoingRequest
from conveyor.egress.target_guard import TargetGuard, ip_literal
from conveyor.model import Gateway, Options, PooledGateway

# The only scheme of SOCKS that has the proxy resolve names: with socks5:// this machine would, past the guard.
SOCKS = "socks5h"
_CREDENTIALS_REQUIRED = 407

_SOCKS_PORT = 1080


def is_socks(proxy: str) -> bool:
    """Whether this is the URL of a SOCKS proxy."""
    return proxy.lower().startswith(f"{SOCKS}:")


def parse_proxy(proxy: str) -> Url:
    """The URL of a proxy; of a SOCKS proxy with the scheme http. The parser leaves hosts as they are (LOCALHOST, 127.1)
    behind schemes that it does not know, and the guard would check another name than the client connects to. Raises
    ValueError."""
    if not is_socks(proxy):
        return Url(proxy)
    url = Url(f"http{proxy[len(SOCKS) :]}")
    # Port 80 is that of http, which the parser leaves out.
    return url.with_port(Url(proxy).port or _SOCKS_PORT)


def _socks_address(parsed: Url) -> str:
    password = "" if parsed.password is None else f":{parsed.password}"
    user = f"{parsed.username}{password}@" if parsed.username or password else ""
    return f"{SOCKS}://{user}{parsed.host_str}:{parsed.port_or_known_default}"


class Hop(msgspec.Struct, frozen=True, gc=False):
    """Where to send one request, and which headers to add."""

    client: Client
    url: Url
    headers: tuple[tuple[str, str], ...] = ()
    pinned: tuple[str, str] | None = None


class Route(Protocol):
    """How the requests of a job reach their targets."""

    # Codes of failures (failures.py) that are the gateway's, because the request connects to it.
    gateway_codes: frozenset[str]
    # Routes with the same scope reach the same sites in the same way.
    scope: Hashable

    def check_status(self, request: OutgoingRequest, status: int) -> None:
        """Raise Failure if the answer is not the target's, but that of a proxy which wants other credentials."""

    def unwrap(self, location: str) -> str:
        """The Location of a redirect as the target meant it: some gateways put their own URL around it."""

    def ready(self, request: OutgoingRequest, connect: float) -> Hop | None:
        """The hop, if it needs no wait; else None, and the caller awaits `hop`. Most requests get their hop here."""

    async def hop(self, request: OutgoingRequest, connect: float, timeout: float) -> Hop:
        """The hop, after resolving the name and building the client. Raises TargetRefused, DnsFailed, or TimeoutError
        if resolving takes too long."""


class Free:
    """Directly to any target: the operator allows private ones."""

    gateway_codes: frozenset[str] = frozenset()

    def __init__(self, cache: Clients) -> None:
        self._clients = cache
        self.scope: Hashable = cache.mode

    def check_status(self, request: OutgoingRequest, status: int) -> None:
        pass

    def unwrap(self, location: str) -> str:
        return location

    def ready(self, request: OutgoingRequest, connect: float) -> Hop | None:
        return Hop(self._clients.shared(connect), request.url)

    async def hop(self, request: OutgoingRequest, connect: float, timeout: float) -> Hop:
        raise AssertionError("this route is always ready")


class Direct:
    """Directly to the target, at the address that the guard has checked."""

    gateway_codes: frozenset[str] = frozenset()

    def __init__(self, cache: Clients, guard: TargetGuard) -> None:
        self._clients = cache
        self.scope: Hashable = cache.mode
        self._guard = guard

    def check_status(self, request: OutgoingRequest, status: int) -> None:
        pass

    def unwrap(self, location: str) -> str:
        return location

    def ready(self, request: OutgoingRequest, connect: float) -> Hop | None:
        return self.ready_to(request.url, connect)

    async def hop(self, request: OutgoingRequest, connect: float, timeout: float) -> Hop:
        return await self.to(request.url, connect, timeout)

    def ready_to(self, url: Url, connect: float) -> Hop | None:
        if self._guard.allow_private:
            return Hop(self._clients.shared(connect), url)
        host = url.host_str or ""
        address = self._guard.known(host)
        return None if address is None else self._at(url, host, address, connect)

    async def to(self, url: Url, connect: float, timeout: float) -> Hop:
        host = url.host_str or ""
        address = await self._guard.resolve(host, url.port_or_known_default or 0, min(connect, timeout))
        hop = self._at(url, host, address, connect)
        if hop is not None:
            return hop
        client = await self._clients.pinned(Pin(host, address, connect))
        return Hop(client, url, pinned=(host, address))

    def _at(self, url: Url, host: str, address: str, connect: float) -> Hop | None:
        if ip_literal(host) is not None:
            return Hop(self._clients.shared(connect), url)
        if url.scheme == "http":
            # Without TLS the name is only a header: one client serves all names.
            named = (("host", url.authority),)
            return Hop(self._clients.shared(connect), url.with_ip_host(address), named, (host, address))
        client = self._clients.known_pinned(Pin(host, address, connect))
        return None if client is None else Hop(client, url, pinned=(host, address))


class ThroughProxy:
    """Through an HTTP or a SOCKS proxy, which resolves the names. The guard refuses names that look local."""

    gateway_codes = frozenset({"connect_failed", "connect_timeout", "dns_failed"})

    def __init__(self, cache: Clients, guard: TargetGuard, gateway: Gateway, *, trusted: bool) -> None:
        assert gateway.proxy is not None
        self._clients = cache
        self._guard = guard
        self._is_socks = is_socks(gateway.proxy)
        self._parsed = parse_proxy(gateway.proxy)
        self._url = _socks_address(self._parsed) if self._is_socks else gateway.proxy
        self._host = self._parsed.host_str or ""
        self._headers = tuple(gateway.headers.items())
        self.scope: Hashable = (cache.mode, gateway.proxy, self._headers)
        self._trusted = trusted

    def check_status(self, request: OutgoingRequest, status: int) -> None:
        # What comes through a tunnel is the target's.
        if status == _CREDENTIALS_REQUIRED and request.url.scheme == "http" and not self._is_socks:
            raise Failure("gateway_failed", PROXY_CREDENTIALS)

    def unwrap(self, location: str) -> str:
        return location

    def ready(self, request: OutgoingRequest, connect: float) -> Hop | None:
        self._guard.check_name(request.url.host_str or "")
        if self._trusted or self._guard.allow_private:
            return self._proxied_hop(request, None, connect)
        address = self._guard.known(self._host)
        return None if address is None else self._proxied_hop(request, address, connect)

    async def hop(self, request: OutgoingRequest, connect: float, timeout: float) -> Hop:
        port = self._parsed.port_or_known_default or 0
        return self._proxied_hop(request, await self._guard.resolve(self._host, port, min(connect, timeout)), connect)

    def _proxied_hop(self, request: OutgoingRequest, address: str | None, connect: float) -> Hop:
        client = self._clients.proxied(clients.Proxy(self._url, self._headers, self._host, address, connect))
        pinned = None if address is None else (self._host, address)
        return Hop(client, request.url, pinned=pinned)


class ThroughTemplate:
    """Through an API gateway that gets the target in its URL. A redirect is one of the target, wherever it leads, and
    goes through the gateway again: a page must not choose what is requested of the gateway itself."""

    gateway_codes = ThroughProxy.gateway_codes | {"tls_failed"}

    def __init__(self, cache: Clients, guard: TargetGuard, gateway: Gateway, *, trusted: bool) -> None:
        assert gateway.url is not None
        self._clients = cache
        self._guard = guard
        self._direct = Direct(cache, guard)
        self._template = gateway.url
        self._headers = tuple(gateway.headers.items())
        self.scope: Hashable = (cache.mode, gateway.url, self._headers)
        self._trusted = trusted
        before, _, self._after = gateway.url.partition("{url}")
        # A gateway that rewrites redirects leads to itself, by its whole URL or by its path.
        self._befores = (before, before[len(Url(before).origin_ascii or "") :])

    def check_status(self, request: OutgoingRequest, status: int) -> None:
        pass

    def unwrap(self, location: str) -> str:
        for before in self._befores:
            if location.startswith(before) and location.endswith(self._after):
                target = unquote(location[len(before) : len(location) - len(self._after)])
                if target.startswith(("http://", "https://")):
                    return target
        return location

    def ready(self, request: OutgoingRequest, connect: float) -> Hop | None:
        self._guard.check_name(request.url.host_str or "")
        url = self._at(request)
        if self._trusted:
            return Hop(self._clients.shared(connect), url, self._headers)
        hop = self._direct.ready_to(url, connect)
        return None if hop is None else self._with_headers(hop)

    async def hop(self, request: OutgoingRequest, connect: float, timeout: float) -> Hop:
        hop = await self._direct.to(self._at(request), connect, timeout)
        return self._with_headers(hop)

    def _with_headers(self, hop: Hop) -> Hop:
        return msgspec.structs.replace(hop, headers=hop.headers + self._headers)

    def _at(self, request: OutgoingRequest) -> Url:
        return Url(self._template.replace("{url}", quote(str(request.url), safe="")))


def route_of(gateway: Gateway | None, cache: Clients, guard: TargetGuard, *, trusted: bool) -> Route:
    """The route for a gateway, or the direct one. `trusted`: the operator set the gateway, so it may be private."""
    if gateway is None:
        return Free(cache) if guard.allow_private else Direct(cache, guard)
    if gateway.proxy is not None:
        return ThroughProxy(cache, guard, gateway, trusted=trusted)
    return ThroughTemplate(cache, guard, gateway, trusted=trusted)


def job_routes(
    options: Options, operators: Gateway | None, clients_by_mode: ModeClients, guard: TargetGuard
) -> tuple[Route, ...]:
    """The routes for a job's requests: one through each gateway of its pool; one if there is no pool. `operators` is
    the gateway for jobs that name none."""
    gateway, trusted = options.gateway or operators, options.gateway is None
    routes = []
    for member in (None,) if gateway is None else gateway.members:
        # A job decides about its own connections: the operator's API, which gets the operator's key, is verified.
        is_operators_api = trusted and member is not None and member.url is not None
        mode = TlsMode(options.insecure and not is_operators_api, options.http2)
        routes.append(route_of(member, clients_by_mode.of(mode), guard, trusted=trusted))
    return tuple(routes)


def operator_gateway(text: str | None) -> Gateway | None:
    """The gateway that CONVEYOR_GATEWAY names: a URL template with {url}, or a proxy; or several, with blanks between
    them."""
    if text is None:
        return None
    pool = [PooledGateway(url=url) if "{url}" in url else PooledGateway(proxy=url) for url in text.split()]
    return Gateway(pool[0].proxy, pool[0].url) if len(pool) == 1 else Gateway(pool=pool)
