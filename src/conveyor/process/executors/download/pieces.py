"""Pieces: a file on its way into blobs. Gets its bytes as they come, keeps them in objects of one size, and hands on
a reference to the whole with its sha256.

Blobs can not be appended to, on no engine. So a file is kept as pieces `<key>/000000` and on, and stays so: composing
one object of them would write every byte a second time. Each piece is durable by itself, so what is listed under the
key, up to the first gap, is how far the file is: no row has to be written for it. A state of sha256 can not be kept,
so after a restart what is there is read back and hashed beside the download.
"""

import asyncio
from collections.abc import Iterable
from hashlib import sha256

from conveyor.engines.blobs import Blobs
from conveyor.faults import crashpoint
from conveyor.model import BodyRef, piece_key

KIB = 1024
_LEAST_PIECE = 256 * KIB
_UNKNOWN_PIECE = 4 * KIB * KIB
# A crash costs at most what is under way, about two parts of so many.
_PARTS = 192
_STEP = 64 * KIB


def piece_size(total: int | None, largest: int) -> int:
    """In what pieces a file of this size is kept."""
    if total is None:
        return min(_UNKNOWN_PIECE, largest)
    return min(largest, max(_LEAST_PIECE, -(-total // _PARTS // _STEP) * _STEP))


class Pieces:
    """One file under one key. Memory: a piece that fills, and one that is written."""

    def __init__(self, blobs: Blobs, key: str, size: int) -> None:
        self._blobs = blobs
        self._key = key
        self._size = size
        self._digest = _Digest(blobs, key)
        self._buffer = bytearray(size)
        self._filled = 0
        self._number = 0
        self._writing: asyncio.Task[None] | None = None

    @property
    def offset(self) -> int:
        """Bytes that were taken, in memory or kept."""
        return self._number * self._size + self._filled

    @property
    def kept(self) -> int:
        """Bytes of the pieces that were begun to be kept."""
        return self._number * self._size

    async def find(self, total: int | None) -> None:
        """Go on after what is there already: all pieces from the first on that are as long as they should be."""
        number = 0
        async for info in self._blobs.listing(f"{self._key}/"):
            if info.key != piece_key(self._key, number) or info.size != self._size:
                break
            number += 1
        last = None if total is None else total - number * self._size
        if last is not None and 0 < last < self._size:
            found = await self._blobs.get(piece_key(self._key, number))
            # The last one is shorter: it goes back into memory, and is written again when the file is sealed.
            if found is not None and len(found) == last:
                self._buffer[:last] = found
                self._filled = last
        self._number = number
        self._digest.kept(number)

    async def take(self, data: memoryview) -> None:
        """Take bytes; waits while the piece before is still being written."""
        while data:
            part = data[: self._size - self._filled]
            self._buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == self._size:
                await self._turn()

    async def seal(self) -> BodyRef:
        """All bytes were taken: keep what is left, and say where the whole is."""
        length = self.offset
        if self._filled or not self._number:
            await self._turn()
        await self.settle()
        digest = await self._digest.whole(self._number)
        if self._number == 1:
            return BodyRef(piece_key(self._key, 0), length, digest)
        return BodyRef(self._key, length, digest, piece=self._size)

    async def settle(self) -> None:
        """Wait for the piece that is being written."""
        if self._writing is not None:
            await self._writing
            self._writing = None

    async def leave(self) -> None:
        """End what goes on behind, in whatever state it is."""
        tasks: Iterable[asyncio.Task[None] | None] = (self._writing, self._digest.leave())
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)

    async def _turn(self) -> None:
        """The piece is full, or the last: write it while the next one fills."""
        await self.settle()
        full, self._buffer = self._buffer, bytearray(self._size)
        data = memoryview(full)[: self._filled]
        self._writing = asyncio.create_task(self._keep(self._number, data))
        self._number += 1
        self._filled = 0

    async def _keep(self, number: int, data: memoryview) -> None:
        crashpoint("download.piece.before")
        await self._blobs.put(piece_key(self._key, number), data)
        crashpoint("download.piece.after")
        await self._digest.add(number, data)


class _Digest:
    """The sha256 of pieces in order: from memory as they are kept, or read back where they were kept before."""

    def __init__(self, blobs: Blobs, key: str) -> None:
        self._blobs = blobs
        self._key = key
        self._hash = sha256()
        self._next = 0
        self._kept = 0
        self._reading: asyncio.Task[None] | None = None
        # Set when a piece could not be read to its end: what was hashed of it can not be taken back.
        self._failure: Exception | None = None

    def kept(self, count: int) -> None:
        """So many pieces are there already."""
        self._kept = count
        self._read_on()

    async def add(self, number: int, data: memoryview) -> None:
        """One more is there, and in memory."""
        if self._reading is None and number == self._next and self._failure is None:
            await asyncio.to_thread(self._hash.update, data)
            self._next += 1
        self._kept = number + 1
        self._read_on()

    async def whole(self, count: int) -> str:
        """The digest of `count` pieces, all of which are there."""
        self._kept = count
        while self._next < count and self._failure is None:
            self._read_on()
            assert self._reading is not None
            await self._reading
        if self._failure is not None:
            raise self._failure
        return self._hash.hexdigest()

    def leave(self) -> asyncio.Task[None] | None:
        if self._reading is not None:
            self._reading.cancel()
        return self._reading

    def _read_on(self) -> None:
        if self._reading is None and self._next < self._kept and self._failure is None:
            self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            while self._next < self._kept:
                async for part in self._blobs.stream(piece_key(self._key, self._next)):
                    await asyncio.to_thread(self._hash.update, part)
                self._next += 1
        except Exception as error:
            self._failure = error
        finally:
            self._reading = None
