"""The way a request takes: direct, through a proxy, or through an API gateway. A route gets the next request of a
task, has the guard check where it leads, and hands on the client and the URL to send it to."""

from typing import Protocol
from urllib.parse import quote

import msgspec
from pyreqwest.client import Client
from pyreqwest.http import Url

from conveyor.egress import clients
from conveyor.egress.clients import Clients, Pin
from conveyor.egress.redirects import OutgoingRequest
from conveyor.egress.target_guard import TargetGuard, ip_literal
from conveyor.model import Gateway


class Hop(msgspec.Struct, frozen=True, gc=False):
    """Where to send one request, and with which headers beside its own. `base` is what a Location is relative to."""

    client: Client
    url: Url
    base: Url
    headers: tuple[tuple[str, str], ...] = ()
    pinned: tuple[str, str] | None = None


class Route(Protocol):
    """How the requests of a job reach their targets."""

    # Codes of failures (failures.py) that are those of the gateway, because it is what we connect to.
    blamed: frozenset[str]
    # The gateway's own origin: redirects that stay on it are between the gateway and us.
    origin: str | None

    def ready(self, request: OutgoingRequest, connect: float) -> Hop | None:
        """The hop, if there is nothing to wait for; None means: ask `hop`. Most tasks of a job get theirs here."""

    async def hop(self, request: OutgoingRequest, connect: float, timeout: float) -> Hop:
        """The hop, after resolving and building what it takes. Raises TargetRefused, DnsFailed, or TimeoutError when
        resolving takes too long."""


class Free:
    """Straight to the target, wherever it is: the operator allows private targets."""

    blamed: frozenset[str] = frozenset()
    origin: str | None = None

    def __init__(self, kept: Clients) -> None:
        self._clients = kept

    def ready(self, request: OutgoingRequest, connect: float) -> Hop | None:
        url = request.url
        return Hop(self._clients.shared(connect), url, url)

    async def hop(self, request: OutgoingRequest, connect: float, timeout: float) -> Hop:
        raise AssertionError("this route is always ready")


class Direct:
    """Straight to the target, at the address that the guard has checked."""

    blamed: frozenset[str] = frozenset()
    origin: str | None = None

    def __init__(self, kept: Clients, guard: TargetGuard) -> None:
        self._clients = kept
        self._guard = guard

    def ready(self, request: OutgoingRequest, connect: float) -> Hop | None:
        return self.ready_to(request.url, connect)

    async def hop(self, request: OutgoingRequest, connect: float, timeout: float) -> Hop:
        return await self.to(request.url, connect, timeout)

    def ready_to(self, url: Url, connect: float) -> Hop | None:
        if self._guard.allow_private:
            return Hop(self._clients.shared(connect), url, url)
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
        return Hop(client, url, url, pinned=(host, address))

    def _at(self, url: Url, host: str, address: str, connect: float) -> Hop | None:
        if ip_literal(host) is not None:
            return Hop(self._clients.shared(connect), url, url)
        if url.scheme == "http":
            # Without TLS the name is only a header: one client, and its connections, serve all names.
            named = (("host", url.authority),)
            return Hop(self._clients.shared(connect), url.with_ip_host(address), url, named, (host, address))
        client = self._clients.known_pinned(Pin(host, address, connect))
        return None if client is None else Hop(client, url, url, pinned=(host, address))


class ThroughProxy:
    """By an HTTP proxy, which resolves the names: those that are local by their look are refused here."""

    blamed = frozenset({"connect_failed", "connect_timeout", "dns_failed"})
    origin: str | None = None

    def __init__(self, kept: Clients, guard: TargetGuard, gateway: Gateway, *, trusted: bool) -> None:
        assert gateway.proxy is not None
        self._clients = kept
        self._guard = guard
        self._url = gateway.proxy
        self._parsed = Url(gateway.proxy)
        self._host = self._parsed.host_str or ""
        self._headers = tuple(gateway.headers.items())
        self._trusted = trusted

    def ready(self, request: OutgoingRequest, connect: float) -> Hop | None:
        self._guard.check_name(request.url.host_str or "")
        if self._trusted or self._guard.allow_private:
            return self._by(request, None, connect)
        address = self._guard.known(self._host)
        return None if address is None else self._by(request, address, connect)

    async def hop(self, request: OutgoingRequest, connect: float, timeout: float) -> Hop:
        port = self._parsed.port_or_known_default or 0
        return self._by(request, await self._guard.resolve(self._host, port, min(connect, timeout)), connect)

    def _by(self, request: OutgoingRequest, address: str | None, connect: float) -> Hop:
        client = self._clients.proxied(clients.Proxy(self._url, self._headers, self._host, address, connect))
        pinned = None if address is None else (self._host, address)
        return Hop(client, request.url, request.url, pinned=pinned)


class ThroughTemplate:
    """By an API gateway that is told the target in its URL. A redirect that leaves the gateway is a redirect of the
    target, and is asked for through the gateway again."""

    blamed = ThroughProxy.blamed | {"tls_failed"}

    def __init__(self, kept: Clients, guard: TargetGuard, gateway: Gateway, *, trusted: bool) -> None:
        assert gateway.url is not None
        self._clients = kept
        self._guard = guard
        self._direct = Direct(kept, guard)
        self._template = gateway.url
        self._headers = tuple(gateway.headers.items())
        self._trusted = trusted
        self.origin: str | None = Url(gateway.url.replace("{url}", "")).origin_ascii

    def ready(self, request: OutgoingRequest, connect: float) -> Hop | None:
        self._guard.check_name(request.url.host_str or "")
        url = self._at(request)
        if self._trusted:
            return Hop(self._clients.shared(connect), url, url, self._headers)
        hop = self._direct.ready_to(url, connect)
        return None if hop is None else self._with_headers(hop)

    async def hop(self, request: OutgoingRequest, connect: float, timeout: float) -> Hop:
        hop = await self._direct.to(self._at(request), connect, timeout)
        return self._with_headers(hop)

    def _with_headers(self, hop: Hop) -> Hop:
        return msgspec.structs.replace(hop, headers=hop.headers + self._headers)

    def _at(self, request: OutgoingRequest) -> Url:
        return request.at or Url(self._template.replace("{url}", quote(str(request.url), safe="")))


def route_of(gateway: Gateway | None, kept: Clients, guard: TargetGuard, *, trusted: bool) -> Route:
    """The route for a gateway, or the direct one. `trusted`: the operator named it, so it may be a private one."""
    if gateway is None:
        return Free(kept) if guard.allow_private else Direct(kept, guard)
    if gateway.proxy is not None:
        return ThroughProxy(kept, guard, gateway, trusted=trusted)
    return ThroughTemplate(kept, guard, gateway, trusted=trusted)


def operator_gateway(text: str | None) -> Gateway | None:
    """The gateway that CONVEYOR_GATEWAY names: a URL template with {url}, or a proxy."""
    if text is None:
        return None
    return Gateway(url=text) if "{url}" in text else Gateway(proxy=text)
