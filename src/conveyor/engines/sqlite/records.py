"""Records on SQLite."""

from collections.abc import Collection
from typing import Any, cast

import apsw
import msgspec

from conveyor.clock import Clock
from conveyor.engines.records import Checkpoint, IdempotencyRow
from conveyor.engines.sqlite.database import Database, named_queries
from conveyor.errors import BadCursor
from conveyor.model import (
    ApiKey,
    Event,
    Job,
    JobId,
    JobKind,
    Notice,
    Options,
    Page,
    ResultLayout,
    Run,
    RunId,
    TenantId,
)
from conveyor.states import ENDED, RunState

SQL = named_queries("records.sql")

_options = msgspec.json.Decoder(Options)
# Sorts after every id.
_NEWEST = "~"


class SqliteRecords:
    """Job, run and notice rows; every change is one transaction."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def create_job(self, job: Job, notice: Notice, idempotency: IdempotencyRow | None) -> IdempotencyRow | None:
        now = self._clock.now()
        return await self._database.write(lambda db: insert_job(db, now, job, notice, idempotency))

    async def idempotency(self, tenant: TenantId, route: str, key: str) -> IdempotencyRow | None:
        now = self._clock.now()
        return await self._database.read(lambda db: find_idempotency(db, now, tenant, route, key))

    async def job(self, tenant: TenantId, job_id: JobId) -> Job | None:
        values = {"tenant": tenant, "job_id": job_id, "now": self._clock.now()}
        row = await self._database.row(SQL["job"], values)
        return _job(row) if row else None

    async def jobs(self, tenant: TenantId, cursor: str | None, limit: int) -> Page[Job]:
        values = {"tenant": tenant, "before": cursor or _NEWEST, "limit": limit + 1, "now": self._clock.now()}
        rows = await self._database.rows(SQL["jobs"], values)
        items = [_job(row) for row in rows[:limit]]
        return Page(items, items[-1].job_id if len(rows) > limit else None)

    async def active_jobs(self) -> list[Job]:
        values = {"now": self._clock.now()}
        rows = await self._database.rows(SQL["active_jobs"], values)
        return [_job(row) for row in rows]

    async def run(self, job_id: JobId, run_id: RunId) -> Run | None:
        return await self._database.read(lambda db: _find_run(db, job_id, run_id))

    async def set_total(self, job_id: JobId, run_id: RunId, total: int) -> None:
        values = {"job_id": job_id, "run_id": run_id, "total": total}
        await self._database.change(SQL["set_total"], values)

    async def latch(self, job_id: JobId, run_id: RunId) -> Run | None:
        values = {"job_id": job_id, "run_id": run_id}

        def work(db: apsw.Connection) -> Run | None:
            db.execute(SQL["latch"], values)
            db.execute(SQL["show_run_state"], values)
            return _find_run(db, job_id, run_id)

        return await self._database.write(work)

    async def checkpoint(self, job_id: JobId, run_id: RunId, at: Checkpoint, fence: int) -> bool:
        values = {"job_id": job_id, "run_id": run_id, "fence": fence, **msgspec.structs.asdict(at)}

        def work(db: apsw.Connection) -> bool:
            db.execute(SQL["checkpoint"], values)
            if db.changes() == 0:
                return False
            db.execute(SQL["show_progress"], values)
            return True

        return await self._database.write(work)

    async def checkpointed(self, run_id: RunId) -> Checkpoint | None:
        row = await self._database.row(SQL["checkpointed"], {"run_id": run_id})
        return Checkpoint(*row) if row else None

    async def move_run(
        self,
        job_id: JobId,
        run_id: RunId,
        sources: Collection[RunState],
        target: RunState,
        reason: str | None,
        notice: Notice | None,
    ) -> bool:
        values = {
            "job_id": job_id,
            "run_id": run_id,
            "sources": msgspec.json.encode(sorted(sources)).decode(),
            "target": target,
            "reason": reason,
            "ended_at": self._clock.now() if target in ENDED else None,
        }

        def work(db: apsw.Connection) -> bool:
            db.execute(SQL["move_run"], values)
            if db.changes() == 0:
                return False
            db.execute(SQL["move_job"], values)
            if notice is not None:
                _insert_notice(db, notice)
            return True

        return await self._database.write(work)

    async def ended_unswept(self, limit: int) -> list[Job]:
        return [_job(row) for row in await self._database.rows(SQL["ended_unswept"], {"limit": limit})]

    async def mark_swept(self, job_id: JobId, run_id: RunId) -> None:
        await self._database.change(SQL["mark_swept"], {"job_id": job_id, "run_id": run_id})

    async def notices(self, tenant: TenantId, job_id: JobId, cursor: str | None, limit: int) -> Page[Event]:
        values = {"tenant": tenant, "job_id": job_id, "after": after(cursor), "limit": limit + 1}
        rows = await self._database.rows(SQL["notices"], values)
        return events_page(rows, limit)

    async def create_key(self, key: ApiKey) -> None:
        values = msgspec.structs.asdict(key)
        await self._database.change(SQL["insert_key"], values)

    async def key(self, key_id: str) -> ApiKey | None:
        row = await self._database.row(SQL["key"], {"key_id": key_id})
        return ApiKey(*row) if row else None

    async def keys(self, tenant: TenantId | None) -> list[ApiKey]:
        rows = await self._database.rows(SQL["keys"], {"tenant": tenant})
        return [ApiKey(*row) for row in rows]

    async def revoke_key(self, key_id: str, at: float) -> bool:
        def work(db: apsw.Connection) -> bool:
            known = db.execute(SQL["key"], {"key_id": key_id}).fetchone() is not None
            db.execute(SQL["revoke_key"], {"key_id": key_id, "at": at})
            return known

        return await self._database.write(work)


def insert_job(
    db: apsw.Connection, now: float, job: Job, notice: Notice, idempotency: IdempotencyRow | None
) -> IdempotencyRow | None:
    """Part of a transaction: the job with its run and notice, unless its idempotency key is taken."""
    if idempotency is not None:
        taken = find_idempotency(db, now, idempotency.tenant, idempotency.route, idempotency.key)
        if taken is not None:
            return taken
        db.execute(SQL["insert_idempotency"], msgspec.structs.asdict(idempotency))
    db.execute(
        SQL["insert_job"],
        {
            **msgspec.structs.asdict(job),
            "options": msgspec.json.encode(job.options).decode(),
            "run_id": job.run.run_id,
        },
    )
    db.execute(SQL["insert_run"], {**msgspec.structs.asdict(job.run), "job_id": job.job_id})
    _insert_notice(db, notice)
    return None


def find_idempotency(db: apsw.Connection, now: float, tenant: TenantId, route: str, key: str) -> IdempotencyRow | None:
    values = {"tenant": tenant, "route": route, "key": key, "now": now}
    row = db.execute(SQL["idempotency"], values).fetchone()
    return IdempotencyRow(*cast(Any, row)) if row else None


def after(cursor: str | None) -> int:
    """The sequence number in an event cursor."""
    if cursor is None:
        return 0
    if not cursor.isascii() or not cursor.isdigit() or len(cursor) > 18:
        raise BadCursor
    return int(cursor)


def events_page(rows: list[Any], limit: int) -> Page[Event]:
    items = [
        Event(seq, at, event, run_id, index, msgspec.json.decode(data))
        for seq, at, event, run_id, index, data in rows[:limit]
    ]
    return Page(items, str(items[-1].seq) if len(rows) > limit else None)


def _insert_notice(db: apsw.Connection, notice: Notice) -> None:
    values = {**msgspec.structs.asdict(notice), "data": msgspec.json.encode(notice.data).decode()}
    db.execute(SQL["insert_notice"], values)


def _find_run(db: apsw.Connection, job_id: JobId, run_id: RunId) -> Run | None:
    row = db.execute(SQL["run"], {"job_id": job_id, "run_id": run_id}).fetchone()
    return _run(row) if row else None


def _run(row: Any) -> Run:
    run_id, number, state, total, last_batch, created_at, ended_at = row
    return Run(run_id, number, RunState(state), total, bool(last_batch), created_at, ended_at)


def _job(row: Any) -> Job:
    tenant, job_id, name, kind, mode, options, shards, layout, state, reason, created_at, expires_at = row[:12]
    return Job(
        tenant=tenant,
        job_id=job_id,
        name=name,
        kind=JobKind(kind),
        mode=mode,
        options=_options.decode(options),
        task_shard_count=shards,
        result_layout=ResultLayout(layout),
        state=RunState(state),
        reason=reason,
        created_at=created_at,
        expires_at=expires_at,
        run=_run(row[12:19]),
        source=row[19],
    )
