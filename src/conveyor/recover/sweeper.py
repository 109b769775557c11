"""Sweeper: completes runs whose completion was missed, requeues lost references, requests stalled ingests, closes idle
open jobs, fails runs at their maximum lifetime, clears finished runs. A run that makes it fail stops no other.

It reads runs that are active or just finished, never all tasks; `run_once` returns counts.
"""

from collections.abc import Callable
from functools import partial

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.coordination.isolation import Isolation, run_all
from conveyor.engines.queue import CONTROL, Queue, run_queue, run_queues
from conveyor.engines.records import Records
from conveyor.engines.tasks import Tasks
from conveyor.faults import crashpoint
from conveyor.jobs.chunks import has_holders, request_ingest, requeue_pending
from conveyor.lifecycle import Lifecycle
from conveyor.model import Counts, Job, Mode, RunId, lifetime_of
from conveyor.states import ReasonCode, RunState
from conveyor.telemetry import metrics

log = structlog.get_logger()

_EVERY = 2.0
_RUNS = 100
_ROWS = 5000
# Seconds without a change after which an ingest may have lost its message.
_STALLED = 10.0
_ASK_AGAIN = 60.0


class Swept(msgspec.Struct):
    """What one pass did."""

    checked: int = 0
    completed: int = 0
    requeued: int = 0
    resumed: int = 0
    closed: int = 0
    failed: int = 0
    cancelled: int = 0
    cleared: int = 0


class Sweeper:
    """A role."""

    def __init__(
        self,
        records: Records,
        tasks: Tasks,
        queue: Queue,
        lifecycle: Lifecycle,
        clock: Clock,
        max_lifetime: float = 0.0,
    ) -> None:
        """`max_lifetime` is the operator's limit, in seconds, beside those of jobs; 0: none."""
        self.name = "sweeper"
        self.wake: Callable[[], None] = lambda: None
        self.stopping = False
        self._records = records
        self._tasks = tasks
        self._queue = queue
        self._lifecycle = lifecycle
        self._clock = clock
        self._max_lifetime = max_lifetime
        self._asked_at: dict[RunId, float] = {}
        self._runs = Isolation(self.name, clock)
        self._remains = Isolation(self.name, clock)

    async def tick(self) -> float:
        swept = await self.run_once()
        metrics.add_counts(metrics.SWEPT, swept)
        if swept != Swept(checked=swept.checked):
            log.info("swept", **msgspec.structs.asdict(swept))
        return _EVERY

    async def close(self) -> None:
        """Nothing to release between ticks."""

    async def run_once(self) -> Swept:
        swept = Swept()
        await run_all(partial(self._check_active, swept), partial(self._clear_ended, swept))
        return swept

    async def _check_active(self, swept: Swept) -> None:
        active = await self._records.jobs.active_jobs()
        known = {job.run.run_id for job in active}
        self._asked_at = {run_id: at for run_id, at in self._asked_at.items() if run_id in known}
        self._runs.forget_others(known)
        for job in active:
            if not self._runs.is_resting(job.run.run_id):
                with self._runs.item(job.run.run_id):
                    await self._check_run(job, swept)

    async def _check_run(self, job: Job, swept: Swept) -> None:
        if await self._check_lifetime(job, swept):
            return
        if job.state is RunState.RUNNING:
            await self._check(job, swept)
        elif job.state is RunState.INGESTING:
            await self._check_ingest(job, swept)

    async def _check_lifetime(self, job: Job, swept: Swept) -> bool:
        """Fail a run that reached its maximum lifetime, whatever it waits for."""
        lifetime = lifetime_of(job, self._max_lifetime)
        if job.run.created_at + lifetime > self._clock.now():
            return False
        counts = await self._tasks.counts(job.key)
        if job.run.last_batch and counts.ended >= job.run.total:
            # All its tasks have finished: it is completed instead.
            return False
        unfinished = f"{job.run.total - counts.ended} tasks are" if job.run.last_batch else "its list is"
        reason = f"max_lifetime: not finished within {lifetime:g} s; {unfinished} unfinished"
        if await self._lifecycle.move(job, RunState.FAILED, reason, counts, code=ReasonCode.MAX_LIFETIME):
            swept.failed += 1
            log.error("run reached its maximum lifetime", job=job.job_id, run=job.run.run_id, reason=reason)
        return True

    async def _clear_ended(self, swept: Swept) -> None:
        ended = await self._records.jobs.unswept_jobs(_RUNS + self._remains.failing)
        self._remains.forget_others({job.run.run_id for job in ended})
        for job in ended:
            if not self._remains.is_resting(job.run.run_id):
                with self._remains.item(job.run.run_id):
                    await self._clear(job, swept)

    async def _check_ingest(self, job: Job, swept: Swept) -> None:
        """A crash between the row and the message loses the message. A second message does no harm."""
        swept.checked += 1
        quiet = self._clock.now() - job.run.touched_at
        open_still = job.mode is Mode.OPEN and not job.run.sealed and job.run.lineage is None
        if open_still and quiet > job.options.idle_timeout:
            reason = f"closed: nothing was added for {job.options.idle_timeout:g} s"
            crashpoint("sweeper.seal.before")
            # With `touched_at`: a batch that was accepted since the job was read keeps it open.
            sealed = await self._records.ingests.seal(
                job.job_id, job.run.run_id, reason, touched_at=job.run.touched_at, code=ReasonCode.IDLE_TIMEOUT
            )
            crashpoint("sweeper.seal.after")
            if sealed:
                swept.closed += 1
                await request_ingest(self._queue, job, self._clock)
            return
        if quiet < _STALLED or (open_still and (await self._records.ingests.ingested(job.run.run_id)).done):
            return
        depth = await self._queue.depth(CONTROL)
        # In a busy queue it is unknown whether it holds a message of this run; one more does no harm.
        is_due = self._asked_at.get(job.run.run_id, job.run.touched_at) + _ASK_AGAIN <= self._clock.now()
        if is_due or depth.ready + depth.held + depth.delayed == 0:
            await request_ingest(self._queue, job, self._clock)
            self._asked_at[job.run.run_id] = self._clock.now()
            swept.resumed += 1

    async def _check(self, job: Job, swept: Swept) -> None:
        swept.checked += 1
        empty = await self._is_empty(job)
        # Depth first: a reference is acknowledged after its task is counted, so that the counts include it.
        counts = await self._tasks.counts(job.key)
        if await self._lifecycle.settle(job, counts):
            swept.completed += 1
        elif empty and job.run.last_batch:
            await self._repair(job, counts, swept)

    async def _is_empty(self, job: Job) -> bool:
        """Whether no queue of the run holds a reference."""
        for queue in run_queues(job.run.run_id):
            if (await self._queue.depth(queue)).total:
                return False
        return True

    async def _repair(self, job: Job, counts: Counts, swept: Swept) -> None:
        """The queues are empty and the run is not complete: the counts have drifted, or references were lost."""
        counted = await self._tasks.recount(job.key)
        if counted != counts:
            metrics.COUNTER_DRIFT.add(_difference(counts, counted))
            log.error("counts had drifted", run=job.run.run_id, kept=counts, counted=counted)
            if await self._lifecycle.settle(job, counted):
                swept.completed += 1
                return
        queue = run_queue(job.run.run_id)
        swept.requeued += await requeue_pending(self._queue, queue, self._tasks, job, _ROWS, self._clock)

    async def _clear(self, job: Job, swept: Swept) -> None:
        """Cancel the pending tasks of a finished run, in bounded steps, then drop its queues."""
        completed = job.run.state is RunState.COMPLETED
        moved = 0 if completed else await self._tasks.cancel_pending(job.key, _ROWS, self._clock.now())
        swept.cancelled += moved
        if moved == 0:
            if await has_holders(self._queue, job.run, self._clock.now()):
                return
            for queue in run_queues(job.run.run_id):
                await self._queue.drop(queue)
            if not job.run.last_batch:
                # It finished during its ingest: its total is the number of tasks that were written.
                counts = await self._tasks.counts(job.key)
                await self._records.jobs.set_total(job.job_id, job.run.run_id, counts.ended, job.run.invalid)
            await self._records.jobs.mark_swept(job.job_id, job.run.run_id)
            swept.cleared += 1
        else:
            self.wake()


def _difference(stored: Counts, counted: Counts) -> int:
    pairs = zip(msgspec.structs.astuple(stored), msgspec.structs.astuple(counted), strict=True)
    return sum(abs(left - right) for left, right in pairs)
