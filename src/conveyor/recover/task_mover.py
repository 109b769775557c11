"""Task mover: gets a system that opens two task engines, and moves the rows of finished jobs to one of them.

A job is copied run by run, counted on both engines, and then switched: one conditional write records the new engine,
from which all processes read it from then on. It stays where it is if anything differs, or if a rerun was added
meanwhile. Copying only adds rows, and each row once, so a mover may die anywhere and repeat, and two may run at once.
Unfinished jobs go on where they are and are moved once they have finished. The rows on the engine that a job came from
stay for its readers, until `clean` deletes them.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import msgspec
import structlog

from conveyor.engines.task_router import TaskRouter
from conveyor.engines.tasks import CopiesRuns, RunTally, TaskEvent, TaskFilter, Tasks
from conveyor.errors import InvalidSetting
from conveyor.faults import crashpoint
from conveyor.jobs.latest_outcomes import latest_outcomes
from conveyor.jobs.row_counts import RowCounts
from conveyor.model import (
    EventRecord,
    InputJson,
    Job,
    JobId,
    Page,
    Run,
    RunKey,
    Task,
    TaskEnd,
    TaskSeed,
    is_resumable,
    prior_text,
)
from conveyor.states import TaskStatus
from conveyor.system import System

log = structlog.get_logger()

_JOBS = 100
_ROWS = 2000
_DELETED = 5000


class MovedJob(msgspec.Struct, frozen=True):
    """A job that was moved, with the counts of each of its runs, the same on both engines."""

    job_id: JobId
    source: str
    runs: list[RunTally]


class MoveTotals(msgspec.Struct):
    """The work of a mover so far, and what is left."""

    jobs: int = 0
    tasks: int = 0
    events: int = 0
    # Jobs and tasks to copy, as far as is known.
    jobs_total: int = 0
    tasks_total: int = 0
    # Rows deleted from the engines that jobs came from.
    deleted: int = 0
    # Jobs that are not finished, by state, or whose leftovers are not swept.
    unfinished: dict[JobId, str] = msgspec.field(default_factory=dict)
    # Jobs that cannot be moved as they are, and why.
    blocked: dict[JobId, str] = msgspec.field(default_factory=dict)


class TaskMover:
    """Moves jobs to one task engine. `report` gets the totals after each step."""

    def __init__(
        self,
        system: System,
        target: str,
        report: Callable[[MoveTotals], None] = lambda totals: None,
        moved: Callable[[MovedJob], None] = lambda job: None,
    ) -> None:
        assert isinstance(system.tasks, TaskRouter)
        self._clock = system.clock
        self._jobs = system.records.jobs
        self._router = system.tasks
        self._target_id = target
        self._target: Tasks = system.tasks.engine(target)
        if not isinstance(self._target, CopiesRuns):
            raise InvalidSetting("Jobs can be moved to Postgres only. Use postgres://… as the target.")
        self._counts: CopiesRuns = self._target
        self._report = report
        self._moved = moved
        self.totals = MoveTotals()

    async def move(self) -> MoveTotals:
        """One pass: move every job that has finished, and find those that have not."""
        totals = self.totals
        totals.unfinished, totals.blocked = {}, {}
        await self._record_unfinished()
        await self._estimate()
        async for job in self._finished(self._target_id):
            await self._move_job(await self._recorded(job))
        await self._find_unfinished()
        self._report(totals)
        return totals

    async def clean(self) -> MoveTotals:
        """Delete the rows that moved jobs left on the engines that they came from."""
        async for job in self._finished(""):
            await self._clean_job(job)
        for job in await self._jobs.active_jobs():
            await self._clean_job(job)
        return self.totals

    async def _finished(self, outside: str) -> AsyncIterator[Job]:
        cursor: str | None = None
        while True:
            page: Page[Job] = await self._jobs.finished_jobs(outside, cursor, _JOBS)
            for job in page.items:
                yield job
            cursor = page.next_cursor
            if cursor is None:
                return

    async def _estimate(self) -> None:
        totals = self.totals
        totals.jobs_total, totals.tasks_total = totals.jobs, totals.tasks
        async for job in self._finished(self._target_id):
            totals.jobs_total += 1
            totals.tasks_total += sum(run.total for run in await self._jobs.runs(job.job_id))
        self._report(totals)

    async def _recorded(self, job: Job) -> Job:
        """A job without a record gets one before it is copied: from then on, rows on two engines are no question."""
        if job.task_store:
            return job
        store = await self._router.holder_of([job.key_of(run) for run in await self._jobs.runs(job.job_id)])
        crashpoint("move.record.before")
        await self._jobs.record_task_store(job.job_id, store)
        crashpoint("move.record.after")
        return msgspec.structs.replace(job, task_store=store)

    async def _record_unfinished(self) -> None:
        for job in await self._jobs.active_jobs():
            # As the router has found it, if it has no record.
            await self._jobs.record_task_store(job.job_id, job.task_store)

    async def _move_job(self, job: Job) -> None:
        if job.task_store == self._target_id:
            return
        if is_resumable(job):
            self.totals.blocked[job.job_id] = "its ingest failed and can be resumed: rerun or delete the job"
            return
        if job.task_store not in self._router.stores:
            self.totals.blocked[job.job_id] = f"its tasks are in {job.task_store}: add it to CONVEYOR_OTHER_TASKS"
            return
        tallies = []
        runs = await self._jobs.runs(job.job_id)
        keys = [job.key_of(run) for run in runs]
        for place, (run, key) in enumerate(zip(runs, keys, strict=True)):
            copied = await self._copy(key, keys[:place])
            stored = await self._counts.tally(key)
            if copied != stored or copied.rows != copied.counts.ended:
                log.error("copied run differs", job=job.job_id, run=run.run_id, read=copied, stored=stored)
                difference = f"{_words(copied)} read, {_words(stored)} stored"
                self.totals.blocked[job.job_id] = f"run {run.number} differs: {difference}"
                return
            tallies.append(stored)
        crashpoint("move.switch.before")
        switched = await self._jobs.switch_task_store(job.job_id, job.run.run_id, job.task_store, self._target_id)
        crashpoint("move.switch.after")
        if switched:
            self.totals.jobs += 1
            self._moved(MovedJob(job.job_id, job.task_store, tallies))
        elif await self._jobs.job(job.tenant, job.job_id) is None:
            await self._discard(job, runs)
        self._report(self.totals)

    async def _copy(self, key: RunKey, before: Sequence[RunKey]) -> RunTally:
        """Copy a run, which comes after others of its job, and count what was read."""
        source = self._router.engine_of(key)
        counted = RowCounts()
        for shard in range(max(1, key.shard_count)):
            after = None
            while page := await source.page(key, shard, after, _ROWS, TaskFilter()):
                after = page[-1].task_id
                await self._copy_rows(key, page, await _priors(source, before, page))
                counted.add(page)
                self.totals.tasks += len(page)
                self._report(self.totals)
        return RunTally(counted.total, counted.counts, await self._copy_events(source, key))

    async def _copy_rows(self, key: RunKey, tasks: Sequence[Task], priors: Mapping[int, str]) -> None:
        seeds = [TaskSeed(task.index, InputJson(bytes(task.input).decode()), priors.get(task.index)) for task in tasks]
        crashpoint("move.rows.before")
        await self._target.put(key, seeds)
        crashpoint("move.rows.between")
        await self._target.finish(key, [_end_of(task) for task in tasks if task.status is not TaskStatus.PENDING])
        crashpoint("move.rows.after")

    async def _copy_events(self, source: Tasks, key: RunKey) -> int:
        count = 0
        cursor: str | None = None
        while True:
            page = await source.events(key, None, cursor, _ROWS)
            # An event that was stored twice, to the last digit of its time, is one event.
            events = list(dict.fromkeys(map(_event_of, page.items)))
            crashpoint("move.events.before")
            await self._counts.copy_events(key, events)
            crashpoint("move.events.after")
            count += len(events)
            self.totals.events += len(events)
            cursor = page.next_cursor
            if cursor is None:
                return count

    async def _discard(self, job: Job, runs: Sequence[Run]) -> None:
        """The job was deleted or has expired while it was copied: nobody else knows of the copy."""
        for run in runs:
            while await self._target.delete(job.key_of(run), _DELETED):
                pass

    async def _clean_job(self, job: Job) -> None:
        if job.task_store != self._target_id:
            return
        for run in await self._jobs.runs(job.job_id):
            key = job.key_of(run)
            for store in self._router.stores:
                if store != self._target_id:
                    await self._clean_run(job, key, self._router.engine(store))

    async def _clean_run(self, job: Job, key: RunKey, engine: Tasks) -> None:
        if (await engine.counts(key)).ended > (await self._counts.tally(key)).counts.ended:
            self.totals.blocked[job.job_id] = f"run {key.run_id} has more tasks on the engine that it came from"
            return
        crashpoint("move.clean.before")
        while deleted := await engine.delete(key, _DELETED):
            self.totals.deleted += deleted
            self._report(self.totals)
            crashpoint("move.clean.between")
        crashpoint("move.clean.after")

    async def _find_unfinished(self) -> None:
        """A job may finish or be rerun at any time: look for active jobs, then for finished ones, then again."""
        await self._find_active()
        async for job in self._finished(self._target_id):
            if job.job_id not in self.totals.blocked:
                self.totals.unfinished.setdefault(job.job_id, "has just finished")
        await self._find_active()

    async def _find_active(self) -> None:
        unfinished = self.totals.unfinished
        for job in await self._jobs.unswept_jobs(_JOBS):
            if job.task_store != self._target_id:
                unfinished[job.job_id] = "finished, not yet swept"
        for job in await self._jobs.active_jobs():
            if job.task_store != self._target_id:
                unfinished[job.job_id] = job.state


async def _priors(source: Tasks, before: Sequence[RunKey], tasks: Sequence[Task]) -> dict[int, str]:
    """What the tasks of a rerun replace: the latest outcome of each in the runs before."""
    if not before:
        return {}
    of_first_run = await source.at(before[0], [task.index for task in tasks])
    return {task.index: prior_text(task) for task in await latest_outcomes(source, before, of_first_run)}


def _end_of(task: Task) -> TaskEnd:
    detail = msgspec.json.encode(task.detail).decode()
    at = task.finished_at or 0.0
    return TaskEnd(task.index, task.status, task.attempts, task.http_status, task.error_code, detail, at)


def _event_of(event: EventRecord) -> TaskEvent:
    assert event.index is not None
    return TaskEvent(event.index, event.at, event.event, msgspec.json.encode(event.data).decode())


def _words(tally: RunTally) -> str:
    counts = ", ".join(f"{count} {status}" for status, count in msgspec.structs.asdict(tally.counts).items())
    return f"{tally.rows} tasks ({counts}), {tally.events} events"
