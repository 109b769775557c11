"""The Postgres engine behind PgBouncer: what it asks of sessions, what it leaves in them, and what doctor says."""

import asyncio
from contextlib import AsyncExitStack

import asyncpg
import pytest

from conveyor.engines.postgres import PostgresEngine, migrate, schema
from conveyor.engines.postgres.url import parse_url
from conveyor.engines.queue import Outgoing, QueueName
from conveyor.model import Counts
from conveyor.states import TaskStatus
from tests.servers import pgbouncer, postgres
from tests.servers.pgbouncer import FEW, PgBouncer, own_pooler
from tests.support.clocks import JumpingClock, ManualClock
from tests.support.make_jobs import end, make_run, seeds
from tests.support.places import quick_place

pytestmark = pytest.mark.server

QUEUE = QueueName("run:one")
# More than PgBouncer has sessions for.
CLIENTS = 12


def direct() -> str:
    return f"&direct=127.0.0.1:{postgres.server().port}"


async def work_on(engine: PostgresEngine, clock: ManualClock) -> Counts:
    """A little of everything: tasks in shared tables and in tables of their own, outcomes, messages."""
    run = make_run(clock)
    queue = QueueName(f"run:{run.run_id}")
    await engine.tasks.put(run, seeds(120))
    await engine.queue.send(queue, [Outgoing(b"x")] * 3)
    got = await engine.queue.receive(queue, 10, 30.0)
    await engine.tasks.finish(run, [end(index, TaskStatus.SUCCEEDED) for index in range(0, 120, 2)])
    assert await engine.queue.ack(queue, [each.receipt for each in got]) == frozenset()
    assert len(got) == 3
    assert len(await engine.tasks.unfinished(run, range(120))) == 60
    return await engine.tasks.recount(run)


async def test_many_take_turns_on_few_sessions_in_transaction_mode() -> None:
    """Several processes, none of which is told of the pooler. Sessions have no settings of theirs afterwards, and no
    statements."""
    with quick_place() as place, own_pooler("transaction") as bouncer:
        clock = ManualClock()
        url = pgbouncer.url_of(place, through=bouncer)
        await asyncio.gather(*(migrate(url) for _ in range(3)))
        async with (
            PostgresEngine.open(url, clock, postgres.OWN_FROM) as one,
            PostgresEngine.open(url, clock, postgres.OWN_FROM) as two,
        ):
            each = (work_on(engine, clock) for engine in (one, two) * (CLIENTS // 2))
            counts = await asyncio.gather(*each, return_exceptions=True)
            assert counts == [Counts(succeeded=60)] * CLIENTS
        assert await left_in_sessions(bouncer) == [('"$user", public', "on", 0)] * FEW


async def left_in_sessions(bouncer: PgBouncer) -> list[tuple[str, str, int]]:
    """Two settings of each server session, and how many prepared statements it has."""
    left = []
    async with AsyncExitStack() as stack:
        for _ in range(FEW):
            connection = await asyncpg.connect(bouncer.url, statement_cache_size=0)
            stack.push_async_callback(connection.close)
            # It keeps its session while the others look for theirs.
            await stack.enter_async_context(connection.transaction())
            left.append(
                await connection.fetchrow(
                    "SELECT current_setting('search_path'), current_setting('enable_seqscan'), "
                    "(SELECT count(*) FROM pg_prepared_statements)"
                )
            )
    return [(row[0], row[1], row[2]) for row in left if row]


@pytest.mark.parametrize("said", ["", "&pooler=session", "&pooler=transaction"])
async def test_it_works_in_session_mode(said: str) -> None:
    with quick_place() as place:
        clock = ManualClock()
        url = pgbouncer.url_of(place, said, pgbouncer.pooler("session"))
        await migrate(url)
        async with PostgresEngine.open(url, clock, postgres.OWN_FROM) as engine:
            assert await asyncio.gather(*(work_on(engine, clock) for _ in range(4))) == [Counts(succeeded=60)] * 4
            assert engine._database.shares_sessions is (said != "&pooler=session")


async def test_the_server_itself_is_no_pooler() -> None:
    with quick_place() as place:
        async with postgres.open_engine(place, ManualClock()) as engine:
            assert not engine._database.shares_sessions


async def test_a_restart_of_the_server_behind_the_pooler_is_not_noticed() -> None:
    clock = JumpingClock()
    server = postgres.Server()
    bouncer = PgBouncer(server, "transaction", 3)
    url = f"{bouncer.url}?schema=restarted"
    try:
        await migrate(url)
        async with PostgresEngine.open(url, clock, postgres.OWN_FROM) as engine:
            assert await work_on(engine, clock) == Counts(succeeded=60)
            await asyncio.to_thread(server.restart)
            assert await work_on(engine, clock) == Counts(succeeded=60)
    finally:
        bouncer.close()
        server.close()


class TestWakes:
    @pytest.mark.parametrize(
        ("mode", "said"), [("transaction", "direct"), ("session", "&pooler=session")], ids=["direct", "session"]
    )
    async def test_receivers_are_woken_where_there_is_a_session(self, mode: str, said: str) -> None:
        with quick_place() as place:
            clock = ManualClock()
            url = pgbouncer.url_of(place, direct() if said == "direct" else said, pgbouncer.pooler(mode))
            await migrate(url)
            heard: asyncio.Queue[QueueName] = asyncio.Queue()
            async with PostgresEngine.open(url, clock) as engine, engine.wakes(heard.put_nowait):
                await engine.queue.send(QUEUE, [Outgoing(b"x")])
                assert await heard.get() == QUEUE

    async def test_nobody_notifies_where_nobody_can_listen(self) -> None:
        with quick_place() as place:
            url = pgbouncer.url_of(place)
            await migrate(url)
            heard: asyncio.Queue[str] = asyncio.Queue()
            channel = parse_url(url).channel
            async with (
                postgres.connect_to(place) as listener,
                PostgresEngine.open(url, ManualClock()) as engine,
                engine.wakes(heard.put_nowait),
            ):
                await listener.add_listener(channel, lambda *said: heard.put_nowait(said[3]))
                await engine.queue.send(QUEUE, [Outgoing(b"x")])
                await listener.execute(f"NOTIFY {channel}, 'the end'")
                assert await heard.get() == "the end"
                assert len(await engine.queue.receive(QUEUE, 10, 30.0)) == 1, "polling finds it"


class TestDoctor:
    @pytest.mark.parametrize(
        ("mode", "said", "advice"),
        [
            ("transaction", "", "pooler=session"),
            ("transaction", "&pooler=transaction", None),
            ("transaction", "direct", None),
            ("transaction", "&pooler=session", "pooler=transaction"),
            ("transaction", "&direct=127.0.0.1:{pooler}", "the server itself"),
            ("session", "&pooler=session", None),
        ],
    )
    async def test_it_says_what_to_write(self, mode: str, said: str, advice: str | None) -> None:
        with quick_place() as place, own_pooler(mode) as bouncer:
            more = direct() if said == "direct" else said.format(pooler=bouncer.port)
            await migrate(pgbouncer.url_of(place))
            async with PostgresEngine.open(pgbouncer.url_of(place, more, bouncer), JumpingClock()) as engine:
                found = dict(await engine.checks())["pooler"]
        assert advice in str(found) if advice else found is None


async def test_a_migration_that_waits_for_a_reader_lets_others_through(monkeypatch: pytest.MonkeyPatch) -> None:
    with quick_place() as place:
        url = postgres.url_of(place)
        await migrate(url)
        async with postgres.connect_to(place) as reader, postgres.connect_to(place) as other:
            reading = reader.transaction()
            await reading.start()
            await reader.fetch("SELECT * FROM keys")
            waited: list[float] = []

            class Waiting(ManualClock):
                async def sleep(self, seconds: float) -> None:
                    waited.append(seconds)
                    assert await other.fetch("SELECT * FROM keys") == []
                    if len(waited) == 2:
                        await reading.rollback()

            monkeypatch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, "ALTER TABLE keys ADD COLUMN more text"])
            monkeypatch.setattr(schema, "_LOCK_TIMEOUT", "20ms")
            assert await migrate(url, Waiting()) == [len(schema.MIGRATIONS)]
            assert len(waited) == 2
