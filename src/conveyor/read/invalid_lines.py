"""Invalid lines of a list. Gets a job, reads the lines that its ingest stored, and returns pages or all of them.

They are stored as JSON lines in objects whose names sort by place in the list. While the ingest runs, later ranges may
add lines before a cursor; once it is done, a listing has every line.
"""

import re
from collections.abc import AsyncIterator
from typing import NamedTuple

from conveyor.engines.blobs import Blobs
from conveyor.errors import BadCursor
from conveyor.lists.reader import InvalidListLine, decode_invalid
from conveyor.model import Job, Page, invalid_prefix

# The name of an object, and how many of its lines were returned.
_CURSOR = re.compile(r"(\d{6,12}-\d{12})\.(\d{1,6})")
_SUFFIX = ".jsonl"


class _Place(NamedTuple):
    name: str
    returned: int


async def invalid_page(blobs: Blobs, job: Job, limit: int, cursor: str | None) -> Page[InvalidListLine]:
    """Up to `limit` lines, in the order of the list. Raises BadCursor."""
    start = _decode(cursor)
    items: list[InvalidListLine] = []
    place = start
    async for name, lines in _objects(blobs, job, start):
        if len(items) == limit:
            # There is more: the next page begins at the last place.
            return Page(items, _encode(place))
        skip = start.returned if name == start.name else 0
        page = lines[skip : skip + limit - len(items)]
        items += map(decode_invalid, page)
        place = _Place(name, skip + len(page))
        if place.returned < len(lines):
            return Page(items, _encode(place))
    return Page(items)


async def invalid_lines(blobs: Blobs, job: Job) -> AsyncIterator[bytes]:
    """All invalid lines as JSON lines, one object at a time."""
    async for info in blobs.listing(invalid_prefix(job)):
        data = await blobs.get(info.key)
        if data:
            yield data


async def _objects(blobs: Blobs, job: Job, start: _Place) -> AsyncIterator[tuple[str, list[bytes]]]:
    prefix = invalid_prefix(job)
    async for info in blobs.listing(prefix):
        name = info.key.removeprefix(prefix).removesuffix(_SUFFIX)
        if name < start.name:
            continue
        data = await blobs.get(info.key)
        if data:
            yield name, data.splitlines()


def _encode(place: _Place) -> str:
    return f"{place.name}.{place.returned}"


def _decode(cursor: str | None) -> _Place:
    if cursor is None:
        return _Place("", 0)
    match = _CURSOR.fullmatch(cursor)
    if match is None or not cursor.isascii():
        raise BadCursor
    return _Place(match[1], int(match[2]))
