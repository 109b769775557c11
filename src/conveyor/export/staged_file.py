"""Drafts: a file on its way into a store whose objects are written whole. Gets bytes as they are made, puts them as
pieces, and in the end as one file that readers find.

Names of objects carry the attempt that wrote them, so that nobody writes over what another wrote; `attempts` says which
are the right ones.
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

# Objects that are asked for at once.
_AT_ONCE = 16


class Digest(Protocol):
    """A hash that is being made."""

    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


class StagedFile:
    """One file, by one attempt. Beside it stands what its end is made of. Not for two threads at once."""

    def __init__(
        self, blobs: Blobs, prefix: str, number: int, attempt: int, making: PartInProgress, digest: Digest | None = None
    ) -> None:
        """Goes on where `making` says. `digest` is that of the bytes so far, where it is known."""
        self._blobs = blobs
        self._folder = f"{prefix}/{number:04d}"
        self._attempt = attempt
        self._digest = digest
        self._buffer: list[bytes] = []
        self.held = 0
        self.size, self.pieces, self.beside = making.size, making.pieces, making.beside
        self.attempts = list(making.attempts)
        if not making.pieces:
            self._digest = sha256()

    @property
    def digest(self) -> Digest:
        assert self._digest is not None, "it is not open"
        return self._digest

    async def open(self) -> None:
        """Make the hash of the bytes so far again, if it is not known: it can not be handed from one process to
        another."""
        if self._digest is not None:
            return
        digest = sha256()
        for number in range(self.pieces):
            async for data in self._blobs.stream(self._piece_key(number)):
                await asyncio.to_thread(digest.update, data)
        self._digest = digest

    def add(self, data: bytes) -> None:
        """The next bytes of the file."""
        if data:
            self.digest.update(data)
            self._buffer.append(data)
            self.held += len(data)
            self.size += len(data)

    def cut(self, beside: bytes = b"") -> list[tuple[str, bytes]]:
        """All that is held, as the next piece, and what is to stand beside it, under their names."""
        puts: list[tuple[str, bytes]] = []
        if self._buffer or beside:
            self._begin()
        if self._buffer:
            puts.append((self._piece_key(self.pieces), b"".join(self._buffer)))
            self._buffer, self.held = [], 0
            self.pieces += 1
        if beside:
            puts.append((self._beside_key(self.beside), beside))
            self.beside += 1
        return puts

    async def put(self, puts: Sequence[tuple[str, bytes]]) -> None:
        """Make what was cut durable."""
        crashpoint("exports.piece.before")
        await asyncio.gather(*(self._blobs.put(key, data) for key, data in puts))
        crashpoint("exports.piece.after")

    async def beside_at(self, numbers: Sequence[int]) -> list[bytes]:
        """Some of the things beside it."""
        found: list[bytes] = []
        for start in range(0, len(numbers), _AT_ONCE):
            found += await asyncio.gather(*map(self._beside, numbers[start : start + _AT_ONCE]))
        return found

    async def _beside(self, number: int) -> bytes:
        key = self._beside_key(number)
        data = await self._blobs.get(key)
        if data is None:
            raise EngineFailed("What the end of an export is made of is missing.", key=key)
        return data

    async def close(self, tasks: int) -> PartFile:
        """The file as readers find it: one object where there is one, or where the store signs links to it; else a list
        of its pieces. All was put."""
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
        """Remove what the file is not made of any more. What a crash leaves goes when the export expires."""
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
        """What is written from now on carries this attempt."""
        if not self.attempts or self.attempts[-1][2] != self._attempt:
            self.attempts.append((self.pieces, self.beside, self._attempt))

    def _piece_key(self, number: int) -> str:
        attempt = next(attempt for first, _, attempt in reversed(self.attempts) if first <= number)
        return f"{self._folder}/{number:06d}-{attempt}"

    def _beside_key(self, number: int) -> str:
        attempt = next(attempt for _, first, attempt in reversed(self.attempts) if first <= number)
        return f"{self._folder}/beside-{number:06d}-{attempt}"
