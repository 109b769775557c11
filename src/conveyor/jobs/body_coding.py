"""The encoding of bodies in segments. Gets a body and returns the bytes to store; gets stored bytes and returns the
body, checked.

Raw deflate is what a zip and a gzip stream hold between their headers, so that both are made of stored bytes as they
are. A CRC-32 of the stored bytes shows that they are those that were written, without inflating them.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from isal import isal_zlib

from conveyor.errors import BodyDamaged, EngineFailed
from conveyor.model import BodyRef, Job, ResultLayout, StoredAs

DEFLATE = "deflate"
# A longer body is always an object of its own, stored as it is.
LARGE = 1024 * 1024
# The largest page that is part of its row: pages are read less often than results.
INLINE_PAGE = 511
# Without date or name: the same body makes the same bytes.
GZIP_HEADER = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"

# Of the library's levels 0 to 3: 0 is twice as fast and up to half as large again, 3 takes twice the time for nothing.
_LEVEL = 1
_WBITS = -isal_zlib.MAX_WBITS
_GZIP_TRAILER = struct.Struct("<LL")
GZIP_TRAILER_BYTES = _GZIP_TRAILER.size
_REMEDY = "Run its task again: `conveyor rerun JOB --damaged`."
_COMPRESSED = (
    "image/",
    "video/",
    "audio/",
    "font/woff",
    "application/zip",
    "application/gzip",
    "application/x-gzip",
    "application/zstd",
    "application/x-7z",
    "application/x-xz",
    "application/x-bzip",
    "application/vnd.openxmlformats",
)
# Characters that decide: targets send what they like, and few types are kept in mind.
_LONGEST_TYPE = 100
_NOT_COMPRESSED = ("image/svg", "image/bmp", "audio/wav", "audio/midi")


class DeflatedBody(NamedTuple):
    """The bytes to store, and what a reference says about them."""

    data: bytes
    stored: StoredAs


def is_worth_deflating(job: Job, length: int, content_type: str | None) -> bool:
    """Whether a body of this length and type belongs into a segment and may shrink."""
    if length <= INLINE_PAGE or length > LARGE or job.result_layout is not ResultLayout.PACKED:
        return False
    return not is_compressed(content_type)


def is_compressed(content_type: str | None) -> bool:
    """Whether bodies of this type are compressed in themselves."""
    return content_type is not None and _is_compressed(content_type[:_LONGEST_TYPE])


@lru_cache(256)
def _is_compressed(content_type: str) -> bool:
    kind = content_type.strip().lower()
    return kind.startswith(_COMPRESSED) and not kind.startswith(_NOT_COMPRESSED)


def deflate(body: bytes | memoryview) -> DeflatedBody | None:
    """The body deflated; None if that does not save a sixteenth."""
    data = isal_zlib.compress(body, _LEVEL, _WBITS)
    if len(data) > len(body) - len(body) // 16:
        return None
    return DeflatedBody(data, StoredAs(DEFLATE, len(data), isal_zlib.crc32(body), isal_zlib.crc32(data)))


def stored_as(ref: BodyRef) -> StoredAs | None:
    """How the body is encoded; None for as it is. Raises EngineFailed for an encoding of a later version."""
    if ref.stored is not None and ref.stored.encoding != DEFLATE:
        raise EngineFailed(
            f"A stored body has the encoding {ref.stored.encoding!r}, which this version of Conveyor does not know. "
            "Upgrade this process.",
            key=ref.key,
            offset=ref.offset,
        )
    return ref.stored


def check_deflated(ref: BodyRef, data: bytes | memoryview) -> StoredAs:
    """Check stored bytes of a deflated body, without inflating them. Raises BodyDamaged."""
    stored = stored_as(ref)
    assert stored is not None
    if len(data) != stored.length or isal_zlib.crc32(data) != stored.stored_crc:
        raise damaged_body(ref, f"{len(data)} bytes, deflated, are not those that were written")
    return stored


def inflate(ref: BodyRef, data: bytes | memoryview) -> bytes:
    """The body of which these are the stored bytes, checked by its length and CRC-32. Raises BodyDamaged."""
    # Checked first: only bytes that Conveyor has deflated itself are inflated, and so they have no surprising size.
    stored = check_deflated(ref, data)
    try:
        body = isal_zlib.decompress(data, _WBITS, ref.length + 1)
    except isal_zlib.IsalError as error:  # type: ignore[misc]  # its stubs take the class for an instance
        raise damaged_body(ref, f"it does not inflate: {error}") from None
    if len(body) != ref.length or isal_zlib.crc32(body) != stored.crc:
        raise damaged_body(ref, f"{len(body)} bytes with a wrong CRC-32, where {ref.length} bytes were written")
    return body


def inflate_all(bodies: Sequence[tuple[BodyRef, bytes | memoryview]]) -> list[memoryview]:
    """As `inflate`, of several bodies in one call: to inflate each by itself takes the interpreter lock for each, and
    waits for it while another thread runs. Raises BodyDamaged if any of them is damaged."""
    from isal import igzip  # noqa: PLC0415  (fetchers and most commands start without it)

    members: list[bytes | memoryview] = []
    for ref, data in bodies:
        # As in `inflate`, before any byte is inflated.
        stored = check_deflated(ref, data)
        # Of each member the length and the CRC-32 are checked.
        members += (GZIP_HEADER, data, gzip_trailer(stored.crc, ref.length))
    try:
        inflated = memoryview(igzip.decompress(b"".join(members)))  # type: ignore[no-untyped-call]
    except (OSError, EOFError, isal_zlib.IsalError) as error:  # type: ignore[misc]  # as above
        raise damaged_body(bodies[0][0], f"it, or one beside it, does not inflate: {error}") from None
    cut: list[memoryview] = []
    end = 0
    for ref, _ in bodies:
        start, end = end, end + ref.length
        cut.append(inflated[start:end])
    return cut


def gzip_length(stored: StoredAs) -> int:
    """The length of a gzip stream of the body."""
    return len(GZIP_HEADER) + stored.length + _GZIP_TRAILER.size


def gzip_trailer(crc: int, length: int) -> bytes:
    """The end of a gzip stream."""
    return _GZIP_TRAILER.pack(crc, length & 0xFFFFFFFF)


def damaged_body(ref: BodyRef, reason: str) -> BodyDamaged:
    """The error for stored bytes that are not those that were written."""
    return BodyDamaged(f"A stored body is damaged: {reason}. {_REMEDY}", key=ref.key, offset=ref.offset)


def missing_body(ref: BodyRef) -> BodyDamaged:
    """The error for a row whose body is not there."""
    return BodyDamaged(f"A stored body is missing. {_REMEDY}", key=ref.key, offset=ref.offset)
