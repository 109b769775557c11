"""pgqueuer on Postgres: jobs enqueued in batches of 5,000, then drained in batches of 1,000 by one worker."""

import asyncio
import time

import asyncpg
import uvloop
from marks import arguments, report
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.domain.types import QueueExecutionMode
from pgqueuer.queries import Queries

_ENQUEUE = 5000
_DEQUEUE = 1000


async def main() -> None:
    asked = arguments()
    count: int = asked["count"]
    connection = await asyncpg.connect(asked["postgres"])
    await connection.execute("SET client_min_messages = warning; DROP SCHEMA IF EXISTS peers CASCADE")
    await connection.execute("CREATE SCHEMA peers; CHECKPOINT")
    await connection.close()
    settings = {"search_path": "peers"}
    connection = await asyncpg.connect(asked["postgres"], server_settings=settings)
    queries = Queries(AsyncpgDriver(connection))
    await queries.install()
    queue = PgQueuer.from_asyncpg_connection(connection)
    called = 0

    @queue.entrypoint("nothing")
    async def nothing(_: object) -> None:
        nonlocal called
        called += 1

    started = time.perf_counter()
    for start in range(0, count, _ENQUEUE):
        some = min(_ENQUEUE, count - start)
        await queries.enqueue(["nothing"] * some, [b"%d" % index for index in range(start, start + some)], [0] * some)
    sent = time.perf_counter() - started
    await queue.qm.run(batch_size=_DEQUEUE, mode=QueueExecutionMode.drain)
    seconds = time.perf_counter() - started
    if called != count:
        raise SystemExit(f"{called} of {count} jobs ran")
    report(seconds=seconds, sent=sent)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
