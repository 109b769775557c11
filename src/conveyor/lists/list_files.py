"""List files on this machine, in a bucket that the user may read, or behind a URL, as one stream of bytes to stage.

A single file is sent as it is, in whatever format. Several files, or files and a pipe, are read and joined into one
list of inputs, one JSON value per line; their formats may differ.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import BinaryIO

from conveyor.client.list_objects import ListObject, is_object, open_object
from conveyor.errors import ListUnreadable, NoTasks
from conveyor.lists.reader import (
    InvalidListLine,
    ListReading,
    check_header,
    decompressed,
    detect_compression,
    detect_format,
    marked_invalid,
    read,
    take,
)
from conveyor.lists.url_lists import UrlLists
from conveyor.model import JobKind, ListFormat, RemoteSource, format_from_name

STDIN = "-"
# Maximum number of invalid lines that an error has.
MAX_LINES_SHOWN = 10

_PIECE = 1024 * 1024
# Enough bytes to detect the format and the compression of a list.
_HEAD = 64 * 1024


def list_format(paths: Sequence[str]) -> ListFormat | None:
    """The format of what `pieces_of` yields; None if the first bytes have to tell."""
    return format_from_name(_shown(paths[0])) if len(paths) == 1 else ListFormat.JSONL


async def pieces_of(
    paths: Sequence[str],
    max_bytes: int,
    kind: JobKind = JobKind.FETCH,
    url_column: str | None = None,
    urls: UrlLists | None = None,
) -> AsyncIterator[bytes]:
    """The bytes of one list, or of several joined, for a job of this kind; `urls` reads those behind a URL. Raises
    ListUnreadable."""
    if len(paths) == 1:
        async for piece in _raw_pieces(paths[0], max_bytes, urls):
            yield piece
        return
    for path in paths:
        async for piece in _input_lines(path, max_bytes, kind, url_column, urls):
            yield piece


async def check_readable(path: str, kind: JobKind, url_column: str | None) -> None:
    """Check a list on this machine before it is sent: that it is no archive, and the columns of a csv. Raises
    ListUnreadable."""
    raw = aiter(_raw_pieces(path, _HEAD, None))
    head = await take(raw, _HEAD)
    compression = detect_compression(head)
    if format_from_name(path) is not ListFormat.CSV and url_column is None:
        return
    plain = aiter(decompressed(_chain(head, raw), compression, _PIECE))
    first = await take(plain, _HEAD)
    check_header(first.partition(b"\n")[0], kind, url_column)


async def check_some_task(
    path: str, form: ListFormat | None, kind: JobKind, url_column: str | None, max_bytes: int
) -> None:
    """Check that a file on this machine has a task: read it up to the first one. Raises NoTasks, whose `lines` are the
    first invalid ones, and ListUnreadable."""
    invalid, shown = 0, list[InvalidListLine]()
    pieces, reading = await _opened(path, form, max_bytes, kind, url_column, None)
    async for batch in read(pieces, reading):
        if batch.seeds:
            return
        invalid += len(batch.invalid)
        shown += batch.invalid[: MAX_LINES_SHOWN - len(shown)]
    lines = f"{invalid:,} invalid line{'' if invalid == 1 else 's'}"
    raise NoTasks(f"The list has no tasks ({lines}).", lines=shown)


async def _opened(
    path: str,
    form: ListFormat | None,
    max_bytes: int,
    kind: JobKind,
    url_column: str | None,
    urls: UrlLists | None,
) -> tuple[AsyncIterator[bytes], ListReading]:
    """The bytes of a list, decompressed and without the header of a csv, and how to read them."""
    raw = aiter(_raw_pieces(path, max_bytes, urls))
    head = await take(raw, _HEAD)
    plain = aiter(decompressed(_chain(head, raw), detect_compression(head), max_bytes))
    first = await take(plain, _HEAD)
    form = form or (ListFormat.CSV if url_column else detect_format(first))
    header = None
    if form is ListFormat.CSV:
        header, _, first = first.partition(b"\n")
        check_header(header, kind, url_column)
    return _chain(first, plain), ListReading(kind, form, header=header, url_column=url_column)


async def _input_lines(
    path: str, max_bytes: int, kind: JobKind, url_column: str | None, urls: UrlLists | None
) -> AsyncIterator[bytes]:
    """The lines of a file as JSON lines, in order. Invalid ones are marked, and say where they are from."""
    form = format_from_name(_shown(path))
    pieces, reading = await _opened(path, form, max_bytes, kind, url_column, urls)
    async for batch in read(pieces, reading):
        lines: dict[int, str] = {seed.index: seed.input for seed in batch.seeds}
        lines |= {line.line - reading.first_line: marked_invalid(_shown(path), line) for line in batch.invalid}
        if lines:
            yield "".join(f"{lines[index]}\n" for index in sorted(lines)).encode()


def _shown(path: str) -> str:
    """The name of a list, without the query of a URL, which may be secret."""
    return path.partition("?")[0] if _is_url(path) else path


def _is_url(path: str) -> bool:
    return path.lower().startswith(("http://", "https://"))


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece


async def _raw_pieces(path: str, max_bytes: int, urls: UrlLists | None) -> AsyncIterator[bytes]:
    """Read in a thread: a slow disk or pipe must not block the loop."""
    if _is_url(path):
        if urls is None:
            raise ListUnreadable(f"{_shown(path)} cannot be read here. Pass it alone, so that the server reads it.")
        async for piece in urls.whole(RemoteSource(path), max_bytes, None):
            yield piece
        return
    try:
        file = sys.stdin.buffer if path == STDIN else await asyncio.to_thread(_open, path)
        try:
            while piece := await asyncio.to_thread(file.read, _PIECE):
                yield piece
        finally:
            if path != STDIN:
                file.close()
    except OSError as error:
        raise ListUnreadable(f"{path} cannot be read: {error.strerror or error}") from None


def _open(path: str) -> BinaryIO | ListObject:
    return open_object(path) if is_object(path) else Path(path).open("rb")
