"""Origins: scheme, host and port of a URL, as one text. The default port of the scheme is left out."""

from urllib.parse import urlsplit

from pyreqwest.http import Url

_DEFAULT_PORTS = {"http": 80, "https": 443}


def origin_of(url: Url) -> str | None:
    """The origin of a parsed URL, such as https://a.example or http://a.example:8080; None without a host."""
    host = (url.host_str or "").rstrip(".")
    return make_origin(url.scheme, host, url.port) if host else None


def plain_origin(text: str) -> str | None:
    """The origin of a URL that only names a target, such as a gateway; None if it has none."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    return make_origin(parts.scheme, f"[{host}]" if ":" in host else host, port) if host else None


def make_origin(scheme: str, host: str, port: int | None) -> str:
    """The origin of these parts."""
    default = port is None or port == _DEFAULT_PORTS.get(scheme)
    return f"{scheme}://{host}" if default else f"{scheme}://{host}:{port}"
