"""Tasks on SQLite. One statement takes a batch as one JSON value."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import apsw
import msgspec

from conveyor.engines.sqlite.database import SqliteDatabase, named_queries
from conveyor.engines.sqlite.events import after as after_seq
from conveyor.engines.sqlite.events import events_page
from conveyor.engines.sqlite.seed_rows import SeedPart, seed_part
from conveyor.engines.sqlite.slabs import index_of, next_keys, sort_key
from conveyor.engines.tasks import (
    FEW_FAILED,
    MAX_CODES,
    MAX_SCANNED,
    Finished,
    Scanned,
    TaskEvent,
    TaskFilter,
    Walked,
    page_by_scans,
)
from conveyor.faults import crashpoint
from conveyor.model import (
    Counts,
    EventRecord,
    Page,
    Replaced,
    ResultDetail,
    RunId,
    RunKey,
    Task,
    TaskEnd,
    TaskId,
    TaskSeed,
    TenantId,
    count_ends,
    count_replaced,
    is_task_id,
    shard_of,
    task_id,
)
from conveyor.states import TaskStatus

SQL = named_queries("tasks.sql")

# Above every sort key and every index.
_BEYOND = 1 << 62

# At most a millisecond of work.
_ROWS_IN_ONE_STEP = 400
# Tasks that are looked up on the event loop, in one call: those of one message.
_READ_ON_LOOP = 100
# Tasks between them that a look at neighbours reads, too.
_MOST_BETWEEN = 32

_encode = msgspec.json.encode
_indexes = msgspec.json.Decoder(list[int])
_decode_detail = msgspec.json.Decoder(ResultDetail).decode
_NO_DETAIL = ResultDetail()
# By value: a call of the enumeration would take longer than all else of a small row.
_STATUSES = list(TaskStatus)


class SqliteTasks:
    """Tasks, their counts and their events."""

    inline_bytes = 2048

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database
        # The number of a run never changes, so it is cached.
        self._numbers: dict[tuple[TenantId, RunId], int] = {}
        # The numbers of reruns, whose tasks have earlier outcomes.
        self._reruns: set[int] = set()
        # Where the cancellation of a run's pending tasks stopped, so that the next call resumes there.
        self._cancelled: dict[tuple[TenantId, RunId], int] = {}

    async def put(self, run: RunKey, seeds: Sequence[TaskSeed]) -> None:
        if not seeds:
            return
        parts: list[SeedPart] = []
        for start in range(0, len(seeds), _ROWS_IN_ONE_STEP):
            if start:
                await asyncio.sleep(0)
            parts.append(seed_part(run, seeds[start : start + _ROWS_IN_ONE_STEP]))
        crashpoint("tasks.put.before")
        await self._database.write(lambda db: _put(db, run, parts))
        crashpoint("tasks.put.after")

    async def unfinished(self, run: RunKey, indexes: Sequence[int]) -> frozenset[int]:
        if len(indexes) <= _READ_ON_LOOP and (run.tenant, run.run_id) not in self._numbers:
            return self._unfinished_of(run, indexes)
        number = await self._number(run)
        if number is None:
            return frozenset()
        if len(indexes) <= _READ_ON_LOOP:
            return self._few_unfinished(number, indexes)
        values = {"run_no": number, "indexes": _encode(list(indexes)).decode()}
        return await self._database.read(lambda db: _unfinished(db, values))

    def _few_unfinished(self, number: int, indexes: Sequence[int]) -> frozenset[int]:
        if not indexes:
            return frozenset()
        first, last = min(indexes), max(indexes)
        if last - first >= len(indexes) + _MOST_BETWEEN:
            values = {"run_no": number, "indexes": _encode(list(indexes)).decode()}
            return frozenset(_indexes.decode(self._database.read_one(SQL["unfinished"], values)[0]))
        bounds = {"run_no": number, "first": first, "last": last}
        found = _indexes.decode(self._database.read_one(SQL["unfinished_between"], bounds)[0])
        return frozenset(indexes).intersection(found)

    def _unfinished_of(self, run: RunKey, indexes: Sequence[int]) -> frozenset[int]:
        """The first look at a run: one read for its number, too."""
        values = {"run_id": run.run_id, "tenant": run.tenant, "indexes": _encode(list(indexes)).decode()}
        row = self._database.read_one(SQL["unfinished_of"], values)
        if row is None:
            return frozenset()
        number, is_rerun, live = row
        self._note_number(run, number, is_rerun)
        return frozenset(_indexes.decode(live))

    async def finish(self, run: RunKey, ends: Sequence[TaskEnd]) -> Finished:
        number = await self._number(run)
        if number is None:
            return Finished(frozenset(), Counts())
        crashpoint("tasks.finish.before")
        is_rerun = number in self._reruns
        finished = await self._database.write(lambda db: _finish(db, number, ends, is_rerun))
        crashpoint("tasks.finish.after")
        return finished

    async def cancel_pending(self, run: RunKey, limit: int, at: float) -> int:
        number = await self._number(run)
        if number is None:
            return 0

        known = (run.tenant, run.run_id)
        start = self._cancelled.pop(known, 0)
        while True:
            # A reader searches: in the writer thread, the search would delay all writes.
            values = {"run_no": number, "start": start, "limit": limit}
            pending = [row[0] for row in await self._database.rows(SQL["pending"], values)]
            if not pending and start == 0:
                return 0
            moved = await self._cancel(number, pending, at) if pending else 0
            # Start over once at the end: tasks may have been written behind the position.
            start = pending[-1] + 1 if pending else 0
            if moved:
                self._cancelled[known] = start
                return moved

    async def _cancel(self, number: int, indexes: Sequence[int], at: float) -> int:
        values = {"run_no": number, "indexes": _encode(indexes).decode(), "at": at}

        def work(db: apsw.Connection) -> int:
            db.execute(SQL["cancel"], values)
            moved: int = db.changes()
            _count(db, number, Counts(cancelled=moved))
            return moved

        return await self._database.write(work)

    async def counts(self, run: RunKey) -> Counts:
        number = await self._number(run)
        if number is None:
            return Counts()
        row = self._database.read_one(SQL["counts"], {"run_no": number})
        return Counts(*row) if row else Counts()

    async def recount(self, run: RunKey) -> Counts:
        number = await self._number(run)
        if number is None:
            return Counts()

        def look(db: apsw.Connection) -> tuple[list[int], list[int]]:
            kept, *truth = _row(db, SQL["recount"], {"run_no": number})
            return _indexes.decode(kept or "[]"), truth

        def mend(db: apsw.Connection) -> list[int]:
            _, truth = look(db)
            db.execute(SQL["set_counts"], {"run_no": number, **{f"c{at}": count for at, count in enumerate(truth)}})
            return truth

        kept, truth = await self._database.read(look)
        right = truth if kept == truth else await self._database.write(mend)
        return Counts(*right[:4])

    async def replaced(self, run: RunKey) -> Replaced:
        number = await self._number(run)
        if number is None or number not in self._reruns:
            return Replaced()
        row = await self._database.read(lambda db: db.execute(SQL["replaced"], {"run_no": number}).fetchone())
        codes = await self._database.rows(SQL["replaced_codes"], {"run_no": number, "limit": MAX_CODES})
        return Replaced(Counts(*row) if row else Counts(), dict(codes))

    async def error_codes(self, run: RunKey, limit: int) -> list[tuple[str, int]]:
        number = await self._number(run)
        if number is None:
            return []
        values = {"run_no": number, "limit": limit}
        rows = await self._database.rows(SQL["error_codes"], values)
        return [(code, count) for code, count in rows]

    async def task(self, run: RunKey, task_id: TaskId) -> Task | None:
        number = await self._number(run)
        if number is None or not is_task_id(task_id):
            return None
        shard = shard_of(task_id, run.shard_count)

        def work(db: apsw.Connection) -> list[Any]:
            index = index_of(db, run, number, shard, task_id)
            wanted = {"run_no": number, "indexes": _encode([] if index is None else [index]).decode()}
            return db.execute(SQL["at"], wanted).fetchall()

        rows = await self._database.read(work)
        return _task(run.run_id, rows[0]) if rows else None

    async def at(self, run: RunKey, indexes: Sequence[int]) -> list[Task]:
        number = await self._number(run)
        if number is None:
            return []
        values = {"run_no": number, "indexes": _encode(list(indexes)).decode()}
        return await _tasks(run.run_id, await self._database.rows(SQL["at"], values))

    async def page(self, run: RunKey, shard: int, after: TaskId | None, limit: int, where: TaskFilter) -> list[Task]:
        return await page_by_scans(self, run, shard, after, limit, where)

    async def scan(self, run: RunKey, shard: int, after: TaskId | None, limit: int, where: TaskFilter) -> Scanned:
        number = await self._number(run)
        if number is None:
            return Scanned([], None)
        scan = _scan_failed if where.status == TaskStatus.FAILED else _scan
        rows, last = await self._database.read(lambda db: scan(db, run, number, shard, after, limit, where))
        return Scanned(await _tasks(run.run_id, rows), None if last is None else task_id(run.run_id, last))

    async def walk(self, run: RunKey, after: int, limit: int, where: TaskFilter) -> Walked:
        number = await self._number(run)
        if number is None:
            return Walked([], 0, None)
        values = {"run_no": number, "after": after, "limit": limit, **msgspec.structs.asdict(where)}

        def work(db: apsw.Connection) -> tuple[list[Any], int, int | None]:
            if where == TaskFilter():
                rows: list[Any] = db.execute(SQL["walk_all"], values).fetchall()
                return rows, len(rows), rows[-1][0] if len(rows) == limit else None
            if where.status == TaskStatus.FAILED and _are_few_failed(db, number):
                return _walk_failed(db, values)
            read, last = _row(db, SQL["stretch"], values)
            rows = db.execute(SQL["walk"], {**values, "last": last}).fetchall() if read else []
            return rows, read, last if read == limit else None

        rows, read, last = await self._database.read(work)
        return Walked(await _tasks(run.run_id, rows), read, last)

    async def note(self, run: RunKey, events: Sequence[TaskEvent]) -> None:
        number = await self._number(run)
        if number is not None:
            values = {"run_no": number, "events": _encode(events).decode()}
            await self._database.change(SQL["note"], values)

    async def events(self, run: RunKey, task_id: TaskId | None, cursor: str | None, limit: int) -> Page[EventRecord]:
        values = {"run_id": run.run_id, "after": after_seq(cursor), "limit": limit + 1}
        values["run_no"] = await self._number(run)
        query = "events"
        if task_id is not None:
            task = await self.task(run, task_id)
            values["idx"] = task.index if task else None
            query = "events_of_task"
        rows = await self._database.rows(SQL[query], values)
        return events_page(rows, limit)

    async def delete(self, run: RunKey, limit: int) -> int:
        number = await self._number(run)
        if number is None:
            return 0

        def work(db: apsw.Connection) -> int:
            gone = 0
            for query in ("delete_tasks", "delete_events"):
                db.execute(SQL[query], {"run_no": number, "limit": limit - gone})
                gone += db.changes()
            if gone == 0:
                db.execute(SQL["delete_errors"], {"run_no": number})
                db.execute(SQL["delete_run_no"], {"run_no": number})
            return gone

        gone = await self._database.write(work)
        if gone == 0:
            self._reruns.discard(self._numbers.pop((run.tenant, run.run_id), -1))
        return gone

    async def _number(self, run: RunKey) -> int | None:
        known = (run.tenant, run.run_id)
        number = self._numbers.get(known)
        if number is None:
            row = self._database.read_one(SQL["run_no"], {"run_id": run.run_id, "tenant": run.tenant})
            if row is not None:
                number = row[0]
                self._note_number(run, *row)
        return number

    def _note_number(self, run: RunKey, number: int, is_rerun: int) -> None:
        self._numbers[run.tenant, run.run_id] = number
        if is_rerun:
            self._reruns.add(number)


def _put(db: apsw.Connection, run: RunKey, parts: Sequence[SeedPart]) -> None:
    pending = _find_run(db, run)
    if pending is None:
        is_rerun = any(part.is_rerun for part in parts)
        values = {"run_id": run.run_id, "tenant": run.tenant, "rerun": is_rerun}
        pending = _row(db, SQL["insert_run_no"], values)
    for part in parts:
        db.execute(SQL[part.query], {"run_no": pending[0], **part.values})


def _row(db: apsw.Connection, query: str, values: dict[str, Any]) -> Any:
    row = db.execute(query, values).fetchone()
    assert row is not None
    return row


def _find_run(db: apsw.Connection, run: RunKey) -> Any:
    """The number of the run, and whether it is a rerun; None for an unknown run."""
    return db.execute(SQL["run_no"], {"run_id": run.run_id, "tenant": run.tenant}).fetchone()


def _unfinished(db: apsw.Connection, values: dict[str, Any]) -> frozenset[int]:
    return frozenset(_indexes.decode(_row(db, SQL["unfinished"], values)[0]))


def _finish(db: apsw.Connection, number: int, ends: Sequence[TaskEnd], is_rerun: bool) -> Finished:
    # If a batch finishes a task twice, the first outcome must win; the update would keep the last.
    first = {end.index: end for end in reversed(ends)}
    live = _unfinished(db, {"run_no": number, "indexes": _encode(list(first)).decode()})
    moving = [end for end in first.values() if end.index in live]
    db.execute(SQL["finish"], {"run_no": number, "ends": _encode(moving).decode()})
    assert db.changes() == len(moving)
    codes = Counter(end.error_code for end in moving if end.status == TaskStatus.FAILED and end.error_code)
    if codes:
        db.execute(SQL["count_errors"], {"run_no": number, "counts": _encode(codes).decode()})
    if is_rerun:
        count_replaced_outcomes(db, number, moving)
    return Finished(live, _count(db, number, count_ends(moving)))


def count_replaced_outcomes(db: apsw.Connection, number: int, moving: Sequence[TaskEnd]) -> None:
    """Part of a transaction: count the earlier outcomes that these ends of a rerun replace."""
    indexes = _encode([end.index for end in moving]).decode()
    rows: list[Any] = db.execute(SQL["priors"], {"run_no": number, "indexes": indexes}).fetchall()
    priors: dict[int, str | None] = dict(rows)
    replaced = count_replaced((end.status, priors.get(end.index)) for end in moving)
    db.execute(SQL["count_replaced"], {"run_no": number, **msgspec.structs.asdict(replaced.counts)})
    if replaced.codes:
        db.execute(SQL["count_replaced_errors"], {"run_no": number, "counts": _encode(replaced.codes).decode()})


def _count(db: apsw.Connection, number: int, more: Counts) -> Counts:
    row = db.execute(SQL["count"], {"run_no": number, **msgspec.structs.asdict(more)}).fetchone()
    # A late writer: the run was deleted after the lookup of its number, and no task moved.
    return Counts(*row) if row else Counts()


def _scan(
    db: apsw.Connection, run: RunKey, number: int, shard: int, after: TaskId | None, limit: int, where: TaskFilter
) -> tuple[list[Any], int | None]:
    """The rows that match, and the index of the last one that was read; None if no row follows."""
    most = limit if where == TaskFilter() else MAX_SCANNED
    indexes = [index for _, index in next_keys(db, run, number, shard, after, most)]
    values = {"run_no": number, "limit": limit, "indexes": _encode(indexes).decode(), **msgspec.structs.asdict(where)}
    rows: list[Any] = db.execute(SQL["page"], values).fetchall()
    if len(rows) == limit:
        return rows, rows[-1][0]
    return rows, indexes[-1] if len(indexes) == most else None


def _scan_failed(
    db: apsw.Connection, run: RunKey, number: int, shard: int, after: TaskId | None, limit: int, where: TaskFilter
) -> tuple[list[Any], int | None]:
    """As `_scan`. Failed tasks have an index of their own, over all slabs."""
    values = {"run_no": number, "shard": shard, "limit": limit, "rows": MAX_SCANNED, **msgspec.structs.asdict(where)}
    values["after_key"] = -1 if after is None else sort_key(after)
    values["after_idx"] = -1
    if after is not None:
        index = index_of(db, run, number, shard, after)
        # A deleted task counts as the last of those that share its sort key.
        values["after_idx"] = _BEYOND if index is None else index
    end = db.execute(SQL["scan_end_failed"], values).fetchone()
    values["last_key"], values["last_idx"] = end or (_BEYOND, _BEYOND)
    rows: list[Any] = db.execute(SQL["page_failed"], values).fetchall()
    if len(rows) == limit:
        return rows, rows[-1][0]
    return rows, None if end is None else end[1]


def _are_few_failed(db: apsw.Connection, number: int) -> bool:
    row = db.execute(SQL["counts"], {"run_no": number}).fetchone()
    return row is not None and Counts(*row).failed <= FEW_FAILED


def _walk_failed(db: apsw.Connection, values: dict[str, Any]) -> tuple[list[Any], int, int | None]:
    """The failed tasks among the next rows, their number, and the last index; None if no failed task follows."""
    found: list[Any] = db.execute(SQL["next_failed"], values).fetchall()
    indexes = [index for (index,) in found]
    rows: list[Any] = db.execute(SQL["page"], {**values, "indexes": _encode(indexes).decode()}).fetchall()
    return rows, len(indexes), indexes[-1] if len(indexes) == values["limit"] else None


async def _tasks(run_id: RunId, rows: list[Any]) -> list[Task]:
    """The tasks of these rows. Many take milliseconds, so that others run in between."""
    tasks: list[Task] = []
    for start in range(0, len(rows), _ROWS_IN_ONE_STEP):
        if start:
            await asyncio.sleep(0)
        tasks += [_task(run_id, row) for row in rows[start : start + _ROWS_IN_ONE_STEP]]
    return tasks


def _task(run_id: RunId, row: Any) -> Task:
    index, text, status, attempts, http_status, error_code, detail, finished_at = row
    return Task(
        task_id(run_id, index),
        index,
        msgspec.Raw(text.encode()),
        _STATUSES[status],
        attempts,
        http_status,
        error_code,
        _decode_detail(detail) if detail else _NO_DETAIL,
        finished_at,
    )
