"""Retention: purges what has expired or was deleted, in bounded steps that can be interrupted anywhere.

Readers check expiry themselves and do not see it any more; retention only frees the space. The row of a job is removed
last: while it exists, the rest is found again. In general an object is removed before the row that names it.
"""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.coordination.buckets import ALL_BUCKETS, Buckets
from conveyor.coordination.isolation import Isolation, run_all
from conveyor.coordination.parallel import together
from conveyor.coordination.trusted_time import TrustedTime
from conveyor.engines.blobs import Blobs
from conveyor.engines.coordinator import Coordinator, export_lease, ingest_lease
from conveyor.engines.queue import Queue, run_queues
from conveyor.engines.records import Document, Records
from conveyor.engines.tasks import Tasks
from conveyor.faults import crashpoint
from conveyor.jobs.dead_letters import decode_dead_letter
from conveyor.jobs.orphans import ORPHANS, note_upload, orphans_of
from conveyor.model import EXPORT, UPLOADS, Job, RunKey, UploadRecord, export_prefix
from conveyor.telemetry import metrics

log = structlog.get_logger()

# Seconds in which workers and ingesters notice that a job was deleted: what they write after the purge would stay.
SETTLE_SECONDS = 15.0

_EVERY = 5.0
_JOBS = 200
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
        self,
        records: Records,
        tasks: Tasks,
        queue: Queue,
        coordinator: Coordinator,
        blobs: Blobs,
        clock: Clock,
        buckets: Buckets = ALL_BUCKETS,
        trusted: TrustedTime | None = None,
    ) -> None:
        """What expires is purged by the trusted time; by the wall clock without one."""
        self.name = "retention"
        self.wake: Callable[[], None] = lambda: None
        self.stopping = False
        self._records = records
        self._tasks = tasks
        self._queue = queue
        self._coordinator = coordinator
        self._blobs = blobs
        self._clock = clock
        self._trusted = trusted
        self._jobs = Isolation(self.name, clock, buckets)
        # The same jobs, in the last step.
        self._rows = Isolation(self.name, clock, buckets)
        self._exports = Isolation(self.name, clock, buckets)
        self._uploads = Isolation(self.name, clock, buckets)
        self._orphans = Isolation(self.name, clock, buckets)

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
        before = await self._now() - SETTLE_SECONDS
        limit = _JOBS + self._jobs.skipped + self._rows.failing
        hidden = await self._records.jobs.purgeable_jobs(before, limit)
        emptied: list[Job] = []

        async def empty(job: Job) -> None:
            if await self._empty(job, removed):
                emptied.append(job)

        await self._jobs.each([job for job in hidden if not self._rows.is_resting(job.job_id)], _job_id, empty)
        if emptied:
            # For many jobs together: it reads all dead letters.
            await self._discard_letters(emptied, removed)
        await self._rows.each(emptied, _job_id, partial(self._forget, removed))

    async def _purge_expired(self, removed: Removed) -> None:
        if self._trusted is not None and await self._trusted.is_held():
            return
        expired = await self._records.access.purge_expired(_EXPIRED)
        removed.expired += expired

    async def _now(self) -> float:
        return self._clock.now() if self._trusted is None else await self._trusted.now()

    async def _empty(self, job: Job, removed: Removed) -> bool:
        """Remove a part of a job; True when only its rows in the records are left."""
        crashpoint("retention.remove.before")
        runs = await self._runs(job)
        await together(*(self._queue.drop(queue) for run in runs for queue in run_queues(run.run_id)))
        deletes = (self._blobs.delete_prefix(prefix, _BLOBS) for prefix in _prefixes(job))
        tasks, *blobs = await together(self._delete_tasks(runs), *deletes)
        removed.tasks += tasks
        removed.blobs += sum(blobs)
        return tasks < _ROWS and max(blobs) < _BLOBS

    async def _delete_tasks(self, runs: Sequence[RunKey]) -> int:
        """Delete rows of the runs, in turn; returns how many. The step that finds none forgets the run itself."""
        tasks = 0
        for run in runs:
            while tasks < _ROWS and (gone := await self._tasks.delete(run, _ROWS - tasks)):
                tasks += gone
        return tasks

    async def _runs(self, job: Job) -> list[RunKey]:
        """The keys of all runs of a job."""
        if job.run.number == 1:
            # Its latest run is its only one.
            return [job.key]
        runs = await self._records.jobs.runs(job.job_id)
        return [job.key_of(run) for run in runs] or [job.key]

    async def _remove_exports(self, removed: Removed) -> None:
        """Remove expired and deleted exports: their files, in bounded steps, and then the document."""
        by = await self._now() - SETTLE_SECONDS
        rows = await self._records.documents.due_documents(EXPORT, by, _EXPORTS + self._exports.skipped)
        expired = [row for row in rows if row.job_id and row.expires_at is not None and row.expires_at <= by]
        await self._exports.each(expired, _document_id, partial(self._remove_export, removed))

    async def _remove_export(self, removed: Removed, row: Document) -> None:
        assert row.job_id is not None
        crashpoint("retention.export.before")
        blobs = await self._blobs.delete_prefix(export_prefix(row.tenant, row.job_id, row.id), _BLOBS)
        removed.blobs += blobs
        if not blobs:
            await self._coordinator.forget_leases(export_lease(row.job_id, row.id))
            gone = await self._records.documents.remove_document(row)
            removed.exports += gone

    async def _remove_uploads(self, removed: Removed) -> None:
        """Remove expired uploads that nothing refers to. A request that read one before it expired has had the time to
        refer to it."""
        by = await self._now() - SETTLE_SECONDS
        uploads = await self._records.access.expired_uploads(by, _UPLOADS + self._uploads.skipped)
        await self._uploads.each(uploads, _upload_id, partial(self._remove_upload, removed))

    async def _remove_upload(self, removed: Removed, upload: UploadRecord) -> None:
        crashpoint("retention.upload.before")
        await self._blobs.delete([upload.key])
        crashpoint("retention.upload.between")
        if upload.stored_at is None and await self._blobs.presigned_put(upload.key, upload.size, upload.sha256, 1.0):
            await note_upload(self._records, self._clock, upload)
        gone = await self._records.access.purge_upload(upload.upload_id)
        removed.uploads += gone
        crashpoint("retention.upload.after")

    async def _remove_orphans(self, removed: Removed) -> None:
        """Remove what submits left that died before their jobs were written: tasks, staged lists, and then the
        document that names them."""
        rows = await self._records.documents.due_documents(ORPHANS, await self._now(), _ORPHANS + self._orphans.skipped)
        await self._orphans.each(rows, _document_id, partial(self._remove_orphan, removed))

    async def _remove_orphan(self, removed: Removed, row: Document) -> None:
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
            gone = await documents.remove_document(row)
            removed.orphans += gone
            crashpoint("retention.orphan.after")

    async def _discard_letters(self, jobs: Sequence[Job], removed: Removed) -> None:
        gone = {job.job_id for job in jobs}
        cursor: str | None = None
        while True:
            page = await self._queue.dead_letters(cursor, _LETTERS)
            read = [letter for letter in map(decode_dead_letter, page.items) if letter is not None]
            theirs = [letter.message_id for letter in read if letter.job_id in gone]
            if theirs:
                discarded = await self._queue.discard(theirs)
                removed.letters += discarded
            cursor = page.next_cursor
            if cursor is None:
                return

    async def _forget(self, removed: Removed, job: Job) -> None:
        # An upload may serve several jobs, and expires with the last of them.
        if job.source is not None and job.source.key and not job.source.key.startswith(UPLOADS):
            await self._blobs.delete([job.source.key])
        leases = [*(ingest_lease(run.run_id) for run in await self._runs(job)), export_lease(job.job_id)]
        await together(*(self._coordinator.forget_leases(prefix) for prefix in leases))
        crashpoint("retention.forget.before")
        await self._records.jobs.purge_job(job.job_id)
        removed.jobs += 1


def _job_id(job: Job) -> str:
    return job.job_id


def _document_id(row: Document) -> str:
    return row.id


def _upload_id(upload: UploadRecord) -> str:
    return upload.upload_id


def _prefixes(job: Job) -> list[str]:
    """The prefixes of all objects of a job: bodies, invalid lines, batches of an open job, and exports."""
    return [f"{kind}/{job.tenant}/{job.job_id}" for kind in ("results", "invalid", "lists", "exports")]
