"""Uploads in parts: a list that is too large for one request to the store. The client asks for signed requests, sends
the parts with them, and completes the upload. The server keeps nothing in between: the store has the parts, and the
client the id. The hash of the whole is compared by the ingest."""

import msgspec

from conveyor.engines.blobs import StoredPart, StoresParts
from conveyor.errors import InvalidField, UploadConflict, UploadRefused
from conveyor.faults import crashpoint
from conveyor.lists.uploads import part_bytes
from conveyor.model import UploadRecord
from conveyor.system import System

MAX_NUMBERS = 100


class PartsSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parts that a client wants to send next. Without `multipart_id` a new upload in parts begins."""

    multipart_id: str | None = None
    numbers: list[int] = []


class CompletionSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The upload in parts to complete."""

    multipart_id: str


class PartView(msgspec.Struct, frozen=True):
    """A part, and the request that sends it."""

    number: int
    size: int
    url: str
    method: str
    headers: dict[str, str]


class PartsView(msgspec.Struct, frozen=True):
    """An upload in parts: `count` parts of `part_bytes`, the last maybe smaller. `stored` are the numbers of those that
    are there."""

    multipart_id: str
    part_bytes: int
    count: int
    stored: list[int]
    parts: list[PartView]


class MultipartUploads:
    """Begins and completes uploads in parts."""

    def __init__(self, system: System) -> None:
        self._system = system

    async def parts(self, upload: UploadRecord, spec: PartsSpec) -> PartsView:
        """Signed requests for some parts. Raises UploadConflict if the list is stored, or is not sent in parts."""
        store, size = await self._store(upload)
        if upload.stored_at is not None:
            raise UploadConflict("The upload is already stored.")
        count = -(-upload.size // size)
        if len(spec.numbers) > MAX_NUMBERS or not all(1 <= number <= count for number in spec.numbers):
            raise InvalidField(
                f"`numbers` must be at most {MAX_NUMBERS} numbers from 1 to {count}.", field="numbers", limit=count
            )
        stored: list[StoredPart] = []
        if spec.multipart_id is not None:
            stored = await store.stored_parts(upload.key, spec.multipart_id)
        multipart_id = spec.multipart_id or await store.begin_parts(upload.key)
        left = upload.expires_at - self._system.clock.now()
        parts = []
        for number in spec.numbers:
            length = min(size, upload.size - (number - 1) * size)
            signed = await store.presigned_part(upload.key, multipart_id, number, length, left)
            parts.append(PartView(number, length, signed.url, signed.method, dict(signed.headers)))
        return PartsView(multipart_id, size, count, [part.number for part in stored], parts)

    async def complete(self, upload: UploadRecord, spec: CompletionSpec) -> None:
        """Make the list of its parts. It may be repeated. Raises UploadRefused if parts are missing."""
        store, size = await self._store(upload)
        if upload.stored_at is not None:
            return
        if await self._system.blobs.size(upload.key) is None:
            parts = await store.stored_parts(upload.key, spec.multipart_id)
            _check_parts(upload, size, parts)
            await store.complete_parts(upload.key, spec.multipart_id, parts)
        crashpoint("upload.complete.before")
        await self._system.records.access.mark_stored(upload.upload_id)
        crashpoint("upload.complete.after")

    async def _store(self, upload: UploadRecord) -> tuple[StoresParts, int]:
        blobs = self._system.blobs
        size = await part_bytes(blobs, upload.size)
        if size is None or not isinstance(blobs, StoresParts):
            raise UploadConflict("This upload is not sent in parts. Send it to the URL of its creation.")
        return blobs, size


def _check_parts(upload: UploadRecord, size: int, parts: list[StoredPart]) -> None:
    count = -(-upload.size // size)
    expected = {number: min(size, upload.size - (number - 1) * size) for number in range(1, count + 1)}
    stored = {part.number: part.size for part in parts}
    if stored != expected:
        missing = sorted(number for number, length in expected.items() if stored.get(number) != length)
        named = ", ".join(map(str, missing[:10])) or "none"
        raise UploadRefused(f"The upload has {len(stored)} of {count} parts. Missing or of another size: {named}.")
