"""Submit: gets a tenant and a JobSpec, decides how the job is taken in, hands back the answer.

A small closed job is written whole, with its tasks and references, and answered 201. Anything larger, open, uploaded
or asked to be async is one row and one message, whatever its size, and answered 202: ingest does the rest.

Where records, tasks and queue are one database, a small job is one atomic write. Elsewhere it is three steps in an
order in which a crash between any two leaves nothing half accepted:

1. the tasks, under a run that nobody knows yet. A crash here leaves rows that no job points to; the client has no
   answer and asks again, and under its key it gets the same ids and writes the same rows.
2. the job, its run, its notice and the answer, in one write. From here on the job is accepted.
3. the references. The queue is a hint: a run with fewer messages than open tasks is mended from its rows.
"""

import asyncio
from collections.abc import Sequence
from hashlib import sha256

import msgspec
import structlog

from conveyor.accept.answer import answer
from conveyor.accept.option_limits import check_limits
from conveyor.accept.spec import JobSpec
from conveyor.accept.subscriptions import check_notify, told_rows
from conveyor.accept.task_seeds import seeds_of
from conveyor.engines.queue import CONTROL, Outgoing, run_queue
from conveyor.engines.records import Document, IdempotencyClaim
from conveyor.errors import InvalidField, NotFound, UploadConflict
from conveyor.faults import crashpoint
from conveyor.jobs.admission import Admission
from conveyor.jobs.chunks import messages, send_all
from conveyor.jobs.deadlines import deadline_rows
from conveyor.jobs.idempotency import Accepted, Claim, Idempotency, IdempotentRequest, standing_answer
from conveyor.model import (
    Compression,
    IngestJob,
    Job,
    JobId,
    ListFormat,
    Mode,
    OutboxEvent,
    ResultLayout,
    Run,
    RunId,
    RunKey,
    Source,
    TaskSeed,
    TenantId,
    UploadRecord,
)
from conveyor.states import RunState
from conveyor.system import System
from conveyor.telemetry import traces

log = structlog.get_logger()

CREATED = 201
ACCEPTED = 202
_DAY = 86_400.0
# Past this, checking a job would hold up everyone else on the loop.
_TASKS_ON_LOOP = 1000
_TASKS_PER_WRITE = 1000


class Submit:
    """Accepts jobs."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._requests = Idempotency(system.settings, system.clock, system.records)
        self._admission = Admission(system)

    async def submit(
        self, tenant: TenantId, spec: JobSpec, request: IdempotentRequest | None = None, prefer_async: bool = False
    ) -> Accepted:
        """Check, write, answer. A request that was answered before gets that answer again."""
        ticket = await self._requests.claim(tenant, request, self._system.clock.new_id("job"))
        if isinstance(ticket, Accepted):
            return ticket
        async with self._requests.carrying_out(ticket):
            return await self._carry_out(tenant, spec, ticket, prefer_async)

    async def submit_as(
        self, job_id: JobId, tenant: TenantId, spec: JobSpec, source: Source | None, request: IdempotentRequest
    ) -> Accepted:
        """As submit, for a job that has its id already, of its own tasks or of a list that was staged for it."""
        ticket = await self._requests.claim(tenant, request, job_id)
        if isinstance(ticket, Accepted):
            return ticket
        async with self._requests.carrying_out(ticket):
            if source is None:
                return await self._carry_out(tenant, spec, ticket, prefer_async=False)
            await self._check(tenant, spec)
            await self._admission.admit(tenant, jobs=1, staged=source.size)
            return await self._ingested(tenant, spec, ticket, source)

    async def submit_source(self, tenant: TenantId, spec: JobSpec, source: Source, job_id: JobId | None = None) -> Job:
        """Make a job of a list that was staged in this process."""
        check_limits(spec)
        job = self._job(tenant, spec, job_id or self._system.clock.new_id("job"), None, source)
        await self._write_ingested(job, None, [_ingest_message(job)], _rows(self._system, job, spec))
        traces.accepted(job, self._system.clock.now())
        return job

    async def _carry_out(self, tenant: TenantId, spec: JobSpec, ticket: Claim, prefer_async: bool) -> Accepted:
        await self._check(tenant, spec)
        if spec.source is not None:
            source = await self._uploaded(tenant, spec)
            await self._admission.admit(tenant, jobs=1, staged=source.size)
            return await self._ingested(tenant, spec, ticket, source)
        if spec.mode is Mode.OPEN:
            await self._admission.admit(tenant, jobs=1)
            return await self._ingested(tenant, spec, ticket, None)
        seeds = await self._seeds(spec)
        await self._admission.admit(tenant, jobs=1, tasks=len(seeds))
        if prefer_async or len(seeds) > self._system.settings.sync_task_limit:
            source = await self._stage(tenant, ticket.subject, seeds)
            return await self._ingested(tenant, spec, ticket, source)
        return await self._written(tenant, spec, ticket, seeds)

    async def _check(self, tenant: TenantId, spec: JobSpec) -> None:
        check_limits(spec)
        _check_shape(spec)
        await check_notify(self._system, tenant, spec.notify)

    async def _seeds(self, spec: JobSpec) -> list[TaskSeed]:
        most = self._system.settings.max_inline_tasks
        if len(spec.tasks) <= _TASKS_ON_LOOP:
            return seeds_of(spec.kind, spec.tasks, most)
        return await asyncio.to_thread(seeds_of, spec.kind, spec.tasks, most)

    async def _uploaded(self, tenant: TenantId, spec: JobSpec) -> Source:
        assert spec.source is not None
        upload = await self._system.records.access.upload(spec.source.upload_id)
        if upload is None or upload.tenant != tenant:
            raise NotFound("There is no such upload, or it has expired.")
        await self._check_stored(upload)
        # The list lives as long as the job that is made of it.
        until = self._system.clock.now() + spec.retention_days * _DAY
        await self._system.records.access.keep_upload(upload.upload_id, until)
        return Source(upload.key, upload.size, upload.sha256, spec.source.format, spec.source.compression)

    async def _check_stored(self, upload: UploadRecord) -> None:
        """A list that went straight to the store was seen by nobody: here its size is looked at, at ingest its hash."""
        if upload.stored_at is not None:
            return
        if await self._system.blobs.size(upload.key) != upload.size:
            raise UploadConflict("The upload was not stored yet: PUT the list to its URL first.")
        await self._system.records.access.mark_stored(upload.upload_id)

    async def _stage(self, tenant: TenantId, job_id: str, seeds: Sequence[TaskSeed]) -> Source:
        """An inline list that is too long to be written in the request; its tasks were checked already."""
        data = await asyncio.to_thread(list_of, seeds)
        key = f"lists/{tenant}/{job_id}/tasks.jsonl"
        crashpoint("accept.stage.before")
        await self._system.blobs.put(key, data)
        crashpoint("accept.stage.after")
        return staged_source(key, data)

    async def _ingested(self, tenant: TenantId, spec: JobSpec, ticket: Claim, source: Source | None) -> Accepted:
        job = self._job(tenant, spec, ticket.subject, None, source)
        body = answer(job)
        row = ticket.answer(ACCEPTED, body, self._requests.keep_until)
        # An open job has nothing to ingest yet.
        outgoing = [] if source is None else [_ingest_message(job)]
        standing = await self._write_ingested(job, row, outgoing, _rows(self._system, job, spec))
        return self._told(job, ACCEPTED, body, standing, row)

    async def _write_ingested(
        self, job: Job, row: IdempotencyClaim | None, outgoing: list[Outgoing], rows: list[Document]
    ) -> IdempotencyClaim | None:
        system, notice = self._system, self._notice(job)
        crashpoint("accept.ingested.before")
        if system.atomic_accept is not None:
            standing = await system.atomic_accept.accept_atomically(job, notice, row, [], CONTROL, outgoing, rows)
        else:
            standing = await system.records.jobs.create_job(job, notice, row, rows)
            crashpoint("accept.ingested.between")
            if standing is None:
                await send_all(system.queue, CONTROL, outgoing, system.clock)
        crashpoint("accept.ingested.after")
        return standing

    async def _written(self, tenant: TenantId, spec: JobSpec, ticket: Claim, seeds: list[TaskSeed]) -> Accepted:
        job = self._job(tenant, spec, ticket.subject, len(seeds), None)
        body = answer(job)
        row = ticket.answer(CREATED, body, self._requests.keep_until)
        outgoing = messages(job.key, seeds, job.options.chunk_size)
        write = self._in_one if self._system.atomic_accept else self._in_steps
        standing = await write(job, row, seeds, outgoing, _rows(self._system, job, spec))
        return self._told(job, CREATED, body, standing, row)

    async def _in_one(
        self,
        job: Job,
        row: IdempotencyClaim | None,
        seeds: list[TaskSeed],
        outgoing: list[Outgoing],
        rows: list[Document],
    ) -> IdempotencyClaim | None:
        assert self._system.atomic_accept is not None
        crashpoint("accept.before")
        queue = run_queue(job.run.run_id)
        standing = await self._system.atomic_accept.accept_atomically(
            job, self._notice(job), row, seeds, queue, outgoing, rows
        )
        crashpoint("accept.after")
        return standing

    async def _in_steps(
        self,
        job: Job,
        row: IdempotencyClaim | None,
        seeds: list[TaskSeed],
        outgoing: list[Outgoing],
        rows: list[Document],
    ) -> IdempotencyClaim | None:
        await self._put(job.key, seeds)
        crashpoint("accept.job.before")
        standing = await self._system.records.jobs.create_job(job, self._notice(job), row, rows)
        crashpoint("accept.job.after")
        if standing is not None:
            return standing
        try:
            crashpoint("accept.send.before")
            await send_all(self._system.queue, run_queue(job.run.run_id), outgoing, self._system.clock)
            crashpoint("accept.send.after")
        except Exception:
            # The job is accepted already: an error now would make the client send it a second time.
            log.exception("references not sent; they are mended from the rows", job=job.job_id)
        return None

    async def _put(self, run: RunKey, seeds: Sequence[TaskSeed]) -> None:
        for start in range(0, len(seeds), _TASKS_PER_WRITE):
            crashpoint("accept.tasks.before")
            await self._system.tasks.put(run, seeds[start : start + _TASKS_PER_WRITE])
            crashpoint("accept.tasks.after")

    def _told(
        self, job: Job, status: int, body: bytes, standing: IdempotencyClaim | None, row: IdempotencyClaim | None
    ) -> Accepted:
        if standing is not None and row is not None:
            return standing_answer(standing, row.fingerprint)
        traces.accepted(job, self._system.clock.now())
        log.info("job accepted", tenant=job.tenant, job=job.job_id, kind=job.kind, state=job.state)
        return Accepted(status, body, job.job_id)

    def _job(self, tenant: TenantId, spec: JobSpec, job_id: str, total: int | None, source: Source | None) -> Job:
        """`total` is None for a job that is ingested, or open."""
        now = self._system.clock.now()
        settings = self._system.settings
        small = total is not None
        run = Run(
            # From the job's id: a second try under the same claim writes the same rows.
            run_id=RunId(job_id.replace("job_", "run_", 1)),
            number=1,
            state=RunState.RUNNING if small else RunState.INGESTING,
            total=total or 0,
            last_batch=small,
            created_at=now,
            sealed=small,
            touched_at=now,
        )
        return Job(
            tenant=tenant,
            job_id=JobId(job_id),
            name=spec.name,
            kind=spec.kind,
            mode=spec.mode,
            options=spec.options(),
            task_shard_count=1 if small or not self._system.sharded else settings.task_shard_count,
            result_layout=spec.result_layout or (ResultLayout.OBJECT if small else ResultLayout.PACKED),
            state=run.state,
            reason=None,
            created_at=now,
            expires_at=now + spec.retention_days * _DAY,
            run=run,
            source=source,
        )

    def _notice(self, job: Job) -> OutboxEvent:
        return OutboxEvent(
            notice_id=self._system.clock.new_id("evt"),
            tenant=job.tenant,
            job_id=job.job_id,
            run_id=job.run.run_id,
            event="job.accepted",
            at=job.created_at,
            data={"total": job.run.total if job.run.last_batch else None},
        )


def staged_source(key: str, data: bytes) -> Source:
    """A list of inputs that we wrote ourselves."""
    return Source(key, len(data), sha256(data).hexdigest(), ListFormat.JSONL, Compression.NONE)


def _rows(system: System, job: Job, spec: JobSpec) -> list[Document]:
    """What is written with the job."""
    return [*told_rows(system, job, spec.notify), *deadline_rows(job)]


def _ingest_message(job: Job) -> Outgoing:
    return Outgoing(msgspec.json.encode(IngestJob(job.tenant, job.job_id, job.run.run_id)))


def list_of(seeds: Sequence[TaskSeed]) -> bytes:
    """Tasks of a request as a list to be staged."""
    return "".join([f"{seed.input}\n" for seed in seeds]).encode()


def _check_shape(spec: JobSpec) -> None:
    if spec.source is not None and spec.tasks:
        raise InvalidField("Give `tasks` or `source`, not both.", field="source")
    if spec.mode is Mode.OPEN and (spec.tasks or spec.source):
        raise InvalidField("An open job starts empty: add its tasks with POST /v1/jobs/{id}/tasks.", field="mode")
