"""The one SQLite file: group commit, one owner, nothing acknowledged is lost, and no other way to the file."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import apsw
import msgspec
import pytest
import structlog

from conveyor import faults
from conveyor.callers import enter_role
from conveyor.engines.ingest_sums import sums_of
from conveyor.engines.job_records import bucket_of
from conveyor.engines.queue import Outgoing, QueueName
from conveyor.engines.records import Document
from conveyor.engines.sqlite import SqliteEngine
from conveyor.engines.sqlite import database as module
from conveyor.engines.sqlite.database import MIGRATIONS, SqliteDatabase, named_queries, open_database
from conveyor.engines.tasks import MAX_SCANNED, TaskFilter
from conveyor.errors import DataDirectoryInUse, EngineFailed, EngineRefused
from conveyor.model import Ingested, JobId, OutboxEvent, RunId
from conveyor.settings import Settings
from conveyor.system import open_system
from tests.conformance.test_tasks import a_scan_is_bounded, late_writer_of_a_deleted_run
from tests.support.clocks import ManualClock
from tests.support.make_jobs import (
    ACME,
    JOBS_WITH_EXPIRY,
    REASONS_WITHOUT_CODE,
    end,
    make_job,
    make_notice,
    make_run,
    seeds,
    some_ranges,
)
from tests.support.places import quick_place

MIB = 1024 * 1024
# Seconds of a listing that waits for a role.
PATIENCE = 10.0


@pytest.fixture
def place() -> Iterator[Path]:
    with quick_place() as directory:
        yield directory


@pytest.fixture
def passed() -> Iterator[list[str]]:
    """The names of the crash points that were passed, in order."""
    names: list[str] = []
    faults.arm(names.append)
    yield names
    faults.arm(None)


async def table(database: SqliteDatabase) -> None:
    await database.change("CREATE TABLE numbers (n INTEGER PRIMARY KEY)", {})


async def insert(database: SqliteDatabase, number: int) -> int:
    return await database.change("INSERT INTO numbers VALUES (:n)", {"n": number})


async def numbers(database: SqliteDatabase) -> list[int]:
    return [row[0] for row in await database.rows("SELECT n FROM numbers ORDER BY n", {})]


class TestGroupCommit:
    async def test_a_write_that_returned_is_seen_by_every_reader(self, place: Path) -> None:
        async with open_database(place) as database:
            await table(database)
            for number in range(50):
                assert await insert(database, number) == 1
                assert await numbers(database) == list(range(number + 1))

    async def test_writes_at_once_share_commits(self, place: Path, passed: list[str]) -> None:
        async with open_database(place) as database:
            await table(database)
            passed.clear()
            await asyncio.gather(*(insert(database, number) for number in range(500)))
            assert passed.count("sqlite.commit.after") < 100
            assert await numbers(database) == list(range(500))

    async def test_one_that_fails_spoils_no_other(self, place: Path) -> None:
        def half_done(db: apsw.Connection) -> None:
            db.execute("INSERT INTO numbers VALUES (1000)")
            raise KeyError("a mistake in the work")

        async with open_database(place) as database:
            await table(database)
            await insert(database, 7)
            writes = [insert(database, number) for number in range(20)]
            results = await asyncio.gather(
                *writes, database.write(half_done), insert(database, 21), return_exceptions=True
            )
            assert isinstance(results[20], KeyError)
            assert isinstance(results[7], EngineRefused), "the primary key was taken"
            assert [each for number, each in enumerate(results) if number not in (7, 20)] == [1] * 20
            assert await numbers(database) == [*range(20), 21]

    async def test_writes_of_one_kind_share_their_statements(self, place: Path) -> None:
        sizes: list[int] = []

        def insert_all(db: apsw.Connection, values: list[int]) -> list[int]:
            sizes.append(len(values))
            for value in values:
                db.execute("INSERT INTO numbers VALUES (?)", (value,))
            return [-value for value in values]

        async with open_database(place) as database:
            await table(database)
            begun, gate = threading.Event(), threading.Event()

            def hold(_: apsw.Connection) -> bool:
                begun.set()
                return gate.wait(PATIENCE)

            held = asyncio.create_task(database.write(hold))
            await asyncio.to_thread(begun.wait, PATIENCE)
            other = insert(database, 100)
            joint = [database.write_jointly(insert_all, number) for number in (1, 2, 3)]
            together = asyncio.gather(joint[0], other, *joint[1:])
            await asyncio.sleep(0)
            gate.set()
            assert await together == [-1, 1, -2, -3]
            assert await held
            assert sizes == [3]
            sizes.clear()
            results = await asyncio.gather(
                *(database.write_jointly(insert_all, number) for number in (4, 2, 5)), return_exceptions=True
            )
            assert [results[0], results[2]] == [-4, -5]
            assert isinstance(results[1], EngineRefused), "the primary key was taken, and spoiled no other"
            assert await numbers(database) == [1, 2, 3, 4, 5, 100]

    async def test_a_commit_that_fails_fails_all_in_it_and_no_later_one(self, place: Path) -> None:
        async with open_database(place) as database:
            await table(database)
            begun, gate = threading.Event(), threading.Event()

            def hold(_: apsw.Connection) -> bool:
                begun.set()
                return gate.wait(30)

            held = asyncio.create_task(database.write(hold))
            assert await asyncio.to_thread(begun.wait, 30)
            together = [asyncio.create_task(insert(database, number)) for number in range(5)]
            await asyncio.sleep(0)
            faults.arm(_fail_once("sqlite.commit.before", after=1))
            try:
                gate.set()
                await held
                results = await asyncio.gather(*together, return_exceptions=True)
            finally:
                faults.arm(None)
            assert all(isinstance(result, EngineFailed) for result in results)
            assert await numbers(database) == []
            await insert(database, 1)
            assert await numbers(database) == [1]

    async def test_a_caller_that_went_away_holds_up_nobody(self, place: Path) -> None:
        async with open_database(place) as database:
            await table(database)
            writes = [asyncio.create_task(insert(database, number)) for number in range(20)]
            await asyncio.sleep(0)
            for write in writes[::2]:
                write.cancel()
            results = await asyncio.gather(*writes, return_exceptions=True)
            assert results[1::2] == [1] * 10
            await insert(database, 100)
            assert set(await numbers(database)) >= {*range(1, 20, 2), 100}

    async def test_many_more_than_one_commit_takes(self, place: Path, passed: list[str]) -> None:
        async with open_database(place) as database:
            await table(database)
            await asyncio.gather(*(insert(database, number) for number in range(2000)))
            assert len(await numbers(database)) == 2000
        assert passed.count("sqlite.commit.after") >= 2000 // 256

    async def test_what_was_written_is_not_kept_until_the_next_write(self, place: Path) -> None:
        class Rows(list[int]):
            """A list that can be referred to weakly."""

        loop, gone = asyncio.get_running_loop(), asyncio.Event()

        async def written(database: SqliteDatabase) -> weakref.ref[Rows]:
            rows = Rows(range(1000))
            await database.write(lambda db: db.executemany("INSERT INTO numbers VALUES (?)", ((n,) for n in rows)))
            return weakref.ref(rows, lambda _: loop.call_soon_threadsafe(gone.set))

        async with open_database(place) as database:
            await table(database)
            rows = await written(database)
            async with asyncio.timeout(PATIENCE / 2):
                await gone.wait()
        assert rows() is None

    async def test_what_was_asked_before_closing_is_written(self, place: Path) -> None:
        async with open_database(place) as database:
            await table(database)
            writes = [asyncio.create_task(insert(database, number)) for number in range(300)]
            await asyncio.sleep(0)
        assert await asyncio.gather(*writes) == [1] * 300
        async with open_database(place) as database:
            assert len(await numbers(database)) == 300

    async def test_a_closed_database_says_so(self, place: Path) -> None:
        async with open_database(place) as database:
            await table(database)
        with pytest.raises(EngineFailed, match="closed"):
            await insert(database, 1)
        with pytest.raises(EngineFailed, match="closed"):
            await numbers(database)

    async def test_readers_can_not_write(self, place: Path) -> None:
        async with open_database(place) as database:
            await table(database)
            with pytest.raises(EngineFailed, match="readonly"):
                await database.read(lambda db: db.execute("INSERT INTO numbers VALUES (1)").fetchall())

    async def test_an_error_of_the_engine_is_one_that_callers_know(self, place: Path) -> None:
        async with open_database(place) as database:
            for call in (
                database.change("INSERT INTO missing VALUES (1)", {}),
                database.rows("SELECT * FROM missing", {}),
            ):
                with pytest.raises(EngineFailed, match="no such table"):
                    await call


def _fail_once(name: str, after: int):
    left = after

    def hook(passing: str) -> None:
        nonlocal left
        if passing == name:
            left -= 1
            if left == -1:
                raise OSError("no space left on device")

    return hook


class TestOwner:
    async def test_a_second_owner_in_this_process_is_refused(self, place: Path) -> None:
        async with open_database(place) as database:
            await table(database)
            with pytest.raises(DataDirectoryInUse, match=str(place)):
                async with open_database(place):
                    pass
            await insert(database, 1)
        async with open_database(place) as database:
            assert await numbers(database) == [1]

    async def test_a_second_process_is_refused_until_the_first_is_gone(self, place: Path) -> None:
        async with open_database(place):
            assert "DataDirectoryInUse" in _child(TRY_TO_OPEN, place).stderr
        assert _child(TRY_TO_OPEN, place).returncode == 0

    async def test_the_owner_of_a_place_that_can_not_be_opened_lets_go(self, place: Path) -> None:
        async with open_database(place):
            pass
        await _set_version(place, 99)
        with pytest.raises(EngineFailed):
            async with open_database(place):
                pass
        await _set_version(place, len(MIGRATIONS))
        async with open_database(place):
            pass


TRY_TO_OPEN = """
import asyncio, sys
from pathlib import Path
from conveyor.engines.sqlite.database import open_database
async def main():
    async with open_database(Path(sys.argv[1])):
        pass
asyncio.run(main())
"""

WRITE_UNTIL_KILLED = """
import asyncio, sys
from pathlib import Path
from conveyor.engines.sqlite.database import open_database
async def writer(database, start):
    number = start
    while True:
        await database.change("INSERT INTO numbers VALUES (:n)", {"n": number})
        print(number, flush=True)
        number += 10
async def main():
    async with open_database(Path(sys.argv[1])) as database:
        await database.change("CREATE TABLE IF NOT EXISTS numbers (n INTEGER PRIMARY KEY)", {})
        row = await database.row("SELECT coalesce(max(n), -1) FROM numbers", {})
        base = (row[0] // 10 + 1) * 10
        await asyncio.gather(*(writer(database, base + n) for n in range(10)))
asyncio.run(main())
"""


def _child(code: str, place: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, str(place)], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.slow
async def test_what_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    """Again and again on the same file; the last opening is ours and looks at every page."""
    acknowledged: set[int] = set()
    for round_number in range(1, 4):
        with subprocess.Popen(
            [sys.executable, "-c", WRITE_UNTIL_KILLED, str(tmp_path)], stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            for _ in range(150 * round_number):
                acknowledged.add(int(child.stdout.readline()))
            child.send_signal(signal.SIGKILL)
            acknowledged |= {int(line) for line in child.stdout.read().split(b"\n")[:-1]}
    async with open_database(tmp_path) as database:
        kept = set(await numbers(database))
        assert acknowledged <= kept
        assert len(kept - acknowledged) <= 3 * 10, "more than was in flight"
        assert await database.row("PRAGMA integrity_check", {}) == ("ok",)


async def _set_version(place: Path, version: int) -> None:
    connection = apsw.Connection(str(place / "conveyor.db"))
    connection.pragma("user_version", version)
    connection.close()


async def test_what_the_last_owner_held_is_free_again(place: Path) -> None:
    """It died, or it would still own the directory: nobody waits for its messages and leases to lapse."""
    clock, name = ManualClock(), QueueName("q")
    async with SqliteEngine.open(place, clock) as engine:
        await engine.queue.send(name, [Outgoing(b"one"), Outgoing(b"later", 60.0)])
        (held,) = await engine.queue.receive(name, 10, 1000.0)
        lease = await engine.coordinator.lease("ingest", "first", 1000.0)
        assert lease is not None
    async with SqliteEngine.open(place, clock) as engine:
        again = await engine.coordinator.lease("ingest", "second", 1000.0)
        assert again is not None
        assert again.fence > lease.fence
        assert not await engine.coordinator.renew(lease, 1000.0)
        assert await engine.queue.ack(name, [held.receipt]) == {held.receipt}
        (delivery,) = await engine.queue.receive(name, 10, 1000.0)
        assert (delivery.body, delivery.receives) == (b"one", 2), "the start was lost, and counts"


def _old_run(db: apsw.Connection) -> None:
    run = "INSERT INTO runs (run_id, job_id, number, state, total, last_batch, created_at, sealed, touched_at) "
    for name in ("run_old", "run_other"):
        db.execute(run + "VALUES (?, 'job_old', 1, 'ingesting', 0, 0, 0.0, 0, 0.0)", (name,))
    for one in some_ranges():
        plan = msgspec.json.encode(one).decode()
        values = (one.number, plan, one.index, one.offset, one.tasks, one.invalid, one.done)
        db.execute(
            "INSERT INTO ranges (run_id, number, plan, next_index, byte_offset, tasks, invalid, done) "
            "VALUES ('run_old', ?, ?, ?, ?, ?, ?, ?)",
            values,
        )


async def test_a_late_writer_of_a_deleted_run_changes_no_later_one() -> None:
    clock = ManualClock()
    with quick_place() as place:
        async with SqliteEngine.open(place, clock) as engine:
            await late_writer_of_a_deleted_run(engine.tasks, clock)


async def test_a_filter_that_matches_nothing_reads_so_many_rows_at_once() -> None:
    clock = ManualClock()
    with quick_place() as place:
        async with SqliteEngine.open(place, clock) as engine:
            run = make_run(clock)
            await engine.tasks.put(run, seeds(MAX_SCANNED + 50))
            await a_scan_is_bounded(engine.tasks, run, MAX_SCANNED)


async def test_a_role_reads_while_requests_hold_their_readers() -> None:
    with quick_place() as place:
        async with SqliteEngine.open(place, ManualClock()) as engine:
            read, held = threading.Event(), threading.Semaphore(0)

            def long(_: apsw.Connection) -> bool:
                held.release()
                return read.wait(PATIENCE)

            database = engine.records.jobs._database
            listings = [asyncio.create_task(database.read(long)) for _ in range(2)]
            for _ in listings:
                await asyncio.to_thread(held.acquire)

            async def role() -> None:
                enter_role()
                await engine.records.jobs.active_jobs()
                read.set()

            await asyncio.create_task(role())
            assert await asyncio.gather(*listings) == [True, True], "the role waited for them"


class TestSchema:
    async def test_a_newer_database_is_refused_and_left_alone(self, place: Path) -> None:
        async with open_database(place) as database:
            await table(database)
            await insert(database, 1)
        await _set_version(place, len(MIGRATIONS) + 1)
        with pytest.raises(EngineFailed, match=f"version {len(MIGRATIONS) + 1}, newer"):
            async with open_database(place):
                pass
        await _set_version(place, len(MIGRATIONS))
        async with open_database(place) as database:
            assert await numbers(database) == [1]

    async def test_an_expansion_leaves_the_version_and_older_code_runs_on_it(
        self, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with open_database(place) as database:
            await table(database)
        added = ("CREATE TABLE later (id INTEGER)", "ALTER TABLE jobs ADD COLUMN later TEXT")
        for expansions in (added[:1], added, added):
            with monkeypatch.context() as patch:
                patch.setattr(module, "EXPANSIONS", expansions)
                async with open_database(place) as database:
                    assert await database.row("PRAGMA user_version", {}) == (len(MIGRATIONS),)
                    assert len(await database.rows("SELECT number FROM expansions", {})) == len(expansions)
        async with open_database(place) as database:
            await insert(database, 1)
            assert await numbers(database) == [1]

    async def test_opening_again_changes_nothing(self, place: Path) -> None:
        async with open_database(place) as database:
            before = await database.rows("SELECT name, sql FROM sqlite_schema ORDER BY name", {})
            assert await database.row("PRAGMA user_version", {}) == (len(MIGRATIONS),)
        async with open_database(place) as database:
            assert await database.rows("SELECT name, sql FROM sqlite_schema ORDER BY name", {}) == before

    async def test_numbers_of_runs_go_on_above_all_that_were_there(
        self, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Those of runs that are gone too, as far as a row tells of them."""
        monkeypatch.setattr(module, "MIGRATIONS", MIGRATIONS[:1])
        async with open_database(place) as database:
            await database.change("INSERT INTO task_runs (run_no, run_id, tenant, failed) VALUES (3, 'r', 't', 7)", {})
            await database.change("INSERT INTO task_events VALUES (1, 8, 0, 0.0, 'late', '{}')", {})
        monkeypatch.undo()
        insert_run = "INSERT INTO task_runs (run_id, tenant) VALUES (:run_id, 't')"
        async with open_database(place) as database:
            assert await database.rows("SELECT run_no, run_id, tenant, failed FROM task_runs", {}) == [(3, "r", "t", 7)]
            for name in ("s", "t"):
                await database.change(insert_run, {"run_id": name})
                await database.change("DELETE FROM task_runs WHERE run_id = :run_id", {"run_id": name})
            await database.change(insert_run, {"run_id": "u"})
            assert await database.row("SELECT run_no FROM task_runs WHERE run_id = 'u'", {}) == (11,)

    async def test_jobs_and_schedules_that_are_there_refer_to_their_uploads(
        self, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        insert_job = (
            "INSERT INTO jobs (job_id, tenant, kind, mode, options, result_layout, state, created_at, expires_at,"
            " run_id, source) VALUES (:job_id, 't', 'fetch', 'closed', '{}', 'packed', 'running', 0, 0, 'r', :source)"
        )
        insert_row = "INSERT INTO rows (kind, tenant, id, body, version) VALUES (:kind, 't', :id, :body, 1)"
        monkeypatch.setattr(module, "MIGRATIONS", MIGRATIONS[:2])
        async with open_database(place) as database:
            await database.change(insert_job, {"job_id": "one", "source": '{"key":"uploads/t/upload_1","size":1}'})
            await database.change(insert_job, {"job_id": "two", "source": None})
            for name, body in (("one", b'{"job": {"source": {"upload_id": "upload_1"}}}'), ("two", b'{"job": {}}')):
                await database.change(insert_row, {"kind": "schedule", "id": name, "body": body})
            await database.change(insert_row, {"kind": "progress", "id": "three", "body": b"no JSON"})
        monkeypatch.undo()
        async with open_database(place) as database:
            jobs = await database.rows("SELECT job_id, source_key FROM jobs ORDER BY job_id", {})
            assert jobs == [("one", "uploads/t/upload_1"), ("two", None)]
            rows = await database.rows("SELECT id, upload_id FROM documents WHERE upload_id IS NOT NULL", {})
            assert rows == [("one", "upload_1")]

    async def test_documents_and_events_of_the_schema_before_are_read(
        self, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "MIGRATIONS", MIGRATIONS[:4])
        async with open_database(place) as database:
            await database.change(
                "INSERT INTO rows (kind, tenant, id, body, version, due_at, expires_at, job_id, upload_id)"
                " VALUES ('schedule', 'acme', 'one', x'00ff', 3, 5.0, NULL, 'job_1', 'upload_1')",
                {},
            )
            insert = (
                "INSERT INTO notices (notice_id, tenant, job_id, run_id, event, at, data, told)"
                " VALUES (:id, 'acme', 'job_1', 'run_1', 'job.accepted', 1.0, '{\"total\":7}', :told)"
            )
            await database.change(insert, {"id": "evt_1", "told": 1})
            await database.change(insert, {"id": "evt_2", "told": 0})
            await database.change(insert, {"id": "evt_3", "told": 0})
            await database.change("DELETE FROM notices WHERE notice_id = 'evt_3'", {})
        monkeypatch.undo()
        document = Document(
            "schedule", ACME, "one", b"\0\xff", 3, due_at=5.0, job_id=JobId("job_1"), upload_id="upload_1"
        )
        pending = OutboxEvent("evt_2", ACME, JobId("job_1"), RunId("run_1"), "job.accepted", 1.0, {"total": 7})
        async with SqliteEngine.open(place, ManualClock()) as engine:
            documents, outbox = engine.records.documents, engine.records.outbox
            assert await documents.document("schedule", ACME, "one") == document
            assert await documents.due_documents("schedule", 5.0, 10) == [document]
            assert (await documents.documents("schedule", ACME, None, 10, JobId("job_1"))).items == [document]
            assert await documents.replace_document(document) is not None
            assert await outbox.undispatched(10) == [pending]
            await outbox.mark_dispatched([pending])
            assert await outbox.undispatched(10) == []
            event = msgspec.structs.replace(pending, notice_id="evt_4")
            await documents.create_documents([], event)
            assert [(each.seq, each.id) for each in (await outbox.events(ACME, JobId("job_1"), None, 10)).items] == [
                (1, "evt_1"),
                (2, "evt_2"),
                (4, "evt_4"),
            ], "the number of a removed event is not used again"
            old = "SELECT name FROM sqlite_schema WHERE name LIKE 'rows%' OR name LIKE 'notices%'"
            assert await engine._database.rows(old, {}) == []

    async def test_a_migration_that_fails_leaves_the_version_before(
        self, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with open_database(place) as database:
            await table(database)
        broken = "CREATE TABLE half (a); INSERT INTO missing VALUES (1);"
        monkeypatch.setattr(module, "MIGRATIONS", (*MIGRATIONS, broken))
        with pytest.raises(apsw.SQLError):
            async with open_database(place):
                pass
        monkeypatch.undo()
        async with open_database(place) as database:
            assert await database.row("SELECT count(*) FROM sqlite_schema WHERE name = 'half'", {}) == (0,)
            await insert(database, 1)

    async def test_ranges_from_before_the_sums_are_added_up(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(module, "MIGRATIONS", MIGRATIONS[:1])
            async with open_database(place) as database:
                await database.write(_old_run)
        async with SqliteEngine.open(place, ManualClock()) as engine:
            ranges = await engine.records.ingests.ranges(RunId("run_old"))
            assert len(ranges) == len(some_ranges())
            assert await engine.records.ingests.ingested(RunId("run_old")) == sums_of(*ranges).ingested
            assert await engine.records.ingests.ingested(RunId("run_other")) == Ingested(0, 0, 0, 0, 0, 0)

    async def test_runs_from_before_the_codes_get_them_from_their_reasons(
        self, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(module, "MIGRATIONS", MIGRATIONS[:4])
            async with open_database(place) as database:
                for number, reason in enumerate(REASONS_WITHOUT_CODE):
                    await database.change(
                        "INSERT INTO jobs (job_id, tenant, kind, mode, options, result_layout, state, reason, "
                        "created_at, expires_at, run_id) "
                        "VALUES (:job, 'acme', 'fetch', 'closed', '{}', 'object', 'failed', :reason, 0, 9e9, :run)",
                        {"job": f"job_{number}", "run": f"run_{number}", "reason": reason},
                    )
                    await database.change(
                        "INSERT INTO runs (run_id, job_id, number, state, total, last_batch, created_at, sealed, "
                        "touched_at) VALUES (:run, :job, 1, 'failed', 0, 1, 0, 1, 0)",
                        {"job": f"job_{number}", "run": f"run_{number}"},
                    )
        async with SqliteEngine.open(place, ManualClock()) as engine:
            found = (await engine.records.jobs.jobs(ACME, None, 100)).items
        assert {job.reason: job.run.reason_code for job in found} == REASONS_WITHOUT_CODE

    async def test_jobs_from_before_expire_after_their_end(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(module, "MIGRATIONS", MIGRATIONS[:6])
            async with open_database(place) as database:
                for number, (state, options, deleted, expires_at, ended_at, _) in enumerate(JOBS_WITH_EXPIRY):
                    values = {"job": f"job_{number}", "run": f"run_{number}", "state": state, "ended_at": ended_at}
                    await database.change(
                        "INSERT INTO jobs (job_id, tenant, kind, mode, options, result_layout, state, created_at, "
                        "expires_at, run_id, deleted) VALUES (:job, 'acme', 'fetch', 'closed', :options, 'object', "
                        ":state, 0, :expires_at, :run, :deleted)",
                        {**values, "options": options, "deleted": deleted, "expires_at": expires_at},
                    )
                    await database.change(
                        "INSERT INTO runs (run_id, job_id, number, state, total, last_batch, created_at, sealed, "
                        "touched_at, ended_at) VALUES (:run, :job, 1, :state, 0, 1, 0, 1, 0, :ended_at)",
                        values,
                    )
        async with open_database(place) as database:
            found = await database.rows("SELECT expires_at FROM jobs ORDER BY job_id", {})
        assert [expires_at for (expires_at,) in found] == [after for *_, after in JOBS_WITH_EXPIRY]

    @pytest.mark.parametrize(
        "file", ["jobs.sql", "ingests.sql", "access.sql", "tasks.sql", "queue.sql", "coordinator.sql"]
    )
    async def test_every_named_query_fits_the_schema(self, place: Path, file: str) -> None:
        queries = named_queries(file)
        assert queries
        async with open_database(place) as database:
            for name, text in queries.items():
                assert text, name
                assert ";" not in text, name
                await database.read(lambda db, text=text: db.execute(f"EXPLAIN {text}", _Anything()).fetchall())

    async def test_the_writer_is_durable_and_the_only_one_to_checkpoint(self, place: Path) -> None:
        async with open_database(place) as database:
            pragmas = ("journal_mode", "synchronous", "wal_autocheckpoint", "journal_size_limit")
            writer = await database.write(lambda db: {name: db.pragma(name) for name in pragmas})
            assert writer["journal_mode"] == "wal"
            assert writer["synchronous"] == 2
            assert 0 < writer["wal_autocheckpoint"] <= 16_000
            assert 0 < writer["journal_size_limit"] <= 64 * MIB
            for reader in await asyncio.gather(
                *(database.read(lambda db: db.pragma("wal_autocheckpoint")) for _ in range(9))
            ):
                assert reader == 0

    async def test_the_library_is_one_without_the_wal_race(self) -> None:
        assert tuple(map(int, apsw.sqlite_lib_version().split("."))) >= (3, 51, 3)

    async def test_one_with_the_race_is_warned_of(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(apsw, "sqlite_lib_version", lambda: "3.40.1")
        with structlog.testing.capture_logs() as logs:
            async with open_database(place):
                pass
        assert any(entry["log_level"] == "warning" and entry.get("version") == (3, 40, 1) for entry in logs)


class _Anything(dict[str, None]):
    """Values for a statement that is only compiled."""

    def __missing__(self, name: str) -> None:
        return None


async def test_the_file_is_opened_by_sqlite_alone(place: Path) -> None:
    """Opening and closing it by path drops every lock that SQLite holds in this process, and with them commits
    (RELIABILITY, finding 2). SQLite opens below Python, which sees none of it."""
    opened: list[str] = []
    listening = True

    def listen(event: str, arguments: tuple[object, ...]) -> None:
        if listening and event == "open":
            opened.append(os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | os.PathLike) else "")

    # A hook can not be taken out again; it falls silent.
    sys.addaudithook(listen)
    try:
        clock = ManualClock()
        for _ in range(2):
            async with open_system(Settings.load({}, data=place), clock) as system:
                run = make_run(clock)
                await system.tasks.put(run, seeds(100))
                await system.tasks.finish(run, [end(index) for index in range(50)])
                await system.tasks.page(run, 0, None, 10, TaskFilter())
                await system.blobs.put("results/acme/a", b"body")
    finally:
        listening = False
    assert any(name.endswith("owner.lock") for name in opened), "the audit sees nothing"
    assert [name for name in opened if "conveyor.db" in name] == []


class TestWal:
    async def test_it_is_bounded_without_a_pinned_reader(self, place: Path) -> None:
        async with open_database(place) as database:
            await _churn(database, 160)
            assert _wal(place) < 80 * MIB

    async def test_it_stops_growing_when_a_pinned_reader_is_gone(self, place: Path) -> None:
        release, pinned = threading.Event(), threading.Event()

        def pin(db: apsw.Connection) -> None:
            db.execute("BEGIN")
            db.execute("SELECT count(*) FROM churn").fetchall()
            pinned.set()
            release.wait(30)
            db.execute("COMMIT")

        async with open_database(place) as database:
            await _churn(database, 1)
            reader = asyncio.create_task(database.read(pin))
            await asyncio.to_thread(pinned.wait, 10)
            await _churn(database, 90)
            grown = _wal(place)
            assert grown > 64 * MIB, "the reader holds the log"
            release.set()
            await reader
            await _churn(database, 40)
            assert _wal(place) <= 65 * MIB, "journal_size_limit cuts it back"
        assert _wal(place) == 0

    async def test_no_reader_of_ours_stays_pinned(self, place: Path) -> None:
        """Every read method leaves no statement open behind it."""
        clock = ManualClock()
        async with SqliteEngine.open(place, clock) as engine:
            database: SqliteDatabase = engine._database
            run = make_run(clock)
            await engine.tasks.put(run, seeds(500))
            for _ in range(6):
                await engine.tasks.page(run, 0, None, 3, TaskFilter())
                await engine.tasks.counts(run)
                await engine.records.jobs.jobs(run.tenant, None, 1)
                await database.row("SELECT idx FROM tasks", {})
            await _churn(database, 160)
            assert _wal(place) < 80 * MIB


async def _churn(database: SqliteDatabase, mebibytes: int) -> None:
    """Write so much, in commits of 1 MiB, over the same rows."""
    await database.change("CREATE TABLE IF NOT EXISTS churn (id INTEGER PRIMARY KEY, body BLOB)", {})
    fill = (
        "WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < 256) "
        "INSERT OR REPLACE INTO churn SELECT n, randomblob(4000) FROM s"
    )
    for _ in range(mebibytes):
        await database.change(fill, {})


def _wal(place: Path) -> int:
    path = place / "conveyor.db-wal"
    return path.stat().st_size if path.exists() else 0


async def test_active_jobs_without_a_bucket_are_in_theirs(place: Path, clock: ManualClock) -> None:
    """Those that an earlier version wrote."""
    async with SqliteEngine.open(place, clock) as engine:
        jobs, records = [make_job(clock) for _ in range(3)], engine.records.jobs
        for job in jobs:
            await records.create_job(job, make_notice(clock, job), None)
        await records._database.change(
            "UPDATE jobs SET bucket = NULL WHERE job_id <> :job_id", {"job_id": jobs[0].job_id}
        )
        assert len(await records.active_jobs()) == 3
        for job in jobs:
            bucket = bucket_of(job.job_id)
            there = {each.job_id for each in jobs if bucket_of(each.job_id) == bucket}
            assert {each.job_id for each in await records.active_jobs([bucket])} == there
