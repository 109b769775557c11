"""The address of a Redis server, a Redis Cluster or the Sentinels of one, parsed from its URL."""

import re
import ssl
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qsl, unquote

import msgspec

from conveyor.errors import InvalidSetting

Mode = Literal["single", "cluster", "sentinel"]

_FORM = (
    "redis://[user:password@]host[:port][/db], redis+cluster://[user:password@]host[:port][,host[:port]…] or "
    "redis+sentinel://[user:password@]host[:port][,host[:port]…]/service[/db], with rediss for TLS and ?prefix=NAME "
    "for the prefix of all keys"
)
_SCHEMES: dict[str, tuple[Mode, bool]] = {
    f"{name}{mode}": (
        "cluster" if "cluster" in mode else "sentinel" if mode else "single",
        name in ("rediss", "valkeys"),
    )
    for name in ("redis", "rediss", "valkey", "valkeys")
    for mode in ("", "+cluster", "+sentinel")
}
_URL = re.compile(r"([a-z+]+)://([^/?#]*)(/[^?#]*)?(?:\?(.*))?", re.DOTALL)
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]@,]+))(?::([0-9]{1,5}))?")
_PREFIX = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TLS_OPTIONS = {"ca", "cert", "key"}
_SENTINEL_OPTIONS = {"sentinel_username", "sentinel_password"}


class RedisNode(NamedTuple):
    """One server process."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class RedisAddress(msgspec.Struct, frozen=True):
    """Where to begin, and the prefix of all keys of Conveyor."""

    mode: Mode
    # The server; some nodes of the cluster; or the Sentinels.
    nodes: tuple[RedisNode, ...]
    tls: bool
    prefix: str
    database: int = 0
    # The name under which the Sentinels know the master.
    service: str = ""
    username: str | None = None
    password: str | None = None
    sentinel_username: str | None = None
    sentinel_password: str | None = None
    # Files in PEM format: the authorities to trust, and the client's certificate with its key.
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def __repr__(self) -> str:
        return f"RedisAddress({self.shown})"

    @property
    def shown(self) -> str:
        """The URL without its secrets."""
        scheme = ("rediss" if self.tls else "redis") + ("" if self.mode == "single" else f"+{self.mode}")
        path = {"single": f"/{self.database}", "cluster": "", "sentinel": f"/{self.service}/{self.database}"}[self.mode]
        return f"{scheme}://{','.join(map(str, self.nodes))}{path}"

    def options(self) -> dict[str, Any]:
        """The client's options for a connection to a server."""
        return {"db": self.database, "username": self.username, "password": self.password, **self._tls_options()}

    def sentinel_options(self) -> dict[str, Any]:
        """The client's options for a connection to a Sentinel."""
        return {"username": self.sentinel_username, "password": self.sentinel_password, **self._tls_options()}

    def check_files(self) -> None:
        """Raise InvalidSetting if a file of the URL cannot be read."""
        if not self.tls:
            return
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except OSError as error:
            files = ", ".join(file for file in (self.ca, self.cert, self.key) if file is not None)
            why = error.strerror or error
            raise InvalidSetting(
                f"{self.shown}: a file of ca=, cert= or key= is not readable as PEM ({files}): {why}."
            ) from None

    def _tls_options(self) -> dict[str, Any]:
        if not self.tls:
            return {}
        return {"ssl": True, "ssl_ca_certs": self.ca, "ssl_certfile": self.cert, "ssl_keyfile": self.key}


def read_address(url: str) -> RedisAddress:
    """Parse the URL. Raises InvalidSetting, whose message contains no secret."""
    parts = _URL.fullmatch(url)
    if parts is None:
        raise _refused("it is not a URL (percent-encode the characters /, ?, # and @ of a password)")
    scheme, authority, path, query = parts[1], parts[2], parts[3] or "", parts[4]
    if scheme not in _SCHEMES:
        raise _refused("it does not begin with redis://, redis+cluster:// or redis+sentinel://")
    mode, tls = _SCHEMES[scheme]
    user, _, hosts = authority.rpartition("@")
    username, _, password = user.partition(":")
    nodes = _nodes(hosts, 26379 if mode == "sentinel" else 6379)
    if mode == "single" and len(nodes) > 1:
        raise _refused("it names several hosts: say redis+cluster:// or redis+sentinel://")
    service, database = _path(mode, path)
    options = _options(query, mode, tls)
    return RedisAddress(
        mode=mode,
        nodes=nodes,
        tls=tls,
        database=database,
        service=service,
        username=unquote(username) or None,
        password=unquote(password) or None,
        **options,
    )


def _nodes(hosts: str, port: int) -> tuple[RedisNode, ...]:
    nodes = []
    for host in hosts.split(","):
        match = _HOST.fullmatch(host)
        if match is None:
            raise _refused("it names no host" if not host else "a host is not of the form host[:port]")
        nodes.append(RedisNode(match[1] or match[2], int(match[3] or port)))
        if not 0 < nodes[-1].port < 65536:
            raise _refused("a port is not between 1 and 65535")
    return tuple(nodes)


def _path(mode: Mode, path: str) -> tuple[str, int]:
    """The name of the service, and the number of the database."""
    service, database = "", path.removeprefix("/")
    if mode == "sentinel":
        service, _, database = database.partition("/")
        if not service:
            raise _refused("its path does not begin with the service that the Sentinels watch, such as /mymaster")
    database = database or "0"
    if not database.isascii() or not database.isdigit() or len(database) > 4:
        raise _refused("its path is not the number of a database")
    if mode == "cluster" and int(database):
        raise _refused("a cluster has database 0 only")
    return unquote(service), int(database)


def _options(query: str | None, mode: Mode, tls: bool) -> dict[str, str]:
    try:
        pairs = parse_qsl(query or "", keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise _refused("its options are not of the form name=value") from None
    options = {"prefix": "conveyor", **dict(pairs)}
    known = {"prefix"} | (_TLS_OPTIONS if tls else set()) | (_SENTINEL_OPTIONS if mode == "sentinel" else set())
    if set(options) - known or len(pairs) > len(dict(pairs)):
        # Not named: they may be a part of a password that is not percent-encoded.
        tls_only = bool(set(options) & _TLS_OPTIONS - known)
        hint = "; ca, cert and key need rediss://" if tls_only else ""
        raise _refused(f"its options may be {', '.join(sorted(known))}, each once{hint}")
    if not _PREFIX.fullmatch(options["prefix"]):
        raise _refused("a prefix is up to 64 of the characters A-Z, a-z, 0-9, dot, dash and underscore")
    if "key" in options and "cert" not in options:
        raise _refused("key= needs cert=")
    return options


def _refused(why: str) -> InvalidSetting:
    return InvalidSetting(f"The URL of the Redis is not valid: {why}. Write {_FORM}.")
