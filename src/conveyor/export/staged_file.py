"""A staged file: a file that is written piece by piece to a store whose objects cannot grow. Gets bytes as they are
made, stores them as pieces with sidecars, and in the end publishes them as one file.

The name of an object contains the attempt that wrote it, so that no process overwrites another's; `attempts` lists the
valid ones.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from hashlib import sha256
from typing import Protocol

import msgspec

from conveyor.engines.blobs import Blobs
from conveyor.errors import EngineFailed
from conveyor.export.exports import PartFile, PartInProgress, Piece
from conveyor.faults import crashpoint

# Concurrent reads.
_AT_ONCE = 16


class Digest(Protocol):
    """A hash over the bytes so far."""

    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


class StagedFile:
    """One file, written by one attempt. Its sidecars hold what the end of the file is made of. Not thread-safe."""

    def __init__(
        self, blobs: Blobs, prefix: str, number: int, attempt: int, making: PartInProgress, digest: Digest | None = None
    ) -> None:
        """Resumes at `making`. `digest` is that of the bytes so far, if this process has it."""
        self._blobs = blobs
        self._folder = f"{prefix}/{number:04d}"
        self._attempt = attempt
        self._digest = digest
        self._buffer: list[bytes] = []
        self.buffered = 0
        self.size, self.pieces, self.sidecars = making.size, making.pieces, making.sidecars
        self.attempts = list(making.attempts)
        if not making.pieces:
            self._digest = sha256()

    @property
    def digest(self) -> Digest:
        assert self._digest is not None, "the file is not open"
        return self._digest

    async def open(self) -> None:
        """Compute the hash of the bytes so far, if it is unknown: one process cannot hand a hash to another."""
        if self._digest is not None:
            return
        digest = sha256()
        for number in range(self.pieces):
            async for data in self._blobs.stream(self._piece_key(number)):
                await asyncio.to_thread(digest.update, data)
        self._digest = digest

    def add(self, data: bytes) -> None:
        """Append bytes to the file."""
        if data:
            self.digest.update(data)
            self._buffer.append(data)
            self.buffered += len(data)
            self.size += len(data)

    def cut(self, sidecar: bytes = b"") -> list[tuple[str, bytes]]:
        """Take the buffered bytes as the next piece, and a sidecar. Returns them with the keys to put them under."""
        puts: list[tuple[str, bytes]] = []
        if self._buffer or sidecar:
            self._begin()
        if self._buffer:
            puts.append((self._piece_key(self.pieces), b"".join(self._buffer)))
            self._buffer, self.buffered = [], 0
            self.pieces += 1
        if sidecar:
            puts.append((self._sidecar_key(self.sidecars), sidecar))
            self.sidecars += 1
        return puts

    async def put(self, puts: Sequence[tuple[str, bytes]]) -> None:
        """Store the objects that `cut` returned."""
        crashpoint("exports.piece.before")
        await asyncio.gather(*(self._blobs.put(key, data) for key, data in puts))
        crashpoint("exports.piece.after")

    async def read_sidecars(self, numbers: Sequence[int]) -> list[bytes]:
        """The sidecars with these numbers."""
        sidecars: list[bytes] = []
        for start in range(0, len(numbers), _AT_ONCE):
            sidecars += await asyncio.gather(*map(self._read_sidecar, numbers[start : start + _AT_ONCE]))
        return sidecars

    async def _read_sidecar(self, number: int) -> bytes:
        key = self._sidecar_key(number)
        data = await self._blobs.get(key)
        if data is None:
            raise EngineFailed("A sidecar of an export is missing.", key=key)
        return data

    async def close(self, tasks: int) -> PartFile:
        """Publish the file, once all pieces are stored: as one object if there is one piece or the store signs links,
        else as a list of pieces."""
        sizes = {info.key: info.size async for info in self._blobs.listing(self._folder)}
        keys = [self._piece_key(number) for number in range(self.pieces)]
        pieces = [Piece(key, sizes.get(key, -1)) for key in keys]
        if sum(piece.size for piece in pieces) != self.size:
            raise EngineFailed("A piece of an export is missing or has another size.", key=self._folder)
        crashpoint("exports.part.before")
        key, listed = await self._place(pieces)
        crashpoint("exports.part.after")
        return PartFile(self.size, self.digest.hexdigest(), tasks, key, listed)

    async def tidy(self, part: PartFile) -> None:
        """Delete objects that the published file does not need. Retention deletes those that a crash leaves behind."""
        keep = {self._piece_key(number) for number in range(self.pieces)} if part.pieces is not None else {part.key}
        leftover = [info.key async for info in self._blobs.listing(self._folder) if info.key not in keep]
        if leftover:
            await self._blobs.delete(leftover)

    async def _place(self, pieces: Sequence[Piece]) -> tuple[str | None, str | None]:
        whole = f"{self._folder}-{self._attempt}"
        if not pieces:
            await self._blobs.put(whole, b"")
            return whole, None
        if len(pieces) == 1:
            return pieces[0].key, None
        if await self._blobs.presigned_get(whole, 60.0, "application/octet-stream", "part") is not None:
            await self._blobs.put_stream(whole, self._bytes_of(pieces))
            return whole, None
        listed = f"{whole}.json"
        await self._blobs.put(listed, msgspec.json.encode(pieces))
        return None, listed

    async def _bytes_of(self, pieces: Sequence[Piece]) -> AsyncIterator[bytes]:
        for piece in pieces:
            async for data in self._blobs.stream(piece.key):
                yield data

    def _begin(self) -> None:
        """Record that this attempt writes the objects from here on."""
        if not self.attempts or self.attempts[-1][2] != self._attempt:
            self.attempts.append((self.pieces, self.sidecars, self._attempt))

    def _piece_key(self, number: int) -> str:
        attempt = next(attempt for first, _, attempt in reversed(self.attempts) if first <= number)
        return f"{self._folder}/{number:06d}-{attempt}"

    def _sidecar_key(self, number: int) -> str:
        attempt = next(attempt for _, first, attempt in reversed(self.attempts) if first <= number)
        # "beside" in stored names: sidecars of exports that earlier versions began.
        return f"{self._folder}/beside-{number:06d}-{attempt}"
