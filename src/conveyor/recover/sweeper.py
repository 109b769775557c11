"""Sweeper: completes runs whose completion was missed, counts tasks that a process finished and did not count before it
died, requeues lost references, requests stalled ingests, closes idle open jobs, fails runs at their maximum lifetime,
clears finished runs. A run that makes it fail stops no other.

It reads runs that are active or just finished, never all tasks; `run_once` returns counts. A run in which nothing moves
is checked less and less often, and the queues of one that moves are not asked.
"""

import math
from collections.abc import Callable
from functools import partial

import msgspec
import structlog

from conveyor.clock import CLOCK_SLACK, Clock
from conveyor.coordination.buckets import ALL_BUCKETS, Buckets
from conveyor.coordination.isolation import Isolation, run_all
from conveyor.coordination.ready_runs import RunRestorer
from conveyor.coordination.revisits import Revisits
from conveyor.coordination.trusted_time import TrustedTime
from conveyor.engines.queue import CONTROL, Depth, Queue, Reveals, run_queue, run_queues
from conveyor.engines.records import Records
from conveyor.engines.tasks import SettledCounts, Tasks, may_lag, settled_counts
from conveyor.faults import crashpoint
from conveyor.jobs.active_jobs import ActiveJobs
from conveyor.jobs.chunks import drop_if_ended, has_holders, request_ingest, requeue_pending
from conveyor.lifecycle import Lifecycle
from conveyor.model import Counts, Job, Mode, RunId, lifetime_of
from conveyor.process.retry import longest_delay
from conveyor.recover.stalled_runs import StalledRuns
from conveyor.states import ENDED, ReasonCode, RunState
from conveyor.telemetry import metrics

log = structlog.get_logger()

_EVERY = 2.0
# The longest pause between two checks of a run in which nothing moves, in passes.
_LONGEST_PAUSE = 30
_RUNS = 200
_ROWS = 5000
# Seconds until the next look at a run whose counts may lag.
_LAGGING = 3.0
# Seconds without a change after which an ingest may have lost its message.
_STALLED = 10.0
_ASK_AGAIN = 60.0
# The longest lease of a message, or wait for a breaker, unless the settings say more.
_MAX_HOLD = 930.0


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
    # Tasks that a process has finished, and not counted before it died.
    settled: int = 0
    # Messages that a clock that was set back had hidden.
    revealed: int = 0


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
        active: ActiveJobs | None = None,
        buckets: Buckets = ALL_BUCKETS,
        *,
        restorer: RunRestorer | None = None,
        max_hold: float = _MAX_HOLD,
        trusted: TrustedTime | None = None,
    ) -> None:
        """`max_lifetime` is the operator's limit, in seconds, beside those of jobs; 0: none. `restorer` restores runs
        that the ready index has lost. `max_hold` is the longest time for which a message is leased, or waits for a
        breaker. `trusted` says when a run has reached its maximum lifetime, and an open job was idle for too long; by
        default the clock does."""
        self.name = "sweeper"
        self.wake: Callable[[], None] = lambda: None
        self.stopping = False
        self._records = records
        self._tasks = tasks
        self._queue = queue
        self._lifecycle = lifecycle
        self._clock = clock
        self._max_lifetime = max_lifetime
        self._active = active or ActiveJobs(records.jobs, clock)
        self._buckets = buckets
        self._restorer = restorer
        # Asked once: the check of a capability is slow.
        self._reveals = queue if isinstance(queue, Reveals) else None
        self._max_hold = max_hold
        self._trusted = trusted
        self._asked_at: dict[RunId, float] = {}
        self._stalled = StalledRuns(clock)
        self._visits = Revisits(clock, _EVERY, _EVERY * _LONGEST_PAUSE)
        self._runs = Isolation(self.name, clock, buckets)
        self._remains = Isolation(self.name, clock, buckets)

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
        active = await self._active.read()
        if self._restorer is not None:
            await self._restorer.restore([job for job in active if self._buckets.owns(job.run.run_id)])
        known = {job.run.run_id for job in active}
        self._asked_at = {run_id: at for run_id, at in self._asked_at.items() if run_id in known}
        self._stalled.forget_others(known)
        self._runs.forget_others(known)
        due = self._visits.due(active, _run_id, _mark, self._active.listed_at)
        await self._runs.each(due, _run_id, partial(self._check_run, swept))

    async def _check_run(self, swept: Swept, job: Job) -> None:
        if await self._check_lifetime(job, swept):
            return
        found: Counts | None = None
        due_by = self._due_by(job)
        if job.state is RunState.RUNNING or may_lag(self._tasks, job.key):
            looked = await self._settle_counts(job, swept)
            found = looked.counts
            due_by = min(due_by, self._clock.now() + _LAGGING if looked.pending else math.inf)
        if job.state is RunState.RUNNING and found is not None:
            found = await self._check(job, found, swept)
        elif job.state is RunState.INGESTING:
            await self._check_ingest(job, swept)
        self._visits.checked(job.run.run_id, _mark(job), found, due_by)

    async def _settle_counts(self, job: Job, swept: Swept) -> SettledCounts:
        looked = await settled_counts(self._tasks, job.key)
        swept.settled += looked.settled
        if looked.settled:
            log.info("counted tasks of a process that died", run=job.run.run_id, tasks=looked.settled)
        return looked

    def _due_by(self, job: Job) -> float:
        """The next time at which an unchanged run needs a check: its maximum lifetime, and while it ingests the time at
        which it has stalled, or is idle and gets closed."""
        times = [job.run.created_at + lifetime_of(job, self._max_lifetime)]
        if job.state is RunState.INGESTING:
            times += [job.run.touched_at + _STALLED, job.run.touched_at + job.options.idle_timeout]
        return min((at for at in times if at > self._clock.now()), default=math.inf)

    async def _check_lifetime(self, job: Job, swept: Swept) -> bool:
        """Fail a run that reached its maximum lifetime, whatever it waits for."""
        lifetime = lifetime_of(job, self._max_lifetime)
        if job.run.created_at + lifetime > await self._trusted_now():
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

    async def _trusted_now(self) -> float:
        return self._clock.now() if self._trusted is None else await self._trusted.now()

    async def _clear_ended(self, swept: Swept) -> None:
        ended = await self._records.jobs.unswept_jobs(_RUNS + self._remains.skipped)
        self._remains.forget_others({job.run.run_id for job in ended})
        await self._remains.each(ended, _run_id, partial(self._clear, swept))
        if len(ended) >= _RUNS and swept.cleared:
            self.wake()

    async def _check_ingest(self, job: Job, swept: Swept) -> None:
        """A crash between the row and the message loses the message. A second message does no harm."""
        swept.checked += 1
        quiet = self._clock.now() - job.run.touched_at
        open_still = job.mode is Mode.OPEN and not job.run.sealed and job.run.lineage is None
        if open_still and await self._trusted_now() - job.run.touched_at > job.options.idle_timeout:
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
        if quiet < -CLOCK_SLACK:
            # The clock was set back: for how long the run has been quiet is not known.
            quiet = _ASK_AGAIN
        if quiet >= _STALLED:
            await self._reveal(job, swept)
        if quiet < _STALLED or (open_still and (await self._records.ingests.ingested(job.run.run_id)).done):
            return
        depth = await self._queue.depth(CONTROL)
        # In a busy queue it is unknown whether it holds a message of this run; one more does no harm.
        asked_at = self._asked_at.get(job.run.run_id)
        asked = quiet if asked_at is None else self._clock.monotonic() - asked_at
        if asked >= _ASK_AGAIN or depth.is_empty:
            await request_ingest(self._queue, job, self._clock)
            self._asked_at[job.run.run_id] = self._clock.monotonic()
            swept.resumed += 1

    async def _check(self, job: Job, counts: Counts, swept: Swept) -> Counts:
        """Complete the run, or repair it if nothing moves and its queues are empty. Returns its counts."""
        swept.checked += 1
        before = self._visits.last_found(job.run.run_id)
        if job.run.last_batch and counts.ended >= job.run.total and await self._is_finished(job):
            # Since the job was read: its queues are empty, and nothing is lost.
            return counts
        if await self._lifecycle.settle(job, counts):
            swept.completed += 1
        elif before in (None, counts) and await self._reveal(job, swept):
            return counts
        elif job.run.last_batch and before in (None, counts) and await self._has_lost(job, counts):
            # A reference is acknowledged after its task is counted: counts that were read after the depth include it.
            counts = await self._tasks.counts(job.key)
            if await self._lifecycle.settle(job, counts):
                swept.completed += 1
            else:
                await self._repair(job, counts, swept)
        return counts

    async def _is_finished(self, job: Job) -> bool:
        run = await self._records.jobs.run(job.job_id, job.run.run_id)
        return run is None or run.state in ENDED

    async def _reveal(self, job: Job, swept: Swept) -> int:
        """Make messages visible that are hidden for longer than any lease or delay of the run: the clock was set
        back since, or the clock of their sender is ahead."""
        if self._reveals is None:
            return 0
        retries = max(self._max_hold, longest_delay(job.options))
        revealed = 0
        for queue, longest in zip(run_queues(job.run.run_id), (self._max_hold, retries), strict=True):
            revealed += await self._reveals.reveal(queue, longest + CLOCK_SLACK)
        if revealed:
            log.error("clock was set back: hidden messages are visible again", run=job.run.run_id, messages=revealed)
        swept.revealed += revealed
        return revealed

    async def _has_lost(self, job: Job, counts: Counts) -> bool:
        """Whether references may be lost: the queues of the run are empty, or it has not moved for too long."""
        depth = await self._depth(job)
        return depth.is_empty or self._stalled.is_stalled(job, depth, counts.ended)

    async def _depth(self, job: Job) -> Depth:
        """How many references the queues of the run hold, up to the first that has some."""
        unknown = False
        for queue in run_queues(job.run.run_id):
            depth = await self._queue.depth(queue)
            if depth.total:
                return depth
            unknown = unknown or depth.unknown
        return Depth(0, 0, 0, unknown)

    async def _repair(self, job: Job, counts: Counts, swept: Swept) -> None:
        """The queues are empty, or the run is stalled, and it is not complete: the counts have drifted, or references
        were lost."""
        counted = await self._tasks.recount(job.key)
        if counted != counts:
            metrics.COUNTER_DRIFT.add(_difference(counts, counted))
            log.error("counts had drifted", run=job.run.run_id, kept=counts, counted=counted)
            if await self._lifecycle.settle(job, counted):
                swept.completed += 1
                return
        queue = run_queue(job.run.run_id)
        # Several runs are checked at once: `+=` over an await would lose counts of the others.
        requeued = await requeue_pending(self._queue, queue, self._tasks, job, _ROWS, self._clock)
        swept.requeued += requeued
        await drop_if_ended(self._records, self._queue, job, self._clock.now())

    async def _clear(self, swept: Swept, job: Job) -> None:
        """Cancel the pending tasks of a finished run, in bounded steps, then drop its queues."""
        completed = job.run.state is RunState.COMPLETED
        moved = 0 if completed else await self._tasks.cancel_pending(job.key, _ROWS, self._clock.now())
        swept.cancelled += moved
        if moved == 0:
            if await has_holders(self._queue, job.run, self._clock.now()):
                return
            if not completed and may_lag(self._tasks, job.key) and (await self._settle_counts(job, swept)).pending:
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


def _run_id(job: Job) -> str:
    return job.run.run_id


def _mark(job: Job) -> object:
    """Changes when somebody changes the job or its run."""
    run = job.run
    return job.state, job.version, run.total, run.last_batch, run.sealed, run.touched_at


def _difference(stored: Counts, counted: Counts) -> int:
    pairs = zip(msgspec.structs.astuple(stored), msgspec.structs.astuple(counted), strict=True)
    return sum(abs(left - right) for left, right in pairs)
