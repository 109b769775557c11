"""Pieces: stores a file in blobs as it comes. Gets bytes, stores them in objects of one size, and returns a reference
to the whole with its sha256.

No engine can append to a blob. So a file is stored as pieces `<key>/000000` and on, and stays so: joining them would
write every byte a second time. Each piece is durable by itself, so the objects under the key, up to the first gap, are
the checkpoint: no row is needed. The state of a sha256 cannot be stored, so after a restart the stored pieces are read
back and hashed while the download goes on.
"""

import asyncio
from collections.abc import Iterable
from hashlib import sha256

from isal import isal_zlib

from conveyor.engines.blobs import Blobs
from conveyor.faults import crashpoint
from conveyor.jobs.block_sums import CHECKED_WHOLE, sums_of
from conveyor.model import BodyRef, piece_key

KIB = 1024
_MIN_PIECE = 256 * KIB
_UNKNOWN_PIECE = 4 * KIB * KIB
# A crash costs about two of this many parts of a file.
_PARTS = 192
_STEP = 64 * KIB


def piece_size(total: int | None, largest: int) -> int:
    """Return the size of the pieces of a file."""
    if total is None:
        return min(_UNKNOWN_PIECE, largest)
    return min(largest, max(_MIN_PIECE, -(-total // _PARTS // _STEP) * _STEP))


class Pieces:
    """One file under one key. Memory: one piece that fills and one that is being written."""

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
        """Bytes so far, in memory or stored."""
        return self._number * self._size + self._filled

    @property
    def stored(self) -> int:
        """Bytes of the pieces whose write has begun."""
        return self._number * self._size

    async def find(self, total: int | None) -> None:
        """Resume after the stored pieces: all from the first on that have the right size."""
        number = 0
        async for info in self._blobs.listing(f"{self._key}/"):
            if info.key != piece_key(self._key, number) or info.size != self._size:
                break
            number += 1
        last = None if total is None else total - number * self._size
        if last is not None and 0 < last < self._size:
            tail = await self._blobs.get(piece_key(self._key, number))
            # The last piece is shorter: it is read into memory and written again with the seal.
            if tail is not None and len(tail) == last:
                self._buffer[:last] = tail
                self._filled = last
        self._number = number
        self._digest.resume(number)

    async def take(self, data: memoryview) -> None:
        """Add bytes. Waits while the piece before is being written."""
        while data:
            part = data[: self._size - self._filled]
            self._buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == self._size:
                await self._write_piece()

    async def seal(self) -> BodyRef:
        """Store the last piece and return a reference to the whole file."""
        length = self.offset
        if self._filled or not self._number:
            await self._write_piece()
        await self.settle()
        digest = await self._digest.whole(self._number)
        # A range is checked by pieces.
        sums = sums_of(self._size, self._digest.crcs) if length > CHECKED_WHOLE else None
        if self._number == 1:
            return BodyRef(piece_key(self._key, 0), length, digest, sums=sums)
        return BodyRef(self._key, length, digest, piece=self._size, sums=sums)

    async def settle(self) -> None:
        """Wait for the piece that is being written."""
        if self._writing is not None:
            await self._writing
            self._writing = None

    async def leave(self) -> None:
        """End background work, finished or not."""
        tasks: Iterable[asyncio.Task[None] | None] = (self._writing, self._digest.leave())
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)

    async def _write_piece(self) -> None:
        """Write a piece that is full, or the last, while the next one fills."""
        await self.settle()
        full, self._buffer = self._buffer, bytearray(self._size)
        data = memoryview(full)[: self._filled]
        self._writing = asyncio.create_task(self._store(self._number, data))
        self._number += 1
        self._filled = 0

    async def _store(self, number: int, data: memoryview) -> None:
        crashpoint("download.piece.before")
        await self._blobs.put(piece_key(self._key, number), data)
        crashpoint("download.piece.after")
        await self._digest.add(number, data)


class _Digest:
    """The sha256 over the pieces in order, and the CRC-32 of each: from memory as they are stored, or read back from
    earlier attempts."""

    def __init__(self, blobs: Blobs, key: str) -> None:
        self._blobs = blobs
        self._key = key
        self._hash = sha256()
        self.crcs: list[int] = []
        self._next = 0
        self._stored = 0
        self._reading: asyncio.Task[None] | None = None
        # Set when reading a piece failed half way: a hash cannot be rolled back.
        self._failure: Exception | None = None

    def resume(self, count: int) -> None:
        """Hash the pieces that are stored already."""
        self._stored = count
        self._read_on()

    async def add(self, number: int, data: memoryview) -> None:
        """Add a piece that was stored and is in memory."""
        if self._reading is None and number == self._next and self._failure is None:
            self.crcs.append(await asyncio.to_thread(self._update, data, 0))
            self._next += 1
        self._stored = number + 1
        self._read_on()

    async def whole(self, count: int) -> str:
        """Return the digest of `count` pieces, all of which are stored."""
        self._stored = count
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

    def _update(self, data: bytes | memoryview, crc: int) -> int:
        """Add bytes. Returns the CRC-32 of their piece up to here."""
        self._hash.update(data)
        return isal_zlib.crc32(data, crc)

    def _read_on(self) -> None:
        if self._reading is None and self._next < self._stored and self._failure is None:
            self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            while self._next < self._stored:
                crc = 0
                async for part in self._blobs.stream(piece_key(self._key, self._next)):
                    crc = await asyncio.to_thread(self._update, part, crc)
                self.crcs.append(crc)
                self._next += 1
        except Exception as error:
            self._failure = error
        finally:
            self._reading = None
