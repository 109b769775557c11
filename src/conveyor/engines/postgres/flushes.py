"""Atomic flush on Postgres: what workers did in many runs, in one transaction with a few statements for all of them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from conveyor.engines.postgres.database import PostgresSession
from conveyor.engines.postgres.jobs import DEFAULT_DAYS, move_run
from conveyor.engines.postgres.outbox import event_values
from conveyor.engines.postgres.queries import made_for, named_texts
from conveyor.engines.postgres.queue import parsed_receipt
from conveyor.engines.postgres.tables import Numbered, split
from conveyor.engines.postgres.tasks import replaced_outcomes
from conveyor.engines.queue import recovery_queue, run_queue
from conveyor.engines.records import Receipts, RunFlush, RunFlushed, RunMove
from conveyor.engines.tasks import Finished, TaskEvent
from conveyor.model import Counts, Replaced, RunId, TaskEnd, count_ends
from conveyor.states import RunState, TaskStatus

SQL = named_texts("flushes.sql")


class _RunPart(NamedTuple):
    """A run of a flush, with where its rows are, and its ends: of each task the first, in order of index."""

    home: Numbered
    flush: RunFlush
    ends: list[TaskEnd]


Moved = dict[int, set[int]]


async def flush(
    db: PostgresSession, now: float, own_from: int, runs: Sequence[RunFlush], acks: Receipts
) -> list[RunFlushed]:
    """The whole transaction: finish tasks, note events, requeue, acknowledge, count, move runs."""
    known = await _known(db, own_from, runs)
    parts = sorted(known.values(), key=lambda part: part.home.number)
    moved, own = await _finish(db, parts)
    await _note(db, parts)
    await _send(db, now, runs)
    await _acknowledge(db, acks)
    counts = await _count(db, parts, moved) if parts else {}
    decided: dict[RunId, RunMove] = {}
    for part in parts:
        move = part.flush.decide(counts[part.home.number]) if part.ends else None
        if move is not None:
            decided[move.event.run_id] = move
    made = await _move(db, now, decided)
    flushed = []
    for run in runs:
        found = known.get(run.job.run.run_id)
        number = -1 if found is None else found.home.number
        indexes = frozenset(moved.get(number, set()) | own.get(number, set()))
        run_id = run.job.run.run_id
        flushed.append(
            RunFlushed(Finished(indexes, counts.get(number, Counts())), decided[run_id] if run_id in made else None)
        )
    return flushed


async def read_counts(db: PostgresSession, run_ids: Sequence[RunId]) -> dict[RunId, Counts]:
    """The counts of runs."""
    rows = await db.rows(made_for(SQL["run_numbers"], ""), {"run_ids": list(run_ids)})
    numbers = {row["run_no"]: row["run_id"] for row in rows}
    counts = await _counts(db, list(numbers))
    return {numbers[number]: each for number, each in counts.items()}


async def _known(db: PostgresSession, own_from: int, runs: Sequence[RunFlush]) -> dict[RunId, _RunPart]:
    """The runs that exist."""
    run_ids = [run.job.run.run_id for run in runs]
    rows = await db.rows(made_for(SQL["run_numbers"], ""), {"run_ids": run_ids}) if run_ids else []
    homes = {
        (row["tenant"], row["run_id"]): Numbered(row["run_no"], row["own"], own_from, row["rerun"]) for row in rows
    }
    known = {}
    for run in runs:
        home = homes.get((run.job.tenant, run.job.run.run_id))
        if home is not None:
            # If a batch finishes a task twice, the first outcome counts.
            first = {end.index: end for end in reversed(run.ends)}
            known[run.job.run.run_id] = _RunPart(home, run, [first[index] for index in sorted(first)])
    return known


async def _finish(db: PostgresSession, parts: Sequence[_RunPart]) -> tuple[Moved, Moved]:
    """Returns the tasks that moved, and those that an attempt with an unanswered commit had moved, by run."""
    moved: Moved = {part.home.number: set() for part in parts}
    own: Moved = {part.home.number: set() for part in parts}
    for suffix, ends in _tables((part.home, part.ends) for part in parts):
        values = {
            "numbers": [number for number, _ in ends],
            "indexes": [end.index for _, end in ends],
            "statuses": [end.status for _, end in ends],
            "attempts": [end.attempts for _, end in ends],
            "http_statuses": [end.http_status for _, end in ends],
            "error_codes": [end.error_code for _, end in ends],
            "details": [end.detail for _, end in ends],
            "ats": [end.at for _, end in ends],
        }
        if db.again:
            for number, index in await db.rows(made_for(SQL["finished_so"], suffix), values):
                own[number].add(index)
        for number, index in await db.rows(made_for(SQL["finish"], suffix), values):
            moved[number].add(index)
    return moved, own


def _tables(rows: Iterable[tuple[Numbered, Sequence[Any]]]) -> Iterator[tuple[str, list[tuple[int, Any]]]]:
    """Rows with the numbers of their runs, by table: those of the shared tables together, and first."""
    tables: dict[str, list[tuple[int, Any]]] = {"": []}
    for home, items in rows:
        for suffix, part in split(home, [item.index for item in items], items):
            tables.setdefault(suffix, []).extend((home.number, item) for item in part)
    return ((suffix, pairs) for suffix, pairs in tables.items() if pairs)


async def _note(db: PostgresSession, parts: Sequence[_RunPart]) -> None:
    noted: list[tuple[Numbered, Sequence[TaskEvent]]] = [(part.home, part.flush.events) for part in parts]
    for suffix, events in _tables(noted):
        values = {
            "noted": sorted({number for number, _ in events}),
            "numbers": [number for number, _ in events],
            "indexes": [event.index for _, event in events],
            "ats": [event.at for _, event in events],
            "events": [event.event for _, event in events],
            "datas": [event.data for _, event in events],
            "again": db.again,
        }
        await db.change(made_for(SQL["note"], suffix), values)


async def _send(db: PostgresSession, now: float, runs: Sequence[RunFlush]) -> None:
    messages = [(run.queue, message) for run in runs if run.queue is not None for message in run.messages]
    if messages:
        values = {
            "queues": [queue for queue, _ in messages],
            "times": [now + message.delay for _, message in messages],
            "bodies": [message.body for _, message in messages],
        }
        await db.change(made_for(SQL["send"], ""), values)


async def _acknowledge(db: PostgresSession, acks: Receipts) -> None:
    parsed = [(parsed_receipt(receipt), queue) for queue, receipt in acks]
    known = sorted((place[0], place[1], queue) for place, queue in parsed if place is not None)
    if known:
        values = {
            "ids": [each[0] for each in known],
            "deliveries": [each[1] for each in known],
            "queues": [each[2] for each in known],
        }
        await db.change(made_for(SQL["ack"], ""), values)


async def _count(db: PostgresSession, parts: Sequence[_RunPart], moved: Moved) -> dict[int, Counts]:
    """Count what moved. Returns the counts of all runs as this transaction sees them."""
    added: list[tuple[int, Counts, Counts]] = []
    errors: list[tuple[int, str, int, int]] = []
    for part in parts:
        number = part.home.number
        counted = [end for end in part.ends if end.index in moved[number]]
        if not counted:
            continue
        replaced = await replaced_outcomes(db, part.home, counted) if part.home.rerun else Replaced()
        added.append((number, count_ends(counted), replaced.counts))
        codes = Counter(end.error_code for end in counted if end.status == TaskStatus.FAILED and end.error_code)
        errors += [
            (number, code, codes[code], replaced.codes.get(code, 0)) for code in sorted({*codes, *replaced.codes})
        ]
    if added:
        await db.change(made_for(SQL["count"], ""), _added(added))
    if errors:
        columns = ("numbers", "codes", "counts", "replaced")
        values = {name: [row[place] for row in errors] for place, name in enumerate(columns)}
        await db.change(made_for(SQL["count_errors"], ""), values)
    return await _counts(db, [part.home.number for part in parts])


def _added(added: Sequence[tuple[int, Counts, Counts]]) -> dict[str, list[int]]:
    values: dict[str, list[int]] = {"numbers": [number for number, _, _ in added]}
    for name in msgspec.structs.asdict(Counts()):
        values[name] = [getattr(counts, name) for _, counts, _ in added]
        values[f"replaced_{name}"] = [getattr(replaced, name) for _, _, replaced in added]
    return values


async def _counts(db: PostgresSession, numbers: list[int]) -> dict[int, Counts]:
    rows = await db.rows(made_for(SQL["counts"], ""), {"numbers": numbers})
    return {number: Counts(*kept) for number, *kept in rows}


async def _move(db: PostgresSession, now: float, moves: Mapping[RunId, RunMove]) -> set[RunId]:
    """Make the moves that are still possible. Returns the runs that moved, those of an unanswered commit too."""
    made: set[RunId] = set()
    if db.again and moves:
        event_ids = [move.event.notice_id for move in moves.values()]
        made = {row[0] for row in await db.rows(made_for(SQL["stored_events"], ""), {"event_ids": event_ids})}
    left = {run_id: move for run_id, move in sorted(moves.items()) if run_id not in made}
    completing = {run_id: move for run_id, move in left.items() if move.target is RunState.COMPLETED}
    if completing:
        made |= await _complete(db, now, completing)
    for run_id, move in left.items():
        if run_id not in completing and await move_run(db, now, move):
            made.add(run_id)
    return made


async def _complete(db: PostgresSession, now: float, moves: Mapping[RunId, RunMove]) -> set[RunId]:
    values = {
        "job_ids": [move.event.job_id for move in moves.values()],
        "run_ids": list(moves),
        "run_queues": [run_queue(run_id) for run_id in moves],
        "recovery_queues": [recovery_queue(run_id) for run_id in moves],
        "sources": sorted(next(iter(moves.values())).sources),
        "now": now,
        "default_days": DEFAULT_DAYS,
    }
    made = {row[0] for row in await db.rows(made_for(SQL["complete_runs"], ""), values)}
    # In order of job, as their turns are taken.
    events = sorted((moves[run_id].event for run_id in made), key=lambda event: event.job_id)
    if events:
        rows = [event_values(event) for event in events]
        columns = {f"{name}s": [row[name] for row in rows] for name in rows[0]}
        await db.change(made_for(SQL["complete_jobs"], ""), {**values, **columns})
        await db.change(made_for(SQL["insert_events"], ""), columns)
    return made
