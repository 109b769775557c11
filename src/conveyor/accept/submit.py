"""Submit: gets a tenant and a JobSpec, writes the job whole, hands back the answer.

Where records, tasks and queue are one database, all of it is one atomic write. Elsewhere it is three steps in an order
in which a crash between any two leaves nothing half accepted:

1. the tasks, under a run that nobody knows yet. A crash here leaves rows that no job points to, and retention removes
   them; the client has no answer and asks again.
2. the job, its run, its notice and the idempotency row, in one write. From here on the job is accepted, and a client
   that asks again under its key gets this answer.
3. the references. The queue is a hint: a run with fewer messages than open tasks is mended from its rows.
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import structlog

from conveyor.accept.answer import accepted_id, answer
from conveyor.accept.limits import check_limits
from conveyor.accept.seeds import seeds_of
from conveyor.accept.spec import JobSpec
from conveyor.clock import Clock
from conveyor.engines.queue import CONTROL, Outgoing, Queue, run_queue
from conveyor.engines.records import AcceptsWhole, IdempotencyRow, Records
from conveyor.engines.tasks import Tasks
from conveyor.errors import IdempotencyMismatch
from conveyor.faults import crashpoint
from conveyor.model import IngestJob, Job, JobId, Notice, ResultLayout, Run, RunId, RunKey, TaskSeed, TenantId
from conveyor.references import messages, send_all
from conveyor.settings import Settings
from conveyor.states import RunState

log = structlog.get_logger()

IDEMPOTENCY_SECONDS = 24 * 3600.0
CREATED = 201
_DAY = 86_400.0
# Past this, checking a job would hold up everyone else on the loop.
_TASKS_ON_LOOP = 1000
_TASKS_PER_WRITE = 1000


class Idempotency(NamedTuple):
    """The client's own name for a request, and what the request was."""

    route: str
    key: str
    fingerprint: str


class Accepted(NamedTuple):
    """What the client is told. `body` is the same bytes for every replay."""

    status: int
    body: bytes
    job_id: JobId
    replayed: bool


class Prepared(NamedTuple):
    """A job that is right and not yet written."""

    job: Job
    seeds: list[TaskSeed]
    messages: list[Outgoing]


class Submit:
    """Accepts jobs."""

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        records: Records,
        tasks: Tasks,
        queue: Queue,
        whole: AcceptsWhole | None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._records = records
        self._tasks = tasks
        self._queue = queue
        self._whole = whole

    async def replay(self, tenant: TenantId, idempotency: Idempotency) -> Accepted | None:
        """The answer that this request got before, if it did."""
        row = await self._records.idempotency(tenant, idempotency.route, idempotency.key)
        return None if row is None else _replayed(row, idempotency.fingerprint)

    async def submit(self, tenant: TenantId, spec: JobSpec, idempotency: Idempotency | None = None) -> Accepted:
        """Check, write, answer. An idempotency key that is taken, even in this moment by another request, writes
        nothing and gives that answer; `replay` finds it sooner, before anything is checked."""
        prepared = await self._prepare(tenant, spec)
        body = answer(prepared.job)
        row = self._row(tenant, idempotency, body)
        notice = self._notice(prepared.job)
        taken = await (self._in_one(prepared, notice, row) if self._whole else self._in_steps(prepared, notice, row))
        if taken is not None and idempotency is not None:
            return _replayed(taken, idempotency.fingerprint)
        job = prepared.job
        log.info("job accepted", tenant=tenant, job=job.job_id, kind=job.kind, tasks=job.run.total)
        return Accepted(CREATED, body, job.job_id, replayed=False)

    async def submit_staged(self, tenant: TenantId, spec: JobSpec, source: str, total: int) -> Job:
        """Make a job of the list staged at `source`: its row, and one message that has it ingested."""
        check_limits(spec)
        job = self._job(tenant, spec, total, source)
        message = Outgoing(msgspec.json.encode(IngestJob(tenant, job.job_id, job.run.run_id, source)))
        notice = self._notice(job)
        crashpoint("accept.staged.before")
        if self._whole is not None:
            await self._whole.accept_whole(job, notice, None, [], CONTROL, [message])
        else:
            await self._records.create_job(job, notice, None)
            await send_all(self._queue, CONTROL, [message], self._clock)
        crashpoint("accept.staged.after")
        return job

    async def _prepare(self, tenant: TenantId, spec: JobSpec) -> Prepared:
        if len(spec.tasks) <= _TASKS_ON_LOOP:
            return self._prepare_now(tenant, spec)
        return await asyncio.to_thread(self._prepare_now, tenant, spec)

    def _prepare_now(self, tenant: TenantId, spec: JobSpec) -> Prepared:
        check_limits(spec)
        seeds = seeds_of(spec, self._settings.max_inline_tasks)
        job = self._job(tenant, spec, len(seeds), None)
        return Prepared(job, seeds, messages(job.key, seeds, spec.chunk_size))

    def _job(self, tenant: TenantId, spec: JobSpec, total: int, source: str | None) -> Job:
        now = self._clock.now()
        run = Run(
            run_id=RunId(self._clock.new_id("run")),
            number=1,
            state=RunState.INGESTING if source else RunState.RUNNING,
            total=0 if source else total,
            last_batch=source is None,
            created_at=now,
        )
        return Job(
            tenant=tenant,
            job_id=JobId(self._clock.new_id("job")),
            name=spec.name,
            kind=spec.kind,
            mode=spec.mode,
            options=spec.options(),
            task_shard_count=1,
            result_layout=spec.result_layout or self._layout(total),
            state=run.state,
            reason=None,
            created_at=now,
            expires_at=now + spec.retention_days * _DAY,
            run=run,
            source=source,
        )

    def _layout(self, total: int) -> ResultLayout:
        return ResultLayout.PACKED if total > self._settings.sync_task_limit else ResultLayout.OBJECT

    def _notice(self, job: Job) -> Notice:
        return Notice(
            notice_id=self._clock.new_id("evt"),
            tenant=job.tenant,
            job_id=job.job_id,
            run_id=job.run.run_id,
            event="job.accepted",
            at=job.created_at,
            data={"total": job.run.total},
        )

    def _row(self, tenant: TenantId, idempotency: Idempotency | None, body: bytes) -> IdempotencyRow | None:
        if idempotency is None:
            return None
        return IdempotencyRow(
            tenant=tenant,
            route=idempotency.route,
            key=idempotency.key,
            fingerprint=idempotency.fingerprint,
            status=CREATED,
            body=body,
            expires_at=self._clock.now() + IDEMPOTENCY_SECONDS,
        )

    async def _in_one(self, prepared: Prepared, notice: Notice, row: IdempotencyRow | None) -> IdempotencyRow | None:
        assert self._whole is not None
        crashpoint("accept.before")
        taken = await self._whole.accept_whole(
            prepared.job, notice, row, prepared.seeds, run_queue(prepared.job.run.run_id), prepared.messages
        )
        crashpoint("accept.after")
        return taken

    async def _in_steps(self, prepared: Prepared, notice: Notice, row: IdempotencyRow | None) -> IdempotencyRow | None:
        run = prepared.job.key
        await self._put(run, prepared.seeds)
        crashpoint("accept.job.before")
        taken = await self._records.create_job(prepared.job, notice, row)
        crashpoint("accept.job.after")
        if taken is not None:
            await self._forget(run)
            return taken
        try:
            crashpoint("accept.send.before")
            await send_all(self._queue, run_queue(run.run_id), prepared.messages, self._clock)
            crashpoint("accept.send.after")
        except Exception:
            # The job is accepted already: an error now would make the client send it a second time.
            log.exception("references not sent; they are mended from the rows", job=run.job_id, run=run.run_id)
        return None

    async def _put(self, run: RunKey, seeds: Sequence[TaskSeed]) -> None:
        for start in range(0, len(seeds), _TASKS_PER_WRITE):
            crashpoint("accept.tasks.before")
            await self._tasks.put(run, seeds[start : start + _TASKS_PER_WRITE])
            crashpoint("accept.tasks.after")

    async def _forget(self, run: RunKey) -> None:
        while await self._tasks.delete(run, _TASKS_PER_WRITE):
            pass


def _replayed(row: IdempotencyRow, fingerprint: str) -> Accepted:
    if row.fingerprint != fingerprint:
        raise IdempotencyMismatch
    return Accepted(row.status, row.body, accepted_id(row.body), replayed=True)
