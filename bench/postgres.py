"""postgres: the engine on a Postgres of its own, on disk and with fsync on.

Ingest: the bare limit is one connection that puts the same rows, and the same chunks of references, into tables with
the same keys and indexes, by two COPY statements and nothing else; its rows are made before the clock starts. Against
it stand the engine alone (put and send, two at once, as two ingesters do) and the whole ingest of a staged list.

Sends: small messages, each to a queue of its own, by many senders at once, as many small jobs make them. Against them
stand the same sends that wake nobody.

noop: the same job as in `noop`, with records, tasks and queue on Postgres, beside the embedded engine.
"""

import asyncio
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, overload

import msgspec

from bench.child import ROOT, MeasurementFailed, Setup
from bench.figures import Figure, cpu_each, details, rates
from bench.meter import Meter

COUNT = 1_000_000
NOOPS = 100_000
SENDS = 20_000
SETTINGS = {"shared_buffers": "512MB", "max_wal_size": "4GB"}

_CHUNK = 100
_BATCH = 1500
_SENDERS = 64
_COLUMNS = ("run_no", "idx", "shard", "sort_key", "tag", "input")


class Backends(Sequence[int]):
    """The processes of a Postgres, for the meter: whichever there are when it looks."""

    def __init__(self, server: int) -> None:
        self._server = server

    def _all(self) -> list[int]:
        try:
            children = Path(f"/proc/{self._server}/task/{self._server}/children").read_text().split()
        except OSError:
            children = []
        return [self._server, *map(int, children)]

    def __iter__(self) -> Iterator[int]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        return self._all()[at]


def run(setup: Setup) -> list[Figure]:
    from tests.servers.postgres import Server

    count, noops, sends = setup.count(COUNT), setup.count(NOOPS), setup.count(SENDS)
    alone, lists, copies, belts, embedded = [], [], [], [], []
    silent, woken = [], []
    # Beside the other scratch, not in it: Postgres runs as another user where this one is root.
    beside = ROOT / ".cache" / "bench"
    beside.mkdir(parents=True, exist_ok=True)
    server = Server(beside, SETTINGS)
    try:
        where = {"url": server.url, "pid": server.pid}
        for _ in range(setup.repeat):
            copies.append(setup.bare("bench.postgres:bare_copy", count=count, **where))
            alone.append(setup.ours("bench.postgres:put_and_send", count=count, **where))
            lists.append(setup.ours("bench.postgres:ingest", count=count, **where))
            silent.append(setup.bare("bench.postgres:send_each", count=sends, wakes=False, **where))
            woken.append(setup.ours("bench.postgres:send_each", count=sends, wakes=True, **where))
            belts.append(setup.ours("bench.postgres:noop", count=noops, **where))
            embedded.append(setup.bare("bench.noop:ours", count=noops))
    finally:
        server.close()
    limit = "bare COPY, same indexes"
    goal = ("at least", 0.4)
    return [
        Figure("postgres", "put and send", "tasks/s", rates(alone), limit, rates(copies), goal, details(alone)),
        Figure("postgres", "ingest of a list", "tasks/s", rates(lists), limit, rates(copies), goal, details(lists)),
        Figure("postgres", "CPU time, put and send", "µs/task", cpu_each(alone), limit, cpu_each(copies)),
        Figure("postgres", "noop end to end", "tasks/s", rates(belts), "ours, embedded", rates(embedded)),
        Figure("postgres", "sends, a queue each", "sends/s", rates(woken), "no wake-ups", rates(silent), goal),
    ]


def _input(index: int) -> str:
    return f'"https://www.example.com/catalogue/item/{index}?from=list"'


async def fresh_schema(url: str, name: str) -> str:
    """A schema with nothing in it."""
    import asyncpg

    from conveyor.engines.postgres import migrate

    connection = await asyncpg.connect(url)
    await connection.execute("SET client_min_messages = warning")
    await connection.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE")
    # What the one before left to be written would be written on the time of this one.
    await connection.execute("CHECKPOINT")
    await connection.close()
    await migrate(f"{url}?schema={name}")
    return f"{url}?schema={name}"


async def bare_copy(count: int, url: str, pid: int, place: str) -> dict[str, Any]:
    import asyncpg

    run = "run_00000000000000000000000000"
    rows = [
        (1, index, 0, int(sha256(f"{run}:{index}".encode()).hexdigest()[:15], 16), None, _input(index))
        for index in range(count)
    ]
    pack = msgspec.msgpack.Encoder().encode
    chunks = [
        (f"run:{run}", 0.0, pack([(row[1], row[5]) for row in rows[start : start + _CHUNK]]))
        for start in range(0, count, _CHUNK)
    ]
    await fresh_schema(url, "bare")
    connection = await asyncpg.connect(url, server_settings={"search_path": "bare"})
    await connection.execute(
        "CREATE TABLE bare_tasks (LIKE tasks, PRIMARY KEY (idx)); CREATE INDEX ON bare_tasks (shard, sort_key, idx)"
    )
    meter = Meter(Backends(pid))
    await connection.copy_records_to_table("bare_tasks", columns=_COLUMNS, records=rows)
    await connection.copy_records_to_table("messages", columns=("queue", "visible_at", "body"), records=chunks)
    spent = meter.stop()
    found = await connection.fetchrow("SELECT (SELECT count(*) FROM bare_tasks), (SELECT count(*) FROM messages)")
    await connection.close()
    if tuple(found) != (count, len(chunks)):
        raise MeasurementFailed(f"bare COPY came to {tuple(found)}")
    return {"count": count, **spent}


async def put_and_send(count: int, url: str, pid: int, place: str) -> dict[str, Any]:
    """Seeds are made as they are put, in two halves at once."""
    from conveyor.clock import SystemClock
    from conveyor.engines.postgres import PostgresEngine
    from conveyor.engines.queue import run_queue
    from conveyor.jobs.chunks import messages, send_all
    from conveyor.model import InputJson, JobId, RunId, RunKey, TaskSeed, TenantId

    clock = SystemClock()
    run = RunKey(TenantId("bench"), JobId("job"), RunId(clock.new_id("run")))
    queue = run_queue(run.run_id)
    async with PostgresEngine.open(await fresh_schema(url, "put"), clock) as engine:

        async def part(first: int, end: int) -> None:
            for start in range(first, end, _BATCH):
                seeds = [TaskSeed(index, InputJson(_input(index))) for index in range(start, min(end, start + _BATCH))]
                await engine.tasks.put(run, seeds)
                await send_all(engine.queue, queue, messages(run, seeds, _CHUNK), clock)

        meter = Meter(Backends(pid))
        await asyncio.gather(part(0, count // 2), part(count // 2, count))
        spent = meter.stop()
        depth = await engine.queue.depth(queue)
        last = await engine.tasks.unfinished(run, [0, count // 2, count - 1])
        if depth.ready < count // _CHUNK or len(last) != 3:
            raise MeasurementFailed(f"{depth.ready} messages, and of three tasks {len(last)}")
    return {"count": count, **spent}


async def send_each(count: int, url: str, pid: int, place: str, wakes: bool) -> dict[str, Any]:
    """Each message goes to a queue of its own."""
    from conveyor.clock import SystemClock
    from conveyor.engines.postgres import PostgresEngine
    from conveyor.engines.postgres.wakes import WAKE_WITHIN
    from conveyor.engines.queue import Outgoing, QueueName

    message = Outgoing(b"x" * 500, delay=0.0 if wakes else 2 * WAKE_WITHIN)
    async with PostgresEngine.open(await fresh_schema(url, "sends"), SystemClock()) as engine:

        async def sender(first: int) -> None:
            for number in range(first, count, _SENDERS):
                await engine.queue.send(QueueName(f"run:{number}"), [message])

        meter = Meter(Backends(pid))
        await asyncio.gather(*map(sender, range(_SENDERS)))
        return {"count": count, **meter.stop()}


async def ingest(count: int, url: str, pid: int, place: str) -> dict[str, Any]:
    """From the message that asks for the ingest of a staged list to the latch."""
    from bench.belt import TENANT, store
    from bench.ingest import write_list
    from conveyor.embedded import Embedded
    from conveyor.engines.queue import run_queue
    from conveyor.service import Service
    from conveyor.states import RunState

    path = write_list(place, count)
    schema = await fresh_schema(url, "ingest")
    async with store(place, records=schema, tasks=schema, queue=schema) as system:
        embedded = Embedded(system)
        services = [Service(role, system.clock) for role in embedded.ingesters()]
        meter = Meter(Backends(pid))
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
    return {"count": count, **spent}


async def noop(count: int, url: str, pid: int, place: str) -> dict[str, Any]:
    from bench.belt import TENANT, belt, check_counts, ended
    from bench.noop import request
    from conveyor.accept.spec import decode_spec

    body = request(count)
    schema = await fresh_schema(url, "noop")
    engines = {"records": schema, "tasks": schema, "queue": schema}
    async with belt(place, app="bench.app", max_inline_tasks=count, **engines) as embedded:
        meter = Meter(Backends(pid))
        accepted = await embedded.submit.submit(TENANT, decode_spec(body))
        submitted = meter.lap()
        job = await ended(embedded, accepted.subject)
        spent = meter.stop()
        await check_counts(embedded.system, job, count)
    return {"count": count, "submit": submitted, "drain": spent["seconds"] - submitted, **spent}
