"""The monitor: stuck tasks, orphans of dead workers, deadlines; several at once, bad rows, and the ways to run it."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conveyor.accept.control import Control
from conveyor.accept.option_changes import change_options
from conveyor.accept.redrive import redrive
from conveyor.accept.rerun import Rerun, RerunSpec
from conveyor.engines.queue import recovery_queue, run_queue
from conveyor.engines.records import Document
from conveyor.jobs.deadlines import DEADLINE
from conveyor.model import (
    BEAT,
    BEAT_TENANT,
    PROGRESS,
    Backoff,
    Beat,
    Breaking,
    Job,
    JobKind,
    LongTask,
    Outcome,
    TaskProgress,
    TaskRef,
    is_resumable,
    progress_id,
)
from conveyor.process.task_progress import ProgressBook
from conveyor.process.worker import Worker
from conveyor.recover.lambda_handler import handler
from conveyor.recover.monitor import Monitor, monitor_of
from conveyor.recover.monitored import Monitored
from conveyor.states import RunState, TaskStatus
from tests.support.dead_letters import dead_letters
from tests.support.make_jobs import ACME
from tests.support.small_fleet import Fleet, Recording, failure, open_fleet, success

LEASE = 30.0
STUCK = 600.0


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with open_fleet() as made:
        yield made


class Long(Recording):
    """Long tasks that write their progress and then wait until they are told to end."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet.clock, self._run)
        self._book = ProgressBook(fleet.system.records, fleet.clock, fleet.system.settings)
        self.go = asyncio.Event()
        self.moved = 0
        self.lost: list[int] = []

    async def _run(self, job: Job, ref: TaskRef) -> Outcome:
        track = await self._book.begin(job, ref)
        self.lost.append(track.lost)
        if self.moved:
            await track.save(self.moved, 100)
        await self.go.wait()
        await track.remove()
        return success()


def long_worker(fleet: Fleet, executor: Long, **settings: Any) -> Worker:
    return fleet.worker(executor, **settings)


async def download(fleet: Fleet, count: int = 1, **spec: Any) -> Job:
    urls = [f"https://a.example/{number}" for number in range(count)]
    return await fleet.submit(urls, kind=JobKind.DOWNLOAD, handler=None, **spec)


async def progress_of(fleet: Fleet, job: Job, index: int = 0) -> tuple[Document, TaskProgress]:
    row = await fleet.system.records.documents.document(PROGRESS, job.tenant, progress_id(job.run.run_id, index))
    assert row is not None
    return row, msgspec.json.decode(row.body, type=TaskProgress)


class TestStuck:
    async def test_it_is_taken_over_and_the_hung_attempt_is_broken_off(self, fleet: Fleet) -> None:
        executor, monitor = Long(fleet), monitor_of(fleet.system)
        job = await download(fleet, stuck_after=40)
        fleet.start(long_worker(fleet, executor))
        await fleet.until(lambda: len(executor.starts) == 1)
        await fleet.passing(35)
        assert await monitor.run_once() == Monitored()
        await fleet.passing(10)
        assert (await monitor.run_once()).requeued == 1
        row, progress = await progress_of(fleet, job)
        assert (progress.holder, progress.turn, progress.lost) == ("", 1, 1)
        assert row.due_at is not None, "it is looked at again should nobody begin it"
        await fleet.until(lambda: len(executor.starts) == 2, within=10)
        await fleet.until(lambda: executor.running["all"] == 1, within=30)
        assert executor.starts[1].attempt == 1
        executor.go.set()
        await fleet.ended(job)
        await fleet.check(job)

    async def test_one_that_never_moves_is_given_up(self, fleet: Fleet) -> None:
        executor, monitor = Long(fleet), monitor_of(fleet.system)
        job = await download(fleet, stuck_after=40)
        fleet.start(long_worker(fleet, executor))
        for number in range(1, 4):
            await fleet.until(lambda number=number: len(executor.starts) == number, within=30)
            # Its worker is alive all the while.
            await fleet.passing(41)
            seen = await monitor.run_once()
            assert (seen.requeued, seen.failed) == ((1, 0) if number < 3 else (0, 1))
        await fleet.ended(job, within=60)
        assert executor.lost == [0, 1, 2]
        tasks = await fleet.check(job)
        assert (tasks[0].status, tasks[0].error_code) == (TaskStatus.FAILED, "stuck")
        (letter,) = await dead_letters(fleet.system)
        assert "3 times in a row" in letter["reason"]

    async def test_one_that_moves_now_and_then_is_not(self, fleet: Fleet) -> None:
        executor, monitor = Long(fleet), monitor_of(fleet.system)
        job = await download(fleet, stuck_after=40)
        fleet.start(long_worker(fleet, executor))
        for number in range(1, 6):
            executor.moved = number
            await fleet.until(lambda number=number: len(executor.starts) == number, within=30)
            await fleet.passing(41)
            assert (await monitor.run_once()).requeued == 1
        executor.go.set()
        await fleet.ended(job, within=60)
        assert (await fleet.check(job))[0].status is TaskStatus.SUCCEEDED

    async def test_of_several_monitors_one_does_it(self, fleet: Fleet) -> None:
        executor = Long(fleet)
        job = await download(fleet, 20, stuck_after=40)
        fleet.start(long_worker(fleet, executor))
        await fleet.until(lambda: len(executor.starts) == 20)
        await fleet.passing(41)
        passes = await asyncio.gather(*(monitor_of(fleet.system).run_once() for _ in range(4)))
        assert sum(seen.requeued for seen in passes) == 20
        assert (await fleet.system.queue.depth(recovery_queue(job.run.run_id))).total == 20
        executor.go.set()
        await fleet.ended(job)
        await fleet.check(job)

    async def test_a_message_that_was_lost_is_sent_again_and_one_that_waits_is_not(self, fleet: Fleet) -> None:
        executor, monitor = Long(fleet), monitor_of(fleet.system)
        job = await download(fleet, stuck_after=40)
        service = fleet.start(long_worker(fleet, executor))
        await fleet.until(lambda: len(executor.starts) == 1)
        await fleet.passing(41)
        assert (await monitor.run_once()).requeued == 1
        await fleet.stop(service)
        queue = recovery_queue(job.run.run_id)
        assert (await fleet.system.queue.depth(queue)).total >= 1
        fleet.clock.advance(STUCK + 1)
        assert (await monitor.run_once()).requeued == 0, "it waits in its queue"
        await fleet.system.queue.drop(queue)
        fleet.clock.advance(STUCK + 1)
        assert (await monitor.run_once()).requeued == 1
        assert (await fleet.system.queue.depth(queue)).total == 1
        _, progress = await progress_of(fleet, job)
        assert (progress.turn, progress.lost) == (2, 1), "nobody was lost meanwhile"

    async def test_rows_of_what_has_ended_or_can_not_be_read_go(self, fleet: Fleet) -> None:
        records, now = fleet.system.records, fleet.clock.now()
        job = await download(fleet, 3)
        await fleet.system.tasks.cancel_pending(job.key, 1, now)
        (ended,) = [task.index for task in (await fleet.tasks(job)).values() if task.status is TaskStatus.CANCELLED]
        fresh = TaskProgress(job.run.run_id, ended, 1, "hold_1", now)

        def row(name: str, body: bytes, expires_at: float | None = None) -> Document:
            return Document(PROGRESS, ACME, name, body, due_at=now, expires_at=expires_at, job_id=job.job_id)

        gone = msgspec.structs.replace(fresh, run_id="run_gone")
        await records.documents.create_documents(
            [
                row("ended", msgspec.json.encode(fresh)),
                row("not json", b"{"),
                row("another run", msgspec.json.encode(gone)),
                row("expired", msgspec.json.encode(fresh), expires_at=now + 1),
            ]
        )
        fleet.clock.advance(2)
        seen = await monitor_of(fleet.system).run_once()
        assert (seen.checked, seen.settled, seen.requeued) == (4, 4, 0)
        assert await monitor_of(fleet.system).run_once() == Monitored()

    async def test_a_full_page_of_others_holds_up_nobody(self, fleet: Fleet) -> None:
        records, now = fleet.system.records, fleet.clock.now()
        job = await download(fleet)
        await fleet.system.tasks.put(job.key, [])
        for start in range(0, 250, 25):
            await records.documents.create_documents(
                [
                    Document(PROGRESS, ACME, f"old {number}", b"{", due_at=now - 1000 + number)
                    for number in range(start, start + 25)
                ]
            )
        fresh = TaskProgress(job.run.run_id, 0, 1, "hold_1", now - 900)
        late = Document(
            PROGRESS, ACME, progress_id(job.run.run_id, 0), msgspec.json.encode(fresh), due_at=now, job_id=job.job_id
        )
        await records.documents.create_documents([late])
        seen = await monitor_of(fleet.system).run_once()
        assert (seen.checked, seen.settled, seen.requeued) == (251, 250, 1)

    async def test_a_paused_job_is_left_alone(self, fleet: Fleet) -> None:
        executor, monitor = Long(fleet), monitor_of(fleet.system)
        job = await download(fleet)
        worker = long_worker(fleet, executor)
        await fleet.abandon(worker, lambda: len(executor.starts) == 1)
        await Control(fleet.system).pause(job)
        fleet.clock.advance(STUCK + 1)
        seen = await monitor.run_once()
        assert seen.requeued == seen.orphans == 0
        assert (await progress_of(fleet, job))[0].due_at is None

    async def test_whoever_wants_to_know_is_told(self, fleet: Fleet) -> None:
        told: list[tuple[str, int]] = []

        async def hear(job: Job, progress: TaskProgress) -> None:
            told.append((job.job_id, progress.index))

        async def more() -> dict[str, int]:
            return {"heartbeats": 7}

        executor = Long(fleet)
        job = await download(fleet)
        await fleet.abandon(long_worker(fleet, executor), lambda: len(executor.starts) == 1)
        fleet.clock.advance(STUCK + 1)
        seen = await monitor_of(fleet.system, told=hear, parts=[more]).run_once()
        assert told == [(job.job_id, 0)]
        assert seen.others == {"heartbeats": 7}


class TestOrphans:
    async def test_what_a_dead_worker_ran_goes_before_new_work(self, fleet: Fleet) -> None:
        executor, monitor = Long(fleet), monitor_of(fleet.system)
        executor.moved = 40
        job = await download(fleet, 40, concurrency=3)
        dead = long_worker(fleet, executor, worker_concurrency=3)
        await fleet.abandon(dead, lambda: len(executor.starts) == 3)
        # Its sign of life, then nothing any more.
        await dead._beat()
        ran = {start.index for start in executor.starts}
        fleet.clock.advance(2 * LEASE - 1)
        assert (await monitor.run_once()).workers == 0
        fleet.clock.advance(2)
        seen = await monitor.run_once()
        assert (seen.workers, seen.orphans, seen.requeued) == (1, 3, 0)
        assert (await fleet.system.records.documents.documents(BEAT, BEAT_TENANT, None, 10)).items == []
        executor.go.set()
        second = Long(fleet)
        second.go.set()
        fleet.start(long_worker(fleet, second, worker_concurrency=1))
        await fleet.until(lambda: len(second.starts) >= 3, within=120)
        assert {start.index for start in second.starts[:3]} == ran, "they come first, with their progress"
        assert {start.attempt for start in second.starts[:3]} == {1}
        await fleet.ended(job, within=600)
        await fleet.check(job)
        assert max(second.count().values()) == 1, "the messages that the dead worker held are not run again"

    async def test_what_another_has_begun_since_is_left_to_it(self, fleet: Fleet) -> None:
        executor, monitor = Long(fleet), monitor_of(fleet.system)
        job = await download(fleet)
        dead = long_worker(fleet, executor)
        await fleet.abandon(dead, lambda: len(executor.starts) == 1)
        await dead._beat()
        second = Long(fleet)
        fleet.start(long_worker(fleet, second))
        # Its message lapses after a lease, and the other worker takes it.
        await fleet.until(lambda: len(second.starts) == 1, within=50)
        fleet.clock.advance(40)
        seen = await monitor.run_once()
        assert (seen.workers, seen.orphans) == (1, 0)
        second.go.set()
        await fleet.ended(job)
        assert len(second.starts) == 1

    async def test_a_worker_says_nothing_without_long_tasks_and_goes_without_a_trace(self, fleet: Fleet) -> None:
        rows = fleet.system.records.documents.documents
        job = await fleet.submit(5)
        executor = Long(fleet)
        long = await download(fleet, 2)
        service = fleet.start(fleet.worker(kinds=[JobKind.PYTHON]))
        await fleet.ended(job)
        await fleet.passing(40)
        assert (await rows(BEAT, BEAT_TENANT, None, 10)).items == []
        assert await fleet.system.coordinator.permits_in_use("workers") == 1
        second = fleet.start(fleet.worker(executor, kinds=[JobKind.DOWNLOAD]))
        await fleet.until(lambda: len(executor.starts) == 2)
        await fleet.passing(40)
        (row,) = (await rows(BEAT, BEAT_TENANT, None, 10)).items
        tasks = msgspec.json.decode(row.body, type=Beat).tasks
        assert sorted(tasks, key=lambda task: task.index) == [
            LongTask(ACME, long.job_id, long.run.run_id, index) for index in (0, 1)
        ]
        assert await fleet.system.coordinator.permits_in_use("workers") == 2
        await fleet.stop(second)
        await fleet.stop(service)
        assert (await rows(BEAT, BEAT_TENANT, None, 10)).items == []
        assert await fleet.system.coordinator.permits_in_use("workers") == 0


class TestDeadlines:
    async def test_the_row_goes_with_the_job_and_without_a_deadline_there_is_none(self, fleet: Fleet) -> None:
        plain, timed = await fleet.submit(1), await fleet.submit(1, deadline=50)
        rows = (await fleet.system.records.documents.documents(DEADLINE, ACME, None, 10)).items
        assert [(row.id, row.job_id, row.due_at) for row in rows] == [
            (timed.run.run_id, timed.job_id, timed.created_at + 50)
        ]
        assert plain.options.deadline is None

    async def test_one_that_was_changed_counts_from_the_beginning(self, fleet: Fleet) -> None:
        monitor = monitor_of(fleet.system)
        job = await fleet.submit(1, deadline=50)
        fleet.clock.advance(10)
        await change_options(fleet.system, job, {"deadline": 200})
        fleet.clock.advance(100)
        assert (await monitor.run_once()).overdue == 0
        job = await fleet.job(job.job_id)
        await change_options(fleet.system, job, {"deadline": 20})
        assert (await monitor.run_once()).overdue == 1
        job = await fleet.job(job.job_id)
        await change_options(fleet.system, job, {"deadline": None})
        fleet.clock.advance(500)
        assert await monitor.run_once() == Monitored()
        assert (await fleet.system.records.documents.documents(DEADLINE, ACME, None, 10)).items == []

    async def test_a_rerun_has_its_own(self, fleet: Fleet) -> None:
        fleet.executor.act = _fails
        job = await fleet.submit(1, attempts=1, deadline=50)
        fleet.start(fleet.worker())
        await fleet.ended(job)
        fleet.clock.advance(1000)
        await Rerun(fleet.system).rerun(await fleet.job(job.job_id), RerunSpec())
        found = await fleet.job(job.job_id)
        row = await fleet.system.records.documents.document(DEADLINE, ACME, found.run.run_id)
        assert row is not None
        assert row.due_at == found.run.created_at + 50

    async def test_a_paused_job_waits_and_is_caught_when_it_goes_on(self, fleet: Fleet) -> None:
        monitor, control = monitor_of(fleet.system), Control(fleet.system)
        job = await control.pause(await fleet.submit(1, deadline=50))
        for _ in range(3):
            fleet.clock.advance(100)
            assert (await monitor.run_once()).overdue == 0
        await control.resume(job)
        fleet.clock.advance(100)
        assert (await monitor.run_once()).overdue == 1

    async def test_a_list_that_is_not_ingested_is_late_too(self, fleet: Fleet) -> None:
        monitor = monitor_of(fleet.system)
        job = await fleet.stage(["1", "2", "3"], deadline=50)
        for _ in range(4):
            fleet.clock.advance(51)
            await monitor.run_once()
        found = await fleet.job(job.job_id)
        assert found.state is RunState.FAILED
        assert found.reason is not None
        assert "its list is not ingested" in found.reason


async def given_up_ingest(fleet: Fleet, **spec: Any) -> Job:
    """A job whose ingest failed because its list is gone for a while."""
    job = await fleet.stage(["1", "2", "3"], **spec)
    assert job.source is not None
    data = await fleet.blobs.get(job.source.key)
    assert data is not None
    await fleet.blobs.delete([job.source.key])
    ingesting = fleet.start(fleet.ingester())
    (failed,) = await fleet.ended(job)
    await fleet.stop(ingesting)
    assert is_resumable(failed)
    await fleet.blobs.put(job.source.key, data)
    return failed


async def test_a_resumed_ingest_has_its_deadline_again() -> None:
    """The row was due while the run had ended, and the monitor has removed it."""
    async with open_fleet(deadline_tries=0) as fleet:
        monitor = monitor_of(fleet.system)
        failed = await given_up_ingest(fleet, deadline=50)
        fleet.clock.advance(60)
        await monitor.run_once()
        assert await fleet.system.records.documents.document(DEADLINE, ACME, failed.run.run_id) is None
        await Rerun(fleet.system).rerun(failed, RerunSpec())
        assert (await monitor.run_once()).expired == 0, "it has its whole time again"
        fleet.clock.advance(49)
        assert (await monitor.run_once()).expired == 0
        fleet.clock.advance(2)
        assert (await monitor.run_once()).expired == 1
        assert (await fleet.job(failed.job_id)).state is RunState.FAILED


async def test_a_redriven_ingest_has_its_deadline_again() -> None:
    """The row was not due yet when the ingest failed."""
    async with open_fleet(deadline_tries=0) as fleet:
        monitor = monitor_of(fleet.system)
        failed = await given_up_ingest(fleet, deadline=50)
        fleet.clock.advance(40)
        letters = (await fleet.system.queue.dead_letters(None, 10)).items
        assert (await redrive(fleet.system, ACME, [letter.message_id for letter in letters])).redriven == 1
        fleet.clock.advance(20)
        assert (await monitor.run_once()).expired == 0, "it has its whole time again"
        fleet.clock.advance(31)
        assert (await monitor.run_once()).expired == 1
        assert (await fleet.job(failed.job_id)).state is RunState.FAILED


async def _fails(job: Job, ref: TaskRef) -> Outcome:
    return failure()


class TestTaskDeadline:
    async def test_no_attempt_begins_after_it(self, fleet: Fleet) -> None:
        fleet.executor.act = _fails
        options = {"attempts": 50, "backoff": Backoff(base=10, rate=1, jitter=False), "task_deadline": 35}
        job = await fleet.submit(2, **options)
        fleet.start(fleet.worker())
        await fleet.ended(job, within=200)
        tasks = await fleet.check(job)
        for task in tasks.values():
            assert (task.error_code, task.attempts) == ("deadline", 4)
            assert task.detail.error is not None
            assert "within 35 seconds; at last: it went wrong" in task.detail.error.message
        times = fleet.executor.times(0)
        assert times[-1] - times[0] < 35

    async def test_it_counts_from_the_first_attempt_and_not_from_the_job(self, fleet: Fleet) -> None:
        job = await fleet.submit(3, task_deadline=5)
        fleet.clock.advance(1000)
        fleet.start(fleet.worker())
        await fleet.ended(job)
        assert {task.status for task in (await fleet.check(job)).values()} == {TaskStatus.SUCCEEDED}

    async def test_one_that_waited_too_long_in_the_queue_is_not_begun(self, fleet: Fleet) -> None:
        fleet.executor.act = _fails
        options = {"attempts": 50, "backoff": Backoff(base=10, rate=1, jitter=False), "task_deadline": 35}
        job = await fleet.submit(1, **options)
        service = fleet.start(fleet.worker())
        await fleet.until(lambda: fleet.executor.starts)
        await fleet.quiet()
        await fleet.stop(service)
        fleet.clock.advance(100)
        fleet.start(fleet.worker())
        await fleet.ended(job)
        (task,) = (await fleet.check(job)).values()
        assert (task.error_code, task.attempts) == ("deadline", 1)
        assert len(fleet.executor.starts) == 1


async def test_a_task_that_was_taken_over_keeps_to_its_deadline() -> None:
    async with open_fleet() as fleet:
        executor, monitor = Long(fleet), monitor_of(fleet.system)
        job = await download(fleet, stuck_after=10, task_deadline=15)
        fleet.start(long_worker(fleet, executor))
        await fleet.until(lambda: len(executor.starts) == 1)
        began = int(fleet.clock.now())
        await fleet.passing(11)
        assert (await monitor.run_once()).requeued == 1
        await fleet.until(lambda: len(executor.starts) == 2, within=10)
        _, progress = await progress_of(fleet, job)
        assert abs(progress.since - began) <= 1
        await fleet.passing(11)
        assert (await monitor.run_once()).requeued == 1
        await fleet.ended(job, within=30)
        (task,) = (await fleet.check(job)).values()
        assert task.error_code == "deadline"
        assert len(executor.starts) == 2


class TestFleet:
    async def test_all_workers_together_keep_to_the_limit(self) -> None:
        async with open_fleet(fleet_concurrency=5, worker_concurrency=4) as fleet:

            async def act(job: Job, ref: TaskRef) -> Outcome:
                await fleet.clock.sleep(1)
                return success()

            fleet.executor.act = act
            job = await fleet.submit(60, chunk_size=5)
            for _ in range(3):
                fleet.start(fleet.worker())
            await fleet.ended(job)
            assert fleet.executor.most["all"] == 5
            await fleet.check(job)

    async def test_a_worker_holds_no_more_than_its_share_of_memory(self) -> None:
        async with open_fleet(worker_held_bytes=1024 * 1024, worker_concurrency=4) as fleet:
            gate = asyncio.Event()

            async def act(job: Job, ref: TaskRef) -> Outcome:
                await gate.wait()
                return success()

            fleet.executor.act = act
            large = "x" * 150_000
            jobs = [await fleet.submit([large] * 4) for _ in range(30)]
            worker = fleet.worker()
            fleet.start(worker)
            await fleet.passing(5)
            held = sum(lane.leased_bytes() for lane in worker._lanes.values())
            # What one look asked for may come on top.
            assert held <= 30 * 160_000 + 2 * 1024 * 1024
            gate.set()
            await fleet.ended(*jobs)
            for job in jobs:
                await fleet.check(job)


class TestRetries:
    async def test_they_come_by_the_recovery_queue(self, fleet: Fleet) -> None:
        fleet.executor.act = _fails
        job = await fleet.submit(3, breaker=Breaking(enabled=False), backoff=Backoff(base=100, jitter=False))
        fleet.start(fleet.worker())
        await fleet.until(lambda: len(fleet.executor.starts) == 3)
        await fleet.quiet()
        assert (await fleet.system.queue.depth(recovery_queue(job.run.run_id))).delayed == 3
        assert (await fleet.system.queue.depth(run_queue(job.run.run_id))).total == 0


class TestWays:
    async def test_as_a_role(self, fleet: Fleet) -> None:
        executor = Long(fleet)
        job = await download(fleet, stuck_after=40)
        fleet.start(long_worker(fleet, executor))
        monitor: Monitor = monitor_of(fleet.system)
        fleet.start(monitor)
        for _ in range(100):
            if len(executor.starts) == 2:
                break
            await fleet.passing(1)
        (entry,) = [entry for entry in fleet.logs if entry["event"] == "monitored"]
        assert entry["requeued"] == 1
        executor.go.set()
        await fleet.ended(job)

    def test_as_a_command(self, tmp_path: Path) -> None:
        conveyor = Path(sys.executable).with_name("conveyor")
        command = [str(conveyor), "monitor", "--once", "--data", str(tmp_path / "data")]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
        assert json.loads(ran.stdout) == msgspec.to_builtins(Monitored())

    def test_as_a_function_of_lambda(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CONVEYOR_DATA", str(tmp_path / "data"))
        event = {"source": "aws.events", "detail-type": "Scheduled Event", "detail": {}}
        assert handler(event, None) == msgspec.to_builtins(Monitored())
