"""The Blobs seam: staged lists, result bodies and exports. An object is written once and readable by range."""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec


class BlobInfo(msgspec.Struct, frozen=True):
    """An object in a listing."""

    key: str
    size: int


class Presigned(msgspec.Struct, frozen=True):
    """A signed request that the store answers directly until it expires."""

    url: str
    method: str
    headers: Mapping[str, str]


class StoredPart(msgspec.Struct, frozen=True):
    """A part of an object whose upload is not complete."""

    number: int
    size: int
    etag: str


class Blobs(Protocol):
    """Keys are relative paths of plain segments that Conveyor chooses. `put` returns once the object is durable: only
    then may a record refer to it."""

    async def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        """Write an object; readers see all of it or none."""

    async def put_all(self, objects: Sequence[tuple[str, bytes | bytearray | memoryview]]) -> list[str]:
        """Write several new objects, in as few durable steps as the store can. Returns the key of each, which may be
        longer than the given one: the store may add where it is. Returns once all are durable; if it fails, some may
        be written."""

    async def put_stream(self, key: str, chunks: AsyncIterator[bytes]) -> int:
        """Write an object from a stream in constant memory. Returns its size. A stream that raises writes nothing."""

    async def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes | None:
        """The object or a range of it; None if it does not exist."""

    def stream(self, key: str, offset: int = 0) -> AsyncIterator[bytes]:
        """The object's bytes from `offset`, in pieces. Raises NotFound at the first piece if it does not exist."""

    async def size(self, key: str) -> int | None:
        """The object's size; None if it does not exist."""

    def listing(self, prefix: str) -> AsyncIterator[BlobInfo]:
        """Objects under a prefix, in order of key."""

    async def delete(self, keys: list[str]) -> None:
        """Delete objects. A missing object is not an error."""

    async def delete_prefix(self, prefix: str, limit: int) -> int:
        """Delete up to `limit` objects under a prefix. Returns how many."""

    async def presigned_put(self, key: str, size: int, sha256: str, seconds: float) -> Presigned | None:
        """A request that uploads exactly this object: the signature covers its size and hash. None if clients upload
        through the API instead."""

    async def presigned_get(self, key: str, seconds: float, content_type: str, filename: str) -> Presigned | None:
        """A request that downloads the object as an attachment. None if the API serves it instead."""


@runtime_checkable
class StoresParts(Protocol):
    """A capability: a client sends an object in parts, straight to the store. Parts are numbered from 1; all but the
    last have the same size. Parts that are never completed expire."""

    async def part_bytes(self, size: int) -> int | None:
        """The size of the parts of an object that is too large for one request; None if it is not, or if this store
        takes no parts."""

    async def begin_parts(self, key: str) -> str:
        """Begin an upload. Returns its id, which only this key has."""

    async def presigned_part(self, key: str, multipart_id: str, number: int, size: int, seconds: float) -> Presigned:
        """A request that uploads one part of exactly this size."""

    async def stored_parts(self, key: str, multipart_id: str) -> list[StoredPart]:
        """The parts that are stored, in order. Raises UploadConflict for an unknown id."""

    async def complete_parts(self, key: str, multipart_id: str, parts: list[StoredPart]) -> None:
        """Make the object of these parts, unless there is one. Raises UploadConflict for an unknown id."""


class SharedLogs(Protocol):
    """A capability: processes of one machine write to the same blobs. One appends objects and hands over their keys;
    another makes them durable (SyncsLogs), those of many appends at once."""

    def append(self, objects: Sequence[tuple[str, bytes | bytearray | memoryview]]) -> list[str]:
        """Write several new objects, as `put_all` does, but not durably. It blocks for as long as the system takes to
        copy them."""


@runtime_checkable
class SyncsLogs(Protocol):
    """The other half of SharedLogs."""

    async def make_durable(self, keys: Collection[str]) -> None:
        """Return once these objects are durable, except those that were deleted. A record may refer to them then."""
