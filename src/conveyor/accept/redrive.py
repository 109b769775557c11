"""Redrive: puts dead letters back to work. A part of an ingest, and a chunk with unfinished tasks, goes back to its
queue. A task that was dead-lettered has failed, and its run may have completed: redrive starts a rerun of it.

A job gets one rerun for all its chosen tasks: up to a bound it names them one by one, beyond it selects them by their
mark, so that a request costs the same however many they are. The outcomes of the rerun take the place of the dead
letters: those that it does not finish, because it is cancelled, can be redriven again.
"""

from collections.abc import AsyncGenerator, Collection, Sequence

import msgspec

from conveyor.accept.rerun import Rerun
from conveyor.accept.resume import reopen_ingest
from conveyor.engines.queue import DeadLetter
from conveyor.errors import RunNotEnded
from conveyor.faults import crashpoint
from conveyor.jobs.dead_lettered_tasks import (
    DeadLetteredTask,
    DeadLetterFilter,
    dead_lettered_page,
    find_dead_lettered,
    is_task_letter,
    jobs_with_dead_letters,
)
from conveyor.jobs.dead_letters import DeadLetterOwner, RedriveAction, RedrivePlan, decode_dead_letter, plan_redrives
from conveyor.model import Job, JobId, RunId, TenantId, is_resumable
from conveyor.states import ENDED, RunState
from conveyor.system import System

# Tasks that a rerun names one by one; a redrive of more selects them by their mark.
_MAX_INDEXES = 1000
# Dead-lettered tasks of one job that a redrive counts.
MAX_COUNTED = 10_000
_PAGE = 1000


class RedriveRun(msgspec.Struct, frozen=True):
    """A rerun that a redrive started, and how many dead letters it takes. A dry run starts none: `run_id` is null."""

    job_id: JobId
    run_id: RunId | None
    dead_letters: int


class Redriven(msgspec.Struct, frozen=True):
    """How many dead letters were redriven, and how many were not: unknown ones, those with nothing left to do, and
    those of a job with a run in progress, which `blocked` counts. `requeued` are those that went back to their queues,
    `runs` the reruns of the others. Of each job, at most 10,000 tasks are counted."""

    redriven: int
    skipped: int
    runs: list[RedriveRun] = []
    requeued: int = 0
    blocked: int = 0


class _Candidates(msgspec.Struct):
    """What a redrive may do for one job."""

    job: Job
    letters: list[tuple[DeadLetterOwner, RedrivePlan]] = []
    # Dead-lettered tasks; those beyond the bound are only counted.
    indexes: set[int] = set()
    count: int = 0
    # None: the tasks were chosen one by one. Else all that match were.
    where: DeadLetterFilter | None = None

    @property
    def is_blocked(self) -> bool:
        return self.job.state not in ENDED

    @property
    def size(self) -> int:
        return self.count + len(self.letters)


async def redrive(system: System, tenant: TenantId, ids: Collection[str], *, is_dry: bool = False) -> Redriven:
    """Redrive the tenant's dead letters with these ids. Those of another tenant are unknown. Raises RunNotEnded if none
    could be redriven, and some wait for a run in progress. If `is_dry`, only say what a redrive would do."""
    asked = set(ids)
    messages = await system.queue.find_dead_letters({each for each in asked if not is_task_letter(each)})
    redriving = _Redriving(system, tenant, is_dry)
    await redriving.take_messages(messages, DeadLetterFilter())
    redriving.take_tasks(await find_dead_lettered(system.records, system.tasks, tenant, asked))
    done = await redriving.carry_out()
    return msgspec.structs.replace(done, skipped=len(asked) - done.redriven)


async def redrive_all(system: System, tenant: TenantId, where: DeadLetterFilter, *, is_dry: bool = False) -> Redriven:
    """Redrive all dead letters of the tenant that match, as `redrive` does."""
    redriving = _Redriving(system, tenant, is_dry)
    async for messages in _message_pages(system):
        await redriving.take_messages(messages, where)
    for job_id in await jobs_with_dead_letters(system.records, tenant, where.job_id):
        await redriving.take_all_tasks(msgspec.structs.replace(where, job_id=job_id))
    return await redriving.carry_out()


async def _message_pages(system: System) -> AsyncGenerator[list[DeadLetter], None]:
    cursor: str | None = None
    while True:
        page = await system.queue.dead_letters(cursor, _PAGE)
        yield page.items
        cursor = page.next_cursor
        if cursor is None:
            return


class _Redriving:
    """One redrive: it collects what to do for each job, and does it, or only counts it."""

    def __init__(self, system: System, tenant: TenantId, is_dry: bool) -> None:
        self._system = system
        self._tenant = tenant
        self._is_dry = is_dry
        self._by_job: dict[JobId, _Candidates] = {}
        self._requeued = 0
        self._skipped = 0

    async def take_messages(self, messages: Sequence[DeadLetter], where: DeadLetterFilter) -> None:
        """Requeue what goes back to its queue; collect the rest."""
        decoded = [decode_dead_letter(letter) for letter in messages]
        letters = [letter for letter in decoded if letter is not None and letter.tenant == self._tenant]
        letters = [letter for letter in letters if where.job_id in (None, letter.job_id)]
        for letter, plan in await plan_redrives(self._system.records, self._system.tasks, letters):
            if where.error_code not in (None, plan.error_code):
                continue
            if plan.action is RedriveAction.RERUN_TASK:
                assert plan.job is not None
                self._candidates(plan.job).letters.append((letter, plan))
            elif plan.action is RedriveAction.REQUEUE and (self._is_dry or await self._requeue(letter)):
                self._requeued += 1
            else:
                self._skipped += 1

    def take_tasks(self, tasks: Sequence[DeadLetteredTask]) -> None:
        for each in tasks:
            candidates = self._candidates(each.job)
            candidates.indexes.add(each.task.index)
            candidates.count = len(candidates.indexes)

    async def take_all_tasks(self, where: DeadLetterFilter) -> None:
        """Collect the dead-lettered tasks of one job. Those beyond the first bound are only counted, those beyond the
        second not even that."""
        records, tasks = self._system.records, self._system.tasks
        cursor: str | None = None
        count = 0
        while count < MAX_COUNTED:
            page = await dead_lettered_page(records, tasks, self._tenant, where, _PAGE, cursor)
            for each in page.items:
                candidates = self._candidates(each.job)
                candidates.where = where
                candidates.count = count = count + 1
                if len(candidates.indexes) <= _MAX_INDEXES:
                    candidates.indexes.add(each.task.index)
            cursor = page.next_cursor
            if cursor is None:
                return

    async def carry_out(self) -> Redriven:
        """Start one rerun for each job. Raises RunNotEnded."""
        count, runs = self._requeued, []
        blocked: Job | None = None
        waiting = 0
        for candidates in self._by_job.values():
            job = candidates.job
            if candidates.is_blocked:
                blocked = blocked or job
                waiting += candidates.size
                self._skipped += candidates.size
            elif is_resumable(job):
                self._skipped += candidates.size
            else:
                run_id, number = (None, candidates.size) if self._is_dry else await self._rerun(candidates)
                runs.append(RedriveRun(job.job_id, run_id, number))
                count += number
                self._skipped += candidates.size - number
        if count == 0 and blocked is not None and not self._is_dry:
            raise RunNotEnded(
                f"A run of job {blocked.job_id} is in progress. Redrive its failed tasks once it has finished.",
                job_id=blocked.job_id,
                state=blocked.state,
            )
        return Redriven(count, self._skipped, runs, self._requeued, waiting)

    def _candidates(self, job: Job) -> _Candidates:
        return self._by_job.setdefault(job.job_id, _Candidates(job))

    async def _rerun(self, candidates: _Candidates) -> tuple[RunId, int]:
        """Start the rerun, then remove the messages: after a crash in between, their tasks are in progress or finished,
        and each letter's plan says so. Returns the run, and how many dead letters it takes."""
        job = candidates.job
        if candidates.where is None or len(candidates.indexes) <= _MAX_INDEXES:
            indexes = candidates.indexes.union(*(plan.indexes for _, plan in candidates.letters))
            run_id = await Rerun(self._system).rerun_tasks(job, sorted(indexes))
            discarded = await self._system.queue.discard([letter.message_id for letter, _ in candidates.letters])
            number = candidates.count + discarded
        else:
            run_id = await Rerun(self._system).rerun_dead_letters(job, candidates.where.error_code)
            number = candidates.count
        crashpoint("redrive.rerun.after")
        return run_id, number

    async def _requeue(self, letter: DeadLetterOwner) -> bool:
        if letter.chunk is None and not await self._reopen_ingest(letter):
            return False
        crashpoint("redrive.send.before")
        count = await self._system.queue.redrive([letter.message_id])
        crashpoint("redrive.send.after")
        return count > 0

    async def _reopen_ingest(self, letter: DeadLetterOwner) -> bool:
        """Whether the run is ingesting, after its failed ingest was reopened. The first of several letters reopens
        it."""
        job = await self._system.records.jobs.job(letter.tenant, letter.job_id)
        if job is None or job.run.run_id != letter.run_id:
            return False
        return await reopen_ingest(self._system, job) if is_resumable(job) else job.state is RunState.INGESTING
