"""ingest: a staged list becomes durable rows and enqueued references.

The bare limits are one thread and one apsw connection that inserts the same rows with the same keys and pragmas, and
the same chunks of references, five thousand tasks to a commit; its rows are made before the clock starts. One has the
index of today, which keeps the order of task ids for each slab of neighbours; the other that of earlier versions, over
all ids of a run, which are hashes. The goal was set against that one.
Nothing runs the tasks here, but for the figure that says how soon the first one is done.
"""

import asyncio
import statistics
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import apsw
import msgspec

from bench.child import MeasurementFailed, Setup
from bench.figures import Figure, cpu_each, details, rates
from bench.meter import Meter

COUNT = 1_000_000
SMALL = 10_000
# Submits of which the median is taken.
SUBMITS = 21

_CHUNK = 100
_COMMIT = 5000
_STRETCH = 500_000


def run(setup: Setup) -> list[Figure]:
    count = setup.count(COUNT)
    ours, limits, earlier, small, first, submits, thousand = [], [], [], [], [], [], []
    for _ in range(setup.repeat):
        ours.append(setup.ours("bench.ingest:ours", count=count))
        limits.append(setup.bare("bench.ingest:bare", count=count, index=_BY_SLAB))
        earlier.append(setup.bare("bench.ingest:bare", count=count, index=_OVER_ALL))
        small.append(setup.bare("bench.ingest:ours", count=SMALL))
        first.append(setup.bare("bench.ingest:first_done", count=count))
        submits.append(setup.bare("bench.ingest:submits", count=count))
        thousand.append(setup.bare("bench.ingest:submits", count=1000))
    limit, of_goal = "bare apsw loop, today's index", "bare apsw loop, earlier index, of the goal"
    peaks, small_peaks = ([each["peak_mib"] for each in side] for side in (ours, small))
    return [
        Figure("ingest", "rows", "tasks/s", rates(ours), limit, rates(limits), ("at least", 0.65), details(ours)),
        Figure("ingest", "rows", "tasks/s", rates(ours), of_goal, rates(earlier), ("at least", 0.65)),
        Figure("ingest", "CPU time", "µs/task", cpu_each(ours), limit, cpu_each(limits)),
        Figure("ingest", "peak memory", "MiB", peaks, f"ours, {SMALL:,} lines", small_peaks, ("at most", 1.2)),
        Figure(
            "ingest",
            "answer 202",
            "ms",
            [each["milliseconds"] for each in submits],
            "ours, 1,000 lines",
            [each["milliseconds"] for each in thousand],
            ("at most", 1.5),
        ),
        Figure(
            "ingest",
            "ingested at first done",
            "tasks",
            [each["ingested"] for each in first],
            "the list",
            [float(count)] * len(first),
            ("at most", 0.1),
        ),
    ]


def url(index: int) -> str:
    return f"https://www.example.com/catalogue/item/{index}?from=list"


def write_list(place: str, count: int) -> Path:
    path = Path(place) / "list.txt"
    with path.open("w") as file:
        file.writelines(url(index) + "\n" for index in range(count))
    return path


async def ours(count: int, place: str) -> dict[str, Any]:
    """The list is staged; the clock runs from the message that asks for its ingest to the latch."""
    from bench.belt import TENANT, store
    from conveyor.embedded import Embedded
    from conveyor.engines.queue import run_queue
    from conveyor.service import Service
    from conveyor.states import RunState

    path = write_list(place, count)
    async with store(place) as system:
        embedded = Embedded(system)
        services = [Service(role, system.clock) for role in embedded.ingesters()]
        meter = Meter()
        job = await embedded.submit_list([str(path)], {}, TENANT)
        tasks = [asyncio.create_task(service.run()) for service in services]
        while True:
            job = await embedded.job(TENANT, job.job_id)
            if job.state is not RunState.INGESTING:
                break
            await asyncio.sleep(0.01)
        spent = meter.stop()
        for service in services:
            service.stop()
        await asyncio.gather(*tasks)
        depth = await system.queue.depth(run_queue(job.run.run_id))
        if job.run.total != count or depth.ready < count // _CHUNK:
            raise MeasurementFailed(f"total {job.run.total}, messages {depth.ready}")
    return {"count": count, "bytes": _database_bytes(f"{place}/conveyor.db", count), **spent}


async def first_done(count: int, place: str) -> dict[str, Any]:
    """How much of the list is ingested when the first of its tasks has ended."""
    from bench.app import NothingExecutor
    from bench.belt import TENANT, store
    from conveyor.embedded import Embedded
    from conveyor.model import JobKind

    path = write_list(place, count)
    async with store(place) as system:
        embedded = Embedded(system, executors={JobKind.FETCH: NothingExecutor()})
        async with embedded.running():
            job = await embedded.submit_list([str(path)], {}, TENANT)
            while True:
                counts = await system.tasks.counts(job.key)
                if counts.ended:
                    break
                await asyncio.sleep(0.001)
            job = await embedded.job(TENANT, job.job_id)
            return {"count": count, "ingested": float(max(1, job.run.total))}


async def submits(count: int, place: str) -> dict[str, Any]:
    """From the request to its answer, for a list that was uploaded before; nothing ingests meanwhile."""
    from bench.belt import TENANT, store
    from conveyor.accept.spec import decode_spec
    from conveyor.accept.submit import Submit
    from conveyor.model import UploadRecord

    data = write_list(place, count).read_bytes()
    async with store(place) as system:
        now = system.clock.now()
        name = system.clock.new_id("upload")
        upload = UploadRecord(
            TENANT, name, f"uploads/{TENANT}/{name}", len(data), sha256(data).hexdigest(), now, now + 3600.0
        )
        await system.blobs.put(upload.key, data)
        await system.records.access.create_upload(upload, None)
        await system.records.access.mark_stored(upload.upload_id)
        submit = Submit(system)
        body = msgspec.json.encode({"source": {"upload_id": upload.upload_id}})
        times = []
        for _ in range(SUBMITS):
            started = time.perf_counter()
            accepted = await submit.submit(TENANT, decode_spec(body))
            times.append(time.perf_counter() - started)
            if accepted.status not in (201, 202):
                raise MeasurementFailed(f"answered {accepted.status}")
    return {"count": count, "milliseconds": statistics.median(times) * 1000}


_SCHEMA = """
CREATE TABLE tasks (
    run_no INTEGER NOT NULL, idx INTEGER NOT NULL, shard INTEGER NOT NULL, sort_key INTEGER NOT NULL,
    status INTEGER NOT NULL, attempts INTEGER NOT NULL DEFAULT 0, http_status INTEGER, error_code TEXT,
    finished_at REAL, input TEXT NOT NULL, detail TEXT, PRIMARY KEY (run_no, idx)
) WITHOUT ROWID;
CREATE TABLE messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT, queue TEXT NOT NULL, visible_at REAL NOT NULL, body BLOB NOT NULL
);
CREATE INDEX messages_due ON messages (queue, visible_at, id);
"""


_BY_SLAB = "CREATE INDEX tasks_by_id ON tasks (run_no, shard, idx >> 15, sort_key)"
_OVER_ALL = "CREATE INDEX tasks_by_id ON tasks (run_no, shard, sort_key)"


def bare(count: int, place: str, index: str = _BY_SLAB) -> dict[str, Any]:
    from conveyor.engines.sqlite.database import WRITER_PRAGMAS

    db = apsw.Connection(f"{place}/bare.db")
    for pragma in WRITER_PRAGMAS:
        db.execute(pragma)
    db.execute(_SCHEMA)
    db.execute(index)
    parts = [_bare_stretch(db, range(start, min(count, start + _STRETCH))) for start in range(0, count, _STRETCH)]
    spent = {name: sum(part[name] for part in parts) for name in ("seconds", "cpu_seconds")}
    most = {name: max(part[name] for part in parts) for name in ("disturbed", "peak_mib")}
    found = db.execute("SELECT (SELECT count(*) FROM tasks), (SELECT count(*) FROM messages)").fetchone()
    if found != (count, -(-count // _CHUNK)):
        raise MeasurementFailed(f"the bare loop came to {found}")
    db.close()
    return {"count": count, "bytes": _database_bytes(f"{place}/bare.db", count), **spent, **most}


def _bare_stretch(db: apsw.Connection, indexes: range) -> dict[str, Any]:
    """Its rows are made before the clock starts; those of the whole list would not fit into memory."""
    rows = [(1, index, _sort_key(index), f'"{url(index)}"') for index in indexes]
    pack = msgspec.msgpack.Encoder().encode
    starts = range(0, len(rows), _CHUNK)
    chunks = [pack([(row[1], row[3]) for row in rows[start : start + _CHUNK]]) for start in starts]
    meter = Meter()
    now = time.time()
    for start in range(0, len(rows), _COMMIT):
        db.execute("BEGIN IMMEDIATE")
        db.executemany(
            "INSERT INTO tasks (run_no, idx, shard, sort_key, status, input) VALUES (?, ?, 0, ?, 0, ?)",
            rows[start : start + _COMMIT],
        )
        db.executemany(
            "INSERT INTO messages (queue, visible_at, body) VALUES ('run', ?, ?)",
            [(now, body) for body in chunks[start // _CHUNK : (start + _COMMIT) // _CHUNK]],
        )
        db.execute("COMMIT")
    return meter.stop()


def _database_bytes(path: str, count: int) -> float:
    return Path(path).stat().st_size / count


def _sort_key(index: int) -> int:
    return int(sha256(f"run_00000000000000000000000000:{index}".encode()).hexdigest()[:15], 16)
