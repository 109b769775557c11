"""Add tasks to an open job, and close it. A batch is staged as a list of its own and ingested as one more range of the
run, so that everything that holds for a list of a million holds for it: nothing is counted before it is durable."""

import asyncio

import msgspec

from conveyor.accept.spec import TasksSpec
from conveyor.accept.submit import ACCEPTED, list_of, staged_source
from conveyor.accept.task_seeds import seeds_of
from conveyor.engines.queue import CONTROL, Outgoing
from conveyor.engines.records import IdempotencyClaim
from conveyor.errors import JobClosed
from conveyor.faults import crashpoint
from conveyor.jobs.admission import Admission
from conveyor.jobs.chunks import send_all
from conveyor.jobs.idempotency import Accepted, Claim, Idempotency, IdempotentRequest, standing_answer
from conveyor.model import IngestJob, IngestRange, Job, Mode, TaskSeed
from conveyor.states import RunState
from conveyor.system import System


class BatchView(msgspec.Struct, frozen=True):
    """What a client is told of the tasks it added."""

    batch_id: str
    count: int
    # Whether the job is closed by this batch.
    last_batch: bool


class AddTasks:
    """Adds to open jobs, and closes them."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._requests = Idempotency(system.settings, system.clock, system.records)
        self._admission = Admission(system)

    async def add(self, job: Job, spec: TasksSpec, request: IdempotentRequest | None = None) -> Accepted:
        """Stage the batch and have it ingested. Raises JobClosed for a job that takes no more."""
        ticket = await self._requests.claim(job.tenant, request, self._system.clock.new_id("batch"))
        if isinstance(ticket, Accepted):
            return ticket
        async with self._requests.carrying_out(ticket):
            return await self._carry_out(job, spec, ticket)

    async def close(self, job: Job, reason: str | None = None) -> None:
        """No more tasks. Closing a closed job changes nothing."""
        _check_open(job)
        crashpoint("add.seal.before")
        await self._system.records.ingests.seal(job.job_id, job.run.run_id, reason)
        crashpoint("add.seal.after")
        # Whoever gets this finds that no range is left, and latches.
        await self._request([msgspec.json.encode(IngestJob(job.tenant, job.job_id, job.run.run_id))])

    async def _carry_out(self, job: Job, spec: TasksSpec, ticket: Claim) -> Accepted:
        _check_open(job)
        if job.run.sealed:
            raise JobClosed
        seeds = await self._seeds(job, spec)
        await self._admission.admit(job.tenant, tasks=len(seeds))
        data = await asyncio.to_thread(list_of, seeds)
        key = f"lists/{job.tenant}/{job.job_id}/{ticket.subject}.jsonl"
        crashpoint("add.stage.before")
        await self._system.blobs.put(key, data)
        crashpoint("add.stage.after")
        body = _view(ticket, len(seeds), spec)
        row = ticket.answer(ACCEPTED, body, self._requests.keep_until)
        added = await self._system.records.ingests.append_range(
            job.job_id, job.run.run_id, staged_source(key, data), len(seeds), row, spec.last_batch
        )
        crashpoint("add.append.after")
        if added is None:
            raise JobClosed
        if isinstance(added, IdempotencyClaim):
            assert row is not None
            return standing_answer(added, row.fingerprint)
        await self._request([msgspec.json.encode(IngestRange(job.tenant, job.job_id, job.run.run_id, added.number))])
        return Accepted(ACCEPTED, body, ticket.subject)

    async def _seeds(self, job: Job, spec: TasksSpec) -> list[TaskSeed]:
        """A last batch may be empty: it closes the job and is answered, and replayed, as any other."""
        if not spec.tasks and spec.last_batch:
            return []
        return await asyncio.to_thread(seeds_of, job.kind, spec.tasks, self._system.settings.max_inline_tasks)

    async def _request(self, bodies: list[bytes]) -> None:
        await send_all(self._system.queue, CONTROL, [Outgoing(body) for body in bodies], self._system.clock)


def _view(ticket: Claim, count: int, spec: TasksSpec) -> bytes:
    return msgspec.json.encode(BatchView(ticket.subject, count, spec.last_batch))


def _check_open(job: Job) -> None:
    if job.mode is not Mode.OPEN:
        raise JobClosed('The job is closed: only a job made with `mode: "open"` takes more tasks.')
    if job.run.lineage is not None:
        raise JobClosed("The job is closed: its tasks are run again, and none can be added to them.")
    if job.state not in (RunState.INGESTING, RunState.PAUSED) and not job.run.sealed:
        raise JobClosed(f"The job is {job.state}: it takes no more tasks.")
