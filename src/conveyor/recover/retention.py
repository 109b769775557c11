"""Retention: purges what has expired or was deleted, in bounded steps that can be interrupted anywhere.

Readers check expiry themselves and do not see it any more; retention only frees the space. The row of a job is removed
last: while it exists, the rest is found again. In general an object is removed before the row that names it.
"""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.coordination.isolation import Isolation, run_all
from conveyor.engines.blobs import Blobs
from conveyor.engines.coordinator import Coordinator, export_lease, ingest_lease
from conveyor.engines.queue import Queue, run_queues
from conveyor.engines.records import Document, Records
from conveyor.engines.tasks import Tasks
from conveyor.faults import crashpoint
from conveyor.jobs.dead_letters import decode_dead_letter
from conveyor.jobs.orphans import ORPHANS, note_upload, orphans_of
from conveyor.model import EXPORT, UPLOADS, Job, JobId, RunKey, UploadRecord, export_prefix
from conveyor.telemetry import metrics

log = structlog.get_logger()

# Seconds in which workers and ingesters notice that a job was deleted: what they write after the purge would stay.
SETTLE_SECONDS = 15.0

_EVERY = 5.0
_JOBS = 10
_ROWS = 5000
_BLOBS = 1000
_LETTERS = 1000
_EXPORTS = 1000
_UPLOADS = 1000
_ORPHANS = 100
_EXPIRED = 1000


class Removed(msgspec.Struct):
    """What one pass purged."""

    jobs: int = 0
    tasks: int = 0
    blobs: int = 0
    letters: int = 0
    uploads: int = 0
    # Submits that died before their jobs were written.
    orphans: int = 0
    exports: int = 0
    # Idempotency claims, and documents of all kinds.
    expired: int = 0


class Retention:
    """A role."""

    def __init__(
        self, records: Records, tasks: Tasks, queue: Queue, coordinator: Coordinator, blobs: Blobs, clock: Clock
    ) -> None:
        self.name = "retention"
        self.wake: Callable[[], None] = lambda: None
        self.stopping = False
        self._records = records
        self._tasks = tasks
        self._queue = queue
        self._coordinator = coordinator
        self._blobs = blobs
        self._clock = clock
        self._isolation = Isolation(self.name, clock)

    async def tick(self) -> float:
        """Each pass is bounded, and the next follows at once while there is more to purge."""
        removed = await self.run_once()
        metrics.add_counts(metrics.PURGED, removed)
        if removed == Removed():
            return _EVERY
        log.info("removed", **msgspec.structs.asdict(removed))
        return 0.0

    async def close(self) -> None:
        """Nothing to release between ticks."""

    async def run_once(self) -> Removed:
        removed = Removed()
        parts = (
            self._remove_jobs,
            self._remove_exports,
            self._remove_uploads,
            self._remove_orphans,
            self._purge_expired,
        )
        await run_all(*(partial(part, removed) for part in parts))
        return removed

    async def _remove_jobs(self, removed: Removed) -> None:
        before = self._clock.now() - SETTLE_SECONDS
        hidden = await self._records.jobs.purgeable_jobs(before, _JOBS + self._isolation.failing)
        emptied = []
        for job in hidden:
            if not self._isolation.is_resting(job.job_id):
                with self._isolation.item(job.job_id):
                    if await self._empty(job, removed):
                        emptied.append(job)
        if emptied:
            await self._discard_letters(emptied, removed)
        for job in emptied:
            with self._isolation.item(job.job_id):
                await self._forget(job, removed)

    async def _purge_expired(self, removed: Removed) -> None:
        removed.expired += await self._records.access.purge_expired(_EXPIRED)

    async def _empty(self, job: Job, removed: Removed) -> bool:
        """Remove a part of a job; True when only its rows in the records are left."""
        crashpoint("retention.remove.before")
        tasks = 0
        for run in await self._runs(job):
            for queue in run_queues(run.run_id):
                await self._queue.drop(queue)
            tasks += await self._tasks.delete(run, _ROWS - tasks)
            if tasks >= _ROWS:
                break
        removed.tasks += tasks
        blobs = 0
        for prefix in _prefixes(job):
            blobs += await self._blobs.delete_prefix(prefix, _BLOBS)
        removed.blobs += blobs
        return not tasks and not blobs

    async def _runs(self, job: Job) -> list[RunKey]:
        """The keys of all runs of a job."""
        runs = await self._records.jobs.runs(job.job_id)
        return [job.key_of(run) for run in runs] or [job.key]

    async def _remove_exports(self, removed: Removed) -> None:
        """Remove expired and deleted exports: their files, in bounded steps, and then the document."""
        by = self._clock.now() - SETTLE_SECONDS
        for row in await self._records.documents.due_documents(EXPORT, by, _EXPORTS + self._isolation.failing):
            if row.job_id is None or row.expires_at is None or row.expires_at > by:
                continue
            if not self._isolation.is_resting(row.id):
                with self._isolation.item(row.id):
                    await self._remove_export(row, row.job_id, removed)

    async def _remove_export(self, row: Document, job_id: JobId, removed: Removed) -> None:
        crashpoint("retention.export.before")
        blobs = await self._blobs.delete_prefix(export_prefix(row.tenant, job_id, row.id), _BLOBS)
        removed.blobs += blobs
        if not blobs:
            await self._coordinator.forget_leases(export_lease(job_id, row.id))
            removed.exports += await self._records.documents.remove_document(row)

    async def _remove_uploads(self, removed: Removed) -> None:
        """Remove expired uploads that nothing refers to. A request that read one before it expired has had the time to
        refer to it."""
        by = self._clock.now() - SETTLE_SECONDS
        for upload in await self._records.access.expired_uploads(by, _UPLOADS + self._isolation.failing):
            if not self._isolation.is_resting(upload.upload_id):
                with self._isolation.item(upload.upload_id):
                    await self._remove_upload(upload, removed)

    async def _remove_upload(self, upload: UploadRecord, removed: Removed) -> None:
        crashpoint("retention.upload.before")
        await self._blobs.delete([upload.key])
        crashpoint("retention.upload.between")
        if upload.stored_at is None and await self._blobs.presigned_put(upload.key, upload.size, upload.sha256, 1.0):
            await note_upload(self._records, self._clock, upload)
        removed.uploads += await self._records.access.purge_upload(upload.upload_id)
        crashpoint("retention.upload.after")

    async def _remove_orphans(self, removed: Removed) -> None:
        """Remove what submits left that died before their jobs were written: tasks, staged lists, and then the
        document that names them."""
        rows = await self._records.documents.due_documents(
            ORPHANS, self._clock.now(), _ORPHANS + self._isolation.failing
        )
        for row in rows:
            if not self._isolation.is_resting(row.id):
                with self._isolation.item(row.id):
                    await self._remove_orphan(row, removed)

    async def _remove_orphan(self, row: Document, removed: Removed) -> None:
        orphans, documents = orphans_of(row), self._records.documents
        crashpoint("retention.orphan.before")
        if orphans.run is not None and await self._records.jobs.runs(orphans.run.job_id):
            # The submit died after it wrote the job, which keeps them.
            await documents.remove_document(row)
            return
        if not orphans.is_doomed:
            body = msgspec.json.encode(msgspec.structs.replace(orphans, is_doomed=True))
            doomed = await documents.replace_document(msgspec.structs.replace(row, body=body))
            crashpoint("retention.orphan.doomed")
            if doomed is None:
                return
            row = doomed
        tasks = 0 if orphans.run is None else await self._tasks.delete(orphans.run, _ROWS)
        blobs = 0 if orphans.prefix is None else await self._blobs.delete_prefix(orphans.prefix, _BLOBS)
        await self._blobs.delete(orphans.keys)
        crashpoint("retention.orphan.between")
        removed.tasks += tasks
        removed.blobs += blobs
        if not tasks and not blobs:
            removed.orphans += await documents.remove_document(row)
            crashpoint("retention.orphan.after")

    async def _discard_letters(self, jobs: Sequence[Job], removed: Removed) -> None:
        gone = {job.job_id for job in jobs}
        cursor: str | None = None
        while True:
            page = await self._queue.dead_letters(cursor, _LETTERS)
            read = [letter for letter in map(decode_dead_letter, page.items) if letter is not None]
            theirs = [letter.message_id for letter in read if letter.job_id in gone]
            if theirs:
                removed.letters += await self._queue.discard(theirs)
            cursor = page.next_cursor
            if cursor is None:
                return

    async def _forget(self, job: Job, removed: Removed) -> None:
        # An upload may serve several jobs, and expires with the last of them.
        if job.source is not None and job.source.key and not job.source.key.startswith(UPLOADS):
            await self._blobs.delete([job.source.key])
        for run in await self._runs(job):
            await self._coordinator.forget_leases(ingest_lease(run.run_id))
        await self._coordinator.forget_leases(export_lease(job.job_id))
        crashpoint("retention.forget.before")
        await self._records.jobs.purge_job(job.job_id)
        removed.jobs += 1


def _prefixes(job: Job) -> list[str]:
    """The prefixes of all objects of a job: bodies, invalid lines, batches of an open job, and exports."""
    return [f"{kind}/{job.tenant}/{job.job_id}" for kind in ("results", "invalid", "lists", "exports")]
