"""The plan of an ingest. A first pass over the list detects its format, checks its hash, and splits an
uncompressed list into ranges, so that several ingesters can share it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from hashlib import sha256
from typing import TypeVar

import msgspec

from conveyor.errors import ListChanged, ListMissing, ListRejected, ListUnreadable
from conveyor.lists.list_bytes import ListBytes
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

# Items of a pass between two renewals of the lease.
PIECES = 64
_BATCHES = 4

T = TypeVar("T")

# Renews the lease and the message of the ingester. False: the lease is lost, or the ingester stops.
Renew = Callable[[], Awaitable[bool]]
# Stores the invalid lines of a batch, so that users can read them.
StoreInvalid = Callable[[Range, ListBatch], Awaitable[None]]


class LeaseLostError(Exception):
    """Another ingester holds the lease by now, or this one has to stop."""


class RangeStart(msgspec.Struct):
    """Where a range begins, and the hash of its bytes."""

    offset: int
    index: int
    sha256: str | None = None


class ListForm(msgspec.Struct, frozen=True):
    """The format, compression and header of a list, after detection."""

    format: ListFormat
    compression: Compression
    header: bytes | None = None


async def make_plan(lists: ListBytes, source: Source, kind: JobKind, range_bytes: int, renew: Renew) -> list[Range]:
    """The ranges of a list, which is staged or pinned. Raises ListUnreadable if no retry could help, and
    LeaseLostError."""
    form = await _form(lists, source, kind)
    start = 0 if form.header is None else len(form.header) + 1
    splits = form.compression is Compression.NONE and form.format is not ListFormat.CSV
    marks, digest = await _pass_over(lists, source, range_bytes if splits else None, renew)
    source = msgspec.structs.replace(source, sha256=digest)
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
    lists: ListBytes, ranges: list[Range], kind: JobKind, store_invalid: StoreInvalid, renew: Renew
) -> None:
    """Validate the whole list before any task runs, and store all invalid lines. Raises ListRejected, which names the
    first of them, and LeaseLostError."""
    invalid: list[InvalidListLine] = []
    count = 0
    for range_ in ranges:
        batches = read(range_pieces(lists, range_), reading_of(range_, kind))
        async for batch in while_leased(batches, renew, _BATCHES):
            await store_invalid(range_, batch)
            count += len(batch.invalid)
            invalid += batch.invalid[: _SHOWN - len(invalid)]
    if count:
        lines = "; ".join(f"line {line.line}: {line.reason}" for line in invalid)
        more = f" and {count - len(invalid)} more" if count > len(invalid) else ""
        what = "1 invalid line" if count == 1 else f"{count} invalid lines"
        raise ListRejected(f"The list has {what}: {lines}{more}")


async def check_unchanged(lists: ListBytes, range_: Range, renew: Renew) -> None:
    """Compare the hash of a range's bytes with the planned one, before any of them becomes a task. Raises ListChanged,
    ListMissing, and LeaseLostError."""
    source = list_of(range_)
    if source.remote is None and await lists.blobs.size(source.key) is None:
        raise ListMissing
    digest = sha256()
    whole = range_.sha256 is None
    left = None if whole or range_.end is None else range_.end - range_.start
    pieces = lists.stream(source) if whole else lists.stream(source, range_.start, range_.end)
    async for piece in while_leased(pieces, renew, PIECES):
        digest.update(piece if left is None else piece[:left])
        left = None if left is None else left - len(piece)
        if left is not None and left <= 0:
            break
    if digest.hexdigest() != (source.sha256 if whole else range_.sha256):
        raise ListChanged


def list_of(range_: Range) -> Source:
    """The list that the range is a part of. Only a rerun has ranges without one."""
    assert isinstance(range_.source, Source)
    return range_.source


def reading_of(range_: Range, kind: JobKind) -> ListReading:
    """How to read the rest of the range."""
    header = None if range_.header is None else range_.header.encode()
    without_task = range_.index - range_.first_index - range_.tasks
    return ListReading(
        kind,
        range_.format,
        range_.index,
        range_.offset,
        range_.end,
        header,
        list_of(range_).url_column,
        tasks=range_.tasks,
        without_task=without_task,
    )


async def range_pieces(lists: ListBytes, range_: Range) -> AsyncIterator[bytes]:
    """The bytes of the list from the range's checkpoint on."""
    source = list_of(range_)
    if range_.compression is Compression.NONE:
        async for piece in lists.stream(source, range_.offset, range_.end):
            yield piece
        return
    left = range_.offset
    async for piece in decompressed(lists.stream(source), range_.compression, lists.max_bytes):
        # A compressed list can only be read from its start.
        if left < len(piece):
            yield piece[left:]
        left = max(0, left - len(piece))


async def _form(lists: ListBytes, source: Source, kind: JobKind) -> ListForm:
    raw = await lists.head(source, _HEAD)
    compression = source.compression or detect_compression(raw)
    head = raw
    if compression is not Compression.NONE:
        head = await take(decompressed(lists.stream(source), compression, lists.max_bytes), _HEAD)
    form = source.format or (ListFormat.CSV if source.url_column else detect_format(head))
    if form is not ListFormat.CSV:
        return ListForm(form, compression)
    header, newline, _ = head.partition(b"\n")
    if not newline:
        raise ListUnreadable(f"The csv has a header and no rows, or a header of more than {_HEAD} bytes.")
    check_header(header, kind, source.url_column)
    return ListForm(form, compression, header)


async def _pass_over(
    lists: ListBytes, source: Source, range_bytes: int | None, renew: Renew
) -> tuple[list[RangeStart], str]:
    """Find where ranges begin, and check that the list is the one that was accepted. Returns its hash too."""
    digest = sha256()
    part = sha256()
    size = 0
    lines = 0
    marks = [RangeStart(0, 0)]
    async for piece in while_leased(lists.stream(source), renew, PIECES):
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
    found = digest.hexdigest()
    # Nobody has hashed a list before that the ingest reads where it is, unless the client did.
    if size != source.size or found != (source.sha256 or found):
        raise ListChanged
    marks[-1].sha256 = part.hexdigest()
    return [mark for mark in marks if mark.offset < size] or marks, found


async def while_leased(items: AsyncIterator[T], renew: Renew, every: int) -> AsyncIterator[T]:
    number = 0
    async for item in items:
        yield item
        # A store may return many buffered pieces without a wait.
        await let_others_run()
        number += 1
        if number % every == 0 and not await renew():
            raise LeaseLostError
