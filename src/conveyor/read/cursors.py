"""Cursors of result listings: opaque text for the last task that each shard returned.

For a job with one shard it is the task_id; for N shards it is `sh:` and the base64url of a JSON list with the last id,
or null, of each shard. A plain task_id of a listing from before the job was sharded resumes in every shard after that
task: all have the same order. Cursors come from outside: `decode` accepts only text that `encode` could have made.
"""

import base64
import binascii
from collections.abc import Sequence

import msgspec

from conveyor.errors import BadCursor
from conveyor.model import TaskId, is_task_id, shard_of

PREFIX = "sh:"

# An id in quotes and a comma are 67 bytes of JSON; base64 makes 4 of 3.
_CHARS_PER_SHARD = 90

Position = TaskId | None


def encode(positions: Sequence[Position]) -> str:
    """The cursor after these positions, one per shard."""
    if len(positions) <= 1:
        if not positions or positions[0] is None:
            raise ValueError("a listing without tasks has no cursor")
        return positions[0]
    text = base64.urlsafe_b64encode(msgspec.json.encode(list(positions)))
    return PREFIX + text.rstrip(b"=").decode()


def decode(cursor: str | None, shard_count: int) -> list[Position]:
    """The position in each shard of the job. No cursor is the beginning of all. Raises BadCursor."""
    shards = max(shard_count, 1)
    if cursor is None:
        return [None] * shards
    if shards == 1:
        return [_task_id(cursor)]
    if not cursor.startswith(PREFIX):
        return [_task_id(cursor)] * shards
    positions = _sharded(cursor, shards)
    if encode(positions) != cursor:
        raise BadCursor
    return positions


def _sharded(cursor: str, shards: int) -> list[Position]:
    if len(cursor) > len(PREFIX) + _CHARS_PER_SHARD * shards + 4:
        raise BadCursor
    text = cursor.removeprefix(PREFIX)
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        ids = msgspec.json.decode(raw, type=list[str | None])
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        raise BadCursor from None
    if len(ids) != shards:
        raise BadCursor
    positions = [None if text is None else _task_id(text) for text in ids]
    foreign = {task for shard, task in enumerate(positions) if task is not None and shard_of(task, shards) != shard}
    # A shard that has returned nothing since the listing resumed from a plain cursor: all of them have that one task.
    if len(foreign) > 1 or (foreign and None in positions):
        raise BadCursor
    return positions


def _task_id(text: str) -> TaskId:
    if not is_task_id(text):
        raise BadCursor
    return TaskId(text)
