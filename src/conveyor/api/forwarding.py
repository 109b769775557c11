"""What a proxy in front of the server says about a request: the scheme, the host and the address of its client.

Anyone can send these headers, so they count only from the proxies in the settings. Each proxy appends to them, so the
last value is that of the nearest one.
"""

import ipaddress
from typing import Any

from conveyor.settings import Settings

_SCHEMES = ("http", "https")

Headers = list[tuple[bytes, bytes]]


class Forwarding:
    """The proxies that one server trusts."""

    def __init__(self, settings: Settings) -> None:
        self._networks = [ipaddress.ip_network(text) for text in (settings.trusted_proxies or "").split()]

    def apply(self, scope: Any, headers: Headers) -> None:
        """Put into a request what a trusted proxy says about it: scheme, client and Host are then those of its
        client."""
        if not self._networks or scope["client"] is None or not self._trusts(scope["client"][0]):
            return
        schemes, hosts = _values(headers, b"x-forwarded-proto"), _values(headers, b"x-forwarded-host")
        if schemes and schemes[-1].lower() in _SCHEMES:
            scope["scheme"] = schemes[-1].lower()
        if hosts:
            headers[:] = [pair for pair in headers if pair[0] != b"host"]
            headers.append((b"host", hosts[-1].encode("latin-1")))
        for address in reversed(_values(headers, b"x-forwarded-for")):
            if not _is_address(address):
                break
            scope["client"] = (address, 0)
            if not self._trusts(address):
                break

    def _trusts(self, address: str) -> bool:
        parsed = ipaddress.ip_address(address)
        mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
        return any((mapped or parsed) in network for network in self._networks)


def _values(headers: Headers, wanted: bytes) -> list[str]:
    text = ",".join(value.decode("latin-1") for name, value in headers if name == wanted)
    return [value.strip() for value in text.split(",") if value.strip()]


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
