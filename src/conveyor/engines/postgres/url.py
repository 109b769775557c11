"""The URL of a Postgres engine: server, database and schema."""

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
# A name that needs no quotes, and leaves 12 characters for the names that it prefixes.
_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,50}")


class PostgresPlace(NamedTuple):
    """The location of the engine's tables."""

    dsn: str
    schema: str
    # Maximum connections of one process.
    connections: int

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
    schema = parameters.pop("schema", DEFAULT_SCHEMA)
    if not _SCHEMA.fullmatch(schema) or schema.startswith("pg_"):
        raise _wrong("a schema has up to 51 of a-z, 0-9 and _, does not begin with a digit, nor with pg_")
    connections = parameters.pop("connections", str(_DEFAULT_CONNECTIONS))
    if not connections.isascii() or not connections.isdigit() or not 1 <= int(connections) <= _MAX_CONNECTIONS:
        raise _wrong(f"connections is a number from 1 to {_MAX_CONNECTIONS}")
    unknown = sorted(parameters.keys() - _DRIVERS_OWN)
    if unknown:
        known = ", ".join(sorted(_DRIVERS_OWN | {"schema", "connections"}))
        raise _wrong(f"there is no parameter {unknown[0]!r}; there are {known}")
    dsn = urlunsplit(("postgres", parts.netloc, parts.path, urlencode(parameters), ""))
    return PostgresPlace(dsn, schema, int(connections))


def _wrong(why: str) -> InvalidSetting:
    return InvalidSetting(f"Not the URL of a Postgres engine: {why}. Write {FORM}.")
