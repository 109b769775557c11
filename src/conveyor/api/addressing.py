"""How a request is addressed: its HTTP version, its Host, and whether this server answers to that name.

A page of another site can have its own name resolved to a loopback address, and then request this server as if it were
that site (DNS rebinding). The browser still sends the name in `Host`, so a server on a loopback address answers to
loopback names only, and to those in the settings.
"""

import re
from typing import Any

from conveyor.api.forwarding import Forwarding, Headers
from conveyor.errors import HostRefused, MalformedHttp
from conveyor.settings import Settings, is_loopback

# A name or an address, with or without a port.
HOST = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(?P<port>:\d{1,5})?")
# Health checks of load balancers send any name; they reveal nothing.
_ANY_HOST = frozenset({"/healthz", "/readyz"})
_VERSIONS = ("1.0", "1.1")
_MAX_ANSWERS = 1000


class Addressing:
    """The names that one server answers to."""

    def __init__(self, settings: Settings, bound: str) -> None:
        """`bound` is the address that the server listens on."""
        self._names = frozenset(name.lower() for name in (settings.allowed_hosts or "").split())
        self._forwarding = Forwarding(settings)
        self._is_open = "*" in self._names or not (self._names or is_loopback(bound))
        # Answers for the names that clients use, so that most requests need no parsing of addresses.
        self._answers: dict[str, bool] = {}

    def check(self, version: str, url: bytes, scope: Any) -> None:
        """Raise MalformedHttp or HostRefused unless the request may be answered. Scheme, host and client become those
        of the client of a trusted proxy."""
        headers: Headers = scope["headers"]
        if version not in _VERSIONS:
            raise MalformedHttp(f"HTTP/{version} is not supported. Send HTTP/1.1.")
        _check_coding(version, headers)
        named = _host_of(version, headers)
        self._forwarding.apply(scope, headers)
        host = _host_of(version, headers)
        if not url.startswith(b"/") and url != b"*" and url.split(b"/")[2:3] != [named.encode()]:
            raise MalformedHttp("The URL of the request names another host than the Host header.")
        path = url.partition(b"?")[0].decode("latin-1")
        if path not in _ANY_HOST and not self._answers_to(host):
            raise HostRefused

    def _answers_to(self, host: str) -> bool:
        known = self._answers.get(host)
        if known is None:
            if len(self._answers) >= _MAX_ANSWERS:
                self._answers.clear()
            known = self._answers[host] = self._is_own(host)
        return known

    def _is_own(self, host: str) -> bool:
        match = HOST.fullmatch(host)
        name = "" if match is None else match["name"].lower().rstrip(".")
        if self._is_open or name in self._names or host.lower() in self._names:
            return True
        _, dot, domain = name.partition(".")
        return is_loopback(name.strip("[]")) or name.endswith(".localhost") or f"*{dot}{domain}" in self._names


def _host_of(version: str, headers: Headers) -> str:
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    if len(hosts) > 1:
        # A proxy in front of us may pick another one than we would.
        raise MalformedHttp("The request has more than one Host header. Send exactly one.")
    if not hosts:
        if version != "1.0":
            raise MalformedHttp("The Host header is missing. Send exactly one.")
        return ""
    if not HOST.fullmatch(hosts[0]):
        raise MalformedHttp("The Host header is invalid. Send the name of the server, with its port.")
    return hosts[0]


def _check_coding(version: str, headers: Headers) -> None:
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and (version == "1.0" or codings != [b"chunked"]):
        raise MalformedHttp("The Transfer-Encoding is not supported. Send `chunked`, by HTTP/1.1, or a Content-Length.")
