"""Submit: gets a tenant and a JobSpec, accepts the job, returns the answer.

A small closed job is written with its tasks and references, and answered 201, whether its list is in the request or
stored. A larger job, an open one, one whose list is behind a URL, and one with `Prefer: respond-async` is written as
one row and one message, and answered 202; ingest does the rest. Shards follow the size too: a small closed job has one.

Where records, tasks and queue are one database, a small job is accepted in one transaction. Elsewhere it is accepted in
three steps, ordered so that a crash between any two leaves nothing half accepted:

1. Write the tasks, under a run that no job points to yet. After a crash here the client has no answer and asks again;
   with the same idempotency key it gets the same ids, and writes the same rows. If it does not ask again, retention
   removes them: a document names them before they are written, and a staged list too.
2. Write the job, its run, its outbox event and the answer, in one step. From here on the job is accepted.
3. Send the references. If some are lost, the sweeper requeues the run's pending tasks from their rows.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from hashlib import sha256
from http import HTTPStatus

import msgspec
import structlog

from conveyor.accept.answer import answer
from conveyor.accept.default_pace import with_default_pace
from conveyor.accept.option_limits import check_body_budget, check_insecure, check_limits
from conveyor.accept.remote_sources import check_source, remote_source
from conveyor.accept.replace import NOTHING, Replace, ReplacedJobs, check_replaces
from conveyor.accept.spec import JobSpec
from conveyor.accept.subscriptions import check_notify, subscription_documents
from conveyor.accept.task_seeds import check_tasks, encode_list
from conveyor.engines.queue import CONTROL, Outgoing, run_queue
from conveyor.engines.records import Document, IdempotencyClaim
from conveyor.errors import ConveyorError, InvalidField, NotFound, UploadConflict
from conveyor.faults import crashpoint
from conveyor.jobs.admission import Admission
from conveyor.jobs.announced_workers import KnownHandlers
from conveyor.jobs.chunks import ingest_message, messages, send_all
from conveyor.jobs.deadlines import deadline_documents
from conveyor.jobs.idempotency import Accepted, Claim, ClaimedAnswer, Idempotency, IdempotentRequest
from conveyor.jobs.orphans import forget_note, note_submit
from conveyor.jobs.replacements import replacement_documents
from conveyor.lists.reader import encode_invalid
from conveyor.lists.small_list import CheckedList, read_small_list
from conveyor.model import (
    UPLOADS,
    Compression,
    Job,
    JobId,
    JobKind,
    ListFormat,
    Mode,
    OnInvalid,
    OutboxEvent,
    ResultLayout,
    Run,
    RunKey,
    Source,
    TaskSeed,
    TenantId,
    UploadRecord,
    first_run_id,
    invalid_key,
)
from conveyor.states import RunState
from conveyor.system import System
from conveyor.telemetry import metrics, traces

log = structlog.get_logger()

CREATED = 201
ACCEPTED = 202
# Past this, checking a job would hold up everyone else on the loop.
_TASKS_ON_LOOP = 1000
_TASKS_PER_WRITE = 1000


class Submit:
    """Accepts jobs."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._idempotency = Idempotency(system.settings, system.clock, system.records)
        self._admission = Admission(system)
        self._replace = Replace(system)
        self._handlers = KnownHandlers(system.records.documents, system.coordinator, system.clock)

    async def submit(
        self, tenant: TenantId, spec: JobSpec, request: IdempotentRequest | None = None, prefer_async: bool = False
    ) -> Accepted:
        """Check the request, write the job, answer. A request that was answered before gets that answer again."""
        carry_out = partial(self._carry_out, tenant, spec, prefer_async)
        job_id = self._system.clock.new_id("job")
        is_one_write = not prefer_async and self._is_one_write(spec)
        return await self._idempotency.once(tenant, request, job_id, carry_out, is_one_write=is_one_write)

    def _is_one_write(self, spec: JobSpec) -> bool:
        """Whether the job is accepted by one transaction, before which nothing is written."""
        is_inline = spec.source is None and spec.mode is Mode.CLOSED and spec.replaces is None
        is_small = len(spec.tasks) <= self._system.settings.sync_task_limit
        return self._system.atomic_accept is not None and is_inline and is_small

    async def submit_untaken(self, tenant: TenantId, spec: JobSpec, request: IdempotentRequest, key: str) -> Accepted:
        """As submit, unless another job took the place of the key meanwhile: then raises AlreadyReplaced."""

        async def carry_out(claim: Claim) -> Accepted:
            await self._replace.check_untaken(tenant, key)
            return await self._carry_out(tenant, spec, False, claim)

        return await self._idempotency.once(tenant, request, self._system.clock.new_id("job"), carry_out)

    async def submit_as(
        self, job_id: JobId, tenant: TenantId, spec: JobSpec, source: Source | None, request: IdempotentRequest
    ) -> Accepted:
        """As submit, under an id that the caller has chosen: with the tasks of the spec, or with a staged list."""
        if source is None:
            carry_out = partial(self._carry_out, tenant, spec, False)
        else:
            carry_out = partial(self._accept_source, tenant, spec, source)
        return await self._idempotency.once(
            tenant, request, job_id, lambda claim: carry_out(claim._replace(is_repeated=True))
        )

    async def submit_list(
        self,
        tenant: TenantId,
        spec: JobSpec,
        stage: Callable[[JobId], Awaitable[Source]],
        request: IdempotentRequest | None,
    ) -> Accepted:
        """As submit, with a list that `stage` gets, or makes, for the new job."""

        async def carry_out(claim: Claim) -> Accepted:
            await self._check(tenant, spec)
            source = await stage(JobId(claim.subject))
            try:
                return await self._accept_stored(tenant, spec, source, False, claim._replace(is_repeated=True))
            except ConveyorError as refused:
                # After a server error the job may exist all the same.
                if refused.status < HTTPStatus.INTERNAL_SERVER_ERROR and not source.key.startswith(UPLOADS):
                    # A copy, or the empty key of a list behind a URL.
                    await self._system.blobs.delete([source.key] if source.key else [])
                raise

        return await self._idempotency.once(tenant, request, self._system.clock.new_id("job"), carry_out)

    async def submit_source(self, tenant: TenantId, spec: JobSpec, source: Source, job_id: JobId | None = None) -> Job:
        """Make a job of a list that this process has staged."""
        self._check_options(spec)
        job = self._job(tenant, spec, job_id or self._system.clock.new_id("job"), None, source)
        await self._write_ingested(job, None, [ingest_message(job)], _documents(self._system, job, spec))
        traces.trace_accept(job, self._system.clock.now())
        return job

    async def _carry_out(self, tenant: TenantId, spec: JobSpec, prefer_async: bool, claim: Claim) -> Accepted:
        await self._check(tenant, spec)
        replaced = await self._replace.find(tenant, spec.replaces, JobId(claim.subject))
        if spec.source is not None and spec.source.url is not None:
            source = remote_source(self._system, tenant, spec.source)
            # The list stays where it is: none of its bytes are staged.
            await self._admission.admit(tenant, jobs=_new_jobs(replaced))
            return await self._accept_for_ingest(tenant, spec, claim, source, replaced)
        if spec.source is not None:
            source = await self._uploaded(tenant, spec)
            return await self._accept_stored(tenant, spec, source, prefer_async, claim, replaced)
        if spec.mode is Mode.OPEN:
            await self._admission.admit(tenant, jobs=_new_jobs(replaced))
            return await self._accept_for_ingest(tenant, spec, claim, None, replaced)
        checked = await self._checked_tasks(spec)
        await self._admission.admit(tenant, jobs=_new_jobs(replaced), tasks=_new_tasks(len(checked.seeds), replaced))
        is_small = checked.lines <= self._system.settings.sync_task_limit
        # A job that has to wait for another is ingested: its tasks are written when the other has stopped.
        if is_small and not prefer_async and not replaced.runs:
            return await self._accept_with_tasks(tenant, spec, claim, checked, replaced)
        note = await note_submit(self._system, tenant, claim.subject, claim.is_repeated)
        source = await self._stage(tenant, claim.subject, spec, checked)
        accepted = await self._accept_for_ingest(
            tenant, spec, claim, source, replaced, is_small=is_small, invalid=len(checked.invalid)
        )
        await self._forget(note)
        return accepted

    async def _accept_source(self, tenant: TenantId, spec: JobSpec, source: Source, claim: Claim) -> Accepted:
        await self._check(tenant, spec)
        return await self._accept_stored(tenant, spec, source, False, claim)

    async def _accept_stored(
        self,
        tenant: TenantId,
        spec: JobSpec,
        source: Source,
        prefer_async: bool,
        claim: Claim,
        replaced: ReplacedJobs = NOTHING,
    ) -> Accepted:
        """Accept a job of a stored list: with its tasks if the list is small, else for ingest."""
        small = None if source.remote is not None else await self._read_small(spec, source)
        if small is None or prefer_async or replaced.runs:
            await self._admission.admit(tenant, jobs=_new_jobs(replaced), staged=source.size)
            return await self._accept_for_ingest(tenant, spec, claim, source, replaced, is_small=small is not None)
        await self._admission.admit(tenant, jobs=_new_jobs(replaced), tasks=_new_tasks(len(small.seeds), replaced))
        return await self._accept_with_tasks(tenant, spec, claim, small, replaced, source)

    async def _read_small(self, spec: JobSpec, source: Source) -> CheckedList | None:
        """The list, if it is small and becomes tasks as it is; ingest reports what is wrong with any other."""
        settings = self._system.settings
        max_bytes = min(settings.sync_list_bytes, settings.max_list_bytes)
        small = await read_small_list(self._system.blobs, source, spec.kind, max_bytes, settings.sync_task_limit)
        if small is None or not small.seeds or (small.invalid and spec.on_invalid is OnInvalid.REJECT):
            return None
        return small

    def _check_options(self, spec: JobSpec) -> None:
        check_limits(spec)
        check_body_budget(spec, self._system.settings)
        check_insecure(spec, self._system.settings)

    async def _check(self, tenant: TenantId, spec: JobSpec) -> None:
        self._check_options(spec)
        check_replaces(spec.replaces)
        _check_shape(spec)
        await check_notify(self._system, tenant, spec.notify)
        await self._handlers.check(spec.handler if spec.kind is JobKind.PYTHON else spec.extract)

    async def _checked_tasks(self, spec: JobSpec) -> CheckedList:
        parts = (spec.kind, spec.tasks, self._system.settings.max_inline_tasks, spec.on_invalid)
        if len(spec.tasks) <= _TASKS_ON_LOOP:
            return check_tasks(*parts)
        return await asyncio.to_thread(check_tasks, *parts)

    async def _uploaded(self, tenant: TenantId, spec: JobSpec) -> Source:
        assert spec.source is not None
        upload = await self._system.records.access.upload(spec.source.upload_id or "")
        if upload is None or upload.tenant != tenant:
            raise NotFound("The upload was not found, or has expired.")
        await self._check_stored(upload)
        # Until the job is written: from then on the list is kept as long as the job.
        until = self._system.clock.now() + self._system.settings.upload_seconds
        await self._system.records.access.keep_upload(upload.upload_id, until)
        return Source(
            upload.key,
            upload.size,
            upload.sha256,
            spec.source.format,
            spec.source.compression,
            url_column=spec.source.url_column,
        )

    async def _check_stored(self, upload: UploadRecord) -> None:
        """A list that went straight to the blob store was not checked on its way: its size is checked here, and its
        hash by the ingest."""
        if upload.stored_at is not None:
            return
        if await self._system.blobs.size(upload.key) != upload.size:
            raise UploadConflict("The upload was not stored yet: PUT the list to its URL first.")
        await self._system.records.access.mark_stored(upload.upload_id)

    async def _stage(self, tenant: TenantId, job_id: str, spec: JobSpec, checked: CheckedList) -> Source:
        """Stage an inline list that is too long to write within the request."""
        data = await asyncio.to_thread(encode_list, spec.tasks, checked)
        key = f"lists/{tenant}/{job_id}/tasks.jsonl"
        crashpoint("accept.stage.before")
        await self._system.blobs.put(key, data)
        crashpoint("accept.stage.after")
        return staged_source(key, data)

    async def _accept_for_ingest(
        self,
        tenant: TenantId,
        spec: JobSpec,
        claim: Claim,
        source: Source | None,
        replaced: ReplacedJobs = NOTHING,
        *,
        is_small: bool = False,
        invalid: int = 0,
    ) -> Accepted:
        """`invalid` are the invalid tasks of the request, which the ingest will count."""
        job = self._job(tenant, spec, claim.subject, None, source, is_small=is_small)
        reply = claim.answer(ACCEPTED, answer(job, invalid=invalid))
        # An open job has nothing to ingest yet; its message has the jobs that it replaces cancelled.
        outgoing = [] if source is None and not replaced.runs else [ingest_message(job)]
        rows = [*_documents(self._system, job, spec), *replacement_documents(job, replaced.runs)]
        await self._replace.take(tenant, replaced, job.job_id)
        existing = await self._write_ingested(job, reply.row, outgoing, rows)
        if existing is None:
            await self._replace.cancel(replaced, job.job_id)
        return self._reply(job, reply, existing)

    async def _write_ingested(
        self, job: Job, row: IdempotencyClaim | None, outgoing: list[Outgoing], rows: list[Document]
    ) -> IdempotencyClaim | None:
        system, event = self._system, self._event(job)
        crashpoint("accept.ingested.before")
        if system.atomic_accept is not None:
            existing = await system.atomic_accept.accept_atomically(job, event, row, [], CONTROL, outgoing, rows)
        else:
            existing = await system.records.jobs.create_job(job, event, row, rows)
            crashpoint("accept.ingested.between")
            if existing is None:
                await send_all(system.queue, CONTROL, outgoing, system.clock)
        crashpoint("accept.ingested.after")
        return existing

    async def _accept_with_tasks(
        self,
        tenant: TenantId,
        spec: JobSpec,
        claim: Claim,
        checked: CheckedList,
        replaced: ReplacedJobs,
        source: Source | None = None,
    ) -> Accepted:
        seeds = checked.seeds
        job = self._job(tenant, spec, claim.subject, len(seeds), source, is_small=True)
        invalid = [invalid_key(job, 0, checked.lines)] if checked.invalid else []
        note = None
        if invalid or self._system.atomic_accept is None:
            note = await note_submit(self._system, tenant, job.job_id, claim.is_repeated, invalid)
        if source is not None:
            metrics.INGESTED.add(len(seeds), "task")
        if invalid:
            job = await self._with_invalid(job, checked)
        reply = claim.answer(CREATED, answer(job))
        outgoing = messages(job.key, seeds, job.options.chunk_size)
        rows = _documents(self._system, job, spec)
        await self._replace.take(tenant, replaced, job.job_id)
        if self._system.atomic_accept is None:
            assert note is not None
            existing = await self._write_in_steps(job, reply.row, seeds, outgoing, rows, note)
        else:
            existing = await self._write_at_once(job, reply.row, seeds, outgoing, rows)
            if note is not None and existing is None:
                await self._forget(note)
        return self._reply(job, reply, existing)

    async def _with_invalid(self, job: Job, checked: CheckedList) -> Job:
        """Store the invalid lines, as ingest does, before the job that counts them."""
        metrics.INGESTED.add(len(checked.invalid), "invalid")
        crashpoint("accept.invalid.before")
        await self._system.blobs.put(invalid_key(job, 0, checked.lines), encode_invalid(checked.invalid))
        crashpoint("accept.invalid.after")
        return msgspec.structs.replace(job, run=msgspec.structs.replace(job.run, invalid=len(checked.invalid)))

    async def _write_at_once(
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
        existing = await self._system.atomic_accept.accept_atomically(
            job, self._event(job), row, seeds, queue, outgoing, rows
        )
        crashpoint("accept.after")
        return existing

    async def _write_in_steps(
        self,
        job: Job,
        row: IdempotencyClaim | None,
        seeds: list[TaskSeed],
        outgoing: list[Outgoing],
        rows: list[Document],
        note: Document,
    ) -> IdempotencyClaim | None:
        await self._put(job.key, seeds)
        crashpoint("accept.job.before")
        existing = await self._system.records.jobs.create_job(job, self._event(job), row, rows)
        crashpoint("accept.job.after")
        if existing is not None:
            return existing
        await asyncio.gather(self._send(job, outgoing), self._forget(note))
        return None

    async def _send(self, job: Job, outgoing: list[Outgoing]) -> None:
        try:
            crashpoint("accept.send.before")
            await send_all(self._system.queue, run_queue(job.run.run_id), outgoing, self._system.clock)
            crashpoint("accept.send.after")
        except Exception:
            # The job is accepted already: after an error the client would send it a second time.
            log.exception("references not sent; the sweeper will requeue them", job=job.job_id)

    async def _forget(self, note: Document) -> None:
        """The job is accepted, and keeps what was noted."""
        try:
            await forget_note(self._system.records, note)
        except Exception:
            log.exception("note of a submit not removed; retention will remove it", job=note.id)

    async def _put(self, run: RunKey, seeds: Sequence[TaskSeed]) -> None:
        for start in range(0, len(seeds), _TASKS_PER_WRITE):
            crashpoint("accept.tasks.before")
            await self._system.tasks.put(run, seeds[start : start + _TASKS_PER_WRITE])
            crashpoint("accept.tasks.after")

    def _reply(self, job: Job, reply: ClaimedAnswer, existing: IdempotencyClaim | None) -> Accepted:
        accepted = reply.unless_lost(existing)
        if not accepted.replayed:
            traces.trace_accept(job, self._system.clock.now())
            log.info("job accepted", tenant=job.tenant, job=job.job_id, kind=job.kind, state=job.state)
        return accepted

    def _job(
        self,
        tenant: TenantId,
        spec: JobSpec,
        job_id: str,
        total: int | None,
        source: Source | None,
        *,
        is_small: bool = False,
    ) -> Job:
        """`total` is None for a job that is ingested, or open."""
        now = self._system.clock.now()
        settings = self._system.settings
        is_complete = total is not None
        run = Run(
            run_id=first_run_id(job_id),
            number=1,
            state=RunState.RUNNING if is_complete else RunState.INGESTING,
            total=total or 0,
            last_batch=is_complete,
            created_at=now,
            sealed=is_complete,
            touched_at=now,
        )
        return Job(
            tenant=tenant,
            job_id=JobId(job_id),
            name=spec.name,
            kind=spec.kind,
            mode=spec.mode,
            options=with_default_pace(spec.options(), spec.kind, settings),
            task_shard_count=1 if is_small or not self._system.sharded else settings.task_shard_count,
            result_layout=spec.result_layout or ResultLayout.PACKED,
            state=run.state,
            reason=None,
            created_at=now,
            expires_at=None,
            run=run,
            source=source,
            task_store=self._system.task_store,
        )

    def _event(self, job: Job) -> OutboxEvent:
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
    """A list of inputs that this server has written."""
    return Source(key, len(data), sha256(data).hexdigest(), ListFormat.JSONL, Compression.NONE)


def _documents(system: System, job: Job, spec: JobSpec) -> list[Document]:
    """The documents that are written with the job."""
    return [*subscription_documents(system, job, spec.notify), *deadline_documents(job)]


def _new_jobs(replaced: ReplacedJobs) -> int:
    """How many jobs there are more: the new job has the capacity of those that it replaces."""
    return max(0, 1 - len(replaced.active))


def _new_tasks(count: int, replaced: ReplacedJobs) -> int:
    return max(0, count - sum(job.run.total for job in replaced.active))


def _check_shape(spec: JobSpec) -> None:
    if spec.source is not None:
        check_source(spec.source)
    if spec.source is not None and spec.tasks:
        raise InvalidField("Give `tasks` or `source`, not both.", field="source")
    if spec.mode is Mode.OPEN and (spec.tasks or spec.source):
        raise InvalidField("An open job starts empty: add its tasks with POST /v1/jobs/{id}/tasks.", field="mode")
