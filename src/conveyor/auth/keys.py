"""API keys: `cv_<key_id>_<secret>`. Made here, shown once, kept as the hash of the secret, and checked here.

The secret has 256 bits, so a plain SHA-256 is as good as a slow hash. The tenant of a request comes from its key and
from nowhere else.
"""

import hmac
import re
import secrets
from hashlib import sha256
from typing import NamedTuple, Protocol

from conveyor.clock import Clock
from conveyor.errors import InvalidField, InvalidKey, MissingKey
from conveyor.model import ApiKey, TenantId

_TENANT = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_KEY = re.compile(r"cv_([0-9a-z]{26})_([0-9a-f]{64})")
_BEARER = re.compile(r"bearer +(\S+)", re.IGNORECASE)
_MAX_NAME = 200
# Compared with when there is no such key, so that a known id takes no longer than an unknown one.
_NO_HASH = "0" * 64


class Parsed(NamedTuple):
    """The two halves of a key's text."""

    key_id: str
    secret: str


class KeySource(Protocol):
    """Where keys are looked up: AccessRecords, or a KeyCache before it."""

    async def key(self, key_id: str) -> ApiKey | None: ...


def check_tenant(name: str) -> TenantId:
    """A tenant's name is part of keys and paths in every engine: plain, short, lower case."""
    if not _TENANT.fullmatch(name):
        raise InvalidField(
            "A tenant is 1 to 63 characters of a-z, 0-9, `_` and `-`, and starts with a letter or digit.",
            field="tenant",
        )
    return TenantId(name)


def make_key(
    clock: Clock, tenant: str, name: str | None = None, expires_at: float | None = None, admin: bool = False
) -> tuple[str, ApiKey]:
    """The text to show once, and the key to keep. An admin's key may make and revoke keys of every tenant."""
    if name is not None and not (0 < len(name) <= _MAX_NAME and name.isprintable()):
        raise InvalidField(f"A key's name is 1 to {_MAX_NAME} printable characters.", field="name")
    key_id = clock.new_id("key").removeprefix("key_")
    secret = secrets.token_hex(32)
    key = ApiKey(
        key_id=key_id,
        tenant=check_tenant(tenant),
        name=name,
        secret_sha256=_hash(secret),
        created_at=clock.now(),
        expires_at=expires_at,
        admin=admin,
    )
    return f"cv_{key_id}_{secret}", key


def parse(text: str) -> Parsed:
    """Split a key's text."""
    match = _KEY.fullmatch(text)
    if match is None:
        raise InvalidKey
    return Parsed(match[1], match[2])


def bearer(header: str | None) -> str:
    """The key's text out of an Authorization header."""
    if not header:
        raise MissingKey
    match = _BEARER.fullmatch(header.strip())
    if match is None:
        raise MissingKey
    return match[1]


async def authenticate(source: KeySource, clock: Clock, text: str) -> ApiKey:
    """The key that this text is, if it is one that may be used now."""
    parsed = parse(text)
    key = await source.key(parsed.key_id)
    same = hmac.compare_digest(_hash(parsed.secret), key.secret_sha256 if key else _NO_HASH)
    if key is None or not same or not is_usable(key, clock.now()):
        raise InvalidKey
    return key


class KeyCache:
    """Keys as they were at most `ttl` seconds ago, so that a flood of calls is not a flood of reads. A revoked key
    works for that long at most. It also remembers that an id is unknown: ids are random, nobody asks before one is
    made."""

    def __init__(self, source: KeySource, clock: Clock, ttl: float = 2.0, size: int = 1024) -> None:
        self._source = source
        self._clock = clock
        self._ttl = ttl
        self._size = size
        self._kept: dict[str, tuple[float, ApiKey | None]] = {}

    async def key(self, key_id: str) -> ApiKey | None:
        # Taken before the read: what is kept is never older than it says.
        now = self._clock.monotonic()
        kept = self._kept.get(key_id)
        if kept is not None and now - kept[0] < self._ttl:
            return kept[1]
        key = await self._source.key(key_id)
        self._kept.pop(key_id, None)
        while len(self._kept) >= self._size:
            del self._kept[next(iter(self._kept))]
        self._kept[key_id] = (now, key)
        return key


def is_usable(key: ApiKey, now: float) -> bool:
    """Whether a key was neither revoked nor has expired."""
    return key.revoked_at is None and (key.expires_at is None or now < key.expires_at)


def _hash(secret: str) -> str:
    return sha256(secret.encode()).hexdigest()
