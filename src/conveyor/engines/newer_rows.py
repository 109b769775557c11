"""Rows that a newer Conveyor wrote, with a field or a value that is unknown here. One of them must not hide the others
of a listing, and nobody may change what they cannot read."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
import structlog

from conveyor.errors import NewerRow

log = structlog.get_logger()

T = TypeVar("T")

_UNKNOWN = (NewerRow, msgspec.MsgspecError, ValueError, KeyError, TypeError)


def readable_rows(rows: Iterable[Any], read: Callable[[Any], T]) -> list[T]:
    """The rows of a listing, without those that cannot be read."""
    found: list[T] = []
    for row in rows:
        try:
            found.append(read(row))
        except _UNKNOWN as error:
            log.warning("row skipped: a newer Conveyor may have written it", error=str(error))
    return found


def read_row(row: Any, read: Callable[[Any], T]) -> T:
    """One row. Raises NewerRow if it cannot be read."""
    try:
        return read(row)
    except _UNKNOWN as error:
        raise NewerRow(f"A row was written by a newer Conveyor: upgrade this one. ({error})") from error
