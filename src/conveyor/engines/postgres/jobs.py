"""Jobs and runs on Postgres."""

import math
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from conveyor.clock import Clock
from conveyor.engines.job_records import JOB_KINDS, MODES, RESULT_LAYOUTS, RUN_STATES, bucket_of
from conveyor.engines.newer_rows import read_row, readable_rows
from conveyor.engines.postgres.access import answer_claim, release_upload
from conveyor.engines.postgres.database import PostgresDatabase, PostgresSession
from conveyor.engines.postgres.documents import insert_documents
from conveyor.engines.postgres.joint_calls import JointCalls
from conveyor.engines.postgres.outbox import insert_event, is_own
from conveyor.engines.postgres.queries import named_queries
from conveyor.engines.records import Document, IdempotencyClaim, RunMove, upload_of
from conveyor.model import (
    Job,
    JobId,
    Lineage,
    Options,
    OutboxEvent,
    Page,
    Run,
    RunId,
    Source,
    TenantId,
)
from conveyor.states import ENDED, RunState

SQL = named_queries("jobs.sql")

_options = msgspec.json.Decoder(Options)
_source = msgspec.json.Decoder(Source)
_lineage = msgspec.json.Decoder(Lineage)
# Sorts after every id.
_NEWEST = "~"
# An unfinished job does not expire.
_NEVER = math.inf
# Stored options leave out their defaults.
DEFAULT_DAYS = Options().retention_days


class _PostgresBusy(Exception):
    """The latest run has not finished, or does not have the previous number."""


class PostgresJobs:
    """JobRecords: every change is one transaction."""

    def __init__(self, database: PostgresDatabase, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._swept = JointCalls(self._mark_all_swept)

    async def create_job(
        self, job: Job, notice: OutboxEvent, answer: IdempotencyClaim | None, rows: Sequence[Document] = ()
    ) -> IdempotencyClaim | None:
        now = self._clock.now()

        async def work(db: PostgresSession) -> IdempotencyClaim | None:
            if await is_own(db, notice):
                return None
            standing = await insert_job(db, job, answer, rows, now)
            if standing is None:
                await insert_event(db, notice)
            return standing

        return await self._database.write(work)

    async def add_run(self, job: Job, notice: OutboxEvent, answer: IdempotencyClaim | None) -> bool | IdempotencyClaim:
        values = {**job_values(job), "number": job.run.number, "now": self._clock.now()}

        async def work(db: PostgresSession) -> bool | IdempotencyClaim:
            if await is_own(db, notice):
                return True
            # Answer the claim first: this very request may have added the run that blocks it.
            standing = await answer_claim(db, answer)
            if standing is not None:
                return standing
            if await db.change(SQL["show_new_run"], values) == 0:
                raise _PostgresBusy
            await _insert_run(db, job)
            await insert_event(db, notice)
            return True

        try:
            return await self._database.write(work)
        except _PostgresBusy:
            return False

    async def runs(self, job_id: JobId) -> list[Run]:
        return [_run(row) for row in await self._database.rows(SQL["runs"], {"job_id": job_id})]

    async def change_options(self, job_id: JobId, version: int, options: Options, notice: OutboxEvent) -> bool:
        values = {
            "job_id": job_id,
            "version": version,
            "options": _text(options),
            "retention_days": options.retention_days,
            "default_days": DEFAULT_DAYS,
            "now": self._clock.now(),
        }

        async def work(db: PostgresSession) -> bool:
            if await db.change(SQL["change_options"], values) == 0:
                return await is_own(db, notice)
            await insert_event(db, notice)
            return True

        return await self._database.write(work)

    async def keep_job(self, tenant: TenantId, job_id: JobId, until: float) -> bool:
        values = {"tenant": tenant, "job_id": job_id, "until": until, "now": self._clock.now()}
        return await self._database.change(SQL["keep_job"], values) > 0

    async def job(self, tenant: TenantId, job_id: JobId) -> Job | None:
        values = {"tenant": tenant, "job_id": job_id, "now": self._clock.now()}
        row = await self._database.row(SQL["job"], values)
        return read_row(row, _job) if row else None

    async def jobs_of(self, keys: Sequence[tuple[TenantId, JobId]]) -> list[Job]:
        values = {"job_ids": [job_id for _, job_id in keys], "now": self._clock.now()}
        jobs = readable_rows(await self._database.rows(SQL["jobs_of"], values), _job) if keys else []
        wanted = frozenset(keys)
        return [job for job in jobs if (job.tenant, job.job_id) in wanted]

    async def jobs(self, tenant: TenantId, cursor: str | None, limit: int) -> Page[Job]:
        values = {"tenant": tenant, "before": cursor or _NEWEST, "limit": limit + 1, "now": self._clock.now()}
        rows = await self._database.rows(SQL["jobs"], values)
        # By the rows: the last of them may be one that cannot be read.
        return Page(readable_rows(rows[:limit], _job), rows[limit - 1]["job_id"] if len(rows) > limit else None)

    async def active_jobs(self, buckets: Collection[int] | None = None) -> list[Job]:
        if buckets is None:
            return readable_rows(await self._database.rows(SQL["active_jobs"], {}), _job)
        rows = await self._database.rows(SQL["active_jobs_of_buckets"], {"buckets": list(buckets)})
        return [job for job in readable_rows(rows, _job) if bucket_of(job.job_id) in buckets]

    async def run(self, job_id: JobId, run_id: RunId) -> Run | None:
        row = await self._database.row(SQL["run"], {"job_id": job_id, "run_id": run_id})
        return _run(row) if row else None

    async def set_total(self, job_id: JobId, run_id: RunId, total: int, invalid: int) -> None:
        values = {"job_id": job_id, "run_id": run_id, "total": total, "invalid": invalid}
        await self._database.change(SQL["set_total"], values)

    async def latch(self, job_id: JobId, run_id: RunId) -> Run | None:
        values = {"job_id": job_id, "run_id": run_id}

        async def work(db: PostgresSession) -> Run | None:
            if await db.change(SQL["latch"], values):
                await db.change(SQL["show_run_state"], values)
            row = await db.row(SQL["run"], values)
            return _run(row) if row else None

        return await self._database.write(work)

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
        now = self._clock.now()
        return await self._database.write(
            lambda db: _move_run(db, now, job_id, run_id, sources, target, reason, notice, keep, code)
        )

    async def unswept_jobs(self, limit: int) -> list[Job]:
        return readable_rows(await self._database.rows(SQL["unswept_jobs"], {"limit": limit}), _job)

    async def finished_jobs(self, outside: str, cursor: str | None, limit: int) -> Page[Job]:
        values = {"outside": outside, "after": cursor or "", "limit": limit + 1, "now": self._clock.now()}
        rows = await self._database.rows(SQL["finished_jobs"], values)
        # By the rows: the last of them may be one that cannot be read.
        return Page(readable_rows(rows[:limit], _job), rows[limit - 1]["job_id"] if len(rows) > limit else None)

    async def record_task_store(self, job_id: JobId, store: str) -> None:
        await self._database.change(SQL["record_task_store"], {"job_id": job_id, "task_store": store})

    async def switch_task_store(self, job_id: JobId, run_id: RunId, source: str, target: str) -> bool:
        values = {"job_id": job_id, "run_id": run_id, "source": source, "target": target}

        async def work(db: PostgresSession) -> bool:
            # The runs first, as everywhere: a rerun or a resumed ingest of the job waits, then finds the new record.
            await db.rows(SQL["lock_runs"], values)
            if await db.change(SQL["switch_task_store"], values) == 0:
                return db.again and await db.value(SQL["is_in_task_store"], values) is not None
            return True

        return await self._database.write(work)

    async def mark_swept(self, job_id: JobId, run_id: RunId) -> None:
        await self._swept.call((job_id, run_id))

    async def _mark_all_swept(self, runs: Sequence[tuple[JobId, RunId]]) -> list[None]:
        values = {"job_ids": [job_id for job_id, _ in runs], "run_ids": [run_id for _, run_id in runs]}
        await self._database.change(SQL["mark_swept"], values)
        return [None] * len(runs)

    async def mark_deleted(self, tenant: TenantId, job_id: JobId) -> bool:
        values = {"tenant": tenant, "job_id": job_id, "now": self._clock.now()}

        async def work(db: PostgresSession) -> bool:
            await db.rows(SQL["lock_runs"], values)
            if await db.change(SQL["mark_deleted"], values) == 0:
                return db.again and await db.value(SQL["deleted_at"], values) is not None
            await db.change(SQL["end_runs"], values)
            return True

        return await self._database.write(work)

    async def purgeable_jobs(self, before: float, limit: int) -> list[Job]:
        rows = await self._database.rows(SQL["purgeable_jobs"], {"before": before, "limit": limit})
        return readable_rows(rows, _job)

    async def purge_job(self, job_id: JobId) -> None:
        values: dict[str, Any] = {"job_id": job_id, "now": self._clock.now()}

        async def work(db: PostgresSession) -> None:
            await db.rows(SQL["lock_runs"], values)
            row = await db.row(SQL["purge_job"], values)
            if row is None:
                return
            values.update(row)
            for query in ("purge_ranges", "purge_events", "purge_documents", "purge_runs"):
                await db.change(SQL[query], values)
            await release_upload(db, upload_of(row["source_key"]), values["now"])

        await self._database.write(work)


async def move_run(db: PostgresSession, now: float, move: RunMove) -> bool:
    """Part of a transaction: move a run and write its event, if it is in one of the sources."""
    event = move.event
    return await _move_run(
        db, now, event.job_id, event.run_id, move.sources, move.target, move.reason, event, False, move.code
    )


async def _move_run(
    db: PostgresSession,
    now: float,
    job_id: JobId,
    run_id: RunId,
    sources: Collection[RunState],
    target: RunState,
    reason: str | None,
    notice: OutboxEvent | None,
    keep: bool,
    code: str | None,
) -> bool:
    values = {
        "keep": keep,
        "job_id": job_id,
        "run_id": run_id,
        "sources": sorted(sources),
        "target": target,
        "reason": reason,
        "reason_code": code,
        "now": now,
        "ended_at": now if target in ENDED else None,
        "default_days": DEFAULT_DAYS,
    }
    if await db.change(SQL["move_run"], values) == 0:
        if notice is None:
            return db.again and await db.value(SQL["moved_to"], values) is not None
        return await is_own(db, notice)
    await db.change(SQL["move_job"], values)
    if notice is not None:
        await insert_event(db, notice)
    return True


async def insert_job(
    db: PostgresSession, job: Job, answer: IdempotencyClaim | None, rows: Sequence[Document], now: float
) -> IdempotencyClaim | None:
    """Part of a transaction: insert the job with its run and documents. If the caller lost the claim, insert nothing
    and return the stored claim. The caller inserts the event last."""
    standing = await answer_claim(db, answer)
    if standing is not None:
        return standing
    await db.change(SQL["insert_job"], job_values(job))
    await _insert_run(db, job)
    await insert_documents(db, rows, now)
    return None


async def _insert_run(db: PostgresSession, job: Job) -> None:
    await db.change(SQL["insert_run"], run_values(job))


def run_values(job: Job) -> dict[str, Any]:
    """The latest run of a job, by the columns of its row."""
    run = job.run
    return {**msgspec.structs.asdict(run), "job_id": job.job_id, "lineage": run.lineage and _text(run.lineage)}


def job_values(job: Job) -> dict[str, Any]:
    """A job, by the columns of its row."""
    return {
        **msgspec.structs.asdict(job),
        "options": _text(job.options),
        "expires_at": _NEVER if job.expires_at is None else job.expires_at,
        "run_id": job.run.run_id,
        "source": job.source and _text(job.source),
        "source_key": job.source and job.source.key,
        "bucket": bucket_of(job.job_id),
    }


def _text(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()


def _run(row: Any) -> Run:
    return Run(
        run_id=row["run_id"],
        number=row["number"],
        state=RUN_STATES[row["run_state"]],
        total=row["total"],
        last_batch=row["last_batch"],
        created_at=row["run_created_at"],
        ended_at=row["ended_at"],
        sealed=row["sealed"],
        invalid=row["invalid"],
        touched_at=row["touched_at"],
        lineage=row["lineage"] and _lineage.decode(row["lineage"]),
        reason_code=row["reason_code"],
    )


def _job(row: Any) -> Job:
    return Job(
        tenant=row["tenant"],
        job_id=row["job_id"],
        name=row["name"],
        kind=JOB_KINDS[row["kind"]],
        mode=MODES[row["mode"]],
        options=_options.decode(row["options"]),
        task_shard_count=row["task_shard_count"],
        result_layout=RESULT_LAYOUTS[row["result_layout"]],
        state=RUN_STATES[row["state"]],
        reason=row["reason"],
        created_at=row["created_at"],
        expires_at=None if row["expires_at"] == _NEVER else row["expires_at"],
        run=_run(row),
        source=row["source"] and _source.decode(row["source"]),
        version=row["version"],
        task_store=row["task_store"],
    )
