"""The export copier: writes the files of an export below a place that the operator lists for the tenant, with the
server's own credentials, in the layout of `conveyor export --to` (client/bucket_exports.py).

The steps, each of which may be repeated: `_export.json`, which claims an empty prefix, before the files are made; each
file, after all are made; `_manifest.json`, last. The row is the checkpoint, as it is for the writer. Names contain the
id of the export, and nothing below the prefix is ever deleted, or overwritten but by the same export.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.engines.blobs import Blobs
from conveyor.engines.records import Document, Records
from conveyor.errors import BadInput, DestinationUnavailable
from conveyor.export.exports import (
    BEGIN,
    MANIFEST,
    ExportRecord,
    ExportState,
    PartFile,
    copy_name,
    manifest_json,
    part_range,
)
from conveyor.export.time_slice import ExportPaused, ExportSuperseded, TimeSlice
from conveyor.export.writer import export_event
from conveyor.export_places import ExportPlaces
from conveyor.faults import crashpoint
from conveyor.model import Job, OutboxEvent

T = TypeVar("T")

log = structlog.get_logger()

# Enough names to tell that a prefix is not empty.
_MAX_NAMES = 10
# Bytes of `_export.json`. The tenant may have put a file of any size there.
_MAX_BEGIN = 4096


class ExportCopier:
    """Copies one export in one attempt. `row` is the last one written."""

    def __init__(
        self,
        records: Records,
        blobs: Blobs,
        clock: Clock,
        places: ExportPlaces,
        job: Job,
        row: Document,
        export: ExportRecord,
        time_slice: TimeSlice,
    ) -> None:
        self._records = records
        self._blobs = blobs
        self._clock = clock
        self._places = places
        self._job = job
        self._time_slice = time_slice
        self.row = row
        self.export = export

    async def begin(self) -> None:
        """Claim the prefix. Raises BadInput if it has anything else, and DestinationRefused."""
        prefix = await self._open()
        names = await self._run(prefix.names, _MAX_NAMES)
        if names and not (names == [BEGIN] and await self._is_ours(prefix)):
            # Without a name: it may be another tenant's, in a place of all.
            raise BadInput(f"{self.export.to} is not empty. Choose another prefix.")
        begun = {"job_id": self.row.job_id, "export_id": self.row.id, "format": self.export.format}
        crashpoint("exports.begin.before")
        await self._run(prefix.write, BEGIN, _text(begun))
        crashpoint("exports.begin.after")
        await self._write(msgspec.structs.replace(self.export, copied=0))

    async def run(self) -> None:
        """Write the files that are not there yet, then the manifest. Raises ExportPaused and ExportSuperseded."""
        prefix = await self._open()
        for part in self.export.parts[self.export.copied or 0 :]:
            await self._copy(prefix, part)
            if self._time_slice.is_over:
                raise ExportPaused
        if not await self._is_ours(prefix):
            raise BadInput(f"{self.export.to} has files of another export. Choose another prefix.")
        manifest = manifest_json(self.row, self.export)
        for number, part in enumerate(manifest["parts"], start=1):
            part["name"] = copy_name(self.row, self.export, number)
        crashpoint("exports.manifest.before")
        await self._run(prefix.write, MANIFEST, _text(manifest))
        crashpoint("exports.manifest.after")
        ready = msgspec.structs.replace(
            self.export, state=ExportState.READY, ended_at=self._clock.now(), is_claimed=False
        )
        event = export_event(self._clock, self._job, self.row, ready, "export.ready")
        crashpoint("exports.ready.before")
        await self._write(ready, self.row.expires_at, event)
        crashpoint("exports.ready.after")

    async def _open(self) -> Any:
        """The prefix. The operator may have changed the list since the request."""
        from conveyor.client.object_stores import open_prefix  # noqa: PLC0415  (few servers write into buckets)

        assert self.export.to is not None
        to = self._places.checked(self._job.tenant, self.export.to)
        return await self._run(open_prefix, to)

    async def _is_ours(self, prefix: Any) -> bool:
        data = await self._run(prefix.read, BEGIN, _MAX_BEGIN)
        try:
            begun = msgspec.json.decode(data or b"null")
        except msgspec.DecodeError:
            return False
        return isinstance(begun, dict) and begun.get("export_id") == self.row.id

    async def _copy(self, prefix: Any, part: PartFile) -> None:
        """Write one file. After a crash it is written again, whole, to the same name."""
        self._time_slice.check_interrupted()
        number = (self.export.copied or 0) + 1
        name = copy_name(self.row, self.export, number)
        crashpoint("exports.copy.before")
        try:
            await prefix.write_stream(name, self._pieces(part), part.size)
        except DestinationUnavailable as error:
            raise self._unavailable(error) from None
        crashpoint("exports.copy.after")
        await self._write(msgspec.structs.replace(self.export, copied=number))

    async def _pieces(self, part: PartFile) -> AsyncIterator[bytes]:
        async for piece in part_range(self._blobs, part, 0, part.size):
            self._time_slice.check_interrupted()
            yield piece

    async def _run(self, function: Callable[..., T], *given: Any) -> T:
        try:
            return await asyncio.to_thread(function, *given)
        except DestinationUnavailable as error:
            raise self._unavailable(error) from None

    def _unavailable(self, error: DestinationUnavailable) -> DestinationUnavailable:
        """What a store says, of roles and endpoints, is for the operator."""
        log.warning("destination unavailable", job=self._job.job_id, export=self.row.id, error=error.message)
        return DestinationUnavailable(f"The server cannot write to {self.export.to}. Its log says why.")

    async def _write(self, export: ExportRecord, due_at: float | None = None, event: OutboxEvent | None = None) -> None:
        """Write the row, which is the fence, as the writer does."""
        if await self._records.jobs.job(self._job.tenant, self._job.job_id) is None:
            raise ExportSuperseded
        export = msgspec.structs.replace(export, tries=0, lost=0)
        row = msgspec.structs.replace(self.row, body=msgspec.json.encode(export), due_at=due_at or self.row.due_at)
        crashpoint("exports.checkpoint.before")
        written = await self._records.documents.replace_document(row, event)
        crashpoint("exports.checkpoint.after")
        if written is None:
            raise ExportSuperseded
        self.row, self.export = written, export


def _text(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"
