"""Files that records refer to: the lists of jobs and schedules, checked by their sizes, and the parts of exports that
are ready, checked by their sizes and hashes."""

from hashlib import sha256

from conveyor.accept.schedules import SCHEDULE
from conveyor.errors import EngineFailed
from conveyor.export.exports import Exports, ExportState, PartFile, StoredExport, part_range
from conveyor.model import EXPORT, Job, JobId, Page, Run, Source, TenantId
from conveyor.system import System
from conveyor.verify.findings import Finding, FindingKind, Findings, Pacing

_PAGE = 100
# Of a part that is read between two pauses.
_BYTES_AT_ONCE = 8 * 1024 * 1024


class FileCheck:
    """Checks lists and exports."""

    def __init__(self, system: System, findings: Findings, pacing: Pacing) -> None:
        self._system = system
        self._findings = findings
        self._pacing = pacing
        self._exports = Exports(system)

    async def check_lists(self, job: Job, runs: list[Run]) -> None:
        """The list of a job, and those of all ranges: an open job has one for each batch."""
        sources = {job.source.key: job.source} if job.source is not None else {}
        for run in runs:
            for range_ in await self._system.records.ingests.ranges(run.run_id):
                if isinstance(range_.source, Source):
                    sources[range_.source.key] = range_.source
        for key, source in sources.items():
            # A list that is read where it is has no key.
            if key:
                await self._check_size(key, source.size, f"of job {job.job_id}", job.job_id)

    async def check_schedules(self, tenant: TenantId) -> None:
        """The uploads that the schedules of a tenant refer to."""
        records, cursor = self._system.records, None
        while True:
            page = await records.documents.documents(SCHEDULE, tenant, cursor, _PAGE)
            for row in page.items:
                if row.upload_id is None:
                    continue
                upload = await records.access.upload(row.upload_id)
                if upload is not None:
                    await self._check_size(upload.key, upload.size, f"of schedule {row.id}")
                elif await records.documents.document(SCHEDULE, tenant, row.id) is not None:
                    detail = f"The upload {row.upload_id} of schedule {row.id} is missing."
                    self._findings.add(Finding(FindingKind.LIST, detail))
            cursor = page.next_cursor
            if cursor is None:
                return

    async def _check_size(self, key: str, size: int, owner: str, job_id: JobId | None = None) -> None:
        found = await self._system.blobs.size(key)
        self._findings.checked.lists += 1
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes, where {size} were written"
            self._findings.add(Finding(FindingKind.LIST, f"The list {owner} {state}.", job_id, key=key, size=size))

    async def check_exports(self, job: Job) -> None:
        """The parts of a job's exports that are ready."""
        cursor: str | None = None
        while True:
            page: Page[StoredExport] = await self._exports.page(job, cursor, _PAGE)
            for stored in page.items:
                if stored.export.state is ExportState.READY:
                    await self._check_export(job, stored)
            cursor = page.next_cursor
            if cursor is None:
                return

    async def _check_export(self, job: Job, stored: StoredExport) -> None:
        self._findings.checked.exports += 1
        for number, part in enumerate(stored.export.parts, start=1):
            damage = await self._damage(part)
            # One that expired or was deleted meanwhile is no finding.
            if damage is None or not await self._is_kept(job, stored.row.id):
                continue
            detail = f"Part {number} of export {stored.row.id}: {damage}"
            self._findings.add(
                Finding(FindingKind.EXPORT, detail, job.job_id, key=part.key or part.pieces, size=part.size)
            )

    async def _is_kept(self, job: Job, export_id: str) -> bool:
        row = await self._system.records.documents.document(EXPORT, job.tenant, export_id)
        return row is not None

    async def _damage(self, part: PartFile) -> str | None:
        digest, read = sha256(), 0
        try:
            async for data in part_range(self._system.blobs, part, 0, part.size):
                digest.update(data)
                self._findings.checked.bytes += len(data)
                read += len(data)
                if read >= _BYTES_AT_ONCE:
                    read = 0
                    self._findings.step()
                    await self._pacing.rest()
        except EngineFailed as error:
            return error.message
        if digest.hexdigest() != part.sha256:
            return "The file differs from what was written."
        return None
