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
from conveyor.engines.postgres.run_reads import RunReads
from conveyor.engines.postgres.seeds import copy_tasks, highest, insert_tasks, sort_key
from conveyor.engines.postgres.tables import OWN_FROM, Numbered, drop_own, make_own, split
from conveyor.engines.tasks import (
    FEW_FAILED,
    MAX_CODES,
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

SQL = named_texts("tasks.sql")

T = TypeVar("T")

_MAX_KNOWN = 10_000
# Above every sort key and every index.
_BEYOND = 1 << 62

_detail = msgspec.json.Decoder(ResultDetail)


class PostgresTasks:
    """Tasks, their outcomes, counts and events."""

    inline_bytes = 2048

    def __init__(self, database: PostgresDatabase, own_from: int = OWN_FROM) -> None:
        self._database = database
        self._own_from = own_from
        self._reads = RunReads(database)
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
        home = known
        self._remember(run, home)
        try:
            await self._database.step(lambda db: copy_tasks(db, run, home, seeds))
        except EngineFailed as error:
            if not already_there(error):
                raise
            # An ingest that resumed after a crash: some tasks already exist.
            await self._database.write(lambda db: insert_tasks(db, run, home, seeds))

    async def unfinished(self, run: RunKey, indexes: Sequence[int]) -> frozenset[int]:
        async def work(home: Numbered) -> frozenset[int]:
            matches: list[int] = []
            wanted = list(indexes)
            for suffix, part in split(home, wanted, wanted):
                if not suffix:
                    matches += await self._reads.unfinished(home.number, part)
                    continue
                values = {"run_no": home.number, "indexes": part}
                matches += await self._database.value(made_for(SQL["unfinished"], suffix), values) or ()
            return frozenset(matches)

        return await self._on(run, work, frozenset(), indexes)

    async def finish(self, run: RunKey, ends: Sequence[TaskEnd]) -> Finished:
        # If a batch finishes a task twice, the first outcome counts. In order of index, so that concurrent writers of
        # the same tasks do not deadlock.
        first = {end.index: end for end in reversed(ends)}
        ordered = [first[index] for index in sorted(first)]

        async def work(home: Numbered) -> Finished:
            crashpoint("tasks.finish.before")
            moved = await self._database.write(lambda db: _finish(db, home, ordered)) if ordered else frozenset()
            crashpoint("tasks.finish.after")
            # After the commit: of several concurrent writers of the last tasks, one sees all of them.
            return Finished(moved, await self._counts(home))

        return await self._on(run, work, Finished(frozenset(), Counts()), list(first))

    async def cancel_pending(self, run: RunKey, limit: int, at: float) -> int:
        async def work(home: Numbered) -> int:
            for suffix in home.suffixes:
                moved = await self._cancel(home, suffix, limit, at)
                if moved:
                    return moved
            return 0

        return await self._on(run, work, 0)

    async def _cancel(self, home: Numbered, suffix: str, limit: int, at: float) -> int:
        """Resume where the last call stopped, and search from the start before returning 0."""
        place = f"{home.number}{suffix}"
        while True:
            start = self._cancelled.pop(place, 0)
            values = {"run_no": home.number, "from": start, "limit": limit, "at": at}
            moved, last = await self._database.write(partial(_cancel, suffix=suffix, values=values))
            if last is not None and moved:
                _bounded(self._cancelled)[place] = last
            if moved or (last is None and start == 0):
                return moved

    async def counts(self, run: RunKey) -> Counts:
        return await self._on(run, self._counts, Counts(), ())

    async def _counts(self, home: Numbered) -> Counts:
        return await self._reads.counts(home.number)

    async def recount(self, run: RunKey) -> Counts:
        async def work(home: Numbered) -> Counts:
            return await self._database.write(lambda db: _recount(db, home))

        return await self._on(run, work, Counts())

    async def replaced(self, run: RunKey) -> Replaced:
        async def work(home: Numbered) -> Replaced:
            if not home.rerun:
                return Replaced()
            row = await self._database.row(made_for(SQL["replaced"], ""), {"run_no": home.number})
            values = {"run_no": home.number, "limit": MAX_CODES}
            codes = await self._database.rows(made_for(SQL["replaced_codes"], ""), values)
            return Replaced(Counts(*row), dict(codes))

        return await self._on(run, work, Replaced(), ())

    async def error_codes(self, run: RunKey, limit: int) -> list[tuple[str, int]]:
        async def work(home: Numbered) -> list[tuple[str, int]]:
            values = {"run_no": home.number, "limit": limit}
            rows = await self._database.rows(made_for(SQL["error_codes"], ""), values)
            return [(code, count) for code, count in rows]

        return await self._on(run, work, [], ())

    async def task(self, run: RunKey, task_id: TaskId) -> Task | None:
        if not is_task_id(task_id):
            return None

        async def work(home: Numbered) -> Task | None:
            rows = await self._by_id(home, shard_of(task_id, run.shard_count), task_id)
            return next((task for task in (_task(run.run_id, row) for row in rows) if task.task_id == task_id), None)

        return await self._on(run, work, None)

    async def _by_id(self, home: Numbered, shard: int, task_id: TaskId) -> list[Any]:
        values = {"run_no": home.number, "shard": shard, "sort_key": sort_key(task_id)}
        return await self._database.rows(_over("task", home), values)

    async def at(self, run: RunKey, indexes: Sequence[int]) -> list[Task]:
        wanted = sorted(set(indexes))

        async def work(home: Numbered) -> list[Task]:
            matches: list[Task] = []
            for suffix, part in split(home, wanted, wanted):
                values = {"run_no": home.number, "indexes": part}
                rows = await self._database.rows(made_for(SQL["at"], suffix), values)
                matches += [_task(run.run_id, row) for row in rows]
            return matches

        return await self._on(run, work, [], wanted)

    async def page(self, run: RunKey, shard: int, after: TaskId | None, limit: int, where: TaskFilter) -> list[Task]:
        return await page_by_scans(self, run, shard, after, limit, where)

    async def scan(self, run: RunKey, shard: int, after: TaskId | None, limit: int, where: TaskFilter) -> Scanned:
        async def work(home: Numbered) -> Scanned:
            values = {
                "run_no": home.number,
                "shard": shard,
                "limit": limit,
                "rows": MAX_SCANNED,
                "after_key": -1 if after is None else sort_key(after),
                "after_idx": -1 if after is None else await self._index_of(run, home, shard, after),
                **msgspec.structs.asdict(where),
            }
            failed = where.status == TaskStatus.FAILED
            end = None if where == TaskFilter() else await self._scan_end(home, failed, values)
            values["last_key"], values["last_idx"] = end or (_BEYOND, _BEYOND)
            text = SQL["page_failed" if failed else "page"]
            streams = [RowStream(self._database, made_for(text, suffix), values) for suffix in home.suffixes]
            tasks = [_task(run.run_id, row) for row in await merged(streams, limit)]
            if len(tasks) == limit:
                return Scanned(tasks, tasks[-1].task_id)
            return Scanned(tasks, None if end is None else task_id(run.run_id, end[1]))

        return await self._on(run, work, Scanned([], None))

    async def _scan_end(self, home: Numbered, failed: bool, values: dict[str, Any]) -> tuple[int, int] | None:
        """The last row of a scan, of the table whose rows are the densest; None if all tables end first."""
        text = SQL["scan_end_failed" if failed else "scan_end"]
        ends = [await self._database.row(made_for(text, suffix), values) for suffix in home.suffixes]
        return min(((row["sort_key"], row["idx"]) for row in ends if row is not None), default=None)

    async def _index_of(self, run: RunKey, home: Numbered, shard: int, after: TaskId) -> int:
        """The index of a cursor's task, for the rare tasks that share a sort key. A deleted task counts as the last."""
        rows = await self._by_id(home, shard, after)
        return next((row["idx"] for row in rows if task_id(run.run_id, row["idx"]) == after), 1 << 62)

    async def walk(self, run: RunKey, after: int, limit: int, where: TaskFilter) -> Walked:
        async def work(home: Numbered) -> Walked:
            """Read the shared tables, then the run's own, which hold the higher indexes."""
            matches: list[Task] = []
            read, end = 0, after
            few_failed = where.status == TaskStatus.FAILED and (await self._counts(home)).failed <= FEW_FAILED
            for suffix in home.suffixes:
                values = {"run_no": home.number, "after": end, "limit": limit - read, **msgspec.structs.asdict(where)}
                if few_failed:
                    found = await self._database.rows(made_for(SQL["next_failed"], suffix), values)
                    values["indexes"] = [row["idx"] for row in found]
                    count, last = len(found), found[-1]["idx"] if found else end
                else:
                    count, last = await self._database.row(made_for(SQL["stretch"], suffix), values)
                if count:
                    text = SQL["walk_failed" if few_failed else "walk"]
                    rows = await self._database.rows(made_for(text, suffix), {**values, "last": last})
                    matches += [_task(run.run_id, row) for row in rows]
                    read, end = read + count, last
                if read == limit:
                    break
            return Walked(matches, read, end if read == limit else None)

        return await self._on(run, work, Walked([], 0, None))

    async def note(self, run: RunKey, events: Sequence[TaskEvent]) -> None:
        indexes = [event.index for event in events]

        async def work(home: Numbered) -> None:
            for suffix, part in split(home, indexes, events):
                await self._database.step(partial(_note, home=home, suffix=suffix, events=part))

        if events:
            await self._on(run, work, None, indexes)

    async def copy_events(self, run: RunKey, events: Sequence[TaskEvent]) -> None:
        indexes = [event.index for event in events]

        async def work(home: Numbered) -> None:
            for suffix, part in split(home, indexes, events):
                await self._database.write(partial(_note, home=home, suffix=suffix, events=part, again=True))

        if events:
            await self._on(run, work, None, indexes)

    async def tally(self, run: RunKey) -> RunTally:
        async def work(home: Numbered) -> RunTally:
            rows = await self._database.rows(_over("tally", home), {"run_no": home.number})
            sums = [sum(row[place] for row in rows) for place in range(6)]
            return RunTally(sums[0], Counts(*sums[1:5]), sums[5])

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

        async def work(home: Numbered) -> Page[EventRecord]:
            values["run_no"] = home.number
            rows = await self._database.rows(_over(name, home, "ORDER BY seq LIMIT :limit"), values)
            return events_page(rows, limit)

        return await self._on(run, work, Page([]))

    async def delete(self, run: RunKey, limit: int) -> int:
        async def work(home: Numbered) -> int:
            gone = await self._database.write(lambda db: _delete(db, home, limit))
            if home.own or gone == 0:
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
            home = self._known.get((run.tenant, run.run_id))
            if home is None or (not home.own and (indexes is None or max(indexes, default=0) >= self._own_from)):
                home = await self._find(run)
                if home is None:
                    return otherwise
                self._remember(run, home)
            return await work(home)

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
        row = await self._reads.find(run)
        return Numbered(row["run_no"], row["own"], self._own_from, row["rerun"]) if row else None

    async def number(self, db: PostgresSession, run: RunKey, seeds: Sequence[TaskSeed]) -> Numbered:
        """Part of a transaction: the run's number. Creates the run's own tables if these tasks need them."""
        values = {"run_id": run.run_id, "tenant": run.tenant, "rerun": any(seed.prior for seed in seeds)}
        await db.change(made_for(SQL["insert_run_no"], ""), values)
        number, own, rerun = await db.row(made_for(SQL["run_no"], ""), values)
        if not own and highest(seeds) >= self._own_from:
            await make_own(db, number)
            own = True
        return Numbered(number, own, self._own_from, rerun)

    def _remember(self, run: RunKey, home: Numbered) -> None:
        _bounded(self._known)[run.tenant, run.run_id] = home


async def _finish(db: PostgresSession, home: Numbered, ends: list[TaskEnd]) -> frozenset[int]:
    moved: list[int] = []
    own: list[int] = []
    for suffix, part in split(home, [end.index for end in ends], ends):
        values = {
            "run_no": home.number,
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
    counted = [end for end in ends if end.index in now]
    await _count(db, home, counted, await replaced_outcomes(db, home, counted) if home.rerun else Replaced())
    return frozenset(moved + own)


async def replaced_outcomes(db: PostgresSession, home: Numbered, ends: list[TaskEnd]) -> Replaced:
    """Part of a transaction: the earlier outcomes that these ends replace."""
    priors: dict[int, str | None] = {}
    indexes = [end.index for end in ends]
    for suffix, part in split(home, indexes, indexes):
        rows = await db.rows(made_for(SQL["priors"], suffix), {"run_no": home.number, "indexes": part})
        priors |= dict(rows)
    return count_replaced((end.status, priors.get(end.index)) for end in ends)


async def _count(db: PostgresSession, home: Numbered, ends: list[TaskEnd], replaced: Replaced) -> None:
    """Lock the counters: the last locks of a transaction, always in this order."""
    if not ends:
        return
    await db.change(made_for(SQL["count"], ""), _additions(home.number, count_ends(ends), replaced.counts))
    codes = Counter(end.error_code for end in ends if end.status == TaskStatus.FAILED and end.error_code)
    if codes or replaced.codes:
        names = sorted({*codes, *replaced.codes})
        values = {
            "run_no": home.number,
            "codes": names,
            "counts": [codes[code] for code in names],
            "replaced": [replaced.codes.get(code, 0) for code in names],
        }
        await db.change(made_for(SQL["count_errors"], ""), values)


def _additions(number: int, counts: Counts, replaced: Counts) -> dict[str, int]:
    """The parameters of the statement that adds to the stored counts."""
    by_name = msgspec.structs.asdict(replaced)
    return {
        "run_no": number,
        **msgspec.structs.asdict(counts),
        **{f"replaced_{name}": count for name, count in by_name.items()},
    }


async def _cancel(db: PostgresSession, suffix: str, values: dict[str, Any]) -> tuple[int, int | None]:
    moved, last = await db.row(made_for(SQL["cancel_pending"], suffix), values)
    if moved:
        more = _additions(values["run_no"], Counts(cancelled=moved), Counts())
        await db.change(made_for(SQL["count"], ""), more)
    return moved, last


async def _recount(db: PostgresSession, home: Numbered) -> Counts:
    values = {"run_no": home.number}
    # One at a time: two concurrent recounts would repair the same drift twice.
    await db.value(made_for(SQL["lock_counts"], ""), values)
    truth, drift = await _compare(db, home, "recount", "ends_of")
    replaced_drift = (await _compare(db, home, "recount_replaced", "priors_of"))[1] if home.rerun else Counts()
    if (drift, replaced_drift) != (Counts(), Counts()):
        await db.change(made_for(SQL["count"], ""), _additions(home.number, drift, replaced_drift))
    return truth


async def _compare(db: PostgresSession, home: Numbered, query: str, rows: str) -> tuple[Counts, Counts]:
    """The counts by the rows, and by how much the stored counts are lower."""
    matches = await db.row(_recount_query(query, rows, tuple(home.suffixes)), {"run_no": home.number})
    truth, kept = matches[:4], matches[4:]
    return Counts(*truth), Counts(*(ours - theirs for ours, theirs in zip(truth, kept, strict=True)))


async def _note(db: PostgresSession, home: Numbered, suffix: str, events: list[TaskEvent], again: bool = False) -> None:
    values = {
        "run_no": home.number,
        "indexes": [event.index for event in events],
        "ats": [event.at for event in events],
        "events": [event.event for event in events],
        "datas": [event.data for event in events],
    }
    await db.change(made_for(SQL["note_again" if again or db.again else "note"], suffix), values)


async def _delete(db: PostgresSession, home: Numbered, limit: int) -> int:
    """Delete a bounded number of rows. Dropping the run's own tables counts as one call."""
    if home.own:
        await drop_own(db, home.number)
        return limit
    gone = 0
    for query in ("delete_tasks", "delete_ends", "delete_events"):
        if gone < limit:
            gone += await db.change(made_for(SQL[query], ""), {"run_no": home.number, "limit": limit - gone})
    if gone == 0:
        for query in ("delete_counts", "delete_errors", "delete_run_no"):
            await db.change(made_for(SQL[query], ""), {"run_no": home.number})
    return gone


def _over(name: str, home: Numbered, tail: str = "") -> Query:
    """A query over all tables of a run."""
    return united(SQL[name], tuple(home.suffixes), tail)


@lru_cache(maxsize=1024)
def _recount_query(query: str, rows: str, suffixes: tuple[str, ...]) -> Query:
    ends = " UNION ALL ".join(SQL[rows].replace("{own}", suffix) for suffix in suffixes)
    return made_for(SQL[query].replace("{all_ends}", ends), "")


def _bounded(known: dict[Any, T]) -> dict[Any, T]:
    """Bound the cache by dropping entries that can be looked up again."""
    if len(known) >= _MAX_KNOWN:
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
