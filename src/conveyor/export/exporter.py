"""Exporter: the role that makes the files of recorded exports (`exports`). It leases the export that has waited
longest, works at it for one time slice (`writer`, and `export_copier` for one that is written elsewhere), and takes the
next, so that a large export does not block others.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.coordination.isolation import Isolation
from conveyor.engines.blobs import Blobs
from conveyor.engines.coordinator import Coordinator, Lease, export_lease
from conveyor.engines.records import Document, Records
from conveyor.engines.tasks import Tasks, is_reachable
from conveyor.errors import BadInput, ConveyorError, DestinationRefused
from conveyor.export.archive_names import NameRegister
from conveyor.export.export_copier import ExportCopier
from conveyor.export.exports import ExportRecord, ExportState, export_of
from conveyor.export.staged_file import Digest
from conveyor.export.time_slice import ExportPaused, ExportSuperseded, TimeSlice
from conveyor.export.writer import ExportWriter, export_event
from conveyor.export_places import ExportPlaces
from conveyor.faults import crashpoint
from conveyor.model import EXPORT, Job, TaskError
from conveyor.telemetry.redact import redact

log = structlog.get_logger()

LEASE_SECONDS = 60.0

_IDLE = 0.5
_SLICE_SECONDS = 20.0
# Due exports that a tick tries to lease.
_CANDIDATES = 100
_MAX_ATTEMPTS = 5
_FIRST_BACKOFF = 2.0
# Processes in a row that may die at an export without progress.
_MAX_LOST = 10
_UNFINISHED = frozenset({ExportState.QUEUED, ExportState.RUNNING})


class _LastExport(NamedTuple):
    """The export of a time slice: its id, the version of its row, the hash of its file so far, and its names."""

    id: str
    version: int
    digest: Digest
    names: NameRegister


class Exporter:
    """A role. It works at one export at a time; any number of exporters share the work."""

    def __init__(
        self,
        records: Records,
        tasks: Tasks,
        blobs: Blobs,
        coordinator: Coordinator,
        clock: Clock,
        piece_bytes: int,
        places: ExportPlaces,
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
        self._places = places
        # The export of the last time slice.
        self._last: _LastExport | None = None
        # Those that a newer version wrote rest.
        self._isolation = Isolation(name, clock)

    async def tick(self) -> float:
        limit = _CANDIDATES + self._isolation.skipped
        rows = await self._records.documents.due_documents(EXPORT, self._clock.now(), limit)
        self._isolation.forget_others({row.id for row in rows})
        for row in rows:
            if row.job_id is None or not self._is_candidate(row):
                continue
            lease = await self._coordinator.lease(export_lease(row.job_id, row.id), self.name, LEASE_SECONDS)
            if lease is not None and await self._work_leased(row, lease):
                return 0.0
        return _IDLE

    async def close(self) -> None:
        """There is nothing to close: no export is claimed between ticks."""

    def _is_candidate(self, row: Document) -> bool:
        """An export that a newer version wrote is left to that version, and hides no other."""
        if not self._isolation.is_resting(row.id):
            with self._isolation.item(row.id):
                return self._is_unfinished(row)
        return False

    def _is_unfinished(self, row: Document) -> bool:
        """Expired exports are left to retention."""
        expired = row.expires_at is not None and row.expires_at <= self._clock.now()
        return not expired and is_waiting(row)

    async def _work_leased(self, seen: Document, lease: Lease) -> bool:
        """Work at an export under its lease. False: there was nothing to do."""
        ended = False
        try:
            row = await self._records.documents.document(EXPORT, seen.tenant, seen.id)
            job = await self._records.jobs.job(seen.tenant, seen.job_id) if seen.job_id is not None else None
            if row is None or job is None or not self._is_unfinished(row):
                return False
            if not is_reachable(self._tasks, job.key):
                # Another process opens the task engine of this job.
                return False
            ended = await self._work(job, row, lease)
            return True
        finally:
            # A finished export needs no fence any more.
            if ended:
                await self._coordinator.forget_leases(lease.name)
            else:
                await self._coordinator.release(lease)

    async def _work(self, job: Job, row: Document, lease: Lease) -> bool:
        """Work for one time slice. True: the export is finished."""
        export = export_of(row)
        claimed = await self._claim(row, export)
        if claimed is None:
            return False
        row, export = claimed
        if export.lost > _MAX_LOST:
            error = ConveyorError(f"{export.lost} processes in a row died while they worked at the export.")
            return await self._handle_failure(job, row, export, error, is_permanent=True)
        async with self._renewing(lease) as lost:
            time_slice = TimeSlice(self._clock, _SLICE_SECONDS, lambda: self.stopping or lost.is_set())
            step: ExportWriter | ExportCopier | None = None
            try:
                if export.to is not None and export.copied is None:
                    step = self._copier(job, row, export, time_slice)
                    await step.begin()
                    row, export = step.row, step.export
                if not export.is_made:
                    step = self._writer(job, row, export, time_slice)
                    await step.run()
                    row, export = step.row, export_of(step.row)
                if export.to is not None:
                    step = self._copier(job, row, export, time_slice)
                    await step.run()
            except ExportPaused:
                assert step is not None
                await self._pause(step)
                return False
            except ExportSuperseded:
                return False
            except Exception as error:
                row = row if step is None else step.row
                is_permanent = isinstance(error, BadInput | DestinationRefused)
                return await self._handle_failure(job, row, export_of(row), error, is_permanent)
        log.info("export ready", job=job.job_id, export=row.id, parts=len(export.parts))
        return True

    def _copier(self, job: Job, row: Document, export: ExportRecord, time_slice: TimeSlice) -> ExportCopier:
        return ExportCopier(self._records, self._blobs, self._clock, self._places, job, row, export, time_slice)

    def _writer(self, job: Job, row: Document, export: ExportRecord, time_slice: TimeSlice) -> ExportWriter:
        known, self._last = self._last, None
        if known is not None and (known.id, known.version) != (row.id, row.version - 1):
            known = None
        return ExportWriter(
            self._records,
            self._tasks,
            self._blobs,
            self._clock,
            job,
            row,
            export,
            piece_bytes=self._piece_bytes,
            time_slice=time_slice,
            digest=known.digest if known is not None and export.making.pieces else None,
            names=None if known is None else known.names,
        )

    async def _claim(self, row: Document, export: ExportRecord) -> tuple[Document, ExportRecord] | None:
        """Claim the export for this process. If it is still claimed, the process before died."""
        claimed = msgspec.structs.replace(
            export,
            state=ExportState.RUNNING,
            started_at=export.started_at or self._clock.now(),
            attempt=export.attempt + 1,
            is_claimed=True,
            lost=export.lost + 1 if export.is_claimed else 0,
        )
        crashpoint("exports.claim.before")
        written = await self._records.documents.replace_document(_with(row, claimed, row.due_at))
        crashpoint("exports.claim.after")
        return None if written is None else (written, claimed)

    async def _pause(self, step: ExportWriter | ExportCopier) -> None:
        """Release the claim, behind all exports that wait."""
        export = msgspec.structs.replace(export_of(step.row), is_claimed=False)
        row = await self._records.documents.replace_document(_with(step.row, export, self._clock.now()))
        if row is not None and isinstance(step, ExportWriter):
            self._last = _LastExport(row.id, row.version, step.digest, step.names)

    async def _handle_failure(
        self, job: Job, row: Document, export: ExportRecord, error: Exception, is_permanent: bool
    ) -> bool:
        """Retry after a backoff, or fail the export. True: the export has failed."""
        tries = export.tries + 1
        if not is_permanent and tries < _MAX_ATTEMPTS:
            log.warning("export failed, will retry", job=job.job_id, export=row.id, error=repr(error))
            backoff = _FIRST_BACKOFF * 2 ** (tries - 1)
            again = msgspec.structs.replace(export, tries=tries, is_claimed=False)
            await self._records.documents.replace_document(_with(row, again, self._clock.now() + backoff))
            return False
        code = error.code if isinstance(error, ConveyorError) else "internal_error"
        message = redact(str(error)) if isinstance(error, ConveyorError) else type(error).__name__
        failed = msgspec.structs.replace(
            export,
            state=ExportState.FAILED,
            ended_at=self._clock.now(),
            is_claimed=False,
            tries=tries,
            error=TaskError(code, message),
        )
        log.error("export failed", job=job.job_id, export=row.id, error=repr(error))
        event = export_event(self._clock, job, row, failed, "export.failed")
        crashpoint("exports.fail.before")
        written = await self._records.documents.replace_document(_with(row, failed, row.expires_at), event)
        crashpoint("exports.fail.after")
        return written is not None

    @asynccontextmanager
    async def _renewing(self, lease: Lease) -> AsyncIterator[asyncio.Event]:
        """Renew the lease while the block runs. The event is set if the lease is lost."""
        lost = asyncio.Event()

        async def renew() -> None:
            while not lost.is_set():
                await self._clock.sleep(LEASE_SECONDS / 3)
                # The engine may answer again before the lease expires; the row fences every write.
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


def is_waiting(row: Document) -> bool:
    """Whether an export is to be worked at. Raises msgspec.MsgspecError."""
    return export_of(row).state in _UNFINISHED


def _with(row: Document, export: ExportRecord, due_at: float | None) -> Document:
    return msgspec.structs.replace(row, body=msgspec.json.encode(export), due_at=due_at)
