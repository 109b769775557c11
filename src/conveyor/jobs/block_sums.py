"""Checksums by block: a CRC-32 for each block of a long body, so that a range of it can be checked without reading the
whole. The sha256 of a body is over the whole.
"""

import struct
from collections.abc import Sequence

from isal import isal_zlib

from conveyor.model import BlockSums

# A body of up to this length is read as a whole before a range of it is sent: a longer one has checksums by block.
CHECKED_WHOLE = 8 * 1024 * 1024
# They are part of the task's row: a file of more pieces than this has none.
_MAX_BLOCKS = 8192
# The blocks of a body that is one object.
BLOCK_BYTES = 1024 * 1024


def block_sums(body: bytes | memoryview) -> BlockSums | None:
    """The checksums of a body that is stored as one object; None for one that is read as a whole."""
    if len(body) <= CHECKED_WHOLE:
        return None
    view = memoryview(body)
    blocks = (view[start : start + BLOCK_BYTES] for start in range(0, len(view), BLOCK_BYTES))
    return sums_of(BLOCK_BYTES, list(map(isal_zlib.crc32, blocks)))


def sums_of(size: int, crcs: Sequence[int]) -> BlockSums | None:
    """The checksums of blocks of `size` bytes, the last of which may be shorter; None if they are too many."""
    return BlockSums(size, struct.pack(f">{len(crcs)}L", *crcs)) if len(crcs) <= _MAX_BLOCKS else None


def crc_of(sums: BlockSums, number: int) -> int:
    """The checksum of one block."""
    (crc,) = struct.unpack_from(">L", sums.crcs, 4 * number)
    return int(crc)
