"""Orphans: objects that no record and no row refers to. Gets nothing but the store, and finds for each object under the
known prefixes what it should belong to.

The time at which an object was made is in the ids of its key. What is younger than a day may be written right now, and
what belongs to a run that has not finished for a day, too.
"""

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from conveyor.clock import time_of_id
from conveyor.engines.blobs import BlobInfo
from conveyor.engines.tasks import is_reachable
from conveyor.jobs.orphans import ORPHANS
from conveyor.model import EXPORT, Job, JobId, RunId, TenantId
from conveyor.system import System
from conveyor.verify.findings import UNREADABLE, Findings, Pacing, error_text
from conveyor.verify.run_check import row_pages

SETTLED_SECONDS = 86_400.0

_PREFIXES = ("uploads", "lists", "results", "invalid", "exports")
_ID = re.compile(r"_([0-9a-hjkmnp-tv-z]{26})(?![0-9a-z])")
# Objects of one owner, or expired records, that are in memory together. Where more have expired, none is an orphan.
_TOGETHER = 10_000


class OrphanObjects:
    """Finds orphans, in pages."""

    def __init__(self, system: System, findings: Findings, pacing: Pacing) -> None:
        self._system = system
        self._findings = findings
        self._pacing = pacing
        self._before = system.clock.now() - SETTLED_SECONDS
        # Expired ones that retention has not purged yet, as the first question finds them.
        self._expired_uploads: set[str] | None = None
        self._due_exports: set[str] | None = None

    async def find(self, only: Job | None = None) -> AsyncGenerator[list[BlobInfo], None]:
        """Orphans of the installation, or those under the prefixes of one job."""
        for prefix in _PREFIXES:
            if only is None:
                place = f"{prefix}/"
            elif prefix == "uploads":
                continue
            else:
                place = f"{prefix}/{only.tenant}/{only.job_id}/"
            async for owner, objects in self._by_owner(place):
                yield await self._or_none(owner, objects)
                self._findings.step()
                await self._pacing.rest()

    async def _by_owner(self, place: str) -> AsyncGenerator[tuple[list[str], list[BlobInfo]], None]:
        """Neighbours in the listing with the same owner: prefix, tenant, and the ids of a job and its run or export, or
        of an upload."""
        owner: list[str] = []
        objects: list[BlobInfo] = []
        async for info in self._system.blobs.listing(place):
            self._findings.checked.objects += 1
            made_at = _made_at(info.key)
            if made_at is None or made_at > self._before:
                continue
            its_owner = info.key.split("/")[:-1][:4] if not info.key.startswith("uploads/") else info.key.split("/")
            if objects and (its_owner != owner or len(objects) >= _TOGETHER):
                yield owner, objects
                objects = []
            owner = its_owner
            objects.append(info)
        if objects:
            yield owner, objects

    async def _or_none(self, owner: list[str], objects: list[BlobInfo]) -> list[BlobInfo]:
        """Where it cannot be told, none is an orphan."""
        try:
            return await self._without_owner(owner, objects)
        except UNREADABLE as error:
            self._findings.fail(f"Objects under {'/'.join(owner)}: {error_text(error)}")
            return []

    async def _without_owner(self, owner: list[str], objects: list[BlobInfo]) -> list[BlobInfo]:
        match owner:
            case ["uploads", tenant, upload_id]:
                is_known = await self._knows_upload(TenantId(tenant), upload_id)
                return [] if is_known else objects
            case [prefix, tenant, job_id, *rest]:
                job = await self._system.records.jobs.job(TenantId(tenant), JobId(job_id))
                if job is None:
                    is_known = await self._knows_job(TenantId(tenant), JobId(job_id))
                    return [] if is_known else objects
                if prefix == "results" and rest:
                    return await self._without_row(job, RunId(rest[0]), objects)
                if prefix == "exports" and rest:
                    return [] if await self._knows_export(job, rest[0]) else objects
        # Lists and invalid lines go with their job.
        return []

    async def _knows_upload(self, tenant: TenantId, upload_id: str) -> bool:
        records = self._system.records
        if await records.access.upload(upload_id) is not None:
            return True
        if self._expired_uploads is None:
            expired = await records.access.expired_uploads(self._system.clock.now(), _TOGETHER)
            self._expired_uploads = {each.upload_id for each in expired}
        is_expired = len(self._expired_uploads) >= _TOGETHER or upload_id in self._expired_uploads
        return is_expired or await records.documents.document(ORPHANS, tenant, upload_id) is not None

    async def _knows_job(self, tenant: TenantId, job_id: JobId) -> bool:
        """Whether a job that no reader sees still has records: retention purges what it left."""
        records = self._system.records
        if await records.jobs.runs(job_id):
            return True
        return await records.documents.document(ORPHANS, tenant, job_id) is not None

    async def _knows_export(self, job: Job, export_id: str) -> bool:
        documents = self._system.records.documents
        if await documents.document(EXPORT, job.tenant, export_id) is not None:
            return True
        if self._due_exports is None:
            due = await documents.due_documents(EXPORT, self._system.clock.now(), _TOGETHER)
            self._due_exports = {each.id for each in due}
        return len(self._due_exports) >= _TOGETHER or export_id in self._due_exports

    async def _without_row(self, job: Job, run_id: RunId, objects: list[BlobInfo]) -> list[BlobInfo]:
        """Those of the objects of a run that none of its rows refers to."""
        if not is_reachable(self._system.tasks, job.key):
            return []
        run = await self._system.records.jobs.run(job.job_id, run_id)
        if run is not None and (run.ended_at is None or run.ended_at > self._before):
            return []
        left = {_body_of(info.key) for info in objects}
        key = msgspec.structs.replace(job.key, run_id=run_id)
        async with aclosing(row_pages(self._system.tasks, key)) as pages:
            async for page in pages:
                for task in page:
                    refs = (task.detail.body, task.detail.extracted)
                    left -= {_body_of(ref.key) for ref in refs if ref is not None}
                if not left:
                    return []
                await self._pacing.rest()
        return [info for info in objects if _body_of(info.key) in left]


def _body_of(key: str) -> str:
    """A body or segment: the key of an object, or of the file that the object is a piece of."""
    return "/".join(key.split("/")[:5])


def _made_at(key: str) -> float | None:
    """When an object was made, or was named; None if the key has no id."""
    return max((time_of_id(text) for text in _ID.findall(key)), default=None)
