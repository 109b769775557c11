"""The bytes of a list, wherever it is: staged in the blob store, in a bucket of the tenant, or behind a URL.

A list that is not staged is pinned before it is read: each request then asks for that version, and another one is
ListChanged. A URL that serves no ranges, or has no validator that identifies its bytes, cannot be pinned: its list is
copied first.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec

from conveyor.engines.blobs import Blobs
from conveyor.engines.source_buckets import SCHEME, SourceBuckets
from conveyor.errors import ListMissing, ListUnreadable, SourceRefused
from conveyor.lists.reader import take
from conveyor.lists.url_lists import UrlLists
from conveyor.model import RemoteSource, Source, TenantId


@dataclass(frozen=True)
class RemoteLists:
    """What reads lists that are not staged."""

    buckets: SourceBuckets
    urls: UrlLists

    async def close(self) -> None:
        await self.urls.close()


@dataclass(frozen=True)
class ListBytes:
    """Reads the lists of one tenant. Without `remote` it reads staged lists only."""

    blobs: Blobs
    tenant: TenantId
    max_bytes: int
    remote: RemoteLists | None = None

    async def pin(self, source: Source) -> Source | None:
        """The source with its size and version; None if the list has to be copied first. Raises ListUnreadable if no
        retry could help."""
        place = source.remote
        if place is None:
            if await self.blobs.size(source.key) is None:
                raise ListMissing
            return source
        readers = self._readers()
        if place.url.startswith(SCHEME):
            try:
                found = await readers.buckets.pin(self.tenant, place)
            except SourceRefused as refused:
                # The operator has removed it from the list since the job was accepted.
                raise ListUnreadable(refused.message) from None
            size = found.size
            pins = {"etag": found.etag, "version_id": found.version_id}
            changes: dict[str, str | None] = {name: value for name, value in pins.items() if value is not None}
        else:
            pinned = await readers.urls.pin(place)
            if pinned is None:
                return None
            size = pinned.size
            # The named version was compared; a weak ETag of it is no condition for a range.
            changes = {"etag": pinned.etag, "last_modified": pinned.last_modified}
        if size > self.max_bytes:
            raise ListUnreadable(f"The list is larger than {self.max_bytes} bytes.")
        return msgspec.structs.replace(source, size=size, remote=msgspec.structs.replace(place, **changes))

    def copied(self, source: Source) -> AsyncIterator[bytes]:
        """The bytes of a list that cannot be pinned, all from one response."""
        return self._readers().urls.whole(_place(source), self.max_bytes, source.compression)

    async def head(self, source: Source, length: int) -> bytes:
        """The first bytes."""
        if source.remote is None:
            return await self.blobs.get(source.key, 0, length) or b""
        return await take(self.stream(source, 0, length), length)

    async def stream(self, source: Source, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        """The bytes from `start`, in pieces; of a staged list maybe beyond `end`. Raises ListChanged."""
        if source.remote is None:
            async for piece in self.blobs.stream(source.key, start):
                yield piece
            return
        stop = source.size if end is None else min(end, source.size)
        readers = self._readers()
        if source.remote.url.startswith(SCHEME):
            pieces = readers.buckets.stream(self.tenant, source.remote, start, stop)
        else:
            pieces = readers.urls.stream(source.remote, source.size, start, stop)
        try:
            async for piece in pieces:
                yield piece
        except SourceRefused as refused:
            raise ListUnreadable(refused.message) from None

    def _readers(self) -> RemoteLists:
        assert self.remote is not None, "this process reads staged lists only"
        return self.remote


def _place(source: Source) -> RemoteSource:
    assert source.remote is not None
    return source.remote
