"""Heartbeat: a worker reports to the coordinator that it is alive. While it runs long tasks, a document lists them, so
that the monitor can requeue them when the document is due."""

import msgspec

from conveyor.clock import Clock
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.records import Document, Records
from conveyor.faults import crashpoint
from conveyor.model import BEAT, BEAT_TENANT, WORKERS, Beat, LongTask

# A worker counts as dead after this many leases without a beat: its messages were redelivered by then.
_LEASES = 2
_NO_LIMIT = 1 << 40
_encode = msgspec.json.encode


class Heartbeat:
    """The heartbeat of one worker."""

    def __init__(self, records: Records, coordinator: Coordinator, clock: Clock, name: str, lease: float) -> None:
        self._records = records
        self._coordinator = coordinator
        self._clock = clock
        self._name = name
        self._ttl = _LEASES * lease
        self._document: Document | None = None

    async def beat(self, tasks: list[LongTask]) -> None:
        """Report that the worker is alive and which long tasks it runs."""
        await self._coordinator.acquire(WORKERS, self._name, 1, _NO_LIMIT, self._ttl)
        if not tasks:
            await self._remove()
            return
        now = self._clock.now()
        document = Document(BEAT, BEAT_TENANT, self._name, _encode(Beat(now, tasks)), due_at=now + self._ttl)
        crashpoint("worker.beat.before")
        self._document = await self._replace(document, self._document) or await self._create(document)
        crashpoint("worker.beat.after")

    async def close(self) -> None:
        """Report that the worker has stopped."""
        await self._coordinator.acquire(WORKERS, self._name, 0, _NO_LIMIT, self._ttl)
        await self._remove()

    async def _replace(self, document: Document, stored: Document | None) -> Document | None:
        if stored is None:
            return None
        return await self._records.documents.replace_document(msgspec.structs.replace(document, version=stored.version))

    async def _create(self, document: Document) -> Document | None:
        """Write the first beat, or the first after the monitor took this worker for dead. Where the answer to the last
        write was lost, the stored document has another version than the one known here."""
        await self._records.documents.create_documents([document])
        stored = await self._records.documents.document(BEAT, BEAT_TENANT, self._name)
        return stored if stored is None or stored.body == document.body else await self._replace(document, stored)

    async def _remove(self) -> None:
        if self._document is None:
            return
        if not await self._records.documents.remove_document(self._document):
            # The answer to the last write, or to the last removal, was lost.
            stored = await self._records.documents.document(BEAT, BEAT_TENANT, self._name)
            if stored is not None:
                await self._records.documents.remove_document(stored)
        self._document = None
