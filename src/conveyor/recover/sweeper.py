"""Sweeper: finishes runs whose completion was missed, sends lost references again, has stalled ingests go on, closes
open jobs that nobody closes, clears up after ended runs. A run that makes it fail stops no other.

It looks at runs that are active or just ended, never at all tasks; `run_once` returns what it did.
"""

from collections.abc import Callable
from functools import partial

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.engines.queue import CONTROL, Outgoing, Queue, run_queue, run_queues
from conveyor.engines.records import Records
from conveyor.engines.tasks import TaskFilter, Tasks
from conveyor.faults import crashpoint
from conveyor.isolation import Isolation, in_turn
from conveyor.lifecycle import Lifecycle
from conveyor.model import Counts, IngestJob, InputJson, Job, Mode, RunId, TaskId, TaskSeed
from conveyor.references import has_holders, messages, send_all
from conveyor.states import RunState, TaskStatus
from conveyor.telemetry import metrics

log = structlog.get_logger()

_EVERY = 2.0
_RUNS = 100
_ROWS = 5000
# Seconds after which an ingest without a message is thought to have lost it.
_STALLED = 10.0
_ASK_AGAIN = 60.0


class Swept(msgspec.Struct):
    """What one pass did."""

    checked: int = 0
    completed: int = 0
    requeued: int = 0
    resumed: int = 0
    closed: int = 0
    cancelled: int = 0
    cleared: int = 0


class Sweeper:
    """A role."""

    def __init__(self, records: Records, tasks: Tasks, queue: Queue, lifecycle: Lifecycle, clock: Clock) -> None:
        self.name = "sweeper"
        self.wake: Callable[[], None] = lambda: None
        self.stopping = False
        self._records = records
        self._tasks = tasks
        self._queue = queue
        self._lifecycle = lifecycle
        self._clock = clock
        self._asked_at: dict[RunId, float] = {}
        self._runs = Isolation(self.name, clock)
        self._remains = Isolation(self.name, clock)

    async def tick(self) -> float:
        swept = await self.run_once()
        metrics.count(metrics.SWEPT, swept)
        if swept != Swept(checked=swept.checked):
            log.info("swept", **msgspec.structs.asdict(swept))
        return _EVERY

    async def close(self) -> None:
        """Nothing is held between ticks."""

    async def run_once(self) -> Swept:
        swept = Swept()
        await in_turn(partial(self._check_active, swept), partial(self._clear_ended, swept))
        return swept

    async def _check_active(self, swept: Swept) -> None:
        active = await self._records.active_jobs()
        known = {job.run.run_id for job in active}
        self._asked_at = {run_id: at for run_id, at in self._asked_at.items() if run_id in known}
        self._runs.forget_others(known)
        for job in active:
            if not self._runs.is_resting(job.run.run_id):
                with self._runs.item(job.run.run_id):
                    await self._check_run(job, swept)

    async def _check_run(self, job: Job, swept: Swept) -> None:
        if job.state is RunState.RUNNING:
            await self._check(job, swept)
        elif job.state is RunState.INGESTING:
            await self._check_ingest(job, swept)

    async def _clear_ended(self, swept: Swept) -> None:
        ended = await self._records.ended_unswept(_RUNS + self._remains.failing)
        self._remains.forget_others({job.run.run_id for job in ended})
        for job in ended:
            if not self._remains.is_resting(job.run.run_id):
                with self._remains.item(job.run.run_id):
                    await self._clear(job, swept)

    async def _check_ingest(self, job: Job, swept: Swept) -> None:
        """A message may be lost between the row that asks for it and its sending; sending it twice does no harm."""
        swept.checked += 1
        quiet = self._clock.now() - job.run.touched_at
        open_still = job.mode is Mode.OPEN and not job.run.sealed and job.run.lineage is None
        if open_still and quiet > job.options.idle_timeout:
            reason = f"closed: nothing was added for {job.options.idle_timeout:g} s"
            crashpoint("sweeper.seal.before")
            # A batch may have been accepted since the job was read: then it is not idle.
            sealed = await self._records.seal(job.job_id, job.run.run_id, reason, touched_at=job.run.touched_at)
            crashpoint("sweeper.seal.after")
            if sealed:
                swept.closed += 1
                await self._request_ingest(job)
            return
        if quiet < _STALLED or (open_still and (await self._records.ingested(job.run.run_id)).done):
            return
        depth = await self._queue.depth(CONTROL)
        # While others keep the queue busy nobody can tell whether a message of this run is among them; one more does
        # no harm.
        again = self._asked_at.get(job.run.run_id, job.run.touched_at) + _ASK_AGAIN <= self._clock.now()
        if again or depth.ready + depth.held + depth.delayed == 0:
            await self._request_ingest(job)
            self._asked_at[job.run.run_id] = self._clock.now()
            swept.resumed += 1

    async def _request_ingest(self, job: Job) -> None:
        message = IngestJob(job.tenant, job.job_id, job.run.run_id)
        await send_all(self._queue, CONTROL, [Outgoing(msgspec.json.encode(message))], self._clock)

    async def _check(self, job: Job, swept: Swept) -> None:
        swept.checked += 1
        empty = await self._is_empty(job)
        # Depth first: references are acknowledged after their tasks are counted, so counts read now include them.
        counts = await self._tasks.counts(job.key)
        if await self._lifecycle.settle(job, counts):
            swept.completed += 1
        elif empty and job.run.last_batch:
            await self._mend(job, counts, swept)

    async def _is_empty(self, job: Job) -> bool:
        """Whether no queue of the run holds a reference."""
        for queue in run_queues(job.run.run_id):
            if (await self._queue.depth(queue)).total:
                return False
        return True

    async def _mend(self, job: Job, counts: Counts, swept: Swept) -> None:
        """No queue holds a reference and yet the run is not complete: the counts drifted, or references were lost."""
        truth = await self._tasks.recount(job.key)
        if truth != counts:
            metrics.DRIFT.add(_difference(counts, truth))
            log.error("counts had drifted", run=job.run.run_id, kept=counts, counted=truth)
            if await self._lifecycle.settle(job, truth):
                swept.completed += 1
                return
        for shard in range(max(1, job.task_shard_count)):
            swept.requeued += await self._requeue(job, shard)

    async def _requeue(self, job: Job, shard: int) -> int:
        sent = 0
        after: TaskId | None = None
        while True:
            page = await self._tasks.page(job.key, shard, after, _ROWS, TaskFilter(status=TaskStatus.PENDING))
            if not page:
                return sent
            seeds = [TaskSeed(task.index, InputJson(bytes(task.input).decode())) for task in page]
            outgoing = messages(job.key, seeds, job.options.chunk_size)
            await send_all(self._queue, run_queue(job.run.run_id), outgoing, self._clock)
            sent += len(page)
            after = page[-1].task_id

    async def _clear(self, job: Job, swept: Swept) -> None:
        """Cancel what an ended run left pending, a bounded step at a time, then drop its queue. A completed one left
        nothing."""
        completed = job.run.state is RunState.COMPLETED
        moved = 0 if completed else await self._tasks.cancel_pending(job.key, _ROWS, self._clock.now())
        swept.cancelled += moved
        if moved == 0:
            if await has_holders(self._queue, job.run, self._clock.now()):
                return
            for queue in run_queues(job.run.run_id):
                await self._queue.drop(queue)
            if not job.run.last_batch:
                # It ended while its list was read: its total is what was written of it.
                counts = await self._tasks.counts(job.key)
                await self._records.set_total(job.job_id, job.run.run_id, counts.ended, job.run.invalid)
            await self._records.mark_swept(job.job_id, job.run.run_id)
            swept.cleared += 1
        else:
            self.wake()


def _difference(kept: Counts, truth: Counts) -> int:
    pairs = zip(msgspec.structs.astuple(kept), msgspec.structs.astuple(truth), strict=True)
    return sum(abs(one - other) for one, other in pairs)
