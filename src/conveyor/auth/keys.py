"""API keys: `cv_<key_id>_<secret>`. This module creates and checks them. A key is shown once; only the hash of its
secret is stored.

The secret has 256 bits, so a plain SHA-256 is as safe as a slow hash. The tenant of a request comes only from its key.
"""

import hmac
import re
import secrets
from hashlib import sha256
from typing import NamedTuple, Protocol

import msgspec

from conveyor.clock import Clock
from conveyor.engines.records import Document, DocumentRecords
from conveyor.errors import EngineFailed, InvalidField, InvalidKey, LastAdminKey, MissingKey, NotFound
from conveyor.faults import crashpoint
from conveyor.model import ApiKey, TenantId

_TENANT = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_KEY = re.compile(r"cv_([0-9a-z]{26})_([0-9a-f]{64})")
_BEARER = re.compile(r"bearer +(\S+)", re.IGNORECASE)
_MAX_NAME = 200
# Compared for an unknown id, so that it takes as long as a known one.
_NO_HASH = "0" * 64
# The kind, tenant and id of the document with the administrators' keys that are being revoked.
_REVOKING = "admin_keys"
_REVOKING_TENANT = TenantId("~keys")
_REVOKING_ID = "revoking"
_MAX_TRIES = 100
_key_ids = msgspec.json.Decoder(frozenset[str])


class ParsedKey(NamedTuple):
    """The two parts of a key's text."""

    key_id: str
    secret: str


class KeySource(Protocol):
    """Looks up keys: Records, or a KeyCache in front of it."""

    async def key(self, key_id: str) -> ApiKey | None: ...


class KeyStore(KeySource, Protocol):
    """The part of Records that holds the keys."""

    async def keys(self, tenant: TenantId | None) -> list[ApiKey]: ...

    async def revoke_key(self, key_id: str, at: float) -> bool: ...


def check_tenant(name: str) -> TenantId:
    """Check a tenant's name, which is part of keys and paths in every engine. Raises InvalidField."""
    if not _TENANT.fullmatch(name):
        raise InvalidField(
            "Invalid tenant. Use 1 to 63 characters of a-z, 0-9, `_` and `-`, starting with a letter or digit.",
            field="tenant",
        )
    return TenantId(name)


def new_key_id(clock: Clock) -> str:
    """The public part of a new key."""
    return clock.new_id("key").removeprefix("key_")


def make_key(
    clock: Clock,
    tenant: str,
    name: str | None = None,
    expires_at: float | None = None,
    admin: bool = False,
    key_id: str | None = None,
) -> tuple[str, ApiKey]:
    """Create a key: returns its text, to show once, and the record to store. An admin key manages keys of all
    tenants. `key_id` is an id that was reserved for it."""
    if name is not None and not (0 < len(name) <= _MAX_NAME and name.isprintable()):
        raise InvalidField(f"Invalid key name. Use 1 to {_MAX_NAME} printable characters.", field="name")
    key_id = key_id or new_key_id(clock)
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


def parse_key(text: str) -> ParsedKey:
    """Split the text of a key. Raises InvalidKey."""
    match = _KEY.fullmatch(text)
    if match is None:
        raise InvalidKey
    return ParsedKey(match[1], match[2])


def bearer_token(header: str | None) -> str:
    """The token in an Authorization header. Raises MissingKey."""
    if not header:
        raise MissingKey
    match = _BEARER.fullmatch(header.strip())
    if match is None:
        raise MissingKey
    return match[1]


async def authenticate(source: KeySource, clock: Clock, text: str) -> ApiKey:
    """The key for this text. Raises InvalidKey if it is unknown, expired or revoked."""
    parsed = parse_key(text)
    key = await source.key(parsed.key_id)
    matches = hmac.compare_digest(_hash(parsed.secret), key.secret_sha256 if key else _NO_HASH)
    if key is None or not matches or not is_usable(key, clock.now()):
        raise InvalidKey
    return key


async def revoke(access: KeyStore, documents: DocumentRecords, clock: Clock, key_id: str) -> None:
    """Revoke a key. Raises NotFound, and LastAdminKey if no other key could revoke or list any."""
    key = await access.key(key_id)
    if key is None:
        raise NotFound(f"Key {key_id} not found. `conveyor keys list` shows all keys.")
    if key.admin and is_usable(key, clock.now()):
        await _claim_revocation(access, documents, clock, key_id)
    crashpoint("key.revoke.before")
    await access.revoke_key(key_id, clock.now())
    crashpoint("key.revoke.after")


async def _claim_revocation(access: KeyStore, documents: DocumentRecords, clock: Clock, key_id: str) -> None:
    """Write down that this administrator's key goes, if another one stays. Two administrators who revoke each other's
    keys at the same time write on the same version of a document, so that one of them sees the claim of the other."""
    for _ in range(_MAX_TRIES):
        # Before the keys: a claim that is not in the document yet changes its version.
        row = await documents.document(_REVOKING, _REVOKING_TENANT, _REVOKING_ID)
        if row is None:
            await documents.create_documents([Document(_REVOKING, _REVOKING_TENANT, _REVOKING_ID, b"[]")])
            continue
        going = _key_ids.decode(row.body)
        now = clock.now()
        others = [other for other in await access.keys(None) if other.admin and other.key_id != key_id]
        usable = {other.key_id for other in others if is_usable(other, now)}
        if not usable - going:
            raise LastAdminKey
        # Claims of keys that are revoked by now are of no more use.
        body = msgspec.json.encode(sorted({key_id} | (usable & going)))
        crashpoint("key.revoking.before")
        claimed = await documents.replace_document(msgspec.structs.replace(row, body=body))
        crashpoint("key.revoking.after")
        if claimed is not None:
            return
    raise EngineFailed("Other keys are being revoked at the same time. Retry.")


class KeyCache:
    """Caches keys for `ttl` seconds, so that a flood of requests does not flood the store. A revoked key works for at
    most that long. Unknown ids are cached too: ids are random, so none is used before its key exists."""

    def __init__(self, source: KeySource, clock: Clock, ttl: float = 2.0, size: int = 1024) -> None:
        self._source = source
        self._clock = clock
        self._ttl = ttl
        self._size = size
        self._entries: dict[str, tuple[float, ApiKey | None]] = {}

    def forget(self, key_id: str) -> None:
        """Have the next look read it again."""
        self._entries.pop(key_id, None)

    async def key(self, key_id: str) -> ApiKey | None:
        # Taken before the read, so that an entry is never older than its timestamp.
        now = self._clock.monotonic()
        entry = self._entries.get(key_id)
        if entry is not None and now - entry[0] < self._ttl:
            return entry[1]
        key = await self._source.key(key_id)
        self._entries.pop(key_id, None)
        while len(self._entries) >= self._size:
            del self._entries[next(iter(self._entries))]
        self._entries[key_id] = (now, key)
        return key


def is_usable(key: ApiKey, now: float) -> bool:
    """Whether a key is neither revoked nor expired."""
    return key.revoked_at is None and (key.expires_at is None or now < key.expires_at)


def _hash(secret: str) -> str:
    return sha256(secret.encode()).hexdigest()
