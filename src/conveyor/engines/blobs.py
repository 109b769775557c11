"""Blobs: staged lists, result bodies, exports. Whole objects, written once, readable by range."""

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

import msgspec


class BlobInfo(msgspec.Struct, frozen=True):
    """An object as a listing shows it."""

    key: str
    size: int


class Presigned(msgspec.Struct, frozen=True):
    """A request that the store itself answers to whoever holds it, until it lapses."""

    url: str
    method: str
    headers: Mapping[str, str]


class Blobs(Protocol):
    """A key is a relative path of plain segments, chosen by us. `put` returns once the object would survive a power
    cut: a row that points to it may be written then, and not before."""

    async def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        """Write an object whole; readers see all of it or none."""

    async def put_stream(self, key: str, chunks: AsyncIterator[bytes]) -> int:
        """Write an object from a stream in flat memory; returns its size. If the stream raises, nothing is left."""

    async def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes | None:
        """The object, or a range of it; None if there is none."""

    def stream(self, key: str, offset: int = 0) -> AsyncIterator[bytes]:
        """The object's bytes from `offset`, in pieces. Raises NotFound at the first piece if there is none."""

    async def size(self, key: str) -> int | None:
        """The object's size; None if there is none."""

    def listing(self, prefix: str) -> AsyncIterator[BlobInfo]:
        """Objects under a prefix, in order of key."""

    async def delete(self, keys: list[str]) -> None:
        """Remove objects; those that are not there are no error."""

    async def delete_prefix(self, prefix: str, limit: int) -> int:
        """Remove up to `limit` objects under a prefix; returns how many."""

    async def presigned_put(self, key: str, size: int, sha256: str, seconds: float) -> Presigned | None:
        """A request that stores this object and no other: its size and hash are bound into the signature. None where
        the API itself takes it."""

    async def presigned_get(self, key: str, seconds: float, content_type: str, filename: str) -> Presigned | None:
        """A request that reads the object, always as an attachment. None where the API itself serves it."""
