"""Add tasks to an open job, and close it. A batch is staged as a list of its own and ingested as one more range of the
run. It has the guarantees of a large list: no task is counted before it is durable."""

import asyncio
from functools import partial

import msgspec

from conveyor.accept.spec import TasksSpec
from conveyor.accept.submit import ACCEPTED, staged_source
from conveyor.accept.task_seeds import check_tasks, encode_list
from conveyor.engines.queue import CONTROL
from conveyor.engines.records import IdempotencyClaim
from conveyor.errors import JobClosed
from conveyor.faults import crashpoint
from conveyor.jobs.admission import Admission
from conveyor.jobs.chunks import range_message, request_ingest, send_all
from conveyor.jobs.idempotency import Accepted, Claim, Idempotency, IdempotentRequest
from conveyor.lists.small_list import CheckedList
from conveyor.model import Job, Mode
from conveyor.states import RunState
from conveyor.system import System


class BatchView(msgspec.Struct, frozen=True):
    """The answer to a client that added tasks."""

    batch_id: str
    # Tasks that were added, and invalid ones that were skipped.
    count: int
    invalid_lines: int
    # Whether this batch closes the job.
    last_batch: bool


class AddTasks:
    """Adds to open jobs, and closes them."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._idempotency = Idempotency(system.settings, system.clock, system.records)
        self._admission = Admission(system)

    async def add(self, job: Job, spec: TasksSpec, request: IdempotentRequest | None = None) -> Accepted:
        """Stage the batch and request its ingest. Raises JobClosed for a job that takes no more tasks."""
        batch_id = self._system.clock.new_id("batch")
        return await self._idempotency.once(job.tenant, request, batch_id, partial(self._add, job, spec))

    async def close(self, job: Job, reason: str | None = None) -> None:
        """Close the job: it takes no more tasks. Closing a closed job changes nothing."""
        _check_open(job)
        crashpoint("add.seal.before")
        await self._system.records.ingests.seal(job.job_id, job.run.run_id, reason)
        crashpoint("add.seal.after")
        # An ingester then finds that no range is left, and latches the run.
        await request_ingest(self._system.queue, job, self._system.clock)

    async def _add(self, job: Job, spec: TasksSpec, claim: Claim) -> Accepted:
        _check_open(job)
        if job.run.sealed:
            raise JobClosed
        checked = await self._checked(job, spec)
        await self._admission.admit(job.tenant, tasks=len(checked.seeds))
        data = await asyncio.to_thread(encode_list, spec.tasks, checked)
        key = f"lists/{job.tenant}/{job.job_id}/{claim.subject}.jsonl"
        crashpoint("add.stage.before")
        await self._system.blobs.put(key, data)
        crashpoint("add.stage.after")
        view = BatchView(claim.subject, len(checked.seeds), len(checked.invalid), spec.last_batch)
        answer = claim.answer(ACCEPTED, msgspec.json.encode(view))
        added = await self._system.records.ingests.append_range(
            job.job_id, job.run.run_id, staged_source(key, data), checked.lines, answer.row, spec.last_batch
        )
        crashpoint("add.append.after")
        if added is None:
            raise JobClosed
        if isinstance(added, IdempotencyClaim):
            return answer.unless_lost(added)
        await send_all(self._system.queue, CONTROL, [range_message(job, added.number)], self._system.clock)
        return answer.accepted

    async def _checked(self, job: Job, spec: TasksSpec) -> CheckedList:
        """A last batch may be empty: it closes the job, and is answered and replayed like any other."""
        if not spec.tasks and spec.last_batch:
            return CheckedList([], [], 0)
        max_tasks = self._system.settings.max_inline_tasks
        check = partial(check_tasks, is_batch=True)
        return await asyncio.to_thread(check, job.kind, spec.tasks, max_tasks, job.options.on_invalid)


def _check_open(job: Job) -> None:
    if job.mode is not Mode.OPEN:
        raise JobClosed('The job is closed: only a job made with `mode: "open"` takes more tasks.')
    if job.run.lineage is not None:
        raise JobClosed("The job is closed: no task can be added to a rerun.")
    if job.state not in (RunState.INGESTING, RunState.PAUSED) and not job.run.sealed:
        raise JobClosed(f"The job is {job.state}: it takes no more tasks.")
