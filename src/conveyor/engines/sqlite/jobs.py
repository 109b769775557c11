"""Jobs and runs on SQLite."""

import math
from collections.abc import Collection, Sequence
from typing import Any

import apsw
import msgspec

from conveyor.clock import Clock
from conveyor.engines.job_records import JOB_KINDS, MODES, RESULT_LAYOUTS, RUN_STATES, bucket_of
from conveyor.engines.newer_rows import read_row, readable_rows
from conveyor.engines.records import Document, IdempotencyClaim, RunMove, upload_of
from conveyor.engines.sqlite.access import answer_claim, release_upload
from conveyor.engines.sqlite.database import SqliteDatabase, named_queries
from conveyor.engines.sqlite.documents import insert_documents
from conveyor.engines.sqlite.outbox import insert_event
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
# Point reads on the event loop, in one call.
_READ_ON_LOOP = 64
# The column of `runs_shown` behind those of the job and its run.
_TASK_STORE = 29


class _SqliteBusy(Exception):
    """The latest run has not finished, or does not have the previous number."""


class SqliteJobs:
    """JobRecords: every change is one transaction."""

    def __init__(self, database: SqliteDatabase, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def create_job(
        self, job: Job, notice: OutboxEvent, answer: IdempotencyClaim | None, rows: Sequence[Document] = ()
    ) -> IdempotencyClaim | None:
        now = self._clock.now()
        return await self._database.write(lambda db: insert_job(db, job, notice, answer, rows, now))

    async def add_run(self, job: Job, notice: OutboxEvent, answer: IdempotencyClaim | None) -> bool | IdempotencyClaim:
        values = {**job_values(job), "number": job.run.number, "now": self._clock.now()}

        def work(db: apsw.Connection) -> bool | IdempotencyClaim:
            # Answer the claim first: this very request may have added the run that blocks it.
            standing = answer_claim(db, answer)
            if standing is not None:
                return standing
            db.execute(SQL["show_new_run"], values)
            if db.changes() == 0:
                raise _SqliteBusy
            _insert_run(db, job)
            insert_event(db, notice)
            return True

        try:
            return await self._database.write(work)
        except _SqliteBusy:
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

        def work(db: apsw.Connection) -> bool:
            db.execute(SQL["change_options"], values)
            if db.changes() == 0:
                return False
            insert_event(db, notice)
            return True

        return await self._database.write(work)

    async def keep_job(self, tenant: TenantId, job_id: JobId, until: float) -> bool:
        values = {"tenant": tenant, "job_id": job_id, "until": until, "now": self._clock.now()}
        return await self._database.change(SQL["keep_job"], values) > 0

    async def job(self, tenant: TenantId, job_id: JobId) -> Job | None:
        values = {"tenant": tenant, "job_id": job_id, "now": self._clock.now()}
        row = self._database.read_one(SQL["job"], values)
        return read_row(row, _job) if row else None

    async def jobs_of(self, keys: Sequence[tuple[TenantId, JobId]]) -> list[Job]:
        values = {"job_ids": msgspec.json.encode([job_id for _, job_id in keys]).decode(), "now": self._clock.now()}
        if len(keys) <= _READ_ON_LOOP:
            rows = self._database.read_few(SQL["jobs_of"], values)
        else:
            rows = await self._database.rows(SQL["jobs_of"], values)
        jobs = readable_rows(rows, _job)
        wanted = frozenset(keys)
        return [job for job in jobs if (job.tenant, job.job_id) in wanted]

    async def jobs(self, tenant: TenantId, cursor: str | None, limit: int) -> Page[Job]:
        values = {"tenant": tenant, "before": cursor or _NEWEST, "limit": limit + 1, "now": self._clock.now()}
        rows = await self._database.rows(SQL["jobs"], values)
        # By the rows: the last of them may be one that cannot be read.
        return Page(readable_rows(rows[:limit], _job), rows[limit - 1][1] if len(rows) > limit else None)

    async def active_jobs(self, buckets: Collection[int] | None = None) -> list[Job]:
        if buckets is None:
            return readable_rows(await self._database.rows(SQL["active_jobs"], {}), _job)
        rows = await self._database.rows(
            SQL["active_jobs_of_buckets"], {"buckets": msgspec.json.encode(list(buckets)).decode()}
        )
        return [job for job in readable_rows(rows, _job) if bucket_of(job.job_id) in buckets]

    async def run(self, job_id: JobId, run_id: RunId) -> Run | None:
        row = self._database.read_one(SQL["run"], {"job_id": job_id, "run_id": run_id})
        return _run(row) if row else None

    async def set_total(self, job_id: JobId, run_id: RunId, total: int, invalid: int) -> None:
        values = {"job_id": job_id, "run_id": run_id, "total": total, "invalid": invalid}
        await self._database.change(SQL["set_total"], values)

    async def latch(self, job_id: JobId, run_id: RunId) -> Run | None:
        values = {"job_id": job_id, "run_id": run_id}

        def work(db: apsw.Connection) -> Run | None:
            db.execute(SQL["latch"], values)
            db.execute(SQL["show_run_state"], values)
            return _find_run(db, job_id, run_id)

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
        return Page(readable_rows(rows[:limit], _job), rows[limit - 1][1] if len(rows) > limit else None)

    async def record_task_store(self, job_id: JobId, store: str) -> None:
        await self._database.change(SQL["record_task_store"], {"job_id": job_id, "task_store": store})

    async def switch_task_store(self, job_id: JobId, run_id: RunId, source: str, target: str) -> bool:
        values = {"job_id": job_id, "run_id": run_id, "source": source, "target": target}

        def work(db: apsw.Connection) -> bool:
            db.execute(SQL["switch_task_store"], values)
            return db.changes() > 0

        return await self._database.write(work)

    async def mark_swept(self, job_id: JobId, run_id: RunId) -> None:
        # Many small runs end at about the same time.
        await self._database.write_jointly(_mark_swept, (job_id, run_id))

    async def mark_deleted(self, tenant: TenantId, job_id: JobId) -> bool:
        values = {"tenant": tenant, "job_id": job_id, "now": self._clock.now()}

        def work(db: apsw.Connection) -> bool:
            db.execute(SQL["mark_deleted"], values)
            if db.changes() == 0:
                return False
            db.execute(SQL["end_runs"], values)
            return True

        return await self._database.write(work)

    async def purgeable_jobs(self, before: float, limit: int) -> list[Job]:
        rows = await self._database.rows(SQL["purgeable_jobs"], {"before": before, "limit": limit})
        return readable_rows(rows, _job)

    async def purge_job(self, job_id: JobId) -> None:
        values: dict[str, Any] = {"job_id": job_id, "now": self._clock.now()}

        def work(db: apsw.Connection) -> None:
            row = db.execute(SQL["purge_job"], values).fetchone()
            if row is None:
                return
            values["tenant"], source_key = row
            for query in ("purge_ranges", "purge_events", "purge_documents", "purge_runs"):
                db.execute(SQL[query], values)
            release_upload(db, upload_of(source_key), values["now"])

        await self._database.write(work)


def insert_job(
    db: apsw.Connection,
    job: Job,
    notice: OutboxEvent,
    answer: IdempotencyClaim | None,
    rows: Sequence[Document],
    now: float,
) -> IdempotencyClaim | None:
    """Part of a transaction: insert the job with its run, event and documents. If the caller lost the claim, insert
    nothing and return the stored claim."""
    standing = answer_claim(db, answer)
    if standing is not None:
        return standing
    db.execute(SQL["insert_job"], job_values(job))
    _insert_run(db, job)
    insert_event(db, notice)
    insert_documents(db, rows, now)
    return None


def _mark_swept(db: apsw.Connection, runs: list[tuple[JobId, RunId]]) -> list[None]:
    """Mark runs as swept, by one statement for all callers."""
    db.execute(SQL["mark_swept"], {"runs": msgspec.json.encode(runs).decode()})
    return [None] * len(runs)


def move_run(db: apsw.Connection, now: float, move: RunMove) -> bool:
    """Part of a transaction: move a run and write its event, if it is in one of the sources."""
    event = move.event
    return _move_run(
        db, now, event.job_id, event.run_id, move.sources, move.target, move.reason, event, False, move.code
    )


def _move_run(
    db: apsw.Connection,
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
        "sources": msgspec.json.encode(sorted(sources)).decode(),
        "target": target,
        "reason": reason,
        "reason_code": code,
        "now": now,
        "ended_at": now if target in ENDED else None,
        "default_days": DEFAULT_DAYS,
    }
    db.execute(SQL["move_run"], values)
    if db.changes() == 0:
        return False
    db.execute(SQL["move_job"], values)
    if notice is not None:
        insert_event(db, notice)
    return True


def _insert_run(db: apsw.Connection, job: Job) -> None:
    db.execute(SQL["insert_run"], run_values(job))


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


def _find_run(db: apsw.Connection, job_id: JobId, run_id: RunId) -> Run | None:
    row = db.execute(SQL["run"], {"job_id": job_id, "run_id": run_id}).fetchone()
    return _run(row) if row else None


def _run(row: Any) -> Run:
    run_id, number, state, total, last_batch, created_at, ended_at, sealed, invalid, touched_at = row[:10]
    lineage, reason_code = row[10:12]
    return Run(
        run_id=run_id,
        number=number,
        state=RUN_STATES[state],
        total=total,
        last_batch=bool(last_batch),
        created_at=created_at,
        ended_at=ended_at,
        sealed=bool(sealed),
        invalid=invalid,
        touched_at=touched_at,
        lineage=lineage and _lineage.decode(lineage),
        reason_code=reason_code,
    )


def _job(row: Any) -> Job:
    (
        tenant,
        job_id,
        name,
        kind,
        mode,
        options,
        shards,
        layout,
        state,
        reason,
        created_at,
        expires_at,
        source,
        version,
    ) = row[:14]
    return Job(
        tenant=tenant,
        job_id=job_id,
        name=name,
        kind=JOB_KINDS[kind],
        mode=MODES[mode],
        options=_options.decode(options),
        task_shard_count=shards,
        result_layout=RESULT_LAYOUTS[layout],
        state=RUN_STATES[state],
        reason=reason,
        created_at=created_at,
        expires_at=None if expires_at == _NEVER else expires_at,
        run=_run(row[14:]),
        source=source and _source.decode(source),
        version=version,
        task_store=row[_TASK_STORE],
    )
