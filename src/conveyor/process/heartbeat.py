"""Heartbeat: a worker's sign of life. That it is there is said to the coordinator; while it runs long tasks, a row says
which, so that whoever finds the row due knows whose they were."""

import msgspec

from conveyor.clock import Clock
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.records import Document, Records
from conveyor.faults import crashpoint
from conveyor.model import BEAT, BEAT_TENANT, WORKERS, Beat, LongTask

# Leases that may pass without a beat: its messages have come to others by then.
_LEASES = 2
_NO_LIMIT = 1 << 40
_encode = msgspec.json.encode


class Heartbeat:
    """Of one worker."""

    def __init__(self, records: Records, coordinator: Coordinator, clock: Clock, name: str, lease: float) -> None:
        self._records = records
        self._coordinator = coordinator
        self._clock = clock
        self._name = name
        self._ttl = _LEASES * lease
        self._row: Document | None = None

    async def beat(self, tasks: list[LongTask]) -> None:
        """Say that it is alive, and what it runs."""
        await self._coordinator.hold(WORKERS, self._name, 1, _NO_LIMIT, self._ttl)
        if not tasks:
            await self._remove()
            return
        now = self._clock.now()
        row = Document(BEAT, BEAT_TENANT, self._name, _encode(Beat(now, tasks)), due_at=now + self._ttl)
        crashpoint("worker.beat.before")
        self._row = await self._replaced(row, self._row) or await self._created(row)
        crashpoint("worker.beat.after")

    async def close(self) -> None:
        """It stops, and holds nothing any more."""
        await self._coordinator.hold(WORKERS, self._name, 0, _NO_LIMIT, self._ttl)
        await self._remove()

    async def _replaced(self, row: Document, standing: Document | None) -> Document | None:
        if standing is None:
            return None
        return await self._records.documents.replace_row(msgspec.structs.replace(row, version=standing.version))

    async def _created(self, row: Document) -> Document | None:
        """The first, or somebody took this worker for dead, or the answer to the last write was lost: then its row has
        another version than the one that is known here."""
        await self._records.documents.create_rows([row])
        standing = await self._records.documents.document(BEAT, BEAT_TENANT, self._name)
        return standing if standing is None or standing.body == row.body else await self._replaced(row, standing)

    async def _remove(self) -> None:
        if self._row is None:
            return
        if not await self._records.documents.remove_row(self._row):
            # The answer to the last write, or to the last try to remove it, was lost.
            standing = await self._records.documents.document(BEAT, BEAT_TENANT, self._name)
            if standing is not None:
                await self._records.documents.remove_row(standing)
        self._row = None
