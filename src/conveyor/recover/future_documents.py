"""FutureDocuments: documents that a clock which was ahead made due too late: before it was set back, or on another
machine. Leases of deliveries and exports, deadlines of runs, the next look at a schedule. They are due now.

A document is one of them if it is due later than its kind ever is. Exports and deadlines say themselves when they were
to be due; they are read when a process starts, and when its clock was set back.
"""

import msgspec
import structlog

from conveyor.accept.option_limits import RANGES
from conveyor.accept.schedules import LOOK_SECONDS, SCHEDULE
from conveyor.clock import CLOCK_SLACK, Clock, ClockSteps
from conveyor.engines.records import Document, Records
from conveyor.errors import NewerRow
from conveyor.export.exporter import is_waiting
from conveyor.jobs.callbacks import CALLBACK, callback_of
from conveyor.jobs.deadlines import DEADLINE, deadline_of, with_since
from conveyor.model import BEAT, EXPORT, PROGRESS
from conveyor.notify.deliverer import longest_pause
from conveyor.notify.deliveries import DELIVERY
from conveyor.settings import Settings

log = structlog.get_logger()

_EVERY = 300.0
_PAGE = 500
_PAGES = 10
# Later than any time that is stored.
_FOREVER = 1e11
# A lease, or a pause after a failure.
_LONGEST_LEASE = 300.0


class FutureDocuments:
    """A part of the monitor."""

    def __init__(self, records: Records, clock: Clock, settings: Settings) -> None:
        self._documents = records.documents
        self._clock = clock
        self._steps = ClockSteps(clock)
        self._is_started = False
        self._next = 0.0
        # How late a document of each kind is due at most, in seconds.
        self._longest = {
            BEAT: 2 * settings.lease_seconds,
            CALLBACK: _LONGEST_LEASE,
            DELIVERY: longest_pause(settings),
            PROGRESS: max(settings.stuck_after, RANGES["stuck_after"][1]),
            SCHEDULE: LOOK_SECONDS,
        }

    async def part(self) -> dict[str, int]:
        """One pass, as an additional step of the monitor."""
        was_set_back = self._steps.look() < 0
        if self._clock.monotonic() < self._next and not was_set_back:
            return {}
        kinds = dict(self._longest)
        if was_set_back or not self._is_started:
            kinds |= {DEADLINE: 0.0, EXPORT: _LONGEST_LEASE}
        revealed = sum([await self._reveal(kind, seconds) for kind, seconds in kinds.items()])
        self._is_started, self._next = True, self._clock.monotonic() + _EVERY
        return {"revealed": revealed} if revealed else {}

    async def _reveal(self, kind: str, seconds: float) -> int:
        """Make the documents of a kind due that are due more than `seconds` from now, though they should not be."""
        now = self._clock.now()
        after, revealed = now + seconds + CLOCK_SLACK, 0
        for _ in range(_PAGES):
            rows = await self._documents.due_documents(kind, _FOREVER, _PAGE, after)
            changed = [right for row in rows if (right := _set_right(row, now)) is not None]
            for row in changed:
                revealed += await self._documents.replace_document(row) is not None
            if len(rows) < _PAGE:
                break
            after = rows[-1].due_at or after
        if revealed:
            log.error("clock was set back: documents are due again", kind=kind, documents=revealed)
        return revealed


def _set_right(row: Document, now: float) -> Document | None:
    """The document as it should be; None if it is."""
    try:
        if row.kind == DEADLINE:
            return with_since(row, now) if deadline_of(row).since > now + CLOCK_SLACK else None
        if row.kind == EXPORT and not is_waiting(row):
            return None
        if row.kind == CALLBACK and (row.due_at or now) - now <= callback_of(row).heartbeat_seconds + CLOCK_SLACK:
            return None
    except (msgspec.MsgspecError, NewerRow):
        return None
    return msgspec.structs.replace(row, due_at=now)
