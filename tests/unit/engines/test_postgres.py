"""The Postgres engine's own parts: its URL, its queries, its migrations, and how it removes a large run."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import msgspec
import pytest

from conveyor.callers import enter_role
from conveyor.engines.ingest_sums import sums_of
from conveyor.engines.postgres import PostgresEngine, migrate, schema
from conveyor.engines.postgres import tasks as postgres_tasks
from conveyor.engines.postgres.queries import parse
from conveyor.engines.postgres.url import parse_url
from conveyor.engines.queue import Outgoing, QueueName
from conveyor.engines.records import Document
from conveyor.engines.tasks import MAX_SCANNED, ReadsByIndex, TaskEvent, TaskFilter
from conveyor.errors import EngineFailed, InvalidSetting
from conveyor.model import Compression, Counts, Ingested, JobId, OutboxEvent, RunId, RunKey, TaskId
from conveyor.states import TaskStatus
from tests.servers.postgres import connect_to, open_engine, url_of
from tests.support.clocks import JumpingClock, ManualClock
from tests.support.make_jobs import ACME, JOBS_WITH_EXPIRY, REASONS_WITHOUT_CODE, end, make_run, seeds, some_ranges
from tests.support.places import quick_place

OWN_FROM = 100

pytestmark = pytest.mark.server


@pytest.fixture
def place() -> Iterator[Path]:
    with quick_place() as directory:
        yield directory


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


class TestUrl:
    def test_its_parts(self) -> None:
        place = parse_url("postgresql://me:s%40fe@db.example:6543/jobs?schema=fleet&connections=3&sslmode=require")
        assert place.dsn == "postgres://me:s%40fe@db.example:6543/jobs?sslmode=require"
        assert (place.schema, place.connections, place.channel) == ("fleet", 3, "conveyor_fleet")
        assert place.shown == "db.example:6543/jobs"

    def test_the_server_past_a_pooler(self) -> None:
        place = parse_url("postgres://me:s%40fe@pool:6432/jobs?sslmode=require&pooler=transaction&direct=db:5433")
        assert (place.pooler, place.dsn) == ("transaction", "postgres://me:s%40fe@pool:6432/jobs?sslmode=require")
        assert place.direct == "postgres://me:s%40fe@db:5433/jobs?sslmode=require"

    def test_what_is_not_said(self) -> None:
        place = parse_url("postgres://db.example/jobs")
        assert (place.schema, place.connections, place.dsn) == ("conveyor", 10, "postgres://db.example/jobs")

    @pytest.mark.parametrize(
        "url",
        [
            "",
            "mysql://me@db/jobs",
            "postgres:///jobs",
            "postgres://me:secret@db",
            "postgres://me:secret@db/",
            "postgres://me:secret@db:port/jobs",
            "postgres://me:secret@db/jobs?schema=",
            "postgres://me:secret@db/jobs?schema=Fleet",
            "postgres://me:secret@db/jobs?schema=a;drop",
            "postgres://me:secret@db/jobs?schema=pg_belt",
            "postgres://me:secret@db/jobs?schema=" + "a" * 52,
            "postgres://me:secret@db/jobs?connections=0",
            "postgres://me:secret@db/jobs?connections=many",
            "postgres://me:secret@db/jobs?shema=fleet",
            "postgres://me:secret@db/jobs?pooler=statement",
            "postgres://me:secret@db/jobs?direct=",
            "postgres://me:secret@db/jobs?direct=db:port",
            "postgres://me:secret@db/jobs?direct=you@db:5432",
            "postgres://me:secret@db/jobs?direct=postgres://db",
        ],
    )
    def test_one_that_is_none_is_refused_with_what_to_write(self, url: str) -> None:
        with pytest.raises(InvalidSetting, match="Write postgres://user:password@host:5432/database") as refused:
            parse_url(url)
        assert "secret" not in refused.value.message


class TestQueries:
    def test_parameters_have_names(self) -> None:
        query = parse("SELECT :b::text, a FROM t WHERE a = :a AND b = :b AND at > '1'::timestamp")
        assert query.text == "SELECT $1::text, a FROM t WHERE a = $2 AND b = $1 AND at > '1'::timestamp"
        assert query.arguments({"a": 1, "b": "x\0y", "c": 3}) == ["x\ufffdy", 1]

    async def test_what_has_a_nul_is_not_found(self, place: Path, clock: ManualClock) -> None:
        async with open_engine(place, clock) as engine:
            assert await engine.records.access.upload("a\0b") is None
            assert (await engine.records.jobs.jobs(ACME, "a\0b", 10)).items == []
            assert await engine.records.documents.document("kind", ACME, "\0") is None


class TestMigrations:
    async def test_tables_say_when_they_are_vacuumed(self, place: Path, clock: ManualClock) -> None:
        """Those of a large run too, whether they are made after the migration or before it."""
        before = [script for script in schema.MIGRATIONS if "autovacuum_vacuum_insert_threshold" not in script]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(schema, "MIGRATIONS", before)
            async with open_engine(place, clock) as engine:
                await engine.tasks.put(make_run(clock), seeds(60))
        async with connect_to(place) as connection:
            await connection.execute("ALTER TABLE tasks_1 RESET (autovacuum_vacuum_insert_threshold)")
            async with open_engine(place, clock) as engine:
                await engine.tasks.put(make_run(clock), seeds(60))
            rows = await connection.fetch(
                "SELECT relname, reloptions FROM pg_class WHERE relkind = 'r' AND relnamespace = to_regnamespace($1)",
                url_of(place).rpartition("=")[2],
            )
        options = {name: set(given or ()) for name, given in rows}
        for own in ("tasks_1", "ends_1", "events_1", "tasks_2", "ends_2", "events_2"):
            assert options[own] == {"autovacuum_vacuum_insert_threshold=-1"}, own
        for shared in ("tasks", "ends", "events", "jobs", "runs", "documents", "outbox"):
            assert "autovacuum_vacuum_scale_factor=0.02" in options[shared], shared
        for hot in ("messages", "task_counts", "task_errors"):
            assert {"autovacuum_vacuum_threshold=500", "autovacuum_vacuum_cost_delay=0"} <= options[hot], hot

    async def test_many_at_once_apply_each_once(self, place: Path, clock: ManualClock) -> None:
        applied = await asyncio.gather(*(migrate(url_of(place)) for _ in range(5)))
        assert sorted(applied) == [[]] * 4 + [list(range(1, len(schema.MIGRATIONS) + 1))]
        async with PostgresEngine.open(url_of(place), clock) as engine:
            assert await engine.records.jobs.active_jobs() == []

    async def test_no_schema_is_refused(self, place: Path, clock: ManualClock) -> None:
        with pytest.raises(EngineFailed, match="Run `conveyor migrate`"):
            async with PostgresEngine.open(url_of(place), clock):
                pass

    async def test_an_older_one_is_refused_until_it_is_migrated(
        self, place: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await migrate(url_of(place))
        monkeypatch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, "CREATE TABLE later (id integer)"])
        with pytest.raises(EngineFailed, match=r"older than this Conveyor needs .* Run `conveyor migrate`"):
            async with PostgresEngine.open(url_of(place), clock):
                pass
        assert await migrate(url_of(place)) == [len(schema.MIGRATIONS)]
        async with PostgresEngine.open(url_of(place), clock):
            pass

    async def test_an_expansion_leaves_the_version_and_older_code_runs_on_it(
        self, place: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await migrate(url_of(place))
        added = ["CREATE TABLE later (id integer)", "ALTER TABLE jobs ADD COLUMN later text"]
        for number in (1, 2, 2):
            with monkeypatch.context() as patch:
                patch.setattr(schema, "EXPANSIONS", [*schema.EXPANSIONS, *added[:number]])
                if number == 1:
                    with pytest.raises(EngineFailed, match="Run `conveyor migrate`"):
                        async with PostgresEngine.open(url_of(place), clock):
                            pass
                assert await migrate(url_of(place)) == []
                async with PostgresEngine.open(url_of(place), clock):
                    pass
        async with PostgresEngine.open(url_of(place), clock) as engine:
            assert await engine.records.jobs.active_jobs() == []
        assert await migrate(url_of(place)) == []

    async def test_a_newer_one_is_refused(
        self, place: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await migrate(url_of(place))
        monkeypatch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:-1])
        with pytest.raises(EngineFailed, match="newer than this Conveyor supports"):
            async with PostgresEngine.open(url_of(place), clock):
                pass
        with pytest.raises(EngineFailed, match="newer than this Conveyor supports"):
            await migrate(url_of(place))

    async def test_ranges_from_before_the_sums_are_added_up(
        self, place: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:1])
            await migrate(url_of(place))
        async with connect_to(place) as connection:
            await connection.execute(
                "INSERT INTO runs (run_id, job_id, number, state, total, last_batch, created_at, sealed, invalid, "
                "touched_at) "
                "SELECT run, 'job_old', 1, 'ingesting', 0, false, 0, false, 0, 0 FROM unnest($1::text[]) AS run",
                ["run_old", "run_other"],
            )
            for one in some_ranges():
                end_byte = one.end or (one.source.size if one.compression is Compression.NONE else None)
                values = (one.number, msgspec.json.encode(one).decode(), one.start, end_byte, one.index, one.offset)
                await connection.execute(
                    "INSERT INTO ranges (run_id, number, plan, first_byte, end_byte, next_index, byte_offset, tasks, "
                    "invalid, done) VALUES ('run_old', $1, $2, $3, $4, $5, $6, $7, $8, $9)",
                    *values,
                    one.tasks,
                    one.invalid,
                    one.done,
                )
        await migrate(url_of(place))
        async with PostgresEngine.open(url_of(place), clock) as engine:
            ranges = await engine.records.ingests.ranges(RunId("run_old"))
            assert ranges == some_ranges()
            assert await engine.records.ingests.ingested(RunId("run_old")) == sums_of(*ranges).ingested
            assert await engine.records.ingests.ingested(RunId("run_other")) == Ingested(0, 0, 0, 0, 0, 0)

    async def test_runs_from_before_the_codes_get_them_from_their_reasons(
        self, place: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:3])
            await migrate(url_of(place))
        async with connect_to(place) as connection:
            for number, reason in enumerate(REASONS_WITHOUT_CODE):
                await connection.execute(
                    "INSERT INTO jobs (job_id, tenant, kind, mode, options, task_shard_count, result_layout, state, "
                    "reason, created_at, expires_at, run_id, version) "
                    "VALUES ($1, 'acme', 'fetch', 'closed', '{}', 1, 'object', 'failed', $2, 0, 9e9, $3, 1)",
                    f"job_{number}",
                    reason,
                    f"run_{number}",
                )
                await connection.execute(
                    "INSERT INTO runs (run_id, job_id, number, state, total, last_batch, created_at, sealed, invalid, "
                    "touched_at) VALUES ($1, $2, 1, 'failed', 0, true, 0, true, 0, 0)",
                    f"run_{number}",
                    f"job_{number}",
                )
        await migrate(url_of(place))
        async with PostgresEngine.open(url_of(place), clock) as engine:
            found = (await engine.records.jobs.jobs(ACME, None, 100)).items
        assert {job.reason: job.run.reason_code for job in found} == REASONS_WITHOUT_CODE

    async def test_jobs_from_before_expire_after_their_end(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:5])
            await migrate(url_of(place))
        async with connect_to(place) as connection:
            for number, (state, options, deleted, expires_at, ended_at, _) in enumerate(JOBS_WITH_EXPIRY):
                await connection.execute(
                    "INSERT INTO jobs (job_id, tenant, kind, mode, options, task_shard_count, result_layout, state, "
                    "created_at, expires_at, run_id, version, deleted) "
                    "VALUES ($1, 'acme', 'fetch', 'closed', $2, 1, 'object', $3, 0, $4, $5, 1, $6)",
                    f"job_{number}",
                    options,
                    state,
                    expires_at,
                    f"run_{number}",
                    deleted,
                )
                await connection.execute(
                    "INSERT INTO runs (run_id, job_id, number, state, total, last_batch, created_at, sealed, invalid, "
                    "touched_at, ended_at) VALUES ($1, $2, 1, $3, 0, true, 0, true, 0, 0, $4)",
                    f"run_{number}",
                    f"job_{number}",
                    state,
                    ended_at,
                )
        await migrate(url_of(place))
        async with connect_to(place) as connection:
            found = await connection.fetch("SELECT expires_at FROM jobs ORDER BY job_id")
        assert [row["expires_at"] for row in found] == [after for *_, after in JOBS_WITH_EXPIRY]

    async def test_one_that_fails_changes_nothing(
        self, place: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await migrate(url_of(place))
        broken = "CREATE TABLE later (id integer); CREATE TABLE later (id integer)"
        with monkeypatch.context() as patch:
            patch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, broken])
            with pytest.raises(EngineFailed, match="was not migrated"):
                await migrate(url_of(place))
        assert await migrate(url_of(place)) == []
        async with PostgresEngine.open(url_of(place), clock):
            pass

    async def test_schedules_that_are_there_refer_to_their_uploads(
        self, place: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        upload_id = "upload_" + "0" * 26
        bodies = {
            "one": {"job": {"name": "a \0", "source": {"format": "text", "upload_id": upload_id}}},
            "two": {"job": {"tasks": ["http://target.example"]}},
        }
        with monkeypatch.context() as patch:
            patch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:1])
            await migrate(url_of(place))
            async with connect_to(place) as connection:
                for name, body in bodies.items():
                    await connection.execute(
                        "INSERT INTO rows (kind, tenant, id, body, version) VALUES ('schedule', $1, $2, $3, 1)",
                        ACME,
                        name,
                        json.dumps(body).encode(),
                    )
        await migrate(url_of(place))
        async with PostgresEngine.open(url_of(place), clock) as engine:
            found = (await engine.records.documents.documents("schedule", ACME, None, 10)).items
            assert {row.id: row.upload_id for row in found} == {"one": upload_id, "two": None}

    async def test_documents_and_events_of_the_schema_before_are_read(
        self, place: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:3])
            await migrate(url_of(place))
            async with connect_to(place) as connection:
                await connection.execute(
                    "INSERT INTO rows (kind, tenant, id, body, version, due_at, job_id, upload_id)"
                    " VALUES ('schedule', 'acme', 'one', '\\x00ff', 3, 5.0, 'job_1', 'upload_1')"
                )
                for event_id, told in (("evt_1", True), ("evt_2", False)):
                    await connection.execute(
                        "INSERT INTO notices (notice_id, tenant, job_id, run_id, event, at, data, told)"
                        " VALUES ($1, 'acme', 'job_1', 'run_1', 'job.accepted', 1.0, '{\"total\":7}', $2)",
                        event_id,
                        told,
                    )
        assert await migrate(url_of(place)) == list(range(4, len(schema.MIGRATIONS) + 1))
        document = Document(
            "schedule", ACME, "one", b"\0\xff", 3, due_at=5.0, job_id=JobId("job_1"), upload_id="upload_1"
        )
        pending = OutboxEvent("evt_2", ACME, JobId("job_1"), RunId("run_1"), "job.accepted", 1.0, {"total": 7})
        async with PostgresEngine.open(url_of(place), clock) as engine:
            documents, outbox = engine.records.documents, engine.records.outbox
            assert await documents.document("schedule", ACME, "one") == document
            assert await documents.due_documents("schedule", 5.0, 10) == [document]
            assert (await documents.documents("schedule", ACME, None, 10, JobId("job_1"))).items == [document]
            assert await documents.replace_document(document) is not None
            assert await outbox.undispatched(10) == [pending]
            await outbox.mark_dispatched([pending])
            assert await outbox.undispatched(10) == []
            await documents.create_documents([], msgspec.structs.replace(pending, notice_id="evt_3"))
            events = (await outbox.events(ACME, JobId("job_1"), None, 10)).items
            assert [(each.seq, each.id) for each in events] == [(1, "evt_1"), (2, "evt_2"), (3, "evt_3")]
        old = "SELECT relname FROM pg_class WHERE relname ~ '^(rows|notices)' AND relnamespace = to_regnamespace($1)"
        async with connect_to(place) as connection:
            assert await connection.fetch(old, parse_url(url_of(place)).schema) == []


async def test_a_role_has_a_connection_while_requests_hold_theirs(place: Path, clock: ManualClock) -> None:
    await migrate(url_of(place))
    async with PostgresEngine.open(url_of(place) + "&connections=4", clock) as engine:
        database = engine.records.jobs._database
        async with database._connection(), database._connection(), database._connection():
            request = asyncio.create_task(engine.records.jobs.active_jobs())

            async def role() -> None:
                enter_role()
                assert await engine.records.jobs.active_jobs() == []

            await asyncio.create_task(role())
            assert not request.done(), "one is left to roles"
        assert await request == []


class TestChecks:
    async def test_a_sound_one_has_nothing_to_mend(self, place: Path) -> None:
        async with open_engine(place, JumpingClock()) as engine:
            found = dict(await engine.checks())
        # The servers of tests are quick, and forget.
        assert found.pop("durable commits") is not None
        assert {name: what for name, what in found.items() if what is not None} == {}
        assert {"reachable", "schema version", "write and conditional write", "clock"} <= set(found)

    async def test_a_clock_that_is_wrong_is_found(self, place: Path) -> None:
        clock = JumpingClock()
        clock.advance(3600)
        async with open_engine(place, clock) as engine:
            found = dict(await engine.checks())
        assert "NTP" in str(found["clock"])

    async def test_a_user_who_may_not_make_tables_is_found(self, place: Path, clock: ManualClock) -> None:
        await migrate(url_of(place))
        name = url_of(place).rpartition("=")[2]
        async with connect_to() as connection:
            await connection.execute(f"CREATE USER {name}; GRANT USAGE ON SCHEMA {name} TO {name}")
            await connection.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {name} TO {name}")
        async with PostgresEngine.open(url_of(place).replace("postgres@", f"{name}@"), clock) as engine:
            found = dict(await engine.checks())
        assert "GRANT CREATE" in str(found["tables can be made"])
        assert found["write and conditional write"] is None


class TestWakes:
    async def test_senders_wake_those_who_listen(self, place: Path, clock: ManualClock) -> None:
        heard: asyncio.Queue[QueueName] = asyncio.Queue()
        async with (
            open_engine(place, clock) as receiver,
            open_engine(place, clock) as sender,
            receiver.wakes(heard.put_nowait),
        ):
            for _ in range(10):
                await sender.queue.send(QueueName("one"), [Outgoing(b"x")])
            await sender.queue.send(QueueName("two"), [Outgoing(b"x")])
            assert [await heard.get(), await heard.get()] == ["one", "two"]
            clock.advance(1.0)
            await sender.queue.send(QueueName("one"), [Outgoing(b"x")])
            assert await heard.get() == "one"
            assert heard.empty()


async def test_a_message_that_is_due_later_wakes_nobody() -> None:
    """A retry in minutes: every commit with NOTIFY waits for all others."""
    with quick_place() as place:
        heard: asyncio.Queue[QueueName] = asyncio.Queue()
        async with open_engine(place, ManualClock()) as engine, engine.wakes(heard.put_nowait):
            await engine.queue.send(QueueName("later"), [Outgoing(b"x", delay=120.0), Outgoing(b"y", delay=1.5)])
            await engine.queue.send(QueueName("soon"), [Outgoing(b"x", delay=120.0), Outgoing(b"y", delay=0.5)])
            await engine.queue.send(QueueName("now"), [Outgoing(b"x")])
            assert [await heard.get(), await heard.get()] == ["soon", "now"]


async def test_wakes_that_come_up_together_are_one_transaction() -> None:
    with quick_place() as place:
        names = [QueueName(f"queue {number}") for number in range(40)]
        heard: asyncio.Queue[QueueName] = asyncio.Queue()
        async with (
            open_engine(place, ManualClock()) as engine,
            engine.wakes(heard.put_nowait),
            connect_to(place) as connection,
        ):
            before = await commits(connection)
            await asyncio.gather(*(engine.queue._waker.wake(name) for name in names))
            assert {await heard.get() for _ in names} == set(names)
            assert await commits(connection) - before < 10, "the first alone, the others behind it together"


async def test_a_send_succeeds_though_nobody_can_be_woken() -> None:
    with quick_place() as place:
        async with open_engine(place, ManualClock()) as engine:
            # Too long for the server.
            engine.queue._waker._channel = "x" * 64
            assert await engine.queue.send(QueueName("one"), [Outgoing(b"x")]) == []
            assert len(await engine.queue.receive(QueueName("one"), 10, 30.0)) == 1


async def commits(connection: asyncpg.Connection) -> int:
    """How many transactions the server has numbered, including this one: those with NOTIFY are."""
    return int(await connection.fetchval("SELECT pg_current_xact_id()::text::bigint"))


async def large(engine: PostgresEngine, clock: ManualClock, count: int, shards: int = 1) -> RunKey:
    run = make_run(clock, shards)
    for start in range(0, count, 1000):
        await engine.tasks.put(run, seeds(min(1000, count - start), start))
    return run


class TestLargeRuns:
    async def test_removing_one_is_as_much_work_as_removing_its_first_tasks(
        self, place: Path, clock: ManualClock
    ) -> None:
        """Bounded for each call, and in all: what is written ahead to remove 2,000 tasks does for 20,000."""
        await migrate(url_of(place))
        written, steps = [], []
        async with PostgresEngine.open(url_of(place), clock, OWN_FROM) as engine:
            for count in (2000, 20_000):
                run = await large(engine, clock, count)
                await engine.tasks.finish(run, [end(index) for index in range(0, count, 2)])
                await engine.tasks.note(run, [TaskEvent(index, 1.0, "noted", "{}") for index in range(count)])
                async with connect_to() as connection:
                    before = await connection.fetchval("SELECT pg_current_wal_insert_lsn()")
                    taken = 0
                    while removed := await engine.tasks.delete(run, 50):
                        assert removed <= 50
                        taken += 1
                    written.append(
                        await connection.fetchval("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), $1)", before)
                    )
                steps.append(taken)
                assert await engine.tasks.at(run, range(count)) == []
                assert (await engine.tasks.events(run, None, None, 10)).items == []
        assert steps[0] == steps[1] < 20
        assert written[1] < 2 * written[0]

    @pytest.mark.parametrize("shards", [1, 4])
    @pytest.mark.parametrize("rows", [MAX_SCANNED, 30])
    async def test_they_read_as_any_other(
        self, place: Path, clock: ManualClock, shards: int, rows: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(postgres_tasks, "MAX_SCANNED", rows)
        await migrate(url_of(place))
        async with PostgresEngine.open(url_of(place), clock, OWN_FROM) as engine:
            run = await large(engine, clock, 350, shards)
            failed = range(90, 130)
            await engine.tasks.finish(run, [end(index, TaskStatus.FAILED, code="x") for index in failed])
            for where, expected in (
                (TaskFilter(), list(range(350))),
                (TaskFilter(status=TaskStatus.FAILED), list(failed)),
                (TaskFilter(status=TaskStatus.PENDING), [each for each in range(350) if each not in failed]),
            ):
                for limit in (7, 40, 500):
                    assert await self.paged(engine, run, limit, where) == expected
                    # Of few failed tasks, only they are read.
                    few = len(failed) if where.status is TaskStatus.FAILED else 350
                    assert await self.walked(engine, run, limit, where) == (expected, few)
                    with monkeypatch.context() as many:
                        many.setattr(postgres_tasks, "FEW_FAILED", len(failed) - 1)
                        assert await self.walked(engine, run, limit, where) == (expected, 350)
            assert await engine.tasks.recount(run) == Counts(failed=40)

    async def paged(self, engine: PostgresEngine, run: RunKey, limit: int, where: TaskFilter) -> list[int]:
        found: list[int] = []
        for shard in range(run.shard_count):
            after: TaskId | None = None
            while page := await engine.tasks.page(run, shard, after, limit, where):
                ids = [task.task_id for task in page]
                assert ids == sorted(ids)
                assert after is None or ids[0] > after
                found += [task.index for task in page]
                after = ids[-1]
                if len(page) < limit:
                    break
        return sorted(found)

    async def walked(self, engine: PostgresEngine, run: RunKey, limit: int, where: TaskFilter) -> tuple[list[int], int]:
        """The indexes that were found, and the number of rows that were read."""
        assert isinstance(engine.tasks, ReadsByIndex)
        found: list[int] = []
        after: int | None = -1
        read = 0
        while after is not None:
            walked = await engine.tasks.walk(run, after, limit, where)
            assert walked.read <= limit
            found += [task.index for task in walked.tasks]
            read, after = read + walked.read, walked.last
        return found, read

    async def test_many_at_once_make_its_tables(self, place: Path, clock: ManualClock) -> None:
        await migrate(url_of(place))
        async with (
            PostgresEngine.open(url_of(place), clock, OWN_FROM) as one,
            PostgresEngine.open(url_of(place), clock, OWN_FROM) as two,
        ):
            run = make_run(clock)
            await asyncio.gather(
                *(engine.tasks.put(run, seeds(40, start)) for start in range(0, 400, 20) for engine in (one, two))
            )
            for engine in (one, two):
                assert await engine.tasks.unfinished(run, range(500)) == frozenset(range(420))
