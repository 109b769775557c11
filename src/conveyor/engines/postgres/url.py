"""The URL of a Postgres engine: server, database and schema, and how to connect to it."""

import re
from typing import NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from conveyor.errors import InvalidSetting

FORM = "postgres://user:password@host:5432/database?schema=NAME"

DEFAULT_SCHEMA = "conveyor"
_DEFAULT_CONNECTIONS = 10
_MAX_CONNECTIONS = 200
_SCHEMES = ("postgres", "postgresql")
# Parameters for the driver; the others are Conveyor's.
_DRIVERS_OWN = frozenset({"sslmode", "sslrootcert", "sslcert", "sslkey", "target_session_attrs"})
_OURS = frozenset({"schema", "connections", "pooler", "direct", "auth", "region"})
_POOLERS = ("session", "transaction")
# A name that needs no quotes, and leaves 12 characters for the names that it prefixes.
_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,50}")
_RDS_HOST = re.compile(r".+\.([a-z]{2}(?:-[a-z]+)+-\d)\.rds\.amazonaws\.com(?:\.cn)?")
# An IAM token is a password in plain text: it is sent over TLS only.
_TLS_MODES = ("require", "verify-ca", "verify-full")


class PostgresPlace(NamedTuple):
    """The location of the engine's tables."""

    dsn: str
    schema: str
    # Maximum connections of one process.
    connections: int
    # How a pooler hands out sessions: "session" or "transaction". None: find out.
    pooler: str | None = None
    # The same database past the pooler, for what needs a session of its own.
    direct: str | None = None
    # Log in by IAM tokens of this AWS region, in place of a password.
    iam_region: str | None = None

    @property
    def channel(self) -> str:
        """The channel on which senders wake receivers."""
        return f"conveyor_{self.schema}"

    @property
    def shown(self) -> str:
        """The URL without its password."""
        parts = urlsplit(self.dsn)
        return f"{parts.hostname}:{parts.port or 5432}{parts.path}"


def parse_url(url: str) -> PostgresPlace:
    """Parse the URL. Raises InvalidSetting with the expected form."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
        parameters = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise _wrong(str(error)) from None
    if parts.scheme not in _SCHEMES:
        raise _wrong(f"it begins with {parts.scheme}:")
    if not host:
        raise _wrong("it names no host")
    if not parts.path.strip("/") or "/" in parts.path.strip("/"):
        raise _wrong("it names no database")
    unknown = sorted(parameters.keys() - _DRIVERS_OWN - _OURS)
    if unknown:
        known = ", ".join(sorted(_DRIVERS_OWN | _OURS))
        raise _wrong(f"there is no parameter {unknown[0]!r}; there are {known}")
    ours = {name: parameters.pop(name) for name in _OURS & parameters.keys()}
    region = _iam_region(ours, host, parts.username, parts.password)
    if region is not None:
        _require_tls(parameters)

    def dsn(netloc: str) -> str:
        return urlunsplit(("postgres", netloc, parts.path, urlencode(parameters), ""))

    return PostgresPlace(
        dsn=dsn(parts.netloc),
        schema=_schema(ours),
        connections=_connections(ours),
        pooler=_pooler(ours),
        direct=dsn(_direct(ours["direct"], parts.netloc)) if "direct" in ours else None,
        iam_region=region,
    )


def _schema(ours: dict[str, str]) -> str:
    schema = ours.get("schema", DEFAULT_SCHEMA)
    if not _SCHEMA.fullmatch(schema) or schema.startswith("pg_"):
        raise _wrong("a schema has up to 51 of a-z, 0-9 and _, does not begin with a digit, nor with pg_")
    return schema


def _connections(ours: dict[str, str]) -> int:
    connections = ours.get("connections", str(_DEFAULT_CONNECTIONS))
    if not connections.isascii() or not connections.isdigit() or not 1 <= int(connections) <= _MAX_CONNECTIONS:
        raise _wrong(f"connections is a number from 1 to {_MAX_CONNECTIONS}")
    return int(connections)


def _pooler(ours: dict[str, str]) -> str | None:
    pooler = ours.get("pooler")
    if pooler is not None and pooler not in _POOLERS:
        raise _wrong(f"pooler is {' or '.join(_POOLERS)}")
    return pooler


def _direct(address: str, netloc: str) -> str:
    """The address past the pooler, with the user of the URL."""
    try:
        parts = urlsplit(f"//{address}")
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or parts.netloc != address or parts.username is not None:
        raise _wrong("direct is HOST or HOST:PORT of the server itself")
    user, at, _ = netloc.rpartition("@")
    return f"{user}{at}{address}"


def _iam_region(ours: dict[str, str], host: str, user: str | None, password: str | None) -> str | None:
    """The region in which to sign tokens; None to log in by password."""
    auth, region = ours.get("auth"), ours.get("region")
    if auth is None:
        if region is not None:
            raise _wrong("region belongs to auth=iam")
        return None
    if auth != "iam":
        raise _wrong("auth is iam, or not there")
    if password is not None or not user:
        raise _wrong("auth=iam needs a user and no password")
    if region is None:
        known = _RDS_HOST.fullmatch(host)
        region = known[1] if known else None
    if not region:
        raise _wrong("auth=iam needs region= where the host is not one of RDS")
    return region


def _require_tls(parameters: dict[str, str]) -> None:
    """Use TLS, and check the certificate if there is something to check it by."""
    mode = parameters.setdefault("sslmode", "verify-full" if "sslrootcert" in parameters else "require")
    if mode not in _TLS_MODES:
        raise _wrong(f"auth=iam needs TLS: sslmode is one of {', '.join(_TLS_MODES)}")


def _wrong(why: str) -> InvalidSetting:
    return InvalidSetting(f"Not the URL of a Postgres engine: {why}. Write {FORM}.")
