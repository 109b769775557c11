"""Sequence numbers of events as cursors."""

from conveyor.errors import BadCursor

# The number of digits of a sequence number in a sort key.
DIGITS = 12


def after(cursor: str | None) -> int:
    """The sequence number in a cursor."""
    if cursor is None:
        return 0
    if not cursor.isascii() or not cursor.isdigit() or len(cursor) > DIGITS:
        raise BadCursor
    return int(cursor)
