"""Redrive: puts dead letters back to work. A part of an ingest, and a chunk with unfinished tasks, goes back to its
queue. A task that was dead-lettered has failed, and its run may have completed: redrive starts a rerun of it."""

from collections.abc import Collection, Sequence

import msgspec

from conveyor.accept.rerun import Rerun
from conveyor.accept.resume import reopen_ingest
from conveyor.errors import RunNotEnded
from conveyor.faults import crashpoint
from conveyor.jobs.dead_letters import DeadLetterOwner, RedriveAction, RedrivePlan, decode_dead_letter, plan_redrives
from conveyor.model import JobId, TenantId, is_resumable
from conveyor.states import RunState
from conveyor.system import System


class Redriven(msgspec.Struct, frozen=True):
    """How many dead letters were redriven, and how many were not: unknown ones, and those with nothing left to do."""

    redriven: int
    skipped: int


async def redrive(system: System, tenant: TenantId, message_ids: Collection[str]) -> Redriven:
    """Redrive the tenant's dead letters. Those of another tenant are unknown. Raises RunNotEnded if none could be
    redriven, and some wait for a run in progress."""
    asked = set(message_ids)
    decoded = [decode_dead_letter(letter) for letter in await system.queue.find_dead_letters(asked)]
    letters = [letter for letter in decoded if letter is not None and letter.tenant == tenant]
    plans = await plan_redrives(system.records, system.tasks, letters)
    count = await _requeue(system, [letter for letter, plan in plans if plan.action is RedriveAction.REQUEUE])
    reruns = [(letter, plan) for letter, plan in plans if plan.action is RedriveAction.RERUN_TASK]
    blocked = [plan for _, plan in reruns if plan.is_blocked]
    count += await _rerun(system, [(letter, plan) for letter, plan in reruns if not plan.is_blocked])
    if count == 0 and blocked:
        job = blocked[0].job
        assert job is not None
        raise RunNotEnded(
            f"A run of job {job.job_id} is in progress. Redrive its failed tasks once it has finished.",
            job_id=job.job_id,
            state=job.state,
        )
    return Redriven(count, len(asked) - count)


async def _requeue(system: System, letters: Sequence[DeadLetterOwner]) -> int:
    count = 0
    for letter in letters:
        if letter.chunk is None and not await _reopen_ingest(system, letter):
            continue
        crashpoint("redrive.send.before")
        count += await system.queue.redrive([letter.message_id])
        crashpoint("redrive.send.after")
    return count


async def _reopen_ingest(system: System, letter: DeadLetterOwner) -> bool:
    """Whether the run is ingesting, after its failed ingest was reopened. The first of several letters reopens it."""
    job = await system.records.jobs.job(letter.tenant, letter.job_id)
    if job is None or job.run.run_id != letter.run_id:
        return False
    return await reopen_ingest(system, job) if is_resumable(job) else job.state is RunState.INGESTING


async def _rerun(system: System, reruns: Sequence[tuple[DeadLetterOwner, RedrivePlan]]) -> int:
    """Start one rerun for each job, then remove the dead letters. After a crash in between, their tasks are in progress
    or finished, and the plan of each letter says so."""
    by_job: dict[JobId, list[tuple[DeadLetterOwner, RedrivePlan]]] = {}
    for letter, plan in reruns:
        by_job.setdefault(letter.job_id, []).append((letter, plan))
    count = 0
    for group in by_job.values():
        job = group[0][1].job
        assert job is not None
        indexes = sorted({index for _, plan in group for index in plan.indexes})
        await Rerun(system).rerun_tasks(job, indexes)
        count += await system.queue.discard([letter.message_id for letter, _ in group])
    return count
