"""Copies of lists for new jobs: the list of a schedule when it fires, and the list of a job that is duplicated."""

from collections.abc import AsyncIterator, Callable
from hashlib import sha256

from conveyor.accept.schedules import ListSource
from conveyor.egress.outbound import Outbound
from conveyor.engines.source_buckets import SCHEME
from conveyor.errors import NotFound, UploadConflict
from conveyor.faults import crashpoint
from conveyor.jobs.orphans import note_submit
from conveyor.lists.url_lists import UrlLists
from conveyor.model import JobId, RemoteSource, Source, TenantId
from conveyor.system import System


class Sources:
    """Stages lists of schedules."""

    def __init__(self, system: System, outbound: Outbound) -> None:
        self._system = system
        self._urls = UrlLists(outbound, system.settings.schedule_fetch_seconds)

    async def stage(self, tenant: TenantId, job_id: JobId, source: ListSource) -> Source:
        """Copy the list for this job; the copy is removed with the job. Raises BadInput for a list that cannot be read,
        SourceUnavailable for one that cannot be read now."""
        if source.url is not None and source.url.startswith(SCHEME):
            # The ingest reads it in its bucket.
            remote = RemoteSource(source.url)
            return Source("", 0, "", source.format, source.compression, remote, source.url_column)
        pieces = self._uploaded(tenant, source.upload_id) if source.upload_id is not None else self._fetched(source)
        crashpoint("schedule.stage.before")
        staged = await stage_copy(self._system, tenant, job_id, pieces, source)
        crashpoint("schedule.stage.after")
        return staged

    async def drop(self, source: Source) -> None:
        """Remove a copy that no job uses."""
        if source.key:
            await self._system.blobs.delete([source.key])

    async def discard(self, tenant: TenantId, job_id: JobId) -> None:
        """Remove all copies for a job that was not made."""
        while await self._system.blobs.delete_prefix(f"{staged_prefix(tenant, job_id)}/", 1000):
            pass

    async def _uploaded(self, tenant: TenantId, upload_id: str) -> AsyncIterator[bytes]:
        upload = await self._system.records.access.upload(upload_id)
        if upload is None or upload.tenant != tenant:
            raise NotFound("The upload of the schedule has expired.")
        if await self._system.blobs.size(upload.key) != upload.size:
            raise UploadConflict("The upload of the schedule was not stored yet.")
        async for piece in self._system.blobs.stream(upload.key):
            yield piece

    async def _fetched(self, source: ListSource) -> AsyncIterator[bytes]:
        assert source.url is not None
        place = RemoteSource(source.url, source.headers)
        async for piece in self._urls.whole(place, self._system.settings.max_list_bytes, source.compression):
            yield piece


async def stage_copy(
    system: System, tenant: TenantId, job_id: JobId, pieces: AsyncIterator[bytes], like: ListSource | Source
) -> Source:
    """Store a list for a job that will be made, in the form of the original. It is noted before, so that retention
    removes it if the job is never made."""
    await note_submit(system, tenant, job_id, is_repeated=True)
    # Each attempt has a key of its own: a slow earlier one never overwrites the list of the accepted job.
    key = f"{staged_prefix(tenant, job_id)}/{system.clock.new_id('list')}"
    digest = sha256()
    size = await system.blobs.put_stream(key, _hashed(pieces, digest.update))
    return Source(key, size, digest.hexdigest(), like.format, like.compression, url_column=like.url_column)


def staged_prefix(tenant: TenantId, job_id: JobId) -> str:
    return f"lists/{tenant}/{job_id}"


async def _hashed(pieces: AsyncIterator[bytes], update: Callable[[bytes], None]) -> AsyncIterator[bytes]:
    async for piece in pieces:
        update(piece)
        yield piece
