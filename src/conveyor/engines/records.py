"""Records: jobs, runs, ranges, keys, idempotency, uploads and notices. Low volume, point reads, conditional writes."""

from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec

from conveyor.engines.queue import Outgoing, QueueName
from conveyor.model import (
    UPLOADS,
    ApiKey,
    EventRecord,
    Ingested,
    Job,
    JobId,
    Options,
    OutboxEvent,
    Page,
    Range,
    Run,
    RunId,
    Source,
    TaskSeed,
    TenantId,
    UploadRecord,
)
from conveyor.states import RunState


class IdempotencyClaim(msgspec.Struct, frozen=True):
    """A request under the client's own key: claimed (status 0), then answered, then replayed verbatim."""

    tenant: TenantId
    route: str
    key: str
    fingerprint: str
    # What the request makes, reserved with the claim: whoever takes a lapsed claim over makes the same.
    subject: str
    # A claim that is not answered by then may be taken over.
    lease_until: float
    expires_at: float
    status: int = 0
    body: bytes = b""


class Claimed(msgspec.Struct, frozen=True):
    """The row under the key, and whether it is now the caller's to answer."""

    granted: bool
    row: IdempotencyClaim


class Document(msgspec.Struct, frozen=True):
    """A small document of one kind: a schedule, an endpoint, a delivery, an export, a callback, the progress of a long
    task. What it says is its owner's business; here it has a name, a version, and the times that are asked for."""

    kind: str
    tenant: TenantId
    id: str
    body: bytes
    # Goes up by one with every write.
    version: int = 1
    # When it next wants attention; None: never.
    due_at: float | None = None
    # From then on nobody reads it.
    expires_at: float | None = None
    # The job that it goes with.
    job_id: JobId | None = None
    # The upload that it refers to, which is kept while the row is there.
    upload_id: str | None = None


def upload_of(source_key: str | None) -> str | None:
    """The upload that a job with this source was made of."""
    if source_key is None or not source_key.startswith(UPLOADS):
        return None
    return source_key.rpartition("/")[2] or None


class JobRecords(Protocol):
    """Jobs, runs and what is told of them."""

    async def create_job(
        self, job: Job, notice: OutboxEvent, answer: IdempotencyClaim | None, rows: Sequence[Document] = ()
    ) -> IdempotencyClaim | None:
        """Write job, run, notice, a few rows that go with it and the answer to the claimed request in one step. If
        the claim was answered or taken over meanwhile, write nothing and return the row that stands."""

    async def add_run(self, job: Job, notice: OutboxEvent, answer: IdempotencyClaim | None) -> bool | IdempotencyClaim:
        """Make `job.run` the job's latest run, with the state and the options that `job` has, if the latest one has
        ended and has the number before; the notice and the answer with it. False if it has not, and the row that
        stands if the claim was lost: nothing is written then."""

    async def runs(self, job_id: JobId) -> list[Run]:
        """All runs of a job, oldest first."""

    async def change_options(self, job_id: JobId, version: int, options: Options, notice: OutboxEvent) -> bool:
        """Replace the options of a job that still has this version, which goes up by one; the notice with it."""

    async def job(self, tenant: TenantId, job_id: JobId) -> Job | None:
        """A job of this tenant, unless it expired or was deleted."""

    async def jobs(self, tenant: TenantId, cursor: str | None, limit: int) -> Page[Job]:
        """The tenant's jobs, newest first."""

    async def active_jobs(self) -> list[Job]:
        """Jobs of all tenants whose latest run has not ended."""

    async def run(self, job_id: JobId, run_id: RunId) -> Run | None:
        """A run, by id."""

    async def set_total(self, job_id: JobId, run_id: RunId, total: int, invalid: int) -> None:
        """Set the run's total and its invalid lines: absolute, so that doing it again changes nothing. Refused once
        latched."""

    async def latch(self, job_id: JobId, run_id: RunId) -> Run | None:
        """Say that all tasks are written; an ingesting run becomes running. Returns the run as it then is."""

    async def move_run(
        self,
        job_id: JobId,
        run_id: RunId,
        sources: Collection[RunState],
        target: RunState,
        reason: str | None,
        notice: OutboxEvent | None,
        keep: bool = False,
        code: str | None = None,
    ) -> bool:
        """Move the run, and the job with it, if it is in one of `sources`; write the notice in the same step.
        True for the one caller that moved it. A run moves to `completed` only once it is latched, and keeps the
        reason and the reason code that it has unless it gets others. With `keep`, what an ended run leaves is not
        swept: its ingest may be resumed."""

    async def ended_unswept(self, limit: int) -> list[Job]:
        """Jobs whose latest run has ended and whose remains (pending tasks, its queue) were not yet swept."""

    async def mark_swept(self, job_id: JobId, run_id: RunId) -> None:
        """Say that an ended run has left nothing behind."""

    async def notices(self, tenant: TenantId, job_id: JobId, cursor: str | None, limit: int) -> Page[EventRecord]:
        """The job's events, oldest first: what was written to the outbox."""

    async def untold(self, limit: int) -> list[OutboxEvent]:
        """Notices of all tenants that were not yet passed on, oldest first."""

    async def mark_told(self, notices: Sequence[OutboxEvent]) -> None:
        """Say that these were passed on to everyone who waits for them."""

    async def hide_job(self, tenant: TenantId, job_id: JobId) -> bool:
        """Delete a job in the eyes of all readers, at once; its run is cancelled with it. False if there is none."""

    async def hidden_jobs(self, before: float, limit: int) -> list[Job]:
        """Jobs that were deleted or expired by then and whose rows are still there."""

    async def forget_job(self, job_id: JobId) -> None:
        """Remove a hidden job, its runs, ranges, notices and all rows of it. The upload that it was made of expires at
        once unless another job or a row refers to it."""


class IngestRecords(Protocol):
    """How a run's list is split, and how far each part is."""

    async def split(self, job_id: JobId, run_id: RunId, ranges: Sequence[Range]) -> bool:
        """Write the ranges of a whole list and seal the run. False, and nothing written, if it is sealed already or
        has ended."""

    async def append_range(
        self,
        job_id: JobId,
        run_id: RunId,
        source: Source,
        lines: int,
        answer: IdempotencyClaim | None,
        seal: bool,
    ) -> Range | IdempotencyClaim | None:
        """Add a range of `lines` inputs as JSON lines behind all others, under indexes that nobody else gets, and
        the answer to the claimed request with it. The row that stands if the claim was lost; None if the run is
        sealed or has ended."""

    async def ranges(self, run_id: RunId) -> list[Range]:
        """All ranges of a run, in order."""

    async def range(self, run_id: RunId, number: int) -> Range | None:
        """One range of a run."""

    async def ingested(self, run_id: RunId) -> Ingested:
        """How far all ranges of a run are together. A point read, however many ranges there are."""

    async def checkpoint(self, run_id: RunId, range: Range, fence: int) -> bool:
        """Keep how far a range is. False, and nothing written, if a later holder of its lease has written already,
        or the run has ended."""

    async def seal(
        self,
        job_id: JobId,
        run_id: RunId,
        reason: str | None,
        *,
        touched_at: float | None = None,
        code: str | None = None,
    ) -> bool:
        """No more ranges; the reason and its code are shown. True for the one caller that sealed it. With `touched_at`,
        only if nothing was added since: the run was last touched at that very time."""


class AccessRecords(Protocol):
    """Keys, requests and uploads."""

    async def claim(self, row: IdempotencyClaim) -> Claimed:
        """Claim the key for this request if it is free, expired, or a claim of the same request whose lease has
        lapsed; that one keeps its subject."""

    async def unclaim(self, row: IdempotencyClaim) -> None:
        """Give a claim back unanswered, if it is still the caller's."""

    async def create_upload(self, upload: UploadRecord, answer: IdempotencyClaim | None) -> IdempotencyClaim | None:
        """Keep an upload that is promised, and the answer to the claimed request, as create_job does."""

    async def upload(self, upload_id: str) -> UploadRecord | None:
        """An upload that has not expired, or that a job or a row refers to."""

    async def keep_upload(self, upload_id: str, until: float) -> None:
        """Let an upload expire no sooner than `until`."""

    async def mark_stored(self, upload_id: str) -> bool:
        """Say that the list is there. True once: an upload is filled one time."""

    async def expired_uploads(self, by: float, limit: int) -> list[UploadRecord]:
        """Uploads that expired by then and that no job and no row refers to. Each is found until it is forgotten: its
        object is removed first."""

    async def forget_upload(self, upload_id: str) -> bool:
        """Forget an upload that `expired_uploads` found. False if it was kept longer, or is referred to, by now."""

    async def purge_expired(self, limit: int) -> int:
        """Remove up to `limit` expired idempotency rows, and as many expired rows that are not due any more; returns
        how many. There may be more until it is 0."""

    async def create_key(self, key: ApiKey) -> None:
        """Keep a new API key."""

    async def key(self, key_id: str) -> ApiKey | None:
        """A key by its public part."""

    async def keys(self, tenant: TenantId | None) -> list[ApiKey]:
        """Keys of one tenant, or of all."""

    async def revoke_key(self, key_id: str, at: float) -> bool:
        """End a key. False if there is none."""


class DocumentRecords(Protocol):
    """Documents of many kinds, each written on its version. `due` is the one index over all tenants."""

    async def create_rows(
        self, rows: Sequence[Document], notice: OutboxEvent | None = None, answer: IdempotencyClaim | None = None
    ) -> IdempotencyClaim | None:
        """Write up to 25 rows, the notice and the answer to the claimed request; a row that is there already is left
        as it is. One step if there is an answer or a notice. If the claim was lost, write nothing and return the row
        that stands."""

    async def row(self, kind: str, tenant: TenantId, id: str) -> Document | None:
        """A row that has not expired."""

    async def replace_row(self, row: Document, notice: OutboxEvent | None = None) -> Document | None:
        """Write a row over the one whose version it carries, and the notice with it; returns it with its new version.
        None, and nothing written, if that version no longer stands or has expired. An upload that it no longer refers
        to expires as by forget_job."""

    async def remove_row(self, row: Document) -> bool:
        """Remove a row if its version still stands. The upload that it refers to expires as by forget_job."""

    async def rows(
        self, kind: str, tenant: TenantId, cursor: str | None, limit: int, job_id: JobId | None = None
    ) -> Page[Document]:
        """The tenant's rows of a kind, or those of one of its jobs, in order of id."""

    async def due_rows(self, kind: str, by: float, limit: int) -> list[Document]:
        """Rows of all tenants whose `due_at` is not after `by`, soonest first. Expired ones too: an owner that set
        both wants to see it through."""


class Records(JobRecords, IngestRecords, AccessRecords, DocumentRecords, Protocol):
    """A missing row is None or False, never an exception; every row of a tenant is found only through it."""


class AtomicAccept(Protocol):
    """A capability: records, tasks and queue are one database, so that a small job is written in one step."""

    async def accept_whole(
        self,
        job: Job,
        notice: OutboxEvent,
        answer: IdempotencyClaim | None,
        seeds: Sequence[TaskSeed],
        queue: QueueName,
        messages: Sequence[Outgoing],
        rows: Sequence[Document] = (),
    ) -> IdempotencyClaim | None:
        """create_job, the tasks and the messages on a queue, all or nothing."""
