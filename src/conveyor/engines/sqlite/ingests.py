"""Ranges of lists, and their checkpoints, on SQLite."""

from collections.abc import Sequence
from typing import Any

import apsw
import msgspec

from conveyor.clock import Clock
from conveyor.engines.ingest_sums import IngestSums, change_of, sums_of
from conveyor.engines.records import IdempotencyClaim
from conveyor.engines.sqlite.access import answer_claim, answered
from conveyor.engines.sqlite.database import SqliteDatabase, named_queries
from conveyor.model import Compression, Ingested, JobId, ListFormat, Range, RunId, Source

SQL = named_queries("ingests.sql")

_range = msgspec.json.Decoder(Range)


class SqliteIngests:
    """IngestRecords."""

    def __init__(self, database: SqliteDatabase, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def split(self, job_id: JobId, run_id: RunId, ranges: Sequence[Range]) -> bool:
        def work(db: apsw.Connection) -> bool:
            db.execute(SQL["seal_run"], {"job_id": job_id, "run_id": run_id, "touched_at": None, "reason_code": None})
            if db.changes() == 0:
                return False
            for span in ranges:
                _insert(db, run_id, span)
            _add(db, run_id, sums_of(*ranges))
            return True

        return await self._database.write(work)

    async def append_range(
        self,
        job_id: JobId,
        run_id: RunId,
        source: Source,
        lines: int,
        answer: IdempotencyClaim | None,
        seal: bool,
    ) -> Range | IdempotencyClaim | None:
        values = {"job_id": job_id, "run_id": run_id, "lines": lines, "seal": seal, "now": self._clock.now()}

        def work(db: apsw.Connection) -> Range | IdempotencyClaim | None:
            if db.execute(SQL["takes_more"], values).fetchone() is None:
                # Another process may have taken over the claim of this very request and sealed the run.
                return answered(db, answer)
            standing = answer_claim(db, answer)
            if standing is not None:
                return standing
            row: Any = db.execute(SQL["allocate"], values).fetchone()
            number: Any = db.execute(SQL["next_number"], values).fetchone()
            span = Range(
                number=number[0],
                source=source,
                format=ListFormat.JSONL,
                compression=Compression.NONE,
                start=0,
                end=None,
                first_index=row[0],
                index=row[0],
            )
            _insert(db, run_id, span)
            _add(db, run_id, sums_of(span))
            return span

        return await self._database.write(work)

    async def ranges(self, run_id: RunId) -> list[Range]:
        rows = await self._database.rows(SQL["ranges"], {"run_id": run_id})
        return [_shown(row) for row in rows]

    async def range(self, run_id: RunId, number: int) -> Range | None:
        row = self._database.read_one(SQL["range"], {"run_id": run_id, "number": number})
        return _shown(row) if row else None

    async def ingested(self, run_id: RunId) -> Ingested:
        row = self._database.read_one(SQL["ingested"], {"run_id": run_id})
        return (IngestSums(*row) if row else IngestSums()).ingested

    async def checkpoint(self, run_id: RunId, range: Range, fence: int) -> bool:
        values = {**_progress(range), "run_id": run_id, "fence": fence}

        def work(db: apsw.Connection) -> bool:
            stored = db.execute(SQL["range"], values).fetchone()
            db.execute(SQL["checkpoint"], values)
            if stored is None or db.changes() == 0:
                return False
            _add(db, run_id, change_of(_shown(stored), range))
            return True

        return await self._database.write(work)

    async def seal(
        self,
        job_id: JobId,
        run_id: RunId,
        reason: str | None,
        *,
        touched_at: float | None = None,
        code: str | None = None,
    ) -> bool:
        values = {"job_id": job_id, "run_id": run_id, "reason": reason, "reason_code": code, "touched_at": touched_at}

        def work(db: apsw.Connection) -> bool:
            db.execute(SQL["seal_run"], values)
            if db.changes() == 0:
                return False
            db.execute(SQL["seal_job"], values)
            return True

        return await self._database.write(work)


def _insert(db: apsw.Connection, run_id: RunId, span: Range) -> None:
    values = {**_progress(span), "run_id": run_id, "plan": msgspec.json.encode(span).decode()}
    db.execute(SQL["insert_range"], values)


def _add(db: apsw.Connection, run_id: RunId, sums: IngestSums) -> None:
    db.execute(SQL["add_sums"], {**msgspec.structs.asdict(sums), "run_id": run_id})


def _progress(span: Range) -> dict[str, Any]:
    return {
        "number": span.number,
        "index": span.index,
        "offset": span.offset,
        "tasks": span.tasks,
        "invalid": span.invalid,
        "done": span.done,
    }


def _shown(row: Any) -> Range:
    _, plan, index, offset, tasks, invalid, done = row
    return msgspec.structs.replace(
        _range.decode(plan), index=index, offset=offset, tasks=tasks, invalid=invalid, done=bool(done)
    )
