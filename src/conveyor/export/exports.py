"""Exports as records: create, find, list and delete them, and show their progress. `exporter` is the role that makes
their files in the background; `writer` is its work on one of them; `direct` makes a zip without any record.

The row is the whole state of an export: the request, the progress, and the checkpoint from which any process can
resume. Every write names the version that it replaces, so that only one process makes progress at a time.
"""

import math
import re
from collections.abc import AsyncIterator, Sequence
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

import msgspec

from conveyor.clock import iso_text
from conveyor.engines.blobs import Blobs
from conveyor.engines.newer_rows import read_row, readable_rows
from conveyor.engines.records import Document
from conveyor.engines.tasks import TaskFilter
from conveyor.errors import BadCursor, BodyDamaged, Conflict, EngineFailed, LimitReached, NotFound
from conveyor.export.columns import OwnColumn
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
    checked_template,
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
from conveyor.settings import export_places
from conveyor.states import ENDED
from conveyor.system import System

ACCEPTED = 202
MAX_PARTS = 1000
# What the client writes, too (client/bucket_exports.py).
BEGIN = "_export.json"
MANIFEST = "_manifest.json"
# Lifetime of a signed download link; less if the export expires sooner.
LINK_SECONDS = 86_400.0

_MAX_PER_JOB = 50
_EXPORT_ID = re.compile(r"export_[0-9a-z]{26}")


class ExportState(StrEnum):
    """An export waits, runs, and is then ready or failed."""

    QUEUED = "queued"
    RUNNING = "running"
    READY = "ready"
    FAILED = "failed"


class PartFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """A finished file: one object (`key`), or an object with the list of its pieces, in order (`pieces`)."""

    size: int
    sha256: str
    tasks: int
    key: str | None = None
    pieces: str | None = None


class PartInProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The checkpoint of a running export: the position among the tasks, and the state of the unfinished file."""

    sorting: Sorting = Sorting()
    position: Position = Position()
    # Of the unfinished file: its size in bytes, its pieces, and its sidecars.
    size: int = 0
    pieces: int = 0
    sidecars: int = msgspec.field(default=0, name="beside")
    # For each attempt: the first piece and the first sidecar that it wrote, and its number.
    attempts: Sequence[tuple[int, int, int]] = ()
    # What the format needs to continue the file.
    part_state: msgspec.Raw = msgspec.field(default=msgspec.Raw(b"null"), name="kept")
    # Steps done at the end of the file; None before the first. `last`: no file follows.
    step: int | None = None
    last: bool = False


class ColumnsInProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The checkpoint of the first pass over the tasks, which collects the list's own columns."""

    position: Position = Position()
    types: dict[str, str] = {}
    extracted: dict[str, str] = {}


class ExportRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
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
    # Rows read; tasks in the files by status; bodies and their bytes.
    read: int = 0
    counts: dict[str, int] = {}
    body_count: int = 0
    body_bytes: int = 0
    # Bodies that are damaged or missing: the files are without them.
    damaged: int = 0
    parts: Sequence[PartFile] = ()
    making: PartInProgress = PartInProgress()
    # Attempts; whether a process works at it now; processes in a row that died without progress.
    attempt: int = 0
    is_claimed: bool = msgspec.field(default=False, name="held")
    lost: int = 0
    # Failures in a row.
    tries: int = 0
    # The template for names of bodies.
    names: str | None = None
    # Whether it has the list's own columns and names by id; exports of earlier versions do not.
    has_labels: bool = msgspec.field(default=False, name="labels")
    # The list's own columns, once they are known; and how far they are collected.
    columns: Sequence[OwnColumn] | None = None
    scan: ColumnsInProgress = ColumnsInProgress()
    # Whether its tables have the column `unchanged`.
    has_unchanged: bool = msgspec.field(default=False, name="unchanged")
    # The place that it is written to; whether all files are made, and how many are there; None: not even begun.
    to: str | None = None
    is_made: bool = msgspec.field(default=False, name="made")
    copied: int | None = None

    @property
    def where(self) -> TaskFilter:
        return self.select.where

    @property
    def bytes(self) -> int:
        return sum(part.size for part in self.parts) + self.making.size

    def run_keys(self, job: Job) -> list[RunKey]:
        return [msgspec.structs.replace(job.key, run_id=run_id) for run_id in self.runs]


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """One object of a file that is stored as several."""

    key: str
    size: int


_decode_export = msgspec.json.Decoder(ExportRecord).decode
_decode_pieces = msgspec.json.Decoder(list[Piece]).decode


def export_of(row: Document) -> ExportRecord:
    """The export in a row. Raises NewerRow if a newer version wrote it."""
    return read_row(row.body, _decode_export)


class StoredExport(NamedTuple):
    """An export with its row."""

    row: Document
    export: ExportRecord


class Exports:
    """Creates, finds, lists and deletes exports."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._idempotency = Idempotency(system.settings, system.clock, system.records)

    async def create(self, job: Job, spec: ExportSpec, request: IdempotentRequest | None = None) -> Accepted:
        """Record a request for an export. A replayed request gets its first answer."""
        export_id = self._system.clock.new_id("export")
        return await self._idempotency.once(job.tenant, request, export_id, partial(self._create, job, spec))

    async def find(self, tenant: TenantId, export_id: str) -> StoredExport:
        """The tenant's export. Raises NotFound alike for one that is unknown, expired or another tenant's, and for one
        whose job is gone."""
        if not _EXPORT_ID.fullmatch(export_id):
            raise NotFound
        row = await self._system.records.documents.document(EXPORT, tenant, export_id)
        if row is None or row.job_id is None or await self._system.records.jobs.job(tenant, row.job_id) is None:
            raise NotFound
        return StoredExport(row, export_of(row))

    async def page(self, job: Job, cursor: str | None, limit: int) -> Page[StoredExport]:
        """The job's exports, oldest first, without those that a newer version wrote."""
        if cursor is not None and not _EXPORT_ID.fullmatch(cursor):
            raise BadCursor
        rows = await self._system.records.documents.documents(EXPORT, job.tenant, cursor, limit, job.job_id)
        stored = readable_rows(rows.items, lambda row: StoredExport(row, export_of(row)))
        return Page(stored, rows.next_cursor)

    async def delete(self, tenant: TenantId, export_id: str) -> None:
        """Expire the export: it is gone for readers at once, its exporter stops, and retention deletes its files."""
        while True:
            row, _ = await self.find(tenant, export_id)
            now = self._system.clock.now()
            gone = msgspec.structs.replace(row, expires_at=now, due_at=now)
            crashpoint("exports.delete.before")
            if await self._system.records.documents.replace_document(gone) is not None:
                crashpoint("exports.delete.after")
                return

    async def _create(self, job: Job, spec: ExportSpec, claim: Claim) -> Accepted:
        export = await self._validate(job, spec)
        existing = await self._system.records.documents.documents(EXPORT, job.tenant, None, _MAX_PER_JOB, job.job_id)
        if len(existing.items) >= _MAX_PER_JOB:
            raise LimitReached(f"The job has {_MAX_PER_JOB} exports already. Delete one first.", limit=_MAX_PER_JOB)
        left = math.inf if job.expires_at is None else job.expires_at - export.created_at
        row = Document(
            EXPORT,
            job.tenant,
            claim.subject,
            msgspec.json.encode(export),
            due_at=export.created_at,
            expires_at=export.created_at + min(self._system.settings.export_seconds, left),
            job_id=job.job_id,
        )
        body = msgspec.json.encode(await export_json(self._system.blobs, row, export, export.created_at))
        answer = claim.answer(ACCEPTED, body)
        crashpoint("exports.create.before")
        existing_claim = await self._system.records.documents.create_documents([row], answer=answer.row)
        crashpoint("exports.create.after")
        return answer.unless_lost(existing_claim)

    async def _validate(self, job: Job, spec: ExportSpec) -> ExportRecord:
        select = checked_select(spec.select)
        to = None if spec.to is None else export_places(self._system.settings).checked(job.tenant, spec.to)
        runs = await self._runs(job, select)
        if not spec.partial and any(run.state not in ENDED for run in runs):
            raise Conflict(
                "The job is not finished. Wait for it, or set `partial` to export the tasks that are finished now.",
                state=job.state,
            )
        return ExportRecord(
            format=spec.format,
            compression=checked_compression(spec),
            bodies=checked_bodies(spec),
            select=select,
            runs=[run.run_id for run in runs],
            total=sum(run.total for run in runs),
            created_at=self._system.clock.now(),
            part_bytes=checked_part_bytes(spec),
            names=checked_template(spec),
            has_labels=True,
            has_unchanged=not select.changed and any(_compares(run) for run in runs),
            to=to,
        )

    async def _runs(self, job: Job, select: ExportSelect) -> list[Run]:
        """Newest first."""
        chosen = await chosen_runs(self._system.records, job, select.run)
        if chosen == [job.key]:
            return [job.run]
        runs = {run.run_id: run for run in await self._system.records.jobs.runs(job.job_id)}
        return [runs[key.run_id] for key in reversed(chosen)]


def _compares(run: Run) -> bool:
    return run.lineage is not None and run.lineage.changed_only


async def export_json(blobs: Blobs, row: Document, export: ExportRecord, now: float) -> dict[str, Any]:
    """An export as the API shows it."""
    expires_at = row.expires_at or now
    return {
        "id": row.id,
        "job_id": row.job_id,
        "state": export.state,
        "error": export.error,
        "warning": _warning(export),
        "format": export.format,
        "compression": export.compression,
        "bodies": export.bodies,
        "select": msgspec.structs.asdict(export.select),
        "part_bytes": export.part_bytes,
        "names": export.names,
        "to": export.to,
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
                "to": _copy_url(row, export, number),
            }
            for number, part in enumerate(export.parts, start=1)
        ],
    }


def manifest_json(row: Document, export: ExportRecord) -> dict[str, Any]:
    """What the files contain, with sizes and hashes to check them. It never changes once the export is ready."""
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
    """The file name for a download. It contains the number of the part if there are several."""
    alone = export.state is ExportState.READY and len(export.parts) == 1
    return f"{row.job_id}{'' if alone else f'-{number:04d}'}{ending_of(export.format, export.compression)}"


def copy_name(row: Document, export: ExportRecord, number: int) -> str:
    """The name of a part below the place that the export is written to."""
    return f"part-{number:04d}-{row.id}{ending_of(export.format, export.compression)}"


def _copy_url(row: Document, export: ExportRecord, number: int) -> str | None:
    is_there = export.to is not None and number <= (export.copied or 0)
    return f"{export.to}{copy_name(row, export, number)}" if is_there else None


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
        raise EngineFailed("A file of an export is shorter than when it was written.", key=part.key or part.pieces)


async def _object(blobs: Blobs, piece: Piece, start: int, length: int) -> AsyncIterator[bytes]:
    try:
        async for data in blobs.stream(piece.key, start):
            wanted = data[:length]
            length -= len(wanted)
            if wanted:
                yield wanted
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
        "damaged": export.damaged,
    }


def _warning(export: ExportRecord) -> str | None:
    if not export.damaged:
        return None
    some = "1 stored body is" if export.damaged == 1 else f"{export.damaged} stored bodies are"
    return (
        f"{some} damaged or missing, and not in the files. Their tasks have the error {BodyDamaged.code}; "
        "`conveyor rerun JOB --damaged` runs them again."
    )
