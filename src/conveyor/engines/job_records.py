"""The jobs part of Records: jobs and their runs."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from conveyor.engines.access_records import IdempotencyClaim
from conveyor.engines.document_records import Document
from conveyor.model import (
    Job,
    JobId,
    JobKind,
    Mode,
    Options,
    OutboxEvent,
    Page,
    ResultLayout,
    Run,
    RunId,
    TenantId,
    fnv32a,
)
from conveyor.states import RunState

# Jobs are spread over this many buckets, so that processes can share them out. Engines store the number.
JOB_BUCKETS = 64

# By value: a call of an enumeration takes longer than all else of a row. An unknown value is a KeyError.
JOB_KINDS: Mapping[str, JobKind] = {each.value: each for each in JobKind}
MODES: Mapping[str, Mode] = {each.value: each for each in Mode}
RESULT_LAYOUTS: Mapping[str, ResultLayout] = {each.value: each for each in ResultLayout}
RUN_STATES: Mapping[str, RunState] = {each.value: each for each in RunState}


def bucket_of(job_id: JobId) -> int:
    """The bucket of a job, in range(JOB_BUCKETS)."""
    return fnv32a(job_id) % JOB_BUCKETS


class JobRecords(Protocol):
    """Stores jobs and runs. Each change writes its outbox event in the same transaction."""

    async def create_job(
        self, job: Job, notice: OutboxEvent, answer: IdempotencyClaim | None, rows: Sequence[Document] = ()
    ) -> IdempotencyClaim | None:
        """Write the job, its run, the outbox event, the job's documents and the answer to the claimed request in one
        transaction. If the caller lost the claim, write nothing and return the stored claim."""

    async def add_run(self, job: Job, notice: OutboxEvent, answer: IdempotencyClaim | None) -> bool | IdempotencyClaim:
        """Make `job.run` the latest run of the job, with the state and options of `job`, and write the event and the
        answer with it. The previous run must have finished and have the number before, and the record of the task
        engine must be the job's, or missing. Otherwise write nothing: return False, or the stored claim if the caller
        lost it."""

    async def runs(self, job_id: JobId) -> list[Run]:
        """All runs of a job, oldest first."""

    async def change_options(self, job_id: JobId, version: int, options: Options, notice: OutboxEvent) -> bool:
        """Replace the options of a job if it still has this version, and add one to the version."""

    async def keep_job(self, tenant: TenantId, job_id: JobId, until: float) -> bool:
        """Let a finished job expire no earlier than this. False if it has expired, was deleted or is unknown; one that
        is not finished does not expire, and stays as it is."""

    async def job(self, tenant: TenantId, job_id: JobId) -> Job | None:
        """A job of this tenant that is neither expired nor deleted."""

    async def jobs_of(self, keys: Sequence[tuple[TenantId, JobId]]) -> list[Job]:
        """As `job` for each of these tenants and ids, in one round trip and in any order, without the missing ones."""

    async def jobs(self, tenant: TenantId, cursor: str | None, limit: int) -> Page[Job]:
        """The tenant's jobs, newest first."""

    async def active_jobs(self, buckets: Collection[int] | None = None) -> list[Job]:
        """Jobs of all tenants whose latest run has not finished, in order of job_id: all, or those of some buckets
        (`bucket_of`), which costs their share of all."""

    async def run(self, job_id: JobId, run_id: RunId) -> Run | None:
        """A run, by id."""

    async def set_total(self, job_id: JobId, run_id: RunId, total: int, invalid: int) -> None:
        """Set the run's number of tasks and of invalid lines. The values are absolute, so a repeated call changes
        nothing. A latched run keeps its values."""

    async def latch(self, job_id: JobId, run_id: RunId) -> Run | None:
        """Mark the tasks of the run as completely written; an ingesting run becomes running. Returns the run
        afterwards."""

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
        """Move the run, and the job with it, to `target` if it is in one of `sources`. True for the one caller that
        moved it. Only a latched run moves to `completed`. The run keeps its reason and its reason code unless new ones
        are passed. With `keep`, the sweeper leaves the finished run alone, because its ingest may resume."""

    async def unswept_jobs(self, limit: int) -> list[Job]:
        """Jobs whose latest run has finished and whose leftovers (pending tasks, the run's queue) are not swept
        yet."""

    async def finished_jobs(self, outside: str, cursor: str | None, limit: int) -> Page[Job]:
        """Jobs of all tenants with finished and swept runs only, whose tasks another task engine than `outside` holds.
        A page may be short, or empty, before the last."""

    async def record_task_store(self, job_id: JobId, store: str) -> None:
        """Record which task engine holds the rows of a job that has no record."""

    async def switch_task_store(self, job_id: JobId, run_id: RunId, source: str, target: str) -> bool:
        """Record that another task engine holds the rows of the job. False, and nothing written, unless the record is
        `source`, `run_id` is still the latest run, and all runs are finished and swept."""

    async def mark_swept(self, job_id: JobId, run_id: RunId) -> None:
        """Mark a finished run as swept."""

    async def mark_deleted(self, tenant: TenantId, job_id: JobId) -> bool:
        """Mark a job as deleted: readers no longer see it, and its run is cancelled. False if the job is unknown."""

    async def purgeable_jobs(self, before: float, limit: int) -> list[Job]:
        """Jobs that were deleted or that expired before this time and are not purged yet."""

    async def purge_job(self, job_id: JobId) -> None:
        """Purge a deleted or expired job with its runs, ranges, events and documents. Its upload expires at once unless
        another job or a document refers to it."""
