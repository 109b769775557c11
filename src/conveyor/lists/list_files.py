"""Files: lists on this machine, as one stream of bytes to be staged.

One file goes as it is, whatever its form. Several, or a pipe among them, are read and joined into one list of inputs,
a JSON value a line: their forms may differ.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import BinaryIO

from conveyor.errors import ListUnreadable
from conveyor.lists.reader import (
    ListReading,
    check_header,
    decompressed,
    detect_compression,
    detect_format,
    read,
    take,
)
from conveyor.model import JobKind, ListFormat

STDIN = "-"

_PIECE = 1024 * 1024
# Enough to know a list by.
_HEAD = 64 * 1024
_SUFFIXES = {".jsonl": ListFormat.JSONL, ".ndjson": ListFormat.JSONL, ".csv": ListFormat.CSV, ".txt": ListFormat.TEXT}
_COMPRESSED = {".gz", ".zst", ".zstd"}


def named_format(path: str) -> ListFormat | None:
    """What a file's name says of its form; None if it says nothing."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return _SUFFIXES.get(suffixes[-1]) if suffixes else None


def list_format(paths: Sequence[str]) -> ListFormat | None:
    """The form of what `pieces_of` gives; None if it is to be found from the first bytes."""
    return named_format(paths[0]) if len(paths) == 1 else ListFormat.JSONL


async def pieces_of(paths: Sequence[str], most: int) -> AsyncIterator[bytes]:
    """The bytes of one list, or of several joined. Raises ListUnreadable."""
    if len(paths) == 1:
        async for piece in _raw(paths[0]):
            yield piece
        return
    for path in paths:
        async for piece in _inputs(path, most):
            yield piece


async def _inputs(path: str, most: int) -> AsyncIterator[bytes]:
    """A file's inputs as JSON lines. What is wrong with an input is found when it is ingested."""
    raw = aiter(_raw(path))
    head = await take(raw, _HEAD)
    compression = detect_compression(head)
    plain = aiter(decompressed(_behind(head, raw), compression, most))
    first = await take(plain, _HEAD)
    form = named_format(path) or detect_format(first)
    header = None
    if form is ListFormat.CSV:
        header, _, first = first.partition(b"\n")
        check_header(header, JobKind.PYTHON)
    async for batch in read(_behind(first, plain), ListReading(JobKind.PYTHON, form, header=header)):
        if batch.invalid:
            line = batch.invalid[0]
            raise ListUnreadable(f"{path}:{line.line}: {line.reason}")
        if batch.seeds:
            yield ("\n".join(seed.input for seed in batch.seeds) + "\n").encode()


async def _behind(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece


async def _raw(path: str) -> AsyncIterator[bytes]:
    """Read off the loop: a slow disk or pipe holds up nobody else."""
    try:
        file = sys.stdin.buffer if path == STDIN else await asyncio.to_thread(_open, path)
        try:
            while piece := await asyncio.to_thread(file.read, _PIECE):
                yield piece
        finally:
            if path != STDIN:
                file.close()
    except OSError as error:
        raise ListUnreadable(f"{path} can not be read: {error.strerror or error}") from None


def _open(path: str) -> BinaryIO:
    return Path(path).open("rb")
