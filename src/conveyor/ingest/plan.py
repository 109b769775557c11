"""The plan of an ingest: a first pass over the staged list that knows it again by its hash, finds its form, and splits
a plain list into ranges, so that several ingest workers can share it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from hashlib import sha256
from typing import TypeVar

import msgspec

from conveyor.engines.blobs import Blobs
from conveyor.errors import ListChanged, ListMissing, ListRejected, ListUnreadable
from conveyor.lists.reader import (
    InvalidListLine,
    ListBatch,
    ListReading,
    check_header,
    decompressed,
    detect_compression,
    detect_format,
    let_others_run,
    read,
    take,
)
from conveyor.model import Compression, JobKind, ListFormat, Range, Source

_HEAD = 64 * 1024
_SHOWN = 5

# Items of a pass between two looks at whether the list is still ours to read.
_PIECES = 64
_BATCHES = 4

T = TypeVar("T")

# Prolongs what the worker holds; False when it was lost, or is given back.
KeepHold = Callable[[], Awaitable[bool]]
# Puts the invalid lines of a batch where they can be looked at.
Keep = Callable[[Range, ListBatch], Awaitable[None]]


class LeaseLostError(Exception):
    """The list is another's to look over by now, or the worker is to stop."""


class RangeStart(msgspec.Struct):
    """Where a range begins, and the hash of its bytes."""

    offset: int
    index: int
    sha256: str | None = None


class ListForm(msgspec.Struct, frozen=True):
    """What a list is, once looked into."""

    format: ListFormat
    compression: Compression
    header: bytes | None = None


async def make_plan(
    blobs: Blobs, source: Source, kind: JobKind, range_bytes: int, most: int, keep_hold: KeepHold
) -> list[Range]:
    """The ranges of a list. Raises ListUnreadable for what no second try would mend, and HoldLost."""
    if await blobs.size(source.key) is None:
        raise ListMissing
    form = await _form(blobs, source, kind, most)
    start = 0 if form.header is None else len(form.header) + 1
    splits = form.compression is Compression.NONE and form.format is not ListFormat.CSV
    marks = await _pass_over(blobs, source, range_bytes if splits else None, keep_hold)
    if not splits:
        marks = [RangeStart(start, 0)]
    ends = [mark.offset for mark in marks[1:]]
    return [
        Range(
            number=number,
            source=source,
            format=form.format,
            compression=form.compression,
            start=mark.offset,
            end=end,
            first_index=mark.index,
            header=None if form.header is None else form.header.decode(),
            sha256=mark.sha256,
            index=mark.index,
            offset=mark.offset,
        )
        for number, (mark, end) in enumerate(zip(marks, [*ends, None], strict=True))
    ]


async def reject_invalid(
    blobs: Blobs, ranges: list[Range], kind: JobKind, most: int, keep: Keep, keep_hold: KeepHold
) -> None:
    """Read all of a list before any of it is run. Raises ListRejected, which names the first lines that are wrong; all
    of them are kept. Raises HoldLost."""
    invalid: list[InvalidListLine] = []
    count = 0
    for one in ranges:
        batches = read(range_pieces(blobs, one, most), reading_of(one, kind))
        async for batch in _while_held(batches, keep_hold, _BATCHES):
            await keep(one, batch)
            count += len(batch.invalid)
            invalid += batch.invalid[: _SHOWN - len(invalid)]
    if count:
        lines = "; ".join(f"line {line.line}: {line.reason}" for line in invalid)
        more = f" and {count - len(invalid)} more" if count > len(invalid) else ""
        what = "1 line that is" if count == 1 else f"{count} lines that are"
        raise ListRejected(f"The list has {what} not valid: {lines}{more}")


async def check_unchanged(blobs: Blobs, one: Range, keep_hold: KeepHold) -> None:
    """A range is read from a list that nobody changes; if somebody did, none of it becomes tasks. Raises ListChanged,
    ListMissing, and HoldLost."""
    if await blobs.size(one.source.key) is None:
        raise ListMissing
    digest = sha256()
    whole = one.sha256 is None
    left = None if whole or one.end is None else one.end - one.start
    async for piece in _while_held(blobs.stream(one.source.key, 0 if whole else one.start), keep_hold, _PIECES):
        digest.update(piece if left is None else piece[:left])
        left = None if left is None else left - len(piece)
        if left is not None and left <= 0:
            break
    if digest.hexdigest() != (one.source.sha256 if whole else one.sha256):
        raise ListChanged


def reading_of(one: Range, kind: JobKind) -> ListReading:
    header = None if one.header is None else one.header.encode()
    return ListReading(kind, one.format, one.index, one.offset, one.end, header)


async def range_pieces(blobs: Blobs, one: Range, most: int) -> AsyncIterator[bytes]:
    """The list's bytes from where the range is."""
    if one.compression is Compression.NONE:
        async for piece in blobs.stream(one.source.key, one.offset):
            yield piece
        return
    left = one.offset
    async for piece in decompressed(blobs.stream(one.source.key), one.compression, most):
        # A compressed list can not be entered in the middle.
        if left < len(piece):
            yield piece[left:]
        left = max(0, left - len(piece))


async def _form(blobs: Blobs, source: Source, kind: JobKind, most: int) -> ListForm:
    raw = await blobs.get(source.key, 0, _HEAD) or b""
    compression = source.compression or detect_compression(raw)
    head = raw
    if compression is not Compression.NONE:
        head = await take(decompressed(blobs.stream(source.key), compression, most), _HEAD)
    found = source.format or detect_format(head)
    if found is not ListFormat.CSV:
        return ListForm(found, compression)
    header, newline, _ = head.partition(b"\n")
    if not newline:
        raise ListUnreadable("The csv has a header and no rows, or a header longer than the most that is read.")
    check_header(header, kind)
    return ListForm(found, compression, header)


async def _pass_over(blobs: Blobs, source: Source, range_bytes: int | None, keep_hold: KeepHold) -> list[RangeStart]:
    """Where ranges begin, and that the list is the one that was accepted."""
    digest = sha256()
    part = sha256()
    size = 0
    lines = 0
    marks = [RangeStart(0, 0)]
    async for piece in _while_held(blobs.stream(source.key), keep_hold, _PIECES):
        digest.update(piece)
        view = memoryview(piece)
        taken = 0
        if range_bytes is not None:
            due = marks[-1].offset + range_bytes
            while size + len(piece) > due:
                newline = piece.find(b"\n", max(0, due - size))
                if newline < 0:
                    break
                part.update(view[taken : newline + 1])
                taken = newline + 1
                marks[-1].sha256 = part.hexdigest()
                part = sha256()
                marks.append(RangeStart(size + taken, lines + piece.count(b"\n", 0, taken)))
                due = marks[-1].offset + range_bytes
            lines += piece.count(b"\n")
        part.update(view[taken:])
        size += len(piece)
    if size != source.size or digest.hexdigest() != source.sha256:
        raise ListChanged
    marks[-1].sha256 = part.hexdigest()
    return [mark for mark in marks if mark.offset < size] or marks


async def _while_held(items: AsyncIterator[T], keep_hold: KeepHold, every: int) -> AsyncIterator[T]:
    number = 0
    async for item in items:
        yield item
        # A store may have many pieces at hand at once.
        await let_others_run()
        number += 1
        if number % every == 0 and not await keep_hold():
            raise LeaseLostError
