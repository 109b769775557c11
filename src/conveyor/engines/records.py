"""Records: jobs, runs, keys, idempotency and notices. Low volume, point reads, conditional writes."""

from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec

from conveyor.engines.queue import Outgoing, QueueName
from conveyor.model import ApiKey, Event, Job, JobId, Notice, Page, Run, RunId, TaskSeed, TenantId
from conveyor.states import RunState


class IdempotencyRow(msgspec.Struct, frozen=True):
    """A request that was answered, under the client's own key: replayed verbatim to the same request."""

    tenant: TenantId
    route: str
    key: str
    fingerprint: str
    status: int
    body: bytes
    expires_at: float


class Checkpoint(msgspec.Struct, frozen=True):
    """How far an ingest has come: every line before `offset` is a task below `next_index`, durable and enqueued."""

    next_index: int
    offset: int


class Records(Protocol):
    """A missing row is None or False, never an exception; every row of a tenant is found only through it."""

    async def create_job(self, job: Job, notice: Notice, idempotency: IdempotencyRow | None) -> IdempotencyRow | None:
        """Write job, run, notice and idempotency row in one step. If the idempotency key is taken by an unexpired
        row, write nothing and return that row."""

    async def idempotency(self, tenant: TenantId, route: str, key: str) -> IdempotencyRow | None:
        """The unexpired row under a key."""

    async def job(self, tenant: TenantId, job_id: JobId) -> Job | None:
        """A job of this tenant, unless it expired."""

    async def jobs(self, tenant: TenantId, cursor: str | None, limit: int) -> Page[Job]:
        """The tenant's jobs, newest first."""

    async def active_jobs(self) -> list[Job]:
        """Jobs of all tenants whose latest run has not ended."""

    async def run(self, job_id: JobId, run_id: RunId) -> Run | None:
        """A run, by id."""

    async def set_total(self, job_id: JobId, run_id: RunId, total: int) -> None:
        """Set the run's total: absolute, so that doing it again changes nothing. Refused once latched."""

    async def latch(self, job_id: JobId, run_id: RunId) -> Run | None:
        """Say that all tasks are written; an ingesting run becomes running. Returns the run as it then is."""

    async def checkpoint(self, job_id: JobId, run_id: RunId, at: Checkpoint, fence: int) -> bool:
        """Keep how far the run's ingest is, and show it as the run's total so far. False, and nothing written, if a
        later holder of the ingest lease has written already (fence), or the run is latched or has ended."""

    async def checkpointed(self, run_id: RunId) -> Checkpoint | None:
        """The last checkpoint of the run's ingest."""

    async def move_run(
        self,
        job_id: JobId,
        run_id: RunId,
        sources: Collection[RunState],
        target: RunState,
        reason: str | None,
        notice: Notice | None,
    ) -> bool:
        """Move the run, and the job with it, if it is in one of `sources`; write the notice in the same step.
        True for the one caller that moved it. A run moves to `completed` only once it is latched."""

    async def ended_unswept(self, limit: int) -> list[Job]:
        """Jobs whose latest run has ended and whose remains (pending tasks, its queue) were not yet swept."""

    async def mark_swept(self, job_id: JobId, run_id: RunId) -> None:
        """Say that an ended run has left nothing behind."""

    async def notices(self, tenant: TenantId, job_id: JobId, cursor: str | None, limit: int) -> Page[Event]:
        """The job's events, oldest first: what was written to the outbox."""

    async def create_key(self, key: ApiKey) -> None:
        """Keep a new API key."""

    async def key(self, key_id: str) -> ApiKey | None:
        """A key by its public part."""

    async def keys(self, tenant: TenantId | None) -> list[ApiKey]:
        """Keys of one tenant, or of all."""

    async def revoke_key(self, key_id: str, at: float) -> bool:
        """End a key. False if there is none."""


class AcceptsWhole(Protocol):
    """A capability: records, tasks and queue are one database, so that a small job is written in one step."""

    async def accept_whole(
        self,
        job: Job,
        notice: Notice,
        idempotency: IdempotencyRow | None,
        seeds: Sequence[TaskSeed],
        queue: QueueName,
        messages: Sequence[Outgoing],
    ) -> IdempotencyRow | None:
        """create_job, the tasks and the messages on a queue, all or nothing."""
