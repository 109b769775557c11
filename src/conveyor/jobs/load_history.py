"""Load of a tenant over time: finished tasks, retried attempts, and tasks that waited or ran, by minute for some hours
and by hour for a week. One document for each tenant, of bounded size, which the sampler writes."""

import msgspec

from conveyor.engines.records import Document, DocumentRecords
from conveyor.model import TenantId

LOAD = "load"
MAX_MINUTES = 240
MAX_HOURS = 168

_ID = "tasks"
_EXPIRES = (MAX_HOURS + 1) * 3600.0


class LoadPoint(msgspec.Struct, frozen=True, array_like=True):
    """One interval. `waiting` and `running` are the largest numbers that were seen in it."""

    succeeded: int = 0
    failed: int = 0
    retried: int = 0
    waiting: int = 0
    running: int = 0

    def raised_to(self, other: "LoadPoint") -> "LoadPoint":
        """The larger of each."""
        return LoadPoint(*map(max, msgspec.structs.astuple(self), msgspec.structs.astuple(other)))


class LoadHistory(msgspec.Struct, frozen=True, array_like=True):
    """By the number of the minute and of the hour since 1970."""

    minutes: dict[int, LoadPoint] = {}
    hours: dict[int, LoadPoint] = {}

    def put(self, minute: int, seen: LoadPoint) -> "LoadHistory":
        """The history with what was seen of a minute, as often as it was looked at."""
        before = self.minutes.get(minute, LoadPoint())
        after = before.raised_to(seen)
        hour = self.hours.get(minute // 60, LoadPoint())
        grown = LoadPoint(
            hour.succeeded + after.succeeded - before.succeeded,
            hour.failed + after.failed - before.failed,
            hour.retried + after.retried - before.retried,
            max(hour.waiting, after.waiting),
            max(hour.running, after.running),
        )
        minutes = {**self.minutes, minute: after}
        hours = {**self.hours, minute // 60: grown}
        return LoadHistory(
            {number: point for number, point in minutes.items() if number > minute - MAX_MINUTES},
            {number: point for number, point in hours.items() if number > minute // 60 - MAX_HOURS},
        )


_decoder = msgspec.json.Decoder(LoadHistory)


async def load_history(documents: DocumentRecords, tenant: TenantId) -> LoadHistory:
    """The load of a tenant; empty if nothing is known."""
    document = await documents.document(LOAD, tenant, _ID)
    return LoadHistory() if document is None else _decoded(document)


async def add_to_load(documents: DocumentRecords, tenant: TenantId, seen: dict[int, LoadPoint], now: float) -> bool:
    """Add what was seen of some minutes. Returns whether anything changed. If another process wrote meanwhile, the next
    look adds it."""
    document = await documents.document(LOAD, tenant, _ID)
    history = before = LoadHistory() if document is None else _decoded(document)
    for minute, point in sorted(seen.items()):
        history = history.put(minute, point)
    if history == before:
        return False
    body, expires_at = msgspec.json.encode(history), now + _EXPIRES
    if document is None:
        await documents.create_documents([Document(LOAD, tenant, _ID, body, expires_at=expires_at)])
    else:
        await documents.replace_document(msgspec.structs.replace(document, body=body, expires_at=expires_at))
    return True


def _decoded(document: Document) -> LoadHistory:
    try:
        return _decoder.decode(document.body)
    except msgspec.MsgspecError:
        # Written by another version.
        return LoadHistory()
