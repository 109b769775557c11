"""noop: tasks that do nothing, submitted in one request, run, each with a durable status of its own.

The bare limit is what an expert would write by hand: one thread, one apsw connection, the same tables, indexes and
pragmas, a thousand tasks to a commit. It inserts tasks and chunks of references, claims chunks, guards against what
has ended, calls the function, ends each task by a conditional update, counts and acknowledges; finishing a batch and
claiming the next are one commit. It has no event loop, no other thread, no tenants, no fairness, no leases to keep.

By default a job of this size is answered 202 and ingested while it is run, so that only its end is to be compared. For
submit and drain it is measured a second time, written whole in the request: its rows are then durable at the answer.
"""

import time
from hashlib import sha256
from typing import Any

import apsw
import msgspec

from bench.child import MeasurementFailed, Setup
from bench.figures import Figure, cpu_each, details, rates
from bench.meter import Meter

COUNT = 100_000
HANDLER = "bench.noop"

_CHUNK = 100
_CHUNKS_IN_A_COMMIT = 10
_VISIBILITY = 30.0


def run(setup: Setup) -> list[Figure]:
    count = setup.count(COUNT)
    ours, whole, limits = [], [], []
    for _ in range(setup.repeat):
        ours.append(setup.ours("bench.noop:ours", count=count))
        whole.append(setup.bare("bench.noop:ours", count=count, whole=True))
        limits.append(setup.bare("bench.noop:bare", count=count))
    limit = "bare apsw loop"
    more = {"count": count, **details(ours)}
    return [
        Figure("noop", "submit, whole", "tasks/s", rates(whole, "submit"), limit, rates(limits, "submit")),
        Figure("noop", "drain, whole", "tasks/s", rates(whole, "drain"), limit, rates(limits, "drain")),
        Figure("noop", "end to end, whole", "tasks/s", rates(whole), limit, rates(limits)),
        Figure("noop", "end to end", "tasks/s", rates(ours), limit, rates(limits), more=more),
        Figure("noop", "CPU time", "µs/task", cpu_each(ours), limit, cpu_each(limits)),
    ]


def request(count: int) -> bytes:
    """The body of the POST."""
    spec = {"kind": "python", "handler": HANDLER, "result_layout": "packed", "tasks": list(range(count))}
    return msgspec.json.encode(spec)


async def ours(count: int, place: str, whole: bool = False) -> dict[str, Any]:
    from bench.belt import TENANT, belt, check_counts, ended
    from conveyor.accept.spec import decode_spec

    body = request(count)
    limits = {"max_inline_tasks": count, **({"sync_task_limit": count} if whole else {})}
    async with belt(place, app="bench.app", **limits) as embedded:
        meter = Meter()
        accepted = await embedded.submit.submit(TENANT, decode_spec(body))
        submitted = meter.lap()
        job = await ended(embedded, accepted.subject)
        spent = meter.stop()
        await check_counts(embedded.system, job, count)
    return {"count": count, "submit": submitted, "drain": spent["seconds"] - submitted, **spent}


_PRAGMAS = ("journal_mode=WAL", "synchronous=FULL", "wal_autocheckpoint=4000", "cache_size=-65536")
_SCHEMA = """
CREATE TABLE runs (run_no INTEGER PRIMARY KEY, state TEXT, total INTEGER, succeeded INTEGER);
CREATE TABLE tasks (
    run_no INTEGER, idx INTEGER, sort_key INTEGER, status INTEGER, attempts INTEGER, finished_at REAL,
    input TEXT, detail TEXT, PRIMARY KEY (run_no, idx)
) WITHOUT ROWID;
CREATE INDEX tasks_by_id ON tasks (run_no, idx >> 15, sort_key);
CREATE TABLE messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT, queue TEXT, visible_at REAL, receives INTEGER, held INTEGER, body BLOB
);
CREATE INDEX messages_due ON messages (queue, visible_at, id);
"""
_CLAIM = """
UPDATE messages SET visible_at = ?, receives = receives + 1, held = 1
WHERE id IN (SELECT id FROM messages WHERE queue = 'run' AND visible_at <= ? ORDER BY visible_at, id LIMIT ?)
RETURNING id, receives, body
"""
_GUARD = """
SELECT t.idx FROM json_each(?) AS wanted CROSS JOIN tasks AS t ON t.run_no = 1 AND t.idx = wanted.value
WHERE t.status = 0
"""
_FINISH = """
UPDATE tasks SET status = 1, attempts = 1, finished_at = ?, detail = ? WHERE run_no = 1 AND idx = ? AND status = 0
"""

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[tuple[int, str]]).decode
_encode = msgspec.json.encode
_decode = msgspec.json.decode


def bare(count: int, place: str) -> dict[str, Any]:
    body = request(count)
    db = apsw.Connection(f"{place}/bare.db")
    for pragma in _PRAGMAS:
        db.execute(f"PRAGMA {pragma}")
    db.execute(_SCHEMA)
    meter = Meter()
    _bare_submit(db, body)
    submitted = meter.lap()
    _bare_drain(db)
    spent = meter.stop()
    row = db.execute("SELECT state, succeeded, (SELECT count(*) FROM tasks WHERE status = 1) FROM runs").fetchone()
    if row != ("completed", count, count):
        raise MeasurementFailed(f"the bare loop came to {row}")
    return {"count": count, "submit": submitted, "drain": spent["seconds"] - submitted, **spent}


def _bare_submit(db: apsw.Connection, body: bytes) -> None:
    inputs = [bytes(raw).decode() for raw in msgspec.json.decode(body, type=_Request).tasks]
    now = time.time()
    db.execute("BEGIN IMMEDIATE")
    db.execute("INSERT INTO runs VALUES (1, 'running', ?, 0)", (len(inputs),))
    db.executemany(
        "INSERT INTO tasks VALUES (1, ?, ?, 0, 0, NULL, ?, NULL)",
        ((index, _sort_key(index), text) for index, text in enumerate(inputs)),
    )
    starts = range(0, len(inputs), _CHUNK)
    db.executemany(
        "INSERT INTO messages (queue, visible_at, receives, held, body) VALUES ('run', ?, 0, 0, ?)",
        ((now, _pack(list(enumerate(inputs[start : start + _CHUNK], start)))) for start in starts),
    )
    db.execute("COMMIT")


def _bare_drain(db: apsw.Connection) -> None:
    db.execute("BEGIN IMMEDIATE")
    held = _bare_claim(db)
    db.execute("COMMIT")
    while held:
        refs = [ref for _, _, packed in held for ref in _unpack(packed)]
        wanted = _encode([index for index, _ in refs]).decode()
        live = {index for (index,) in db.execute(_GUARD, (wanted,))}
        results = [(index, _encode(_nothing(_decode(text))).decode()) for index, text in refs if index in live]
        db.execute("BEGIN IMMEDIATE")
        _bare_finish(db, results)
        db.executemany(
            "DELETE FROM messages WHERE id = ? AND receives = ? AND held = 1",
            [(message, receives) for message, receives, _ in held],
        )
        held = _bare_claim(db)
        db.execute("UPDATE runs SET state = 'completed' WHERE state = 'running' AND succeeded >= total")
        db.execute("COMMIT")


def _bare_claim(db: apsw.Connection) -> list[Any]:
    now = time.time()
    return db.execute(_CLAIM, (now + _VISIBILITY, now, _CHUNKS_IN_A_COMMIT)).fetchall()


def _bare_finish(db: apsw.Connection, results: list[tuple[int, str]]) -> None:
    now = time.time()
    before = db.total_changes()
    db.executemany(_FINISH, ((now, result, index) for index, result in results))
    moved = db.total_changes() - before
    db.execute("UPDATE runs SET succeeded = succeeded + ? WHERE run_no = 1", (moved,))


def _nothing(_: object) -> object:
    return None


def _sort_key(index: int) -> int:
    return int(sha256(f"run:{index}".encode()).hexdigest()[:15], 16)


class _Request(msgspec.Struct):
    tasks: list[msgspec.Raw]
