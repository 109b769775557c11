"""Tasks on Postgres. COPY writes a batch of tasks; one insert finishes a batch.

A task is a row of `tasks` and never changes. Its outcome is a row of `ends`; the first one counts. Large runs have
tables of their own (tables.py).
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache, partial
from typing import Any, TypeVar

import msgspec

from conveyor.engines.postgres.database import PostgresDatabase, PostgresSession, already_there, table_gone
from conveyor.engines.postgres.events import after as after_seq
from conveyor.engines.postgres.events import events_page
from conveyor.engines.postgres.pages import RowStream, merged, united
from conveyor.engines.postgres.queries import Query, made_for, named_texts
from conveyor.engines.postgres.seeds import copy_tasks, highest, insert_tasks, sort_key
from conveyor.engines.postgres.tables import OWN_FROM, Numbered, drop_own, make_own, split
from conveyor.engines.tasks import (
    MAX_SCANNED,
    Finished,
    RunTally,
    Scanned,
    TaskEvent,
    TaskFilter,
    Walked,
    page_by_scans,
)
from conveyor.errors import EngineFailed
from conveyor.faults import crashpoint
from conveyor.model import (
    Counts,
    EventRecord,
    Page,
    ResultDetail,
    RunId,
    RunKey,
    Task,
    TaskEnd,
    TaskId,
    TaskSeed,
    TenantId,
    is_task_id,
    shard_of,
    task_id,
)
from conveyor.states import TaskStatus

SQL = named_texts("tasks.sql")

T = TypeVar("T")

_MOST_KNOWN = 10_000
# Above every sort key and every index.
_BEYOND = 1 << 62

_detail = msgspec.json.Decoder(ResultDetail)


class PostgresTasks:
    """Tasks, their outcomes, counts and events."""

    def __init__(self, database: PostgresDatabase, own_from: int = OWN_FROM) -> None:
        self._database = database
        self._own_from = own_from
        # A run's number never changes, and its own tables stay until it is deleted, so both are cached.
        self._known: dict[tuple[TenantId, RunId], Numbered] = {}
        # By table, the index up to which this process has cancelled all pending tasks.
        self._cancelled: dict[str, int] = {}

    async def put(self, run: RunKey, seeds: Sequence[TaskSeed]) -> None:
        if not seeds:
            return
        crashpoint("tasks.put.before")
        await self._persistently(run, lambda: self._put(run, seeds))
        crashpoint("tasks.put.after")

    async def _put(self, run: RunKey, seeds: Sequence[TaskSeed]) -> None:
        known = await self._find(run)
        if known is None or (not known.own and highest(seeds) >= self._own_from):
            known = await self._database.write(lambda db: self.number(db, run, seeds))
        one = known
        self._remember(run, one)
        try:
            await self._database.step(lambda db: copy_tasks(db, run, one, seeds))
        except EngineFailed as error:
            if not already_there(error):
                raise
            # An ingest that resumed after a crash: some tasks already exist.
            await self._database.write(lambda db: insert_tasks(db, run, one, seeds))

    async def unfinished(self, run: RunKey, indexes: Sequence[int]) -> frozenset[int]:
        async def work(one: Numbered) -> frozenset[int]:
            found: list[int] = []
            wanted = list(indexes)
            for suffix, part in split(one, wanted, wanted):
                values = {"run_no": one.number, "indexes": part}
                found += await self._database.value(made_for(SQL["unfinished"], suffix), values) or ()
            return frozenset(found)

        return await self._on(run, work, frozenset(), indexes)

    async def finish(self, run: RunKey, ends: Sequence[TaskEnd]) -> Finished:
        # If a batch finishes a task twice, the first outcome counts. In order of index, so that concurrent writers of
        # the same tasks do not deadlock.
        first = {end.index: end for end in reversed(ends)}
        ordered = [first[index] for index in sorted(first)]

        async def work(one: Numbered) -> Finished:
            crashpoint("tasks.finish.before")
            moved = await self._database.write(lambda db: _finish(db, one, ordered)) if ordered else frozenset()
            crashpoint("tasks.finish.after")
            # After the commit: of several concurrent writers of the last tasks, one sees all of them.
            return Finished(moved, await self._counts(one))

        return await self._on(run, work, Finished(frozenset(), Counts()), list(first))

    async def cancel_pending(self, run: RunKey, limit: int, at: float) -> int:
        async def work(one: Numbered) -> int:
            for suffix in one.suffixes:
                moved = await self._cancel(one, suffix, limit, at)
                if moved:
                    return moved
            return 0

        return await self._on(run, work, 0)

    async def _cancel(self, one: Numbered, suffix: str, limit: int, at: float) -> int:
        """Resume where the last call stopped, and search from the start before returning 0."""
        place = f"{one.number}{suffix}"
        while True:
            start = self._cancelled.pop(place, 0)
            values = {"run_no": one.number, "from": start, "limit": limit, "at": at}
            moved, last = await self._database.write(partial(_cancel, suffix=suffix, values=values))
            if last is not None and moved:
                _bounded(self._cancelled)[place] = last
            if moved or (last is None and start == 0):
                return moved

    async def counts(self, run: RunKey) -> Counts:
        return await self._on(run, self._counts, Counts(), ())

    async def _counts(self, one: Numbered) -> Counts:
        return Counts(*await self._database.row(made_for(SQL["counts"], ""), {"run_no": one.number}))

    async def recount(self, run: RunKey) -> Counts:
        async def work(one: Numbered) -> Counts:
            return await self._database.write(lambda db: _recount(db, one))

        return await self._on(run, work, Counts())

    async def error_codes(self, run: RunKey, limit: int) -> list[tuple[str, int]]:
        async def work(one: Numbered) -> list[tuple[str, int]]:
            values = {"run_no": one.number, "limit": limit}
            rows = await self._database.rows(made_for(SQL["error_codes"], ""), values)
            return [(code, count) for code, count in rows]

        return await self._on(run, work, [], ())

    async def task(self, run: RunKey, task_id: TaskId) -> Task | None:
        if not is_task_id(task_id):
            return None

        async def work(one: Numbered) -> Task | None:
            rows = await self._by_id(one, shard_of(task_id, run.shard_count), task_id)
            return next((task for task in (_task(run.run_id, row) for row in rows) if task.task_id == task_id), None)

        return await self._on(run, work, None)

    async def _by_id(self, one: Numbered, shard: int, task_id: TaskId) -> list[Any]:
        values = {"run_no": one.number, "shard": shard, "sort_key": sort_key(task_id)}
        return await self._database.rows(_over("task", one), values)

    async def at(self, run: RunKey, indexes: Sequence[int]) -> list[Task]:
        wanted = sorted(set(indexes))

        async def work(one: Numbered) -> list[Task]:
            found: list[Task] = []
            for suffix, part in split(one, wanted, wanted):
                values = {"run_no": one.number, "indexes": part}
                rows = await self._database.rows(made_for(SQL["at"], suffix), values)
                found += [_task(run.run_id, row) for row in rows]
            return found

        return await self._on(run, work, [], wanted)

    async def page(self, run: RunKey, shard: int, after: TaskId | None, limit: int, where: TaskFilter) -> list[Task]:
        return await page_by_scans(self, run, shard, after, limit, where)

    async def scan(self, run: RunKey, shard: int, after: TaskId | None, limit: int, where: TaskFilter) -> Scanned:
        async def work(one: Numbered) -> Scanned:
            values = {
                "run_no": one.number,
                "shard": shard,
                "limit": limit,
                "rows": MAX_SCANNED,
                "after_key": -1 if after is None else sort_key(after),
                "after_idx": -1 if after is None else await self._index_of(run, one, shard, after),
                **msgspec.structs.asdict(where),
            }
            failed = where.status == TaskStatus.FAILED
            end = None if where == TaskFilter() else await self._scan_end(one, failed, values)
            values["last_key"], values["last_idx"] = end or (_BEYOND, _BEYOND)
            text = SQL["page_failed" if failed else "page"]
            streams = [RowStream(self._database, made_for(text, suffix), values) for suffix in one.suffixes]
            tasks = [_task(run.run_id, row) for row in await merged(streams, limit)]
            if len(tasks) == limit:
                return Scanned(tasks, tasks[-1].task_id)
            return Scanned(tasks, None if end is None else task_id(run.run_id, end[1]))

        return await self._on(run, work, Scanned([], None))

    async def _scan_end(self, one: Numbered, failed: bool, values: dict[str, Any]) -> tuple[int, int] | None:
        """The last row of a scan, of the table whose rows are the densest; None if all tables end first."""
        text = SQL["scan_end_failed" if failed else "scan_end"]
        ends = [await self._database.row(made_for(text, suffix), values) for suffix in one.suffixes]
        return min(((row["sort_key"], row["idx"]) for row in ends if row is not None), default=None)

    async def _index_of(self, run: RunKey, one: Numbered, shard: int, after: TaskId) -> int:
        """The index of a cursor's task, for the rare tasks that share a sort key. A deleted task counts as the last."""
        rows = await self._by_id(one, shard, after)
        return next((row["idx"] for row in rows if task_id(run.run_id, row["idx"]) == after), 1 << 62)

    async def walk(self, run: RunKey, after: int, limit: int, where: TaskFilter) -> Walked:
        async def work(one: Numbered) -> Walked:
            """Read the shared tables, then the run's own, which hold the higher indexes."""
            found: list[Task] = []
            read, end = 0, after
            for suffix in one.suffixes:
                values = {"run_no": one.number, "after": end, "limit": limit - read, **msgspec.structs.asdict(where)}
                count, last = await self._database.row(made_for(SQL["stretch"], suffix), values)
                if count:
                    rows = await self._database.rows(made_for(SQL["walk"], suffix), {**values, "last": last})
                    found += [_task(run.run_id, row) for row in rows]
                    read, end = read + count, last
                if read == limit:
                    break
            return Walked(found, read, end if read == limit else None)

        return await self._on(run, work, Walked([], 0, None))

    async def note(self, run: RunKey, events: Sequence[TaskEvent]) -> None:
        indexes = [event.index for event in events]

        async def work(one: Numbered) -> None:
            for suffix, part in split(one, indexes, events):
                await self._database.step(partial(_note, one=one, suffix=suffix, events=part))

        if events:
            await self._on(run, work, None, indexes)

    async def copy_events(self, run: RunKey, events: Sequence[TaskEvent]) -> None:
        indexes = [event.index for event in events]

        async def work(one: Numbered) -> None:
            for suffix, part in split(one, indexes, events):
                await self._database.write(partial(_note, one=one, suffix=suffix, events=part, again=True))

        if events:
            await self._on(run, work, None, indexes)

    async def tally(self, run: RunKey) -> RunTally:
        async def work(one: Numbered) -> RunTally:
            rows = await self._database.rows(_over("tally", one), {"run_no": one.number})
            sums = [sum(row[place] for row in rows) for place in range(5)]
            return RunTally(sums[0], Counts(*sums[1:4]), sums[4])

        return await self._on(run, work, RunTally(0, Counts(), 0))

    async def events(self, run: RunKey, task_id: TaskId | None, cursor: str | None, limit: int) -> Page[EventRecord]:
        values: dict[str, Any] = {"run_id": run.run_id, "after": after_seq(cursor), "limit": limit + 1}
        name = "events"
        if task_id is not None:
            task = await self.task(run, task_id)
            if task is None:
                return Page([])
            values["idx"] = task.index
            name = "events_of_task"

        async def work(one: Numbered) -> Page[EventRecord]:
            values["run_no"] = one.number
            rows = await self._database.rows(_over(name, one, "ORDER BY seq LIMIT :limit"), values)
            return events_page(rows, limit)

        return await self._on(run, work, Page([]))

    async def delete(self, run: RunKey, limit: int) -> int:
        async def work(one: Numbered) -> int:
            gone = await self._database.write(lambda db: _delete(db, one, limit))
            if one.own or gone == 0:
                self._known.pop((run.tenant, run.run_id), None)
            return gone

        return await self._on(run, work, 0)

    async def _on(
        self,
        run: RunKey,
        work: Callable[[Numbered], Awaitable[T]],
        otherwise: T,
        indexes: Sequence[int] | None = None,
    ) -> T:
        """Run `work` on a known run. A cached entry is enough if the tasks with these indexes are in the shared
        tables."""

        async def once() -> T:
            one = self._known.get((run.tenant, run.run_id))
            if one is None or (not one.own and (indexes is None or max(indexes, default=0) >= self._own_from)):
                one = await self._find(run)
                if one is None:
                    return otherwise
                self._remember(run, one)
            return await work(one)

        return await self._persistently(run, once)

    async def _persistently(self, run: RunKey, once: Callable[[], Awaitable[T]]) -> T:
        """Retry with a fresh lookup: another process may have deleted and recreated the run."""
        try:
            return await once()
        except EngineFailed as error:
            if not table_gone(error):
                raise
            self._known.pop((run.tenant, run.run_id), None)
            return await once()

    async def _find(self, run: RunKey) -> Numbered | None:
        row = await self._database.row(made_for(SQL["run_no"], ""), {"run_id": run.run_id, "tenant": run.tenant})
        return Numbered(row["run_no"], row["own"], self._own_from) if row else None

    async def number(self, db: PostgresSession, run: RunKey, seeds: Sequence[TaskSeed]) -> Numbered:
        """Part of a transaction: the run's number. Creates the run's own tables if these tasks need them."""
        values = {"run_id": run.run_id, "tenant": run.tenant}
        await db.change(made_for(SQL["insert_run_no"], ""), values)
        number, own = await db.row(made_for(SQL["run_no"], ""), values)
        if not own and highest(seeds) >= self._own_from:
            await make_own(db, number)
            own = True
        return Numbered(number, own, self._own_from)

    def _remember(self, run: RunKey, one: Numbered) -> None:
        _bounded(self._known)[run.tenant, run.run_id] = one


async def _finish(db: PostgresSession, one: Numbered, ends: list[TaskEnd]) -> frozenset[int]:
    moved: list[int] = []
    own: list[int] = []
    for suffix, part in split(one, [end.index for end in ends], ends):
        values = {
            "run_no": one.number,
            "indexes": [end.index for end in part],
            "statuses": [end.status for end in part],
            "attempts": [end.attempts for end in part],
            "http_statuses": [end.http_status for end in part],
            "error_codes": [end.error_code for end in part],
            "details": [end.detail for end in part],
            "ats": [end.at for end in part],
        }
        if db.again:
            # An unanswered attempt moved and counted these.
            own += await db.value(made_for(SQL["finished_so"], suffix), values) or ()
        moved += await db.value(made_for(SQL["finish"], suffix), values) or ()
    now = set(moved)
    await _count(db, one, [end for end in ends if end.index in now])
    return frozenset(moved + own)


async def _count(db: PostgresSession, one: Numbered, ends: list[TaskEnd]) -> None:
    """Lock the counters: the last locks of a transaction, always in this order."""
    if not ends:
        return
    statuses = Counter(end.status for end in ends)
    await db.change(
        made_for(SQL["count"], ""),
        {
            "run_no": one.number,
            "succeeded": statuses[TaskStatus.SUCCEEDED],
            "failed": statuses[TaskStatus.FAILED],
            "cancelled": statuses[TaskStatus.CANCELLED],
        },
    )
    codes = Counter(end.error_code for end in ends if end.status == TaskStatus.FAILED and end.error_code)
    if codes:
        values = {"run_no": one.number, "codes": sorted(codes), "counts": [codes[code] for code in sorted(codes)]}
        await db.change(made_for(SQL["count_errors"], ""), values)


async def _cancel(db: PostgresSession, suffix: str, values: dict[str, Any]) -> tuple[int, int | None]:
    moved, last = await db.row(made_for(SQL["cancel_pending"], suffix), values)
    if moved:
        more = {"run_no": values["run_no"], "succeeded": 0, "failed": 0, "cancelled": moved}
        await db.change(made_for(SQL["count"], ""), more)
    return moved, last


async def _recount(db: PostgresSession, one: Numbered) -> Counts:
    values = {"run_no": one.number}
    # One at a time: two concurrent recounts would repair the same drift twice.
    await db.value(made_for(SQL["lock_counts"], ""), values)
    found = await db.row(_recount_query(tuple(one.suffixes)), values)
    truth, kept = Counts(*found[:3]), Counts(*found[3:])
    if truth != kept:
        drift = {name: getattr(truth, name) - getattr(kept, name) for name in Counts.__struct_fields__}
        await db.change(made_for(SQL["count"], ""), {**values, **drift})
    return truth


async def _note(db: PostgresSession, one: Numbered, suffix: str, events: list[TaskEvent], again: bool = False) -> None:
    values = {
        "run_no": one.number,
        "indexes": [event.index for event in events],
        "ats": [event.at for event in events],
        "events": [event.event for event in events],
        "datas": [event.data for event in events],
    }
    await db.change(made_for(SQL["note_again" if again or db.again else "note"], suffix), values)


async def _delete(db: PostgresSession, one: Numbered, limit: int) -> int:
    """Delete a bounded number of rows. Dropping the run's own tables counts as one call."""
    if one.own:
        await drop_own(db, one.number)
        return limit
    gone = 0
    for query in ("delete_tasks", "delete_ends", "delete_events"):
        if gone < limit:
            gone += await db.change(made_for(SQL[query], ""), {"run_no": one.number, "limit": limit - gone})
    if gone == 0:
        for query in ("delete_counts", "delete_errors", "delete_run_no"):
            await db.change(made_for(SQL[query], ""), {"run_no": one.number})
    return gone


def _over(name: str, one: Numbered, tail: str = "") -> Query:
    """A query over all tables of a run."""
    return united(SQL[name], tuple(one.suffixes), tail)


@lru_cache(maxsize=1024)
def _recount_query(suffixes: tuple[str, ...]) -> Query:
    ends = " UNION ALL ".join(SQL["ends_of"].replace("{own}", suffix) for suffix in suffixes)
    return made_for(SQL["recount"].replace("{all_ends}", ends), "")


def _bounded(known: dict[Any, T]) -> dict[Any, T]:
    """Bound the cache by dropping entries that can be looked up again."""
    if len(known) >= _MOST_KNOWN:
        known.clear()
    return known


def _task(run_id: RunId, row: Any) -> Task:
    _, index, text, status, attempts, http_status, error_code, detail, finished_at = row
    return Task(
        task_id=task_id(run_id, index),
        index=index,
        input=msgspec.Raw(text.encode()),
        status=TaskStatus(status or 0),
        attempts=attempts or 0,
        http_status=http_status,
        error_code=error_code,
        detail=_detail.decode(detail) if detail else ResultDetail(),
        finished_at=finished_at,
    )
