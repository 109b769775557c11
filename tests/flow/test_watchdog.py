"""The watchdog: of the attempts that one runner makes, only the one that was meant is broken off."""

import asyncio
import dataclasses
import gc
from typing import Any

import msgspec

from conveyor.engines.records import Document
from conveyor.model import PROGRESS, InputJson, Job, JobKind, Outcome, RunId, TaskProgress, TaskRef, TenantId
from conveyor.process.task_progress import ProgressBook, Superseded
from conveyor.process.watchdog import GRACE, Watchdog
from conveyor.states import TaskStatus
from tests.support.clocks import ManualClock
from tests.support.in_process_fetchers import idle
from tests.support.make_jobs import make_job
from tests.support.small_fleet import Recording, open_fleet, success

STUCK_AFTER = 60.0
REF = TaskRef(0, InputJson('"http://site.test/"'))


class SlowProgress:
    """Stands before DocumentRecords: progress is read slowly, and says that the monitor has requeued the task."""

    def __init__(self, documents: Any, run_id: RunId) -> None:
        self._documents = documents
        self._run_id = run_id
        self.asked = asyncio.Event()
        self.answered = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._documents, name)

    async def document(self, kind: str, tenant: TenantId, id: str) -> Document | None:
        if kind != PROGRESS:
            found: Document | None = await self._documents.document(kind, tenant, id)
            return found
        self.asked.set()
        await self.answered.wait()
        progress = TaskProgress(self._run_id, 0, 1, "", 0.0, turn=1)
        return Document(kind, tenant, id, msgspec.json.encode(progress))


async def test_a_runner_that_went_on_while_the_worker_looked_keeps_its_next_attempt() -> None:
    async with open_fleet(stuck_after=STUCK_AFTER) as fleet:
        ends = [asyncio.Event(), asyncio.Event()]

        async def act(job: Job, ref: TaskRef) -> Outcome:
            await ends[ref.index].wait()
            return success()

        executor = Recording(fleet.clock, act)
        job = await fleet.submit(2, concurrency=1)
        documents: Any = SlowProgress(fleet.system.records.documents, job.run.run_id)
        records = dataclasses.replace(fleet.system.records, documents=documents)
        fleet.start(fleet.worker(executor, dataclasses.replace(fleet.system, records=records)))
        await fleet.until(documents.asked.is_set)
        assert [start.index for start in executor.starts] == [0]
        ends[0].set()
        await fleet.until(lambda: len(executor.starts) == 2)
        documents.answered.set()
        await fleet.passing(1.0)
        assert executor.running["all"] == 1
        ends[1].set()
        await fleet.ended(job, within=30.0)
        tasks = await fleet.check(job)
        assert [tasks[index].attempts for index in (0, 1)] == [1, 1]


class Runner:
    """One task that makes attempts one after the other, as a runner of a lane does."""

    def __init__(self, kind: JobKind = JobKind.FETCH) -> None:
        self.clock = ManualClock()
        self.watchdog = Watchdog(self.clock, STUCK_AFTER)
        self.job = make_job(self.clock, kind=kind, timeout=10)
        self.ends: list[asyncio.Future[list[Outcome]]] = []
        self.results: list[Any] = []
        self.swallows = False
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while len(self.results) < 3:
            try:
                self.results.append(await self.watchdog.guard(self.job, [], [REF], 0, self._make()))
            except Superseded as error:
                self.results.append(error)

    async def _make(self) -> list[Outcome]:
        end: asyncio.Future[list[Outcome]] = asyncio.get_running_loop().create_future()
        self.ends.append(end)
        try:
            return await end
        except asyncio.CancelledError:
            if not self.swallows:
                raise
            return [success()]


async def test_an_attempt_that_is_over_can_not_be_broken_off() -> None:
    runner = Runner(JobKind.DOWNLOAD)
    await idle()
    runner.clock.advance(STUCK_AFTER)
    (suspect,) = runner.watchdog.check()
    runner.ends[0].set_result([success()])
    await idle()
    suspect.supersede()
    suspect.expire()
    await idle()
    assert len(runner.ends) == 2 and not runner.ends[1].done()
    assert not runner.task.cancelling()
    (second,) = runner.watchdog.attempts
    second.supersede()
    second.expire()
    await idle()
    assert isinstance(runner.results[1], Superseded)
    assert not runner.task.cancelling()
    runner.ends[2].set_result([success()])
    await runner.task


async def test_an_attempt_that_ends_in_spite_of_it_leaves_its_runner_uncancelled() -> None:
    runner = Runner()
    runner.swallows = True
    await idle()
    runner.clock.advance(10 + GRACE)
    runner.watchdog.check()
    await idle()
    assert len(runner.ends) == 2
    assert not runner.task.cancelling()
    runner.swallows = False
    runner.clock.advance(10 + GRACE)
    runner.watchdog.check()
    await idle()
    (outcome,) = runner.results[1]
    assert (outcome.status, outcome.error.code) == (TaskStatus.FAILED, "timeout")
    assert not runner.task.cancelling()
    runner.ends[2].set_result([success()])
    await runner.task


async def test_what_a_cancelled_attempt_was_writing_is_of_no_concern_to_anybody() -> None:
    unheard: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unheard.append(context))
    async with open_fleet() as fleet:
        job = await fleet.submit(1)
        book = ProgressBook(fleet.system.records, fleet.clock, fleet.system.settings)
        older = await book.begin(job, TaskRef(0, InputJson("1")))
        await book.begin(job, TaskRef(0, InputJson("1"), attempt=2))
        writing = asyncio.create_task(older.save(1, None))
        await asyncio.sleep(0)
        writing.cancel()
        await asyncio.wait([writing])
        assert writing.cancelled()
    del older, writing
    gc.collect()
    assert unheard == []
