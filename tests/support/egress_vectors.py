"""URLs that lead to this machine or its neighbours, by kind: the rows of the table in tests/security. The canaries
listen on both loopback addresses; `PUBLIC` is another one that passes for public in these tests."""

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from conveyor.egress.target_guard import refusal
from tests.support.addresses import EVIL_NAMES, LOOPBACK_HOSTS, PRIVATE_HOSTS

PUBLIC = "127.77.0.1"

# Ports of the canaries, on 127.0.0.1 and on ::1.
Ports = tuple[int, int]

# Resolves to a public address first, and to a loopback address at every further look.
REBINDING = "rebinding.example"


class Vector(NamedTuple):
    """A URL, and what is odd about it."""

    kind: str
    url: str


# Userinfo that looks like a host, and hosts that look like userinfo.
_USERINFO = [
    "http://site.example@127.0.0.1:{port}/",
    "http://site.example:80@127.0.0.1:{port}/",
    "http://site.example%40127.0.0.1:{port}/",
    "http://@127.0.0.1:{port}/",
    "http://:@127.0.0.1:{port}/",
    "http://a:b@[::1]:{port}/",
    "http://127.0.0.1:{port}#@site.example/",
    "http://127.0.0.1:{port}?@site.example/",
    "http://127.0.0.1:{port}\\@site.example/",
    "http://site.example\\@127.0.0.1:{port}/",
    "http://site.example@site.example@127.0.0.1:{port}/",
    "http://127.0.0.1:{port}@localhost:{port}/",
]
_ZONES = [
    "http://[::1%25lo]:{port}/",
    "http://[::1%lo]:{port}/",
    "http://[::1%251]:{port}/",
    "http://[fe80::1%25lo]:{port}/",
    "http://[fe80::1%25eth0]:{port}/",
    "http://[::ffff:127.0.0.1%25lo]:{port}/",
]
_DOTS = [
    "http://127.0.0.1.:{port}/",
    "http://localhost.:{port}/",
    "http://loopback.example.:{port}/",
    "http://2130706433.:{port}/",
    "http://0x7f.1.:{port}/",
    "http://localhost..:{port}/",
    "http://127.0.0.1%2e:{port}/",
    "http://LOCALHOST%2E:{port}/",
]
_PORTS = [
    "http://127.0.0.1:0{port}/",
    "http://127.0.0.1:00000{port}/",
    "http://localhost:0{port}/",
    "http://[::1]:0{port}/",
    "http://127.0.0.1/",
    "https://127.0.0.1/",
    "http://127.0.0.1:80/",
    "http://localhost:443/",
    "https://127.0.0.1:{port}/",
    "http://127.0.0.1:{port}/../../",
]
_SYNTAX = [
    "http:/127.0.0.1:{port}/",
    "http:127.0.0.1:{port}/",
    "http:///127.0.0.1:{port}/",
    "http:\\\\127.0.0.1:{port}\\",
    "//127.0.0.1:{port}/",
    "HTTP://127.0.0.1:{port}/",
    "http://127.0.0.1:{port}/%0d%0aHost:%20site.example",
    "http://127.0.0.1:{port}/\r\nHost: site.example",
    "\thttp://127.0.0.1:{port}/",
    "ftp://127.0.0.1:{port}/",
    "gopher://127.0.0.1:{port}/_",
    "file:///etc/passwd",
]


def _kind_of(host: str) -> str:
    """What is odd about a host that is an address, however it is written."""
    if host in EVIL_NAMES and not host.startswith("localhost"):
        return "name that resolves to it"
    if host.startswith("["):
        is_wrapped = any(
            part in host.lower() for part in ("ffff:", "64:ff9b", "2002:", "2001:0", "::127", "::7f", "::a9")
        )
        return "wrapped in IPv6" if is_wrapped else "IPv6"
    is_plain = host.isascii() and host.count(".") == 3 and all(part.isdigit() for part in host.split("."))
    if not is_plain or any(len(part) > 1 and part[0] == "0" for part in host.split(".")):
        return "another spelling"
    if host.startswith("169.254."):
        return "metadata, link-local"
    return "loopback" if host.startswith(("127.", "0.")) else "private"


def vectors(ports: Ports) -> list[Vector]:
    """All of them: every host with either port, by http and by https, and the tricks with either port."""
    hosts = [*LOOPBACK_HOSTS, *PRIVATE_HOSTS, *EVIL_NAMES]
    made = [
        Vector(_kind_of(host), f"{scheme}://{host}:{port}/")
        for host in hosts
        for port in ports
        for scheme in ("http", "https")
    ]
    tricks = {"userinfo": _USERINFO, "zone": _ZONES, "dot": _DOTS, "port": _PORTS, "syntax": _SYNTAX}
    made += [Vector(kind, url.format(port=port)) for kind, urls in tricks.items() for url in urls for port in ports]
    made += [
        Vector("rebinding", f"{scheme}://{number}.{REBINDING}:{port}/")
        for number in range(8)
        for port in ports
        for scheme in ("http", "https")
    ]
    # Some tricks have no port, and so occur once.
    return list(dict.fromkeys(made))


def sample(rows: Sequence[Vector], step: int, first: int) -> list[Vector]:
    """Every `step`-th of each kind, and at least one."""
    by_kind: dict[str, list[Vector]] = {}
    for row in rows:
        by_kind.setdefault(row.kind, []).append(row)
    return [row for of_kind in by_kind.values() for row in of_kind[first % min(step, len(of_kind)) :: step]]


def public(address: str) -> str | None:
    """The policy of these tests."""
    return None if address == PUBLIC else refusal(address)


class Names:
    """A resolver that knows the names of the vectors; all others are public. One for each path: it counts looks."""

    def __init__(self) -> None:
        self._looks: dict[str, count[int]] = {}

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        name = host.rstrip(".")
        if name.endswith(REBINDING):
            is_first = next(self._looks.setdefault(name, count())) == 0
            return [PUBLIC] if is_first else ["127.0.0.1", "::1"]
        return EVIL_NAMES.get(host) or EVIL_NAMES.get(name) or [PUBLIC]
