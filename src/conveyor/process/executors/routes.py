"""The way a request takes: direct, through a proxy, or through an API gateway. A route gets the next request of a
task, has the guard check where it leads, and hands on the client and the URL to send it to."""

from typing import NamedTuple, Protocol
from urllib.parse import quote

from pyreqwest.client import Client
from pyreqwest.http import Url

from conveyor.model import Gateway
from conveyor.process.executors import clients
from conveyor.process.executors.clients import Clients, Pin
from conveyor.process.executors.redirects import Request
from conveyor.targets import TargetGuard, ip_literal


class Hop(NamedTuple):
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

    async def hop(self, request: Request, connect: float, timeout: float) -> Hop:
        """Raises TargetRefused, DnsFailed, or TimeoutError when resolving takes too long."""


class Direct:
    """Straight to the target, at the address that the guard has checked."""

    blamed: frozenset[str] = frozenset()
    origin: str | None = None

    def __init__(self, kept: Clients, guard: TargetGuard) -> None:
        self._clients = kept
        self._guard = guard

    async def hop(self, request: Request, connect: float, timeout: float) -> Hop:
        return await self.to(request.url, connect, timeout)

    async def to(self, url: Url, connect: float, timeout: float) -> Hop:
        if self._guard.allow_private:
            return Hop(self._clients.shared(connect), url, url)
        host = url.host_str or ""
        address = await self._guard.resolve(host, url.port_or_known_default or 0, min(connect, timeout))
        if ip_literal(host) is not None:
            return Hop(self._clients.shared(connect), url, url)
        pinned = (host, address)
        if url.scheme == "http":
            # Without TLS the name is only a header: one client, and its connections, serve all names.
            named = (("host", url.authority),)
            return Hop(self._clients.shared(connect), url.with_ip_host(address), url, named, pinned)
        client = await self._clients.pinned(Pin(host, address, connect))
        return Hop(client, url, url, pinned=pinned)


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
        self._headers = tuple(gateway.headers.items())
        self._trusted = trusted

    async def hop(self, request: Request, connect: float, timeout: float) -> Hop:
        self._guard.check_name(request.url.host_str or "")
        host = self._parsed.host_str or ""
        address = None
        if not self._trusted and not self._guard.allow_private:
            port = self._parsed.port_or_known_default or 0
            address = await self._guard.resolve(host, port, min(connect, timeout))
        proxy = clients.Proxy(self._url, self._headers, host, address, connect)
        pinned = None if address is None else (host, address)
        return Hop(self._clients.proxied(proxy), request.url, request.url, pinned=pinned)


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

    async def hop(self, request: Request, connect: float, timeout: float) -> Hop:
        self._guard.check_name(request.url.host_str or "")
        url = request.at or Url(self._template.replace("{url}", quote(str(request.url), safe="")))
        if self._trusted:
            return Hop(self._clients.shared(connect), url, url, self._headers)
        hop = await self._direct.to(url, connect, timeout)
        return hop._replace(headers=hop.headers + self._headers)


def route_of(gateway: Gateway | None, kept: Clients, guard: TargetGuard, *, trusted: bool) -> Route:
    """The route for a gateway, or the direct one. `trusted`: the operator named it, so it may be a private one."""
    if gateway is None:
        return Direct(kept, guard)
    if gateway.proxy is not None:
        return ThroughProxy(kept, guard, gateway, trusted=trusted)
    return ThroughTemplate(kept, guard, gateway, trusted=trusted)


def operator_gateway(text: str | None) -> Gateway | None:
    """The gateway that CONVEYOR_GATEWAY names: a URL template with {url}, or a proxy."""
    if text is None:
        return None
    return Gateway(url=text) if "{url}" in text else Gateway(proxy=text)
