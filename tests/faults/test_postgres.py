"""The Postgres engine when things go wrong: a server that restarts, commits that go unanswered, old snapshots.

What is asked of time is asked of counts instead: rows moved, pages read.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conveyor import faults
from conveyor.engines.postgres import PostgresEngine, migrate
from conveyor.engines.queue import Depth, Outgoing, QueueName, run_queue
from conveyor.engines.records import Document, IdempotencyClaim
from conveyor.engines.tasks import TaskEvent
from conveyor.errors import EngineFailed, EngineRefused, is_outage
from conveyor.model import Counts, InputJson, Mode, Options, Range, Source, UploadRecord
from conveyor.states import RunState, TaskStatus, sources_of
from tests.conformance.record_setup import key, part
from tests.servers.postgres import Server, connect_to, open_engine, url_of
from tests.support.clocks import ManualClock
from tests.support.make_jobs import ACME, end, make_job, make_notice, make_run, seeds
from tests.support.places import quick_place

QUEUE = QueueName("run:one")
RESTARTS = 4

replace = msgspec.structs.replace


class RestlessClock(ManualClock):
    """Moved by hand, but nobody has to wait for it: a sleep passes at once."""

    async def sleep(self, seconds: float) -> None:
        self.advance(max(0.0, seconds))
        # A server that restarts takes real time.
        await asyncio.sleep(0.005)


class PatientClock(RestlessClock):
    """Of a process that waits for a server as long as it takes."""

    def monotonic(self) -> float:
        return 0.0


@pytest.fixture
def place() -> Iterator[Path]:
    with quick_place() as directory:
        yield directory


@pytest.fixture
def clock() -> ManualClock:
    return RestlessClock()


@pytest.fixture
async def engine(place: Path, clock: ManualClock) -> AsyncIterator[PostgresEngine]:
    async with open_engine(place, clock) as opened:
        yield opened


@pytest.fixture
def fragile() -> Iterator[Server]:
    """A server of this test's own, to be restarted."""
    server = Server()
    yield server
    server.close()


@asynccontextmanager
async def unanswered(*at: str) -> AsyncIterator[Counter[str]]:
    """The connection is lost at the first passing of each of these points."""
    passed: Counter[str] = Counter()

    def hook(name: str) -> None:
        if name in at:
            passed[name] += 1
            if passed[name] == 1:
                raise ConnectionResetError(f"lost at {name}")

    faults.arm(hook)
    try:
        yield passed
    finally:
        faults.arm(None)


class TestRestarts:
    async def test_nothing_is_lost_or_counted_twice(self, fragile: Server) -> None:
        """Tasks are put and finished, messages sent, received and acknowledged, by several at once, while the server
        goes down hard again and again."""
        url = f"{fragile.url}?schema=restarts"
        await migrate(url)
        clock = PatientClock()
        run = make_run(clock)
        restarted = 0
        put: list[int] = []
        moved: Counter[int] = Counter()
        sent: list[bytes] = []
        received: Counter[bytes] = Counter()
        numbers = itertools.count()
        # So much has to be done before the next restart.
        goal: list[int] = []
        enough = asyncio.Event()

        async with PostgresEngine.open(url, clock, own_from=200) as engine:

            async def feed() -> None:
                while restarted < RESTARTS:
                    start = next(numbers) * 40
                    await engine.tasks.put(run, seeds(40, start))
                    put.extend(range(start, start + 40))
                    bodies = [b"%d" % number for number in range(start, start + 40, 10)]
                    assert await engine.queue.send(QUEUE, [Outgoing(body) for body in bodies]) == []
                    sent.extend(bodies)

            async def work() -> None:
                while restarted < RESTARTS or len(received) < len(sent):
                    got = await engine.queue.receive(QUEUE, 3, 30.0)
                    if not got:
                        clock.advance(5.0)
                        await asyncio.sleep(0.002)
                        continue
                    received.update(each.body for each in got)
                    for each in got:
                        first = int(each.body)
                        ends = [
                            end(index, TaskStatus.FAILED if index % 3 == 0 else TaskStatus.SUCCEEDED, code="x", at=1.0)
                            for index in range(first, first + 10)
                        ]
                        finished = await engine.tasks.finish(run, ends)
                        moved.update(finished.moved)
                    if goal and len(put) >= goal[0] and moved.total() >= goal[1]:
                        enough.set()
                    await engine.queue.ack(QUEUE, [each.receipt for each in got])

            async def restart() -> None:
                nonlocal restarted
                for _ in range(RESTARTS):
                    enough.clear()
                    goal[:] = [len(put) + 400, moved.total() + 100]
                    await enough.wait()
                    await asyncio.to_thread(fragile.restart)
                    restarted += 1

            await asyncio.gather(feed(), feed(), work(), work(), work(), restart())

            assert sorted(put) == list(range(len(put)))
            assert set(received) == set(sent)
            assert moved == Counter(put), "each task moves once, and somebody is told"
            counts = await engine.tasks.counts(run)
            assert counts == await engine.tasks.recount(run)
            failed = sum(index % 3 == 0 for index in put)
            assert counts == Counts(len(put) - failed, failed, 0)
            assert await engine.tasks.error_codes(run, 10) == [("x", failed)]
            clock.advance(100)
            depth = await engine.queue.depth(QUEUE)
            assert (depth.held, depth.delayed) == (0, 0)
            assert await engine.tasks.unfinished(run, put) == frozenset()

    async def test_a_server_that_stays_away_is_said_so(self, fragile: Server) -> None:
        url = f"{fragile.url}?schema=away"
        await migrate(url)
        async with PostgresEngine.open(url, RestlessClock()) as engine:
            await asyncio.to_thread(fragile.stop)
            with pytest.raises(EngineFailed, match="does not answer") as caught:
                await engine.records.jobs.active_jobs()
            assert is_outage(caught.value)
            with pytest.raises(EngineFailed, match="does not answer"):
                await engine.queue.send(QUEUE, [Outgoing(b"x")])
            with pytest.raises(EngineFailed, match="is unreachable"):
                async with PostgresEngine.open(url, RestlessClock()):
                    pass
            await asyncio.to_thread(fragile.start)
            assert await engine.records.jobs.active_jobs() == []
            assert await engine.queue.send(QUEUE, [Outgoing(b"x")]) == []

    async def test_who_listens_hears_again_after_a_restart(self, fragile: Server) -> None:
        url = f"{fragile.url}?schema=wakes"
        await migrate(url)
        clock = PatientClock()
        heard: asyncio.Queue[QueueName] = asyncio.Queue()
        async with PostgresEngine.open(url, clock) as engine, engine.wakes(heard.put_nowait):
            await engine.queue.send(QUEUE, [Outgoing(b"x")])
            assert await heard.get() == QUEUE
            await asyncio.to_thread(fragile.restart)
            while heard.empty():
                # A wake-up may be missed while it connects; each queue has its own.
                await engine.queue.send(QueueName(clock.new_id("q")), [Outgoing(b"x")])
            assert (await heard.get()).startswith("q_")


def claim_of(clock: ManualClock) -> IdempotencyClaim:
    now = clock.now()
    return IdempotencyClaim(ACME, "route", "key", "print", "subject", now + 30, now + 60)


def answered(claim: IdempotencyClaim) -> IdempotencyClaim:
    return replace(claim, status=201, body=b"answer")


# An operation after its preparations: what it returns, and what it leaves, is the same whether it was answered or not.
Operation = Callable[[], Awaitable[Any]]
Case = Callable[[PostgresEngine, ManualClock], Awaitable[tuple[Operation, Operation]]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


@case
async def create_job(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    job, claim = make_job(clock), claim_of(clock)
    rows = [Document("export", ACME, "one", b"x", job_id=job.job_id)]
    await engine.records.access.claim(claim)
    notice = make_notice(clock, job)

    async def left() -> Any:
        page = await engine.records.outbox.events(ACME, job.job_id, None, 10)
        return len(page.items), (await engine.records.access.claim(claim)).row.status

    return lambda: engine.records.jobs.create_job(job, notice, answered(claim), rows), left


@case
async def accept_atomically(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    job = make_job(clock, total=70)
    notice, queue = make_notice(clock, job), run_queue(job.run.run_id)

    async def left() -> Any:
        return (
            await engine.queue.depth(queue),
            len(await engine.tasks.unfinished(job.key, range(100))),
            len(await engine.records.outbox.undispatched(10)),
        )

    return lambda: engine.accept_atomically(job, notice, None, seeds(70), queue, [Outgoing(b"1"), Outgoing(b"2")]), left


@case
async def add_run(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    job = make_job(clock)
    await engine.records.jobs.create_job(job, make_notice(clock, job), None)
    cancelled = RunState.CANCELLED
    await engine.records.jobs.move_run(job.job_id, job.run.run_id, sources_of(cancelled), cancelled, None, None)
    again = replace(job, run=replace(job.run, run_id="run_2", number=2))
    notice = make_notice(clock, again)

    async def left() -> Any:
        return [run.number for run in await engine.records.jobs.runs(job.job_id)], len(
            await engine.records.outbox.undispatched(10)
        )

    return lambda: engine.records.jobs.add_run(again, notice, None), left


@case
async def change_options(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    job = make_job(clock)
    await engine.records.jobs.create_job(job, make_notice(clock, job), None)
    notice = make_notice(clock, job)

    async def left() -> Any:
        found = await engine.records.jobs.job(ACME, job.job_id)
        assert found is not None
        return found.version, len(await engine.records.outbox.undispatched(10))

    return lambda: engine.records.jobs.change_options(job.job_id, 1, Options(concurrency=2), notice), left


@case
async def move_run(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    job = make_job(clock)
    await engine.records.jobs.create_job(job, make_notice(clock, job), None)
    notice, done = make_notice(clock, job), RunState.COMPLETED
    where = (job.job_id, job.run.run_id)
    return (
        lambda: engine.records.jobs.move_run(*where, sources_of(done), done, None, notice),
        lambda: engine.records.outbox.undispatched(10),
    )


@case
async def move_run_untold(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    job = make_job(clock)
    await engine.records.jobs.create_job(job, make_notice(clock, job), None)
    where, done = (job.job_id, job.run.run_id), RunState.COMPLETED

    async def left() -> Any:
        run = await engine.records.jobs.run(*where)
        assert run is not None
        return run.state

    return lambda: engine.records.jobs.move_run(*where, sources_of(done), done, None, None), left


@case
async def mark_deleted(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    job = make_job(clock)
    await engine.records.jobs.create_job(job, make_notice(clock, job), None)
    return lambda: engine.records.jobs.mark_deleted(ACME, job.job_id), lambda: engine.records.jobs.job(ACME, job.job_id)


@case
async def split(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    job = make_job(clock, latched=False, state=RunState.INGESTING)
    await engine.records.jobs.create_job(job, make_notice(clock, job), None)
    ranges = [part(0, 0, 500), part(1, 500, None)]
    return (
        lambda: engine.records.ingests.split(job.job_id, job.run.run_id, ranges),
        lambda: engine.records.ingests.ranges(job.run.run_id),
    )


@case
async def append_range(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    job = make_job(clock, latched=False, state=RunState.INGESTING, mode=Mode.OPEN)
    await engine.records.jobs.create_job(job, make_notice(clock, job), None)
    claim = claim_of(clock)
    await engine.records.access.claim(claim)

    async def append() -> tuple[int, int]:
        source = Source("lists/one", 5, "0" * 64)
        added = await engine.records.ingests.append_range(job.job_id, job.run.run_id, source, 5, answered(claim), True)
        assert isinstance(added, Range)
        return added.number, added.first_index

    return append, lambda: engine.records.ingests.ranges(job.run.run_id)


@case
async def seal(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    job = make_job(clock, latched=False, state=RunState.INGESTING, mode=Mode.OPEN)
    await engine.records.jobs.create_job(job, make_notice(clock, job), None)
    where = (job.job_id, job.run.run_id)

    async def left() -> Any:
        found = await engine.records.jobs.job(ACME, job.job_id)
        assert found is not None
        return found.run.sealed, found.reason

    return lambda: engine.records.ingests.seal(*where, "why"), left


@case
async def claim(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    row = claim_of(clock)
    rival = replace(row, subject="another", lease_until=row.lease_until + 1)

    async def left() -> Any:
        return (await engine.records.access.claim(rival)).granted

    return lambda: engine.records.access.claim(row), left


@case
async def create_upload(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    row, now = claim_of(clock), clock.now()
    await engine.records.access.claim(row)
    upload = UploadRecord(ACME, "upload_1", "uploads/acme/upload_1", 7, "0" * 64, now, now + 600)

    async def left() -> Any:
        return await engine.records.access.upload("upload_1") == upload, (
            await engine.records.access.claim(row)
        ).row.status

    return lambda: engine.records.access.create_upload(upload, answered(row)), left


@case
async def mark_stored(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    now = clock.now()
    await engine.records.access.create_upload(UploadRecord(ACME, "upload_1", "key", 7, "0" * 64, now, now + 600), None)
    return lambda: engine.records.access.mark_stored("upload_1"), lambda: engine.records.access.mark_stored("upload_1")


@case
async def purge_upload(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    now = clock.now()
    for number in range(3):
        upload = UploadRecord(ACME, f"upload_{number}", f"key {number}", 7, "0" * 64, now, now + 1)
        await engine.records.access.create_upload(upload, None)
    clock.advance(2)
    return lambda: engine.records.access.purge_upload("upload_1"), lambda: engine.records.access.expired_uploads(
        now + 2, 5
    )


@case
async def replace_referring_row(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    now = clock.now()
    for number in range(2):
        upload = UploadRecord(ACME, f"upload_{number}", f"key {number}", 7, "0" * 64, now, now + 600)
        await engine.records.access.create_upload(upload, None)
    made = Document("schedule", ACME, "one", b"", upload_id="upload_0")
    await engine.records.documents.create_documents([made])
    other = msgspec.structs.replace(made, upload_id="upload_1")
    return lambda: engine.records.documents.replace_document(other), lambda: engine.records.access.expired_uploads(
        now, 5
    )


@case
async def remove_referring_row(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    now = clock.now()
    await engine.records.access.create_upload(UploadRecord(ACME, "upload_1", "key", 7, "0" * 64, now, now + 600), None)
    made = Document("schedule", ACME, "one", b"", upload_id="upload_1")
    await engine.records.documents.create_documents([made])
    return lambda: engine.records.documents.remove_document(made), lambda: engine.records.access.expired_uploads(now, 5)


@case
async def create_key_answered(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    made, row = key(clock, "k1"), claim_of(clock)
    await engine.records.access.claim(row)
    reply = msgspec.structs.replace(row, status=201, body=b"{}")
    return lambda: engine.records.access.create_key(made, reply), lambda: engine.records.access.keys(ACME)


@case
async def create_key(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    made = key(clock, "k1")
    return lambda: engine.records.access.create_key(made), lambda: engine.records.access.keys(ACME)


@case
async def create_documents(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    job, row = make_job(clock), claim_of(clock)
    await engine.records.access.claim(row)
    notice = make_notice(clock, job)
    return (
        lambda: engine.records.documents.create_documents(
            [Document("export", ACME, "one", b"x")], notice, answered(row)
        ),
        lambda: engine.records.outbox.undispatched(10),
    )


@case
async def create_rows_untold(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    row = claim_of(clock)
    await engine.records.access.claim(row)
    return (
        lambda: engine.records.documents.create_documents([Document("export", ACME, "one", b"x")], None, answered(row)),
        lambda: engine.records.documents.document("export", ACME, "one"),
    )


@case
async def replace_document(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    row = Document("export", ACME, "one", b"x", due_at=5.5)
    await engine.records.documents.create_documents([row])
    notice = make_notice(clock, make_job(clock))
    return (
        lambda: engine.records.documents.replace_document(replace(row, body=b"y"), notice),
        lambda: engine.records.outbox.undispatched(10),
    )


@case
async def remove_document(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    row = Document("export", ACME, "one", b"x")
    await engine.records.documents.create_documents([row])
    return lambda: engine.records.documents.remove_document(row), lambda: engine.records.documents.document(
        "export", ACME, "one"
    )


@case
async def put(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    run = make_run(clock)
    return lambda: engine.tasks.put(run, seeds(70)), lambda: engine.tasks.unfinished(run, range(100))


@case
async def finish(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    run = make_run(clock)
    await engine.tasks.put(run, seeds(70))
    await engine.tasks.finish(run, [end(3), end(60)])
    ends = [end(index, TaskStatus.FAILED, code="x", attempts=2, at=5.0) for index in (1, 2, 3, 59, 60, 61)]

    async def left() -> Any:
        return await engine.tasks.counts(run), await engine.tasks.recount(run), await engine.tasks.error_codes(run, 9)

    return lambda: engine.tasks.finish(run, ends), left


@case
async def cancel_pending(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    run = make_run(clock)
    await engine.tasks.put(run, seeds(70))

    async def cancel() -> None:
        while await engine.tasks.cancel_pending(run, 20, 1.0):
            pass

    async def left() -> Any:
        return await engine.tasks.counts(run), await engine.tasks.recount(run)

    return cancel, left


@case
async def note(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    run = make_run(clock)
    await engine.tasks.put(run, seeds(70))
    events = [TaskEvent(index, 1.0, f"event {index}", "{}") for index in (1, 2, 60)]

    async def left() -> Any:
        return [each.event for each in (await engine.tasks.events(run, None, None, 10)).items]

    return lambda: engine.tasks.note(run, events), left


@case
async def delete(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    run = make_run(clock)
    await engine.tasks.put(run, seeds(70))

    async def remove() -> None:
        while await engine.tasks.delete(run, 20):
            pass

    return remove, lambda: engine.tasks.at(run, range(70))


@case
async def receive(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    await engine.queue.send(QUEUE, [Outgoing(b"%d" % number) for number in range(5)])

    async def take() -> Any:
        got = await engine.queue.receive(QUEUE, 3, 30.0)
        assert await engine.queue.extend(QUEUE, [each.receipt for each in got], 60.0) == frozenset()
        return sorted(each.body for each in got)

    return take, lambda: engine.queue.depth(QUEUE)


@case
async def ack(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    await engine.queue.send(QUEUE, [Outgoing(b"%d" % number) for number in range(3)])
    got = await engine.queue.receive(QUEUE, 2, 30.0)
    await engine.queue.release(QUEUE, [got[0].receipt], 0.0)

    async def acknowledge() -> int:
        return len(await engine.queue.ack(QUEUE, [each.receipt for each in got]))

    return acknowledge, lambda: engine.queue.depth(QUEUE)


@case
async def release(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    await engine.queue.send(QUEUE, [Outgoing(b"x")])
    (got,) = await engine.queue.receive(QUEUE, 2, 30.0)

    async def left() -> Any:
        (again,) = await engine.queue.receive(QUEUE, 2, 30.0)
        return again.receives

    return lambda: engine.queue.release(QUEUE, [got.receipt], 0.0), left


@case
async def dead_letter(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    await engine.queue.send(QUEUE, [Outgoing(b"x")])
    (got,) = await engine.queue.receive(QUEUE, 2, 30.0)

    async def left() -> Any:
        return len((await engine.queue.dead_letters(None, 10)).items), await engine.queue.depth(QUEUE)

    return lambda: engine.queue.dead_letter(QUEUE, [got.receipt], "why"), left


@case
async def redrive(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    await engine.queue.send(QUEUE, [Outgoing(b"x"), Outgoing(b"y")])
    got = await engine.queue.receive(QUEUE, 2, 30.0)
    await engine.queue.dead_letter(QUEUE, [each.receipt for each in got], "why")
    letters = (await engine.queue.dead_letters(None, 10)).items
    ids = [letter.message_id for letter in letters]
    return lambda: engine.queue.redrive(ids), lambda: engine.queue.depth(QUEUE)


@case
async def discard(engine: PostgresEngine, clock: ManualClock) -> tuple[Operation, Operation]:
    await engine.queue.send(QUEUE, [Outgoing(b"x"), Outgoing(b"y")])
    got = await engine.queue.receive(QUEUE, 2, 30.0)
    await engine.queue.dead_letter(QUEUE, [each.receipt for each in got], "why")
    ids = [letter.message_id for letter in (await engine.queue.dead_letters(None, 10)).items]
    return lambda: engine.queue.discard(ids), lambda: engine.queue.find_dead_letters(ids)


class TestUnanswered:
    @pytest.mark.parametrize("name", CASES)
    @pytest.mark.parametrize("points", [("before",), ("after",), ("before", "after")], ids=" and ".join)
    async def test_it_is_as_if_it_had_been_answered(
        self, place: Path, clock: ManualClock, name: str, points: tuple[str, ...]
    ) -> None:
        """The connection is lost around the commit, so that nobody can say whether it was made."""
        results = []
        for attempt, at in enumerate(((), points)):
            fresh = RestlessClock()
            async with open_engine(place / str(attempt), fresh) as engine:
                operation, left = await CASES[name](engine, fresh)
                async with unanswered(*(f"postgres.commit.{point}" for point in at)) as passed:
                    result = await operation()
                if at:
                    assert sum(passed.values()) > len(at), "it was tried again"
                results.append((result, await left()))
        assert results[0] == results[1]


class TestSend:
    async def test_an_unanswered_send_may_come_twice_and_is_never_lost(self, engine: PostgresEngine) -> None:
        async with unanswered("postgres.commit.after"):
            assert await engine.queue.send(QUEUE, [Outgoing(b"x"), Outgoing(b"y")]) == []
        assert {each.body for each in await engine.queue.receive(QUEUE, 10, 30.0)} == {b"x", b"y"}


@asynccontextmanager
async def snapshot(place: Path) -> AsyncIterator[None]:
    """Somebody's transaction that goes on and on."""
    async with connect_to(place) as connection, connection.transaction(isolation="repeatable_read"):
        await connection.fetch("SELECT count(*) FROM jobs")
        yield


async def pages_read(engine: PostgresEngine, work: Operation) -> tuple[Any, int]:
    """What some work on the engine's one connection came to, and how many pages it looked at."""

    async def counted() -> int:
        async with engine._database._connection() as connection:
            await connection.execute("SELECT pg_stat_force_next_flush()")
            await connection.execute("SELECT pg_stat_clear_snapshot()")
            return int(
                await connection.fetchval(
                    "SELECT heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit FROM pg_statio_all_tables "
                    "WHERE relid = 'messages'::regclass"
                )
            )

    before = await counted()
    result = await work()
    return result, await counted() - before


class TestHeldSnapshot:
    @pytest.mark.timeout(300)
    async def test_a_receive_reads_no_more_pages_after_20_000_messages(self, place: Path, clock: ManualClock) -> None:
        url = url_of(place)
        await migrate(url)
        read: list[int] = []
        async with PostgresEngine.open(f"{url}&connections=1", clock) as engine, snapshot(place):
            for _ in range(200):
                await engine.queue.send(QUEUE, [Outgoing(b"x" * 200)] * 100)
                clock.advance(0.2)
                got, pages = await pages_read(engine, lambda: engine.queue.receive(QUEUE, 1, 30.0))
                read.append(pages)
                got += await engine.queue.receive(QUEUE, 99, 30.0)
                assert len(got) == 100
                await engine.queue.ack(QUEUE, [each.receipt for each in got])
                clock.advance(0.2)
            assert await engine.queue.receive(QUEUE, 50, 30.0) == []
            depth, everything = await pages_read(engine, lambda: engine.queue.depth(QUEUE))
            assert depth == Depth(0, 0, 0)
        # Once the first holds would have lapsed, and at the end. Medians: now and then a receive looks at all.
        early, late = sorted(read[80:120])[20], sorted(read[-40:])[20]
        assert late <= early * 1.1 + 10, (early, late)
        assert late < everything / 8, "what has passed is all still there"

    async def test_what_stands_below_the_mark_is_found_in_time(
        self, place: Path, clock: ManualClock, engine: PostgresEngine
    ) -> None:
        """A send that was slow to commit, or a clock that is behind."""
        await engine.queue.send(QUEUE, [Outgoing(b"now")])
        assert len(await engine.queue.receive(QUEUE, 10, 30.0)) == 1
        late = ManualClock(start=clock.now() - 1000)
        async with open_engine(place, late) as behind:
            await behind.queue.send(QUEUE, [Outgoing(b"late")])
        waited = 0.0
        while not (got := await engine.queue.receive(QUEUE, 10, 30.0)):
            clock.advance(1.0)
            waited += 1.0
        assert [each.body for each in got] == [b"late"]
        assert waited <= 10.0


class TestRemoved:
    async def test_a_run_that_another_process_removed(
        self, place: Path, clock: ManualClock, engine: PostgresEngine
    ) -> None:
        run = make_run(clock)
        await engine.tasks.put(run, seeds(100))
        await engine.tasks.finish(run, [end(1), end(99)])
        async with open_engine(place, clock) as other:
            while await other.tasks.delete(run, 1000):
                pass
        assert await engine.tasks.unfinished(run, range(100)) == frozenset()
        assert (await engine.tasks.finish(run, [end(98)])).moved == frozenset()
        assert await engine.tasks.counts(run) == Counts()
        await engine.tasks.put(run, seeds(80))
        assert await engine.tasks.unfinished(run, range(100)) == frozenset(range(80))


async def test_a_value_that_cannot_be_stored_is_no_outage(engine: PostgresEngine, clock: ManualClock) -> None:
    run = make_run(clock)
    seed = replace(seeds(1)[0], input=InputJson('"\x00"'))
    with pytest.raises(EngineRefused):
        await engine.tasks.put(run, [seed])
    await engine.tasks.put(run, seeds(1))
    assert await engine.tasks.unfinished(run, [0]) == {0}
