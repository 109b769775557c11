"""The address of a Redis server, parsed from its URL."""

import re
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from conveyor.errors import InvalidSetting

_FORM = "redis://[user:password@]host[:port][/db][?prefix=NAME], with rediss:// for TLS"
_PREFIX = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class RedisAddress(msgspec.Struct, frozen=True):
    """A server, and the prefix of all keys of Conveyor."""

    host: str
    port: int
    database: int
    username: str | None
    password: str | None
    tls: bool
    prefix: str

    @property
    def shown(self) -> str:
        """The URL without its password."""
        return f"redis{'s' if self.tls else ''}://{self.host}:{self.port}/{self.database}"

    def options(self) -> dict[str, Any]:
        """The connection options of the client."""
        return {
            "host": self.host,
            "port": self.port,
            "db": self.database,
            "username": self.username,
            "password": self.password,
            "ssl": self.tls,
        }


def read_address(url: str) -> RedisAddress:
    """Parse the URL. Raises InvalidSetting, whose message contains no password."""
    try:
        parts = urlsplit(url)
        port = parts.port
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise _refused("it is not a URL") from None
    if parts.scheme not in {"redis", "rediss"}:
        raise _refused("it does not begin with redis://")
    if not parts.hostname:
        raise _refused("it names no host")
    database = parts.path.removeprefix("/") or "0"
    if not database.isascii() or not database.isdigit() or len(database) > 4:
        raise _refused("its path is not the number of a database")
    unknown = sorted({name for name, _ in query} - {"prefix"})
    if unknown or len(query) > 1:
        raise _refused(f"it has more than a prefix after the question mark: {', '.join(unknown) or 'prefix twice'}")
    prefix = dict(query).get("prefix", "conveyor")
    if not _PREFIX.fullmatch(prefix):
        raise _refused("a prefix is up to 64 of the characters A-Z, a-z, 0-9, dot, dash and underscore")
    return RedisAddress(
        host=parts.hostname,
        port=port or 6379,
        database=int(database),
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        tls=parts.scheme == "rediss",
        prefix=prefix,
    )


def _refused(why: str) -> InvalidSetting:
    return InvalidSetting(f"The URL of the Redis is not valid: {why}. Write {_FORM}.")
