"""The SourceBuckets seam: lists in buckets of tenants, which the server only reads. The operator names the buckets that
it reads for each tenant; it reads no other, so that no tenant borrows the server's permissions."""

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from conveyor.errors import SourceRefused
from conveyor.model import RemoteSource, TenantId

SCHEME = "s3://"


class PinnedObject(msgspec.Struct, frozen=True):
    """One version of an object."""

    size: int
    etag: str | None
    # None in a bucket without versions.
    version_id: str | None = None


class SourceBuckets(Protocol):
    """Reads objects. Every method raises SourceRefused for a bucket that is not listed for the tenant."""

    def check(self, tenant: TenantId, url: str) -> None:
        """Raise unless the tenant may have this object read. It sends no request."""

    async def pin(self, tenant: TenantId, remote: RemoteSource) -> PinnedObject:
        """The version to read: the named one, or else the latest. Raises ListMissing, ListChanged if it is not the
        named one, ListUnreadable, and SourceUnavailable if a retry may help."""

    def stream(self, tenant: TenantId, remote: RemoteSource, start: int, end: int) -> AsyncIterator[bytes]:
        """The bytes of the pinned version between `start` and `end`, in pieces. Raises as `pin` does."""


class NoSourceBuckets:
    """The default: no bucket is listed."""

    def check(self, tenant: TenantId, url: str) -> None:
        raise SourceRefused

    async def pin(self, tenant: TenantId, remote: RemoteSource) -> PinnedObject:
        raise SourceRefused

    async def stream(self, tenant: TenantId, remote: RemoteSource, start: int, end: int) -> AsyncIterator[bytes]:
        raise SourceRefused
        yield b""
