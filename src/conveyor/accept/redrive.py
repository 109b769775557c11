"""Redrive: dead letters go back to the queues that they came from, where that can still do something."""

from collections.abc import Collection

import msgspec

from conveyor.accept.resume import reopen
from conveyor.faults import crashpoint
from conveyor.jobs.dead_letters import DeadLetterOwner, read_letter
from conveyor.model import Job, TenantId, resumable
from conveyor.states import WORKABLE, RunState
from conveyor.system import System


class Redriven(msgspec.Struct, frozen=True):
    """How many letters went back, and how many did not: unknown ones, and those whose work has ended."""

    redriven: int
    skipped: int


async def redrive(system: System, tenant: TenantId, message_ids: Collection[str]) -> Redriven:
    """Send the tenant's letters back. Another's are as unknown as those that never were."""
    asked = set(message_ids)
    read = [read_letter(letter) for letter in await system.queue.letters(asked)]
    count = 0
    for letter in read:
        if letter is not None and letter.tenant == tenant and await _wanted(system, letter):
            crashpoint("redrive.send.before")
            count += await system.queue.redrive([letter.message_id])
            crashpoint("redrive.send.after")
    return Redriven(count, len(asked) - count)


async def _wanted(system: System, letter: DeadLetterOwner) -> bool:
    job = await system.records.jobs.job(letter.tenant, letter.job_id)
    if job is None or job.run.run_id != letter.run_id:
        return False
    if letter.chunk is None:
        return await _ingests(system, job)
    # A task that was given up has failed for good; a reference to it would fall to the status guard.
    indexes = [ref.index for ref in letter.chunk.refs]
    return job.state in WORKABLE and bool(await system.tasks.unfinished(job.key, indexes))


async def _ingests(system: System, job: Job) -> bool:
    """Whether the run is ingesting, after it was moved back if its ingest was given up."""
    if resumable(job):
        return await reopen(system, job)
    return job.state is RunState.INGESTING
