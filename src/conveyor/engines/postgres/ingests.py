"""Ranges of lists, and their checkpoints, on Postgres."""

from collections.abc import Sequence
from typing import Any

import msgspec

from conveyor.clock import Clock
from conveyor.engines.ingest_sums import IngestSums, change_of, sums_of
from conveyor.engines.postgres.access import answer_claim, answered
from conveyor.engines.postgres.database import PostgresDatabase, PostgresSession
from conveyor.engines.postgres.queries import named_queries
from conveyor.engines.records import IdempotencyClaim
from conveyor.model import Compression, Ingested, JobId, ListFormat, Range, RunId, Source

SQL = named_queries("ingests.sql")

_range = msgspec.json.Decoder(Range)


class PostgresIngests:
    """IngestRecords."""

    def __init__(self, database: PostgresDatabase, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def split(self, job_id: JobId, run_id: RunId, ranges: Sequence[Range]) -> bool:
        values = {"job_id": job_id, "run_id": run_id, "touched_at": None, "reason_code": None}

        async def work(db: PostgresSession) -> bool:
            if await db.change(SQL["seal_run"], values) == 0:
                return db.again and await _ranges(db, run_id) == list(ranges)
            await _insert(db, run_id, ranges)
            await _add(db, run_id, sums_of(*ranges))
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

        async def work(db: PostgresSession) -> Range | IdempotencyClaim | None:
            if db.again:
                # Every batch has a staging key of its own.
                own = [span for span in await _ranges(db, run_id) if span.source == source]
                if own:
                    return own[-1]
            if await db.row(SQL["lock_open_run"], values) is None:
                # Another process may have taken over the claim of this very request and sealed the run.
                return await answered(db, answer)
            standing = await answer_claim(db, answer)
            if standing is not None:
                return standing
            first = await db.value(SQL["allocate"], values)
            span = Range(
                number=await db.value(SQL["next_number"], values),
                source=source,
                format=ListFormat.JSONL,
                compression=Compression.NONE,
                start=0,
                end=None,
                first_index=first,
                index=first,
            )
            await _insert(db, run_id, [span])
            await _add(db, run_id, sums_of(span))
            return span

        return await self._database.write(work)

    async def ranges(self, run_id: RunId) -> list[Range]:
        rows = await self._database.rows(SQL["ranges"], {"run_id": run_id})
        return [_shown(row) for row in rows]

    async def range(self, run_id: RunId, number: int) -> Range | None:
        row = await self._database.row(SQL["range"], {"run_id": run_id, "number": number})
        return _shown(row) if row else None

    async def ingested(self, run_id: RunId) -> Ingested:
        row = await self._database.row(SQL["ingested"], {"run_id": run_id})
        return (IngestSums(*row) if row else IngestSums()).ingested

    async def checkpoint(self, run_id: RunId, range: Range, fence: int) -> bool:
        values = {
            "run_id": run_id,
            "fence": fence,
            "number": range.number,
            "index": range.index,
            "offset": range.offset,
            "tasks": range.tasks,
            "invalid": range.invalid,
            "done": range.done,
        }

        async def work(db: PostgresSession) -> bool:
            if await db.row(SQL["lock_run"], values) is None:
                return False
            stored = await db.row(SQL["range"], values)
            if stored is None or await db.change(SQL["checkpoint"], values) == 0:
                return False
            await _add(db, run_id, change_of(_shown(stored), range))
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

        async def work(db: PostgresSession) -> bool:
            if await db.change(SQL["seal_run"], values) == 0:
                return db.again and await db.value(SQL["sealed_so"], values) is not None
            await db.change(SQL["seal_job"], values)
            return True

        return await self._database.write(work)


async def _ranges(db: PostgresSession, run_id: RunId) -> list[Range]:
    return [_shown(row) for row in await db.rows(SQL["ranges"], {"run_id": run_id})]


async def _insert(db: PostgresSession, run_id: RunId, ranges: Sequence[Range]) -> None:
    values = {
        "run_id": run_id,
        "numbers": [span.number for span in ranges],
        "plans": [msgspec.json.encode(span).decode() for span in ranges],
        "firsts": [span.start for span in ranges],
        "ends": [_known_end(span) for span in ranges],
        "indexes": [span.index for span in ranges],
        "offsets": [span.offset for span in ranges],
    }
    await db.change(SQL["insert_ranges"], values)


async def _add(db: PostgresSession, run_id: RunId, sums: IngestSums) -> None:
    await db.change(SQL["add_sums"], {**msgspec.structs.asdict(sums), "run_id": run_id})


def _known_end(span: Range) -> int | None:
    if span.end is not None:
        return span.end
    return span.source.size if span.compression is Compression.NONE else None


def _shown(row: Any) -> Range:
    _, plan, index, offset, tasks, invalid, done = row
    return msgspec.structs.replace(
        _range.decode(plan), index=index, offset=offset, tasks=tasks, invalid=invalid, done=done
    )
