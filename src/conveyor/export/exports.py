"""Exports: results as files, made offline. Gets what is wanted of a job, keeps it as a row, and shows how far it is;
`exporter` makes the files.

The row is the whole state of an export: what was asked for, what is done, and what the process that goes on with it
needs to know. Every write names the version that it replaces, so that one process makes progress at a time.
"""

import re
from collections.abc import AsyncIterator, Sequence
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

import msgspec

from conveyor.clock import iso_text
from conveyor.engines.blobs import Blobs
from conveyor.engines.records import Document
from conveyor.engines.tasks import TaskFilter
from conveyor.errors import BadCursor, Conflict, EngineFailed, LimitReached, NotFound
from conveyor.export.request import (
    STATUSES,
    ExportBodies,
    ExportCompression,
    ExportFormat,
    ExportSelect,
    ExportSpec,
    checked_bodies,
    checked_compression,
    checked_part_bytes,
    checked_select,
    ending_of,
    media_type_of,
)
from conveyor.export.sorting import Sorting
from conveyor.faults import crashpoint
from conveyor.jobs.idempotency import Accepted, Claim, Idempotency, IdempotentRequest
from conveyor.model import EXPORT, Job, Page, Run, RunId, RunKey, TaskError, TenantId
from conveyor.read.results import iso_time
from conveyor.read.runs import chosen_runs
from conveyor.read.walk import Position
from conveyor.states import ENDED
from conveyor.system import System

ACCEPTED = 202
MAX_PARTS = 1000
# Of a download link, if the store signs one: the export may go sooner.
LINK_SECONDS = 86_400.0

_MOST_OF_A_JOB = 50
_EXPORT_ID = re.compile(r"export_[0-9a-z]{26}")


class ExportState(StrEnum):
    """An export waits, is made, and then is there or is not."""

    QUEUED = "queued"
    RUNNING = "running"
    READY = "ready"
    FAILED = "failed"


class PartFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file that is done: one object, or a list of the objects that it is made of, in order."""

    size: int
    sha256: str
    tasks: int
    key: str | None = None
    pieces: str | None = None


class PartInProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """What whoever goes on needs to know: how far the tasks are, and the file that is being made."""

    sorting: Sorting = Sorting()
    position: Position = Position()
    # Of the file: its bytes so far, the objects that they are in, and the objects beside it.
    size: int = 0
    pieces: int = 0
    beside: int = 0
    # From which piece, and which object beside, each attempt wrote them.
    attempts: Sequence[tuple[int, int, int]] = ()
    kept: msgspec.Raw = msgspec.Raw(b"null")
    # How many steps of its end are done; None before. `last`: no file follows it.
    step: int | None = None
    last: bool = False


class ExportRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of the row, as JSON."""

    format: ExportFormat
    compression: ExportCompression
    bodies: ExportBodies
    select: ExportSelect
    # Newest first.
    runs: Sequence[RunId]
    total: int
    created_at: float
    part_bytes: int | None = None
    state: ExportState = ExportState.QUEUED
    started_at: float | None = None
    ended_at: float | None = None
    error: TaskError | None = None
    # Rows read; of the tasks in the files, how many there are of each status; bodies and their bytes.
    read: int = 0
    counts: dict[str, int] = {}
    body_count: int = 0
    body_bytes: int = 0
    parts: Sequence[PartFile] = ()
    making: PartInProgress = PartInProgress()
    # Processes that have worked at it; whether one does, and how many in a row died over it before they got on.
    attempt: int = 0
    held: bool = False
    lost: int = 0
    # Failures in a row.
    tries: int = 0

    @property
    def where(self) -> TaskFilter:
        return self.select.where

    @property
    def bytes(self) -> int:
        return sum(part.size for part in self.parts) + self.making.size

    def run_keys(self, job: Job) -> list[RunKey]:
        return [msgspec.structs.replace(job.key, run_id=run_id) for run_id in self.runs]


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """One of the objects that a file is made of."""

    key: str
    size: int


_decode_export = msgspec.json.Decoder(ExportRecord).decode
_decode_pieces = msgspec.json.Decoder(list[Piece]).decode


def export_of(row: Document) -> ExportRecord:
    """What a row says."""
    return _decode_export(row.body)


class StoredExport(NamedTuple):
    """An export, and its row."""

    row: Document
    export: ExportRecord


class Exports:
    """Keeps exports that are asked for, and shows them."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._idempotency = Idempotency(system.settings, system.clock, system.records)

    async def create(self, job: Job, spec: ExportSpec, request: IdempotentRequest | None = None) -> Accepted:
        """Have an export made. A request that was answered before gets that answer again."""
        export_id = self._system.clock.new_id("export")
        return await self._idempotency.once(job.tenant, request, export_id, partial(self._created, job, spec))

    async def find(self, tenant: TenantId, export_id: str) -> StoredExport:
        """The tenant's export. One that never was, one that is gone and another's are the same NotFound; so is one of
        a job that is gone."""
        if not _EXPORT_ID.fullmatch(export_id):
            raise NotFound
        row = await self._system.records.row(EXPORT, tenant, export_id)
        if row is None or row.job_id is None or await self._system.records.job(tenant, row.job_id) is None:
            raise NotFound
        return StoredExport(row, export_of(row))

    async def page(self, job: Job, cursor: str | None, limit: int) -> Page[StoredExport]:
        """The job's exports, oldest first."""
        if cursor is not None and not _EXPORT_ID.fullmatch(cursor):
            raise BadCursor
        rows = await self._system.records.rows(EXPORT, job.tenant, cursor, limit, job.job_id)
        return Page([StoredExport(row, export_of(row)) for row in rows.items], rows.next_cursor)

    async def delete(self, tenant: TenantId, export_id: str) -> None:
        """It is gone at once for every reader, and whoever makes it stops; its files are removed behind it."""
        while True:
            row, _ = await self.find(tenant, export_id)
            now = self._system.clock.now()
            gone = msgspec.structs.replace(row, expires_at=now, due_at=now)
            crashpoint("exports.delete.before")
            if await self._system.records.replace_row(gone) is not None:
                crashpoint("exports.delete.after")
                return

    async def _created(self, job: Job, spec: ExportSpec, claim: Claim) -> Accepted:
        export = await self._checked(job, spec)
        standing = await self._system.records.rows(EXPORT, job.tenant, None, _MOST_OF_A_JOB, job.job_id)
        if len(standing.items) >= _MOST_OF_A_JOB:
            raise LimitReached(f"The job has {_MOST_OF_A_JOB} exports already. Delete one first.", limit=_MOST_OF_A_JOB)
        row = Document(
            EXPORT,
            job.tenant,
            claim.subject,
            msgspec.json.encode(export),
            due_at=export.created_at,
            expires_at=min(export.created_at + self._system.settings.export_seconds, job.expires_at),
            job_id=job.job_id,
        )
        body = msgspec.json.encode(await export_json(self._system.blobs, row, export, export.created_at))
        answer = claim.answer(ACCEPTED, body)
        crashpoint("exports.create.before")
        existing = await self._system.records.create_rows([row], answer=answer.row)
        crashpoint("exports.create.after")
        return answer.unless_lost(existing)

    async def _checked(self, job: Job, spec: ExportSpec) -> ExportRecord:
        runs = await self._runs(job, spec.select)
        if not spec.partial and any(run.state not in ENDED for run in runs):
            raise Conflict(
                "The job has not ended. Wait for it, or ask with `partial` for what is there now.", state=job.state
            )
        return ExportRecord(
            format=spec.format,
            compression=checked_compression(spec),
            bodies=checked_bodies(spec),
            select=checked_select(spec.select),
            runs=[run.run_id for run in runs],
            total=sum(run.total for run in runs),
            created_at=self._system.clock.now(),
            part_bytes=checked_part_bytes(spec),
        )

    async def _runs(self, job: Job, select: ExportSelect) -> list[Run]:
        """Newest first."""
        chosen = await chosen_runs(self._system.records, job, select.run)
        if chosen == [job.key]:
            return [job.run]
        runs = {run.run_id: run for run in await self._system.records.runs(job.job_id)}
        return [runs[key.run_id] for key in reversed(chosen)]


async def export_json(blobs: Blobs, row: Document, export: ExportRecord, now: float) -> dict[str, Any]:
    """An export as the API shows it."""
    expires_at = row.expires_at or now
    return {
        "id": row.id,
        "job_id": row.job_id,
        "state": export.state,
        "error": export.error,
        "format": export.format,
        "compression": export.compression,
        "bodies": export.bodies,
        "select": msgspec.structs.asdict(export.select),
        "part_bytes": export.part_bytes,
        "run_ids": export.runs,
        "created_at": iso_text(export.created_at),
        "started_at": iso_time(export.started_at),
        "finished_at": iso_time(export.ended_at),
        "expires_at": iso_text(expires_at),
        "progress": {
            "tasks": min(export.read, export.total) if export.state is not ExportState.READY else export.total,
            "total": export.total,
            "bytes": export.bytes,
        },
        "counts": _counts(export),
        "parts": [
            {
                "number": number,
                "name": part_name(row, export, number),
                "size": part.size,
                "sha256": part.sha256,
                "tasks": part.tasks,
                "url": await _link(blobs, row, export, number, min(LINK_SECONDS, expires_at - now)),
            }
            for number, part in enumerate(export.parts, start=1)
        ],
    }


def manifest_json(row: Document, export: ExportRecord) -> dict[str, Any]:
    """What the files hold, and how to check them: the same whenever it is asked for."""
    return {
        "export_id": row.id,
        "job_id": row.job_id,
        "run_ids": export.runs,
        "format": export.format,
        "compression": export.compression,
        "bodies": export.bodies,
        "select": msgspec.structs.asdict(export.select),
        "created_at": iso_text(export.created_at),
        "counts": _counts(export),
        "parts": [
            {
                "name": part_name(row, export, number),
                "size": part.size,
                "sha256": part.sha256,
                "tasks": part.tasks,
            }
            for number, part in enumerate(export.parts, start=1)
        ],
    }


def part_name(row: Document, export: ExportRecord, number: int) -> str:
    """What a file is called when it is downloaded. A number is in it if there are several."""
    alone = export.state is ExportState.READY and len(export.parts) == 1
    return f"{row.job_id}{'' if alone else f'-{number:04d}'}{ending_of(export.format, export.compression)}"


async def part_range(blobs: Blobs, part: PartFile, start: int, end: int) -> AsyncIterator[bytes]:
    """The bytes from `start` up to `end` of a file."""
    left = end - start
    for piece in await _pieces(blobs, part):
        if start >= piece.size:
            start -= piece.size
            continue
        if left == 0:
            return
        async for data in _object(blobs, piece, start, min(left, piece.size - start)):
            left -= len(data)
            yield data
        start = 0
    if left:
        raise EngineFailed("A file of an export is shorter than it was.", key=part.key or part.pieces)


async def _object(blobs: Blobs, piece: Piece, start: int, length: int) -> AsyncIterator[bytes]:
    try:
        async for data in blobs.stream(piece.key, start):
            kept = data[:length]
            length -= len(kept)
            if kept:
                yield kept
            if length == 0:
                return
    except NotFound:
        raise EngineFailed("A file of an export is missing.", key=piece.key) from None


async def _pieces(blobs: Blobs, part: PartFile) -> list[Piece]:
    if part.pieces is None:
        return [Piece(part.key or "", part.size)]
    data = await blobs.get(part.pieces)
    if data is None:
        raise EngineFailed("A file of an export is missing.", key=part.pieces)
    return _decode_pieces(data)


async def _link(blobs: Blobs, row: Document, export: ExportRecord, number: int, seconds: float) -> str:
    part = export.parts[number - 1]
    if part.key is not None and seconds > 0:
        media_type = media_type_of(export.format, export.compression)
        signed = await blobs.presigned_get(part.key, seconds, media_type, part_name(row, export, number))
        if signed is not None:
            return signed.url
    return f"/v1/exports/{row.id}/parts/{number}"


def _counts(export: ExportRecord) -> dict[str, int]:
    return {
        "tasks": sum(export.counts.values()),
        **{label: export.counts.get(label, 0) for label in STATUSES},
        "bodies": export.body_count,
        "body_bytes": export.body_bytes,
    }
