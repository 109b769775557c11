"""Exporter: the role that makes exports. It takes the one that has waited longest, under a lease, and works at it for a
while; then the next gets its turn, so that a large one holds up no other.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.engines.blobs import Blobs
from conveyor.engines.coordinator import Coordinator, Lease, export_lease
from conveyor.engines.records import Document, Records
from conveyor.engines.tasks import Tasks
from conveyor.errors import BadInput, ConveyorError
from conveyor.export.exports import ExportRecord, ExportState, export_of
from conveyor.export.staged_file import Digest
from conveyor.export.writer import ExportPaused, ExportSuperseded, ExportWriter, Turn, export_notice
from conveyor.faults import crashpoint
from conveyor.model import EXPORT, Job, TaskError
from conveyor.telemetry.redact import redacted

log = structlog.get_logger()

LEASE_SECONDS = 60.0

_IDLE = 0.5
_TURN_SECONDS = 20.0
# That are looked at for one that nobody has.
_LOOK = 100
_TRIES = 5
_FIRST_PAUSE = 2.0
# Processes that may die over an export, one after the other, without getting on.
_MOST_LOST = 10
_UNFINISHED = frozenset({ExportState.QUEUED, ExportState.RUNNING})


class Exporter:
    """A role; one export at a time. Several share the work."""

    def __init__(
        self,
        records: Records,
        tasks: Tasks,
        blobs: Blobs,
        coordinator: Coordinator,
        clock: Clock,
        piece_bytes: int,
        name: str,
    ) -> None:
        self.name = name
        self.wake: Callable[[], None] = lambda: None
        self.stopping = False
        self._records = records
        self._tasks = tasks
        self._blobs = blobs
        self._coordinator = coordinator
        self._clock = clock
        self._piece_bytes = piece_bytes
        # The export that had the last turn, and the hash of its file, good for that version of its row.
        self._digest: tuple[str, int, Digest] | None = None

    async def tick(self) -> float:
        for row in await self._records.documents.due_rows(EXPORT, self._clock.now(), _LOOK):
            if row.job_id is None or not self._unfinished(row):
                continue
            lease = await self._coordinator.lease(export_lease(row.job_id, row.id), self.name, LEASE_SECONDS)
            if lease is not None and await self._take(row, lease):
                return 0.0
        return _IDLE

    async def close(self) -> None:
        """Nothing is held between ticks."""

    def _unfinished(self, row: Document) -> bool:
        """One that expired is for retention."""
        expired = row.expires_at is not None and row.expires_at <= self._clock.now()
        return not expired and export_of(row).state in _UNFINISHED

    async def _take(self, seen: Document, lease: Lease) -> bool:
        """Whether there was something to do for it."""
        ended = False
        try:
            row = await self._records.documents.document(EXPORT, seen.tenant, seen.id)
            job = await self._records.jobs.job(seen.tenant, seen.job_id) if seen.job_id is not None else None
            if row is None or job is None or not self._unfinished(row):
                return False
            ended = await self._work(job, row, lease)
            return True
        finally:
            # Of what has ended nothing is left to guard.
            if ended:
                await self._coordinator.forget(lease.name)
            else:
                await self._coordinator.release(lease)

    async def _work(self, job: Job, row: Document, lease: Lease) -> bool:
        """Have a turn at it. True when it has ended."""
        export = export_of(row)
        claimed = await self._claim(row, export)
        if claimed is None:
            return False
        row, export = claimed
        if export.lost > _MOST_LOST:
            error = ConveyorError(f"{export.lost} processes in a row died while they made it.")
            return await self._failed(job, row, export, error, lasting=True)
        async with self._renewing(lease) as lost:
            turn = Turn(self._clock, _TURN_SECONDS, lambda: self.stopping or lost.is_set())
            try:
                assembly = self._assembly(job, row, export, turn)
            except BadInput as error:
                return await self._failed(job, row, export, error, lasting=True)
            try:
                await assembly.run()
            except ExportPaused:
                await self._pause(assembly)
                return False
            except ExportSuperseded:
                return False
            except Exception as error:
                return await self._failed(
                    job, assembly.row, export_of(assembly.row), error, isinstance(error, BadInput)
                )
        log.info("export ready", job=job.job_id, export=row.id, parts=len(assembly.export.parts))
        return True

    def _assembly(self, job: Job, row: Document, export: ExportRecord, turn: Turn) -> ExportWriter:
        known = self._digest
        digest = known[2] if known is not None and known[:2] == (row.id, row.version - 1) else None
        self._digest = None
        return ExportWriter(
            self._records,
            self._tasks,
            self._blobs,
            self._clock,
            job,
            row,
            export,
            piece_bytes=self._piece_bytes,
            turn=turn,
            digest=digest,
        )

    async def _claim(self, row: Document, export: ExportRecord) -> tuple[Document, ExportRecord] | None:
        """Make it this process's. One that is still held was let go of by nobody: its process died."""
        claimed = msgspec.structs.replace(
            export,
            state=ExportState.RUNNING,
            started_at=export.started_at or self._clock.now(),
            attempt=export.attempt + 1,
            held=True,
            lost=export.lost + 1 if export.held else 0,
        )
        crashpoint("exports.claim.before")
        written = await self._records.documents.replace_row(_with(row, claimed, row.due_at))
        crashpoint("exports.claim.after")
        return None if written is None else (written, claimed)

    async def _pause(self, assembly: ExportWriter) -> None:
        """Let go of it: others come first now."""
        export = msgspec.structs.replace(export_of(assembly.row), held=False)
        row = await self._records.documents.replace_row(_with(assembly.row, export, self._clock.now()))
        if row is not None and export.making.pieces:
            self._digest = (row.id, row.version, assembly.digest)

    async def _failed(self, job: Job, row: Document, export: ExportRecord, error: Exception, lasting: bool) -> bool:
        """Try again later, or give it up. True if it was given up."""
        tries = export.tries + 1
        if not lasting and tries < _TRIES:
            log.warning("export failed; it is tried again", job=job.job_id, export=row.id, error=repr(error))
            pause = _FIRST_PAUSE * 2 ** (tries - 1)
            again = msgspec.structs.replace(export, tries=tries, held=False)
            await self._records.documents.replace_row(_with(row, again, self._clock.now() + pause))
            return False
        code = error.code if isinstance(error, ConveyorError) else "internal_error"
        message = redacted(str(error)) if isinstance(error, ConveyorError) else type(error).__name__
        given_up = msgspec.structs.replace(
            export,
            state=ExportState.FAILED,
            ended_at=self._clock.now(),
            held=False,
            tries=tries,
            error=TaskError(code, message),
        )
        log.error("export given up", job=job.job_id, export=row.id, error=repr(error))
        notice = export_notice(self._clock, job, row, given_up, "export.failed")
        crashpoint("exports.fail.before")
        written = await self._records.documents.replace_row(_with(row, given_up, row.expires_at), notice)
        crashpoint("exports.fail.after")
        return written is not None

    @asynccontextmanager
    async def _renewing(self, lease: Lease) -> AsyncIterator[asyncio.Event]:
        """Keep the lease while the block runs; the event is set once it is lost."""
        lost = asyncio.Event()

        async def renew() -> None:
            while not lost.is_set():
                await self._clock.sleep(LEASE_SECONDS / 3)
                # An engine that does not answer now may answer before the lease lapses; the row guards what is written.
                with suppress(ConveyorError):
                    if not await self._coordinator.renew(lease, LEASE_SECONDS):
                        lost.set()

        renewing = asyncio.create_task(renew())
        try:
            yield lost
        finally:
            renewing.cancel()
            with suppress(asyncio.CancelledError):
                await renewing


def _with(row: Document, export: ExportRecord, due_at: float | None) -> Document:
    return msgspec.structs.replace(row, body=msgspec.json.encode(export), due_at=due_at)
