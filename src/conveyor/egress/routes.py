"""Routes: direct, through a proxy, or through an API gateway. A route gets the next request, lets the guard check its
target, and returns the client and the URL to send it to."""

from collections.abc import Hashable
from typing import Protocol
from urllib.parse import quote, unquote

import msgspec
from pyreqwest.client import Client
from pyreqwest.http import Url

from conveyor.egress import clients
from conveyor.egress.clients import Clients, Pin
from conveyor.egress.redirects import OutgoingRequest
from conveyor.egress.target_guard import TargetGuard, ip_literal
from conveyor.model import Gateway, PooledGateway


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
    scope: Hashable = None

    def __init__(self, cache: Clients) -> None:
        self._clients = cache

    def unwrap(self, location: str) -> str:
        return location

    def ready(self, request: OutgoingRequest, connect: float) -> Hop | None:
        return Hop(self._clients.shared(connect), request.url)

    async def hop(self, request: OutgoingRequest, connect: float, timeout: float) -> Hop:
        raise AssertionError("this route is always ready")


class Direct:
    """Directly to the target, at the address that the guard has checked."""

    gateway_codes: frozenset[str] = frozenset()
    scope: Hashable = None

    def __init__(self, cache: Clients, guard: TargetGuard) -> None:
        self._clients = cache
        self._guard = guard

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
    """Through an HTTP proxy, which resolves the names. The guard refuses names that look local."""

    gateway_codes = frozenset({"connect_failed", "connect_timeout", "dns_failed"})

    def __init__(self, cache: Clients, guard: TargetGuard, gateway: Gateway, *, trusted: bool) -> None:
        assert gateway.proxy is not None
        self._clients = cache
        self._guard = guard
        self._url = gateway.proxy
        self._parsed = Url(gateway.proxy)
        self._host = self._parsed.host_str or ""
        self._headers = tuple(gateway.headers.items())
        self.scope: Hashable = (gateway.proxy, self._headers)
        self._trusted = trusted

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
        self.scope: Hashable = (gateway.url, self._headers)
        self._trusted = trusted
        before, _, self._after = gateway.url.partition("{url}")
        # A gateway that rewrites redirects leads to itself, by its whole URL or by its path.
        self._befores = (before, before[len(Url(before).origin_ascii or "") :])

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


def routes_of(gateway: Gateway | None, cache: Clients, guard: TargetGuard, *, trusted: bool) -> tuple[Route, ...]:
    """The route through each gateway of a pool; one route if there is no pool."""
    members = (None,) if gateway is None else gateway.members
    return tuple(route_of(member, cache, guard, trusted=trusted) for member in members)


def operator_gateway(text: str | None) -> Gateway | None:
    """The gateway that CONVEYOR_GATEWAY names: a URL template with {url}, or a proxy; or several, with blanks between
    them."""
    if text is None:
        return None
    pool = [PooledGateway(url=url) if "{url}" in url else PooledGateway(proxy=url) for url in text.split()]
    return Gateway(pool[0].proxy, pool[0].url) if len(pool) == 1 else Gateway(pool=pool)
