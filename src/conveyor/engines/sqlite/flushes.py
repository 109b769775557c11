"""Atomic flush on SQLite: what workers did in many runs, in one transaction and a few statements for all of them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import apsw
import msgspec

from conveyor.engines.queue import run_queues
from conveyor.engines.records import Receipts, RunFlush, RunFlushed, RunMove
from conveyor.engines.sqlite.database import named_queries
from conveyor.engines.sqlite.jobs import DEFAULT_DAYS, move_run
from conveyor.engines.sqlite.outbox import insert_events
from conveyor.engines.sqlite.queue import insert_queued
from conveyor.engines.sqlite.tasks import count_replaced_outcomes
from conveyor.engines.tasks import Finished
from conveyor.model import Counts, RunId, TaskEnd, TenantId, count_ends
from conveyor.states import RunState, TaskStatus

SQL = named_queries("flushes.sql")

_encode = msgspec.json.encode
_pairs = msgspec.json.Decoder(list[tuple[int, int]])
# A run, its tenant, its number, and whether it is a rerun.
_numbered_runs = msgspec.json.Decoder(list[tuple[RunId, TenantId, int, int]])
# The number of a run with its counts.
_counts = msgspec.json.Decoder(list[tuple[int, int, int, int, int]])
_run_ids = msgspec.json.Decoder(list[RunId])

# The least number of finished tasks of a run that get a statement of their own, if few other tasks are between them.
_FEW = 32
_MOST_APART = 3
_NO_PLACE = b" " * 18

Moving = dict[int, list[TaskEnd]]


def flush(db: apsw.Connection, now: float, runs: Sequence[RunFlush], acks: Receipts) -> list[RunFlushed]:
    """The whole transaction: finish and count tasks, note events, requeue, acknowledge, move runs."""
    numbers, reruns = _numbers(db, runs)
    # The outcomes of one run by its number. None for a run that was deleted.
    known = [numbers.get((run.job.tenant, run.job.run.run_id)) for run in runs]
    moving = _finish(db, known, runs)
    counts = _count(db, moving, reruns)
    _note(db, known, runs)
    insert_queued(db, now, [(run.queue, message) for run in runs if run.queue for message in run.messages])
    if acks:
        db.execute(SQL["ack"], {"receipts": _encode([_parted(*ack) for ack in acks]).decode()})
    decided = [
        run.decide(counts[number]) if number is not None and run.ends else None
        for number, run in zip(known, runs, strict=True)
    ]
    moved = _move(db, now, decided)
    return [
        RunFlushed(
            Finished(
                frozenset(end.index for end in moving[number]) if number is not None else frozenset(),
                counts[number] if number is not None else Counts(),
            ),
            move if move is not None and move.event.run_id in moved else None,
        )
        for number, move in zip(known, decided, strict=True)
    ]


def _numbers(db: apsw.Connection, runs: Sequence[RunFlush]) -> tuple[dict[tuple[TenantId, RunId], int], set[int]]:
    """The numbers of the runs, and which of them are reruns."""
    run_ids = _encode([run.job.run.run_id for run in runs]).decode()
    rows = _numbered_runs.decode(_value(db, "run_numbers", {"run_ids": run_ids}))
    numbers = {(tenant, run_id): number for run_id, tenant, number, _ in rows}
    return numbers, {number for _, _, number, is_rerun in rows if is_rerun}


def _finish(db: apsw.Connection, known: Sequence[int | None], runs: Sequence[RunFlush]) -> Moving:
    """Finish pending tasks. Returns the ends that moved one, by the number of the run."""
    # If a batch finishes a task twice, the first outcome must win; the update would keep the last.
    firsts = {
        number: {end.index: end for end in reversed(run.ends)}
        for number, run in zip(known, runs, strict=True)
        if number is not None
    }
    # In the order of the rows: neighbours share pages.
    ends = [(number, by_index[index]) for number, by_index in sorted(firsts.items()) for index in sorted(by_index)]
    if ends and not _finish_all(db, ends):
        ends = _unfinished(db, ends)
        changed = _update(db, ends)
        assert changed == len(ends)
    moving: Moving = {number: [] for number in firsts}
    for number, end in ends:
        moving[number].append(end)
    return moving


def _finish_all(db: apsw.Connection, ends: Sequence[tuple[int, TaskEnd]]) -> bool:
    """Finish these tasks if all of them are pending, as nearly always: it takes no read. False: nothing has changed."""
    db.execute("SAVEPOINT finishing")
    is_done = _update(db, ends) == len(ends)
    if not is_done:
        db.execute("ROLLBACK TO finishing")
    db.execute("RELEASE finishing")
    return is_done


def _update(db: apsw.Connection, ends: Sequence[tuple[int, TaskEnd]]) -> int:
    """Finish those tasks that are pending; returns how many. One statement serves all that end alike."""
    alike: dict[tuple[Any, ...], list[tuple[int, TaskEnd]]] = {}
    for number, end in ends:
        how = (end.status, end.attempts, end.http_status, end.error_code, end.at)
        group = alike.get(how)
        if group is None:
            group = alike[how] = []
        group.append((number, end))
    changed = 0
    for (status, attempts, http_status, error_code, at), group in alike.items():
        values = {
            "status": status,
            "attempts": attempts,
            "http_status": http_status,
            "error_code": error_code,
            "at": at,
        }
        for query, ends_of_query in _queries(group):
            db.execute(SQL[query], values | ends_of_query)
            changed += db.changes()
    return changed


def _queries(group: Sequence[tuple[int, TaskEnd]]) -> list[tuple[str, dict[str, Any]]]:
    """The statements that finish these tasks, which end alike, and their parameters. They are in the order of the
    rows."""
    by_run: dict[int, list[TaskEnd]] = {}
    for number, end in group:
        by_run.setdefault(number, []).append(end)
    queries: list[tuple[str, dict[str, Any]]] = []
    others: list[tuple[int, TaskEnd]] = []
    for number, ends in by_run.items():
        if len(ends) >= _FEW and ends[-1].index - ends[0].index < _MOST_APART * len(ends):
            queries.append(("finish_neighbours", {"run_no": number, **_neighbours(ends)}))
        else:
            others += [(number, end) for end in ends]
    if others:
        keys = b"".join([b"%019d%019d" % (number, end.index) for number, end in others])
        details = apsw.carray(tuple([end.detail for _, end in others]))
        queries.append(("finish", {"keys": keys, "details": details}))
    return queries


def _neighbours(ends: Sequence[TaskEnd]) -> dict[str, Any]:
    details = [end.detail.encode() for end in ends]
    first, last = ends[0].index, ends[-1].index
    places, start = [_NO_PLACE] * (last - first + 1), 1
    for end, detail in zip(ends, details, strict=True):
        places[end.index - first] = b"%010d%08d" % (start, len(detail))
        start += len(detail)
    return {"first": first, "last": last, "places": b"".join(places), "details": b"".join(details)}


def _unfinished(db: apsw.Connection, ends: Sequence[tuple[int, TaskEnd]]) -> list[tuple[int, TaskEnd]]:
    """The ends of pending tasks."""
    wanted = [(number, end.index) for number, end in ends]
    pending = set(_pairs.decode(_value(db, "unfinished", {"tasks": _encode(wanted).decode()})))
    return [(number, end) for number, end in ends if (number, end.index) in pending]


def _count(db: apsw.Connection, moving: Moving, reruns: set[int]) -> dict[int, Counts]:
    """Count what moved. Returns the counts of all runs afterwards."""
    more, errors = [], []
    for number, ends in moving.items():
        counts = count_ends(ends)
        more.append((number, *msgspec.structs.astuple(counts)))
        if counts.failed:
            codes = Counter(end.error_code for end in ends if end.status == TaskStatus.FAILED and end.error_code)
            errors += [(number, code, count) for code, count in codes.items()]
        if number in reruns:
            count_replaced_outcomes(db, number, ends)
    if errors:
        db.execute(SQL["count_errors"], {"counts": _encode(errors).decode()})
    if not more:
        return {}
    values = {"counts": _encode(more).decode()}
    db.execute(SQL["count"], values)
    return {number: Counts(*kept) for number, *kept in _counts.decode(_value(db, "counts", values))}


def _note(db: apsw.Connection, known: Sequence[int | None], runs: Sequence[RunFlush]) -> None:
    events = [
        (number, event) for number, run in zip(known, runs, strict=True) if number is not None for event in run.events
    ]
    if events:
        db.execute(SQL["note"], {"events": _encode(events).decode()})


def _parted(queue: str, receipt: str) -> tuple[str, int, int]:
    message, _, delivery = receipt.partition(".")
    return queue, int(message), int(delivery)


def _move(db: apsw.Connection, now: float, decided: Sequence[RunMove | None]) -> set[RunId]:
    """Make the moves that are still possible. Returns the runs that moved."""
    completing = {move.event.run_id: move for move in decided if move is not None and move.target is RunState.COMPLETED}
    moved = _complete(db, now, completing) if completing else set()
    for move in decided:
        if move is not None and move.event.run_id not in completing and move_run(db, now, move):
            moved.add(move.event.run_id)
    return moved


def _complete(db: apsw.Connection, now: float, moves: Mapping[RunId, RunMove]) -> set[RunId]:
    sources = next(iter(moves.values())).sources
    values = {"run_ids": _encode(list(moves)).decode(), "sources": _encode(sorted(sources)).decode(), "now": now}
    events = [moves[run_id].event for run_id in _run_ids.decode(_value(db, "completable_runs", values))]
    if events:
        queues = [(event.run_id, *run_queues(event.run_id)) for event in events]
        db.execute(SQL["complete_runs"], {"runs": _encode(queues).decode(), "now": now})
        pairs = _encode([(event.job_id, event.run_id) for event in events]).decode()
        db.execute(SQL["complete_jobs"], {"moved": pairs, "now": now, "default_days": DEFAULT_DAYS})
        insert_events(db, events)
    return {event.run_id for event in events}


def _value(db: apsw.Connection, query: str, values: dict[str, Any]) -> Any:
    """What a query returns that has one row of one value."""
    ((value,),) = db.execute(SQL[query], values).fetchall()
    return value
