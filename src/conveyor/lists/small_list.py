"""Small stored lists: a list of a few kilobytes is read whole, in the request, instead of being ingested.

It reads only a list without surprises. One that is missing, changed, unreadable, or larger than it looked is left to
ingest, which reports what is wrong with it.
"""

from collections.abc import AsyncIterator
from hashlib import sha256

import msgspec

from conveyor.engines.blobs import Blobs
from conveyor.errors import ListUnreadable
from conveyor.lists.reader import (
    InvalidListLine,
    ListReading,
    check_header,
    decompressed,
    detect_compression,
    detect_format,
    read,
)
from conveyor.model import JobKind, ListFormat, Source, TaskSeed

# How much larger than the stored list the decompressed one may be.
EXPANSION = 16


class CheckedList(msgspec.Struct, frozen=True):
    """The tasks of a list, its invalid lines, and the number of all its lines."""

    seeds: list[TaskSeed]
    invalid: list[InvalidListLine]
    lines: int


async def read_small_list(
    blobs: Blobs, source: Source, kind: JobKind, max_bytes: int, max_lines: int
) -> CheckedList | None:
    """The list, if it has at most `max_bytes` as stored, 16 times as many decompressed, and at most `max_lines` tasks
    and as many invalid lines. None for any other, and for one that cannot be read."""
    if source.size > max_bytes:
        return None
    data = await blobs.get(source.key, 0, max_bytes + 1)
    if data is None or len(data) != source.size or sha256(data).hexdigest() != source.sha256:
        return None
    try:
        compression = source.compression or detect_compression(data)
        plain = [piece async for piece in decompressed(_pieces(data), compression, EXPANSION * max_bytes)]
        return await _read(b"".join(plain), source, kind, max_lines)
    except ListUnreadable:
        return None


async def _read(plain: bytes, source: Source, kind: JobKind, max_lines: int) -> CheckedList | None:
    form = source.format or (ListFormat.CSV if source.url_column else detect_format(plain))
    header: bytes | None = None
    start = 0
    if form is ListFormat.CSV:
        header, newline, _ = plain.partition(b"\n")
        if not newline:
            return None
        check_header(header, kind, source.url_column)
        start = len(header) + 1
    seeds: list[TaskSeed] = []
    invalid: list[InvalidListLine] = []
    lines = 0
    reading = ListReading(kind, form, offset=start, header=header, url_column=source.url_column)
    async for batch in read(_pieces(plain[start:]), reading):
        seeds += batch.seeds
        invalid += batch.invalid
        lines = batch.index
        if len(seeds) > max_lines or len(invalid) > max_lines:
            return None
    return CheckedList(seeds, invalid, lines)


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    yield data
