"""Announced workers: a worker tells in a document where it runs, its version and slots, and which handlers it has. It
writes the document again every minute; one that was not written for three minutes does not count.

The fleet page shows them, and a submit refuses a handler that no live worker has.
"""

import asyncio
import os
import platform
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from conveyor import __version__
from conveyor.clock import Clock
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.records import Document, DocumentRecords
from conveyor.errors import UnknownHandler
from conveyor.faults import crashpoint
from conveyor.model import WORKERS, TenantId

ANNOUNCED = "announced_worker"
ANNOUNCED_TENANT = TenantId("~workers")
ANNOUNCE_SECONDS = 60.0

_LIVES = 3 * ANNOUNCE_SECONDS
_MAX_WORKERS = 1000
_MAX_HANDLERS = 500
# Handlers that an error names.
_MAX_NAMED = 20
# How long the handlers of the fleet are cached, and how long that any is accepted: workers may start.
_FRESH = 10.0
_ANY_FRESH = 1.0


class AnnouncedWorker(msgspec.Struct, frozen=True):
    """The body of the document, as JSON."""

    at: float
    started_at: float
    host: str
    process: int
    version: str
    slots: int
    # Null if it does not run handlers, or has too many to name.
    handlers: Sequence[str] | None = None
    # Whether it makes requests to private addresses. Null from workers of earlier versions.
    private_targets: bool | None = None


class LiveWorker(NamedTuple):
    """A worker that counts as alive."""

    name: str
    said: AnnouncedWorker


_workers = msgspec.json.Decoder(AnnouncedWorker)


class WorkerAnnouncement:
    """The document of one worker."""

    def __init__(
        self,
        documents: DocumentRecords,
        clock: Clock,
        name: str,
        slots: int,
        handlers: Sequence[str] | None,
        private_targets: bool = False,
    ) -> None:
        self._documents = documents
        self._clock = clock
        self._name = name
        self._stored: Document | None = None
        names = None if handlers is None or len(handlers) > _MAX_HANDLERS else list(handlers)
        now = clock.now()
        self._said = AnnouncedWorker(now, now, platform.node(), os.getpid(), __version__, slots, names, private_targets)

    async def renew(self) -> float:
        """Write the document; returns the seconds until it has to be written again."""
        now = self._clock.now()
        body = msgspec.json.encode(msgspec.structs.replace(self._said, at=now))
        row = Document(ANNOUNCED, ANNOUNCED_TENANT, self._name, body, expires_at=now + _LIVES)
        crashpoint("worker.announce.before")
        if self._stored is not None:
            row = msgspec.structs.replace(row, version=self._stored.version)
            self._stored = await self._documents.replace_document(row)
        if self._stored is None:
            await self._documents.create_documents([row])
            self._stored = await self._documents.document(ANNOUNCED, ANNOUNCED_TENANT, self._name)
        crashpoint("worker.announce.after")
        return ANNOUNCE_SECONDS

    async def close(self) -> None:
        """Remove the document: the worker has stopped."""
        if self._stored is not None:
            await self._documents.remove_document(self._stored)
            self._stored = None


async def live_workers(documents: DocumentRecords, now: float) -> list[LiveWorker]:
    """The workers that have announced themselves lately, at most a thousand."""
    rows = (await documents.documents(ANNOUNCED, ANNOUNCED_TENANT, None, _MAX_WORKERS)).items
    workers = [LiveWorker(row.id, _workers.decode(row.body)) for row in rows]
    return [worker for worker in workers if worker.said.at + _LIVES > now]


class KnownHandlers:
    """The handlers that live workers have."""

    def __init__(self, documents: DocumentRecords, coordinator: Coordinator, clock: Clock) -> None:
        self._documents = documents
        self._coordinator = coordinator
        self._clock = clock
        self._read_at = -_FRESH
        # None if any is accepted.
        self._names: frozenset[str] | None = None

    async def check(self, name: str | None) -> None:
        """Raise UnknownHandler if workers are alive and none of them has it. Every name is accepted if none is alive,
        or if any of them does not tell its handlers."""
        if name is None or await self._has(name):
            return
        known = sorted(self._names or ())
        names = ", ".join(known[:_MAX_NAMED]) + (f" and {len(known) - _MAX_NAMED} more" if known[_MAX_NAMED:] else "")
        raise UnknownHandler(
            f"No live worker has the handler '{name}'. They have {names or 'none'}. Check its name, or start a worker "
            "whose CONVEYOR_APP registers it.",
            handler=name,
            known=known[:_MAX_NAMED],
        )

    async def _has(self, name: str) -> bool:
        now = self._clock.monotonic()
        if now - self._read_at < (_ANY_FRESH if self._names is None else _FRESH) and self._accepts(name):
            return True
        # A name that is unknown is read again: its worker may have started a moment ago.
        workers, alive = await asyncio.gather(
            live_workers(self._documents, self._clock.now()), self._coordinator.permits_in_use(WORKERS)
        )
        # Workers of the version before do not announce themselves.
        is_any = not workers or len(workers) < alive or any(worker.said.handlers is None for worker in workers)
        self._names = None if is_any else frozenset(name for worker in workers for name in worker.said.handlers or ())
        self._read_at = now
        return self._accepts(name)

    def _accepts(self, name: str) -> bool:
        return self._names is None or name in self._names
