"""Pages of events on SQLite; the cursor is a sequence number."""

from typing import Any

import msgspec

from conveyor.errors import BadCursor
from conveyor.model import EventRecord, Page


def after(cursor: str | None) -> int:
    """The sequence number in a cursor."""
    if cursor is None:
        return 0
    if not cursor.isascii() or not cursor.isdigit() or len(cursor) > 18:
        raise BadCursor
    return int(cursor)


def events_page(rows: list[Any], limit: int) -> Page[EventRecord]:
    """A page from up to `limit` + 1 rows: the extra row says that another page follows."""
    items = [
        EventRecord(seq, at, event, run_id, index, msgspec.json.decode(data), *notice_id)
        for seq, at, event, run_id, index, data, *notice_id in rows[:limit]
    ]
    return Page(items, str(items[-1].seq) if len(rows) > limit else None)
