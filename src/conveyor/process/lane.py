"""Lane: one run's work inside one worker. References wait here until they start; a subclass starts them, by awaiting
attempts in this process (local_lane.py) or by sending them to fetchers (executors/fetch/remote_lane.py)."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple, Protocol

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.coordination.limits import TargetLimits
from conveyor.coordination.pace import HostPace
from conveyor.coordination.paces import Paces
from conveyor.model import LONG_KINDS, Job, LongTask, Mode, Outcome, TaskError, TaskRef
from conveyor.process.changed_pages import Condition, EarlierPage, reuse_page
from conveyor.process.earlier_outcomes import EarlierOutcomes
from conveyor.process.executors.stored_body_executor import is_extract_only, without_targets
from conveyor.process.extraction import Extractor
from conveyor.process.gate import Gate
from conveyor.process.paced_refs import PacedRefs
from conveyor.process.page_copies import PageCopies
from conveyor.process.recorder import LeasedChunk, Recorder
from conveyor.process.retry import late, too_late
from conveyor.process.retry_first_queue import RetryFirstQueue
from conveyor.process.target_queues import TargetQueues
from conveyor.process.watchdog import WatchedAttempt
from conveyor.states import TaskStatus

log = structlog.get_logger()

# Seconds of work that a lane keeps ready for its runners.
_AHEAD = 0.3
_SMOOTHING = 0.3
# A lane with this many references that wait for their targets receives no more.
_MAX_WAITING_FOR_TARGETS = 5000
# As does one with this many that wait for the pace of their hosts; of long tasks few: another worker may run them.
_MAX_WAITING_FOR_PACE = 1000
_MAX_LONG_WAITING = 8
# How long a lane backs off when a call fails before a task can start; each failure in a row doubles it.
_FIRST_BACKOFF = 0.1
_MAX_BACKOFF = 5.0


class LeasedRef:
    """A reference of a leased chunk. `slot` names the target whose slot it has; `pace` is that of its host, while it is
    sent; `probes` are the breakers that it probes, and `gateway` is the place of its gateway in the pool (gate.py);
    `earlier` is what its page is compared with."""

    __slots__ = ("chunk", "earlier", "gateway", "is_fetched", "pace", "probes", "ref", "slot")

    def __init__(self, chunk: LeasedChunk, ref: TaskRef) -> None:
        self.chunk = chunk
        self.ref = ref
        self.slot: str | None = None
        self.pace: HostPace | None = None
        self.probes: tuple[str, ...] = ()
        self.gateway = 0
        self.earlier: EarlierPage | None = None
        # It has to be fetched, whatever is known of its page: the one that is stored cannot be read.
        self.is_fetched = False

    @property
    def condition(self) -> Condition | None:
        return None if self.earlier is None else self.earlier.condition

    @property
    def recovered(self) -> bool:
        return self.chunk.recovered

    @property
    def is_lost(self) -> bool:
        return self.chunk.lost

    @property
    def is_plain(self) -> bool:
        chunk = self.chunk
        return not (chunk.lost or chunk.suspect)


class LaneOwner(Protocol):
    """The worker, as its lanes see it."""

    def request_tick(self) -> None:
        """Tick soon: the lane needs references, slots or a decision about a target."""

    def on_slots_freed(self, lane: "Lane") -> None:
        """Attempts beyond the lane's width have ended: their slots may go to other lanes."""

    def on_slots_idle(self, lane: "Lane") -> None:
        """The lane has no references for slots that it has."""

    async def on_superseded(self, chunk: LeasedChunk) -> None:
        """A newer attempt owns one task of this chunk and has a message of its own."""

    async def on_poisoned(self, job: Job, chunk: LeasedChunk, ref: TaskRef, reason: str) -> None:
        """The task kills every process that runs it."""

    def on_lost(self, chunks: list[LeasedChunk]) -> None:
        """A fetcher died with references of these chunks."""


class LaneTools(NamedTuple):
    """What a worker gives to a new lane."""

    owner: LaneOwner
    recorder: Recorder
    limits: TargetLimits
    gate: Gate
    clock: Clock
    recovery_ratio: int = 4
    # Seconds without progress after which the monitor may have requeued a long task.
    stuck_after: float = 600.0
    # For jobs that compare with another job.
    copies: PageCopies | None = None
    # For jobs with `extract`.
    extractor: Extractor | None = None
    earlier: EarlierOutcomes | None = None
    # None: no pace is found.
    paces: Paces | None = None
    # The time by which tasks reach their deadlines; None: the clock's.
    deadline_now: Callable[[], float] | None = None


class Lane(ABC):
    """The worker opens it when a run has work and drops it when the run is finished or paused."""

    def __init__(self, job: Job, target: Callable[[TaskRef], str | None], tools: LaneTools) -> None:
        self.job = job
        # Slots that the worker granted, and tasks that run.
        self.width = 0
        self.active = 0
        self.chunks: dict[str, LeasedChunk] = {}
        # When to poll the run's queue and its recovery queue again.
        self.next_poll = 0.0
        self.poll_pause = 0.0
        self.next_recovery = 0.0
        self.recovery_pause = 0.0
        # Whether references were ever fed to it. Since when it has been quiet, and since when it has waited for slots
        # of the run in vain. When it asks for help.
        self.was_fed = False
        # References of new chunks so far.
        self.received = 0
        self.quiet_since = inf
        self.starved_since = inf
        self.help_at = inf
        self._target = target
        self._owner = tools.owner
        self._recorder = tools.recorder
        self._limits = tools.limits
        self._clock = tools.clock
        self._deadline_now = tools.deadline_now or tools.clock.now
        self._gate = tools.gate
        self._copies = tools.copies
        self._extractor = tools.extractor
        self._earlier = tools.earlier
        # Pages that were fetched and wait for what `extract` makes of them.
        self._extracting = 0
        self._waiting: RetryFirstQueue[LeasedRef] = RetryFirstQueue(tools.recovery_ratio)
        # References since the last call of `check_blocked`: fed, and postponed or failed before they could start.
        self._fed = 0
        self._blocked = 0
        # References whose targets have limits.
        self._targets: TargetQueues[LeasedRef] = TargetQueues(
            tools.limits, tools.clock, tools.recovery_ratio, self._free_slots, self._resume, self._spawn
        )
        # References whose hosts get as many at once as their pace allows.
        self._paced: PacedRefs[LeasedRef] = PacedRefs(
            tools.paces,
            job,
            target,
            tools.clock,
            tools.recovery_ratio,
            self._resume,
            self._hold_back,
            self._postpone,
            self._spawn,
        )
        self._running: set[asyncio.Task[None]] = set()
        # Set while the lane backs off.
        self._backing_off: asyncio.Task[None] | None = None
        self._backoff = _FIRST_BACKOFF
        self._rate = 0.0
        self._finished = 0
        self._measured_at = tools.clock.monotonic()
        self._low = 0

    @property
    def demand(self) -> int:
        """Slots that the lane could use now."""
        limit = self.job.options.concurrency
        promising = self._targets.count_promising(limit) + self._paced.count_promising(limit)
        return self.active + len(self._waiting) + promising

    @property
    def attempts(self) -> int:
        """Attempts that run, or at most how many: more than `width` if they began while the lane was wider."""
        return self.active

    @property
    def slots_in_use(self) -> int:
        """Slots that no other lane can have."""
        return max(self.width, self.attempts)

    @property
    def portion(self) -> int:
        """Slots to deal to the lane at a time, when it is its turn."""
        return 1

    @property
    def is_busy(self) -> bool:
        """Whether attempts run or could start now, or the run's queue may have more now or soon."""
        is_ingesting = not self.job.run.last_batch and self.job.mode is not Mode.OPEN
        return self.poll_pause == 0 or is_ingesting or self.demand > 0 or self._extracting > 0

    @property
    def is_crowded(self) -> bool:
        """Whether enough references wait for their targets, so that the lane receives no more."""
        return len(self._targets) >= _MAX_WAITING_FOR_TARGETS or len(self._paced) >= self._max_paced

    @property
    def _max_paced(self) -> int:
        return _MAX_LONG_WAITING if self.job.kind in LONG_KINDS else _MAX_WAITING_FOR_PACE

    @property
    def is_paced(self) -> bool:
        """Whether the pace of its hosts is found."""
        return self._paced.is_on

    @property
    def has_targets(self) -> bool:
        """Whether references wait for targets with limits, or slots of these are not given back yet."""
        return self._targets.has_targets

    @property
    def has_whole_run(self) -> bool:
        """Whether every task of the run was received here, so that only retries can follow."""
        return self.job.run.last_batch and 0 < self.job.run.total <= self.received

    @property
    def is_new_due(self) -> bool:
        """Whether a new task is next, after a series of recovered ones."""
        return self._waiting.is_new_due

    @property
    def take_counts(self) -> tuple[int, int]:
        """How many recovered and how many new references were taken so far."""
        return self._waiting.take_counts

    @abstractmethod
    def set_width(self, width: int) -> None:
        """Run up to `width` tasks at once. What runs beyond that finishes first."""

    def is_settled(self, width: int) -> bool:
        """Whether `set_width` with this width would change nothing."""
        return False

    @abstractmethod
    async def _drain(self, grace: float) -> None:
        """Give running attempts `grace` seconds, then cancel them."""

    def shortage(self) -> tuple[int, int]:
        """Return how many recovered and how many new references to receive, given the lane's throughput."""
        self._measure()
        if len(self._paced) >= self._max_paced:
            self._paced.thin_out()
        if self.job.kind in LONG_KINDS:
            # One at a time: a long task that waits here for hours could run on another worker. Those whose host has no
            # room must not keep those of other hosts from coming.
            full = self._waiting or self._targets or self.is_crowded or self.active >= self.job.options.concurrency
            return (0, 0) if full else (1, 1)
        goal = max(2 * self.width, int(self._rate * _AHEAD))
        self._low = goal // 2
        if self.is_crowded:
            return 0, 0
        return max(0, goal - self._waiting.recovered), max(0, goal - self._waiting.new)

    def check_blocked(self) -> bool:
        """Return whether no reference that was fed since the last call could start. Later ones may be able to."""
        fed, self._fed = self._fed, 0
        blocked, self._blocked = self._blocked, 0
        return 0 < fed <= blocked

    def open_until(self) -> float | None:
        """Return when the breaker that blocks the whole run half-opens; None if no breaker does."""
        return self._gate.open_until()

    def hold_time(self, refs: Sequence[TaskRef]) -> float | None:
        """Return for how many seconds breakers block all of these references; None if one may start."""
        return self._gate.hold_time(refs)

    def count_blocked(self, count: int) -> None:
        """Count references that were received and could not start."""
        self._fed += count
        self._blocked += count

    def feed(self, chunk: LeasedChunk, refs: list[TaskRef]) -> None:
        """Queue references of a chunk."""
        self.chunks[chunk.receipt] = chunk
        self._waiting.extend([LeasedRef(chunk, ref) for ref in refs])
        self._fed += len(refs)
        self.was_fed = True

    def has_in_flight(self) -> bool:
        """Whether a chunk has references without a durable outcome."""
        return any(chunk.left > 0 and not chunk.lost for chunk in self.chunks.values())

    def note_starved(self, *, is_starved: bool) -> None:
        """Note whether other workers have all slots of the run."""
        self.starved_since = min(self.starved_since, self._clock.monotonic()) if is_starved and not self.active else inf

    def follow(self, job: Job) -> None:
        """Apply the job's changed options. New limits hold for references that wait; running attempts keep the old."""
        self.job = job
        limited = without_targets(job) if is_extract_only(job) else job
        self._gate.follow(limited)
        if self._paced.follow(limited):
            self._waiting.extendleft(reversed(self._paced.drain()))
            self._owner.request_tick()
        if self._limits.follow(limited):
            self._targets.follow()
            self._owner.request_tick()

    def shed_long_tasks(self) -> list[LeasedChunk]:
        """Return the chunks of long tasks that wait for a slot: another worker may have one free."""
        return []

    def forget_finished(self) -> None:
        """Drop chunks that are finished or lost, so that the worker no longer renews their leases."""
        self.chunks = {receipt: chunk for receipt, chunk in self.chunks.items() if chunk.left > 0 and not chunk.lost}

    def leased_bytes(self) -> int:
        """Return the size of all leased chunks."""
        return sum(chunk.size for chunk in self.chunks.values() if chunk.left > 0 and not chunk.lost)

    def renew_slots(self) -> None:
        """Renew the slots of targets whose tasks take long."""
        self._targets.renew_slots()

    def recheck_targets(self) -> None:
        """A breaker has opened: references that it blocks are postponed, or fail, and wait for no slot or pass of their
        targets before that."""
        if self._gate.is_watching:
            self._targets.retain(lambda entry: not entry.is_lost and self._check_gate(entry) is not False)
        self._waiting.extendleft(reversed(self._paced.drain()))

    def in_progress(self) -> list[int]:
        """Return the indexes of tasks that are attempted now, as far as attempts take long enough to be looked at."""
        return []

    def long_tasks(self) -> list[LongTask]:
        """Return the long tasks that run now."""
        return []

    def watch(self) -> list[WatchedAttempt]:
        """Cancel overdue attempts. Returns attempts that a newer one may have superseded."""
        return []

    async def stop(self, grace: float) -> list[LeasedChunk]:
        """Start nothing more, give running attempts `grace` seconds, and return the unfinished chunks."""
        self.width = 0
        self._paced.set_slots(0)
        self._waiting.clear()
        self._targets.stop()
        self._paced.stop()
        if self._backing_off is not None:
            self._backing_off.cancel()
        await self._drain(grace)
        # Before the coordinator is asked for anything: other lanes may wait for these slots.
        self._owner.on_slots_freed(self)
        await self._targets.close()
        self._paced.close()
        self._gate.close()
        return [chunk for chunk in self.chunks.values() if not chunk.lost]

    async def _finish_running(self, grace: float) -> None:
        if self._running:
            await asyncio.wait(self._running, timeout=grace)
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("lane task failed", run=self.job.run.run_id, exc_info=error)

    def _fail_late(self, entries: list[LeasedRef]) -> list[LeasedRef]:
        """Fail tasks that are past their deadline; returns the others."""
        options = self.job.options
        if options.task_deadline is None:
            return entries
        now = self._deadline_now()
        overdue = [entry for entry in entries if too_late(options, entry.ref, now)]
        for entry in overdue:
            self._fail(entry, late(options, None))
        return entries if not overdue else [entry for entry in entries if entry not in overdue]

    def _fail(self, entry: LeasedRef, error: TaskError) -> None:
        """Fail a task without an attempt."""
        self._gate.release([entry])
        self._record_unattempted(entry, Outcome(TaskStatus.FAILED, error=error))

    def _postpone(self, entry: LeasedRef, delay: float) -> None:
        """Requeue a task that its breaker or the pace of its host blocks, with a delay. It spends no attempt."""
        outcome = Outcome(TaskStatus.PENDING, retry_after=delay, spends_attempt=False, is_blocked=True)
        self._record_unattempted(entry, outcome)

    def _record_unattempted(self, entry: LeasedRef, outcome: Outcome) -> None:
        self._blocked += 1
        self._free(entry)
        self._recorder.add(self.job, [entry.chunk], [_previous_attempt(entry.ref)], [outcome])

    def _free(self, entry: LeasedRef) -> None:
        """Free the slot of a reference that is not attempted, or no longer, and its place in the pace of its host."""
        self._targets.free_slot(entry)
        if entry.pace is not None:
            self._paced.release([entry])

    def _hold_back(self) -> None:
        """Have references returned that were sent and have not started."""
        return

    def _reuse_pages(self, entries: Sequence[LeasedRef], outcomes: Sequence[Outcome]) -> None:
        """Give unchanged outcomes the pages that earlier runs stored."""
        for entry, outcome in zip(entries, outcomes, strict=True):
            if outcome.unchanged and entry.earlier is not None:
                reuse_page(self.job, outcome, entry.earlier)

    def _note_earlier(self, entries: Sequence[LeasedRef], pages: Mapping[int, EarlierPage]) -> None:
        """Note what the pages of these references are compared with."""
        for entry in entries:
            entry.earlier = None if entry.is_fetched else pages.get(entry.ref.index)

    async def _copy_pages(self, entries: Sequence[LeasedRef], outcomes: Sequence[Outcome]) -> list[bool]:
        """Copy the pages of unchanged outcomes that another job has. False for those that have to be fetched."""
        assert self._copies is not None
        pages = [entry.earlier for entry in entries if entry.earlier is not None]
        copied = await self._copies.copy(pages, outcomes)
        for entry, outcome, is_copied in zip(entries, outcomes, copied, strict=True):
            entry.is_fetched = not is_copied
            if outcome.keeps_extracted and not self.job.options.keep_bodies:
                outcome.body = None
        return copied

    def _record(self, entries: list[LeasedRef], outcomes: list[Outcome]) -> None:
        self._gate.record(entries, outcomes)
        self._add_outcomes(entries, outcomes)

    def _add_outcomes(self, entries: Sequence[LeasedRef], outcomes: Sequence[Outcome]) -> None:
        refs = [_counted_ref(entry.ref, outcome) for entry, outcome in zip(entries, outcomes, strict=True)]
        self._recorder.add(self.job, [entry.chunk for entry in entries], refs, outcomes)
        self._on_recorded(len(entries))

    async def _extract(self, entries: Sequence[LeasedRef], outcomes: Sequence[Outcome]) -> bool:
        """Have the job's `extract` called with the bodies of these outcomes. False: that failed, and they do not count;
        the queue redelivers their messages."""
        assert self._extractor is not None
        self._extracting += len(entries)
        try:
            await self._extractor.extract(self.job, [entry.ref for entry in entries], outcomes)
        except Exception:
            log.exception("extraction failed", run=self.job.run.run_id)
            self._lose(entries)
            return False
        finally:
            self._extracting -= len(entries)
        return True

    def _lose(self, entries: Sequence[LeasedRef]) -> None:
        """Have the messages of these references redelivered."""
        chunks = {entry.chunk.receipt: entry.chunk for entry in entries if not entry.chunk.lost}
        for chunk in chunks.values():
            chunk.lost = True
        self._owner.on_lost(list(chunks.values()))

    def _on_recorded(self, count: int) -> None:
        self._finished += count
        # Of a run that is here as a whole only retries can follow, and these are announced.
        is_low = len(self._waiting) <= self._low and not self.has_whole_run and not self.is_crowded
        is_low = is_low and self._clock.monotonic() >= min(self.next_poll, self.next_recovery)
        if is_low or self._gate.is_urgent:
            self._owner.request_tick()

    def _next(self) -> LeasedRef | None:
        """Take the next reference that can start. References whose targets are at their limits stay queued for them."""
        if not self._targets.is_limited:
            return self._next_paced() if self._paced.is_on else self._pop_waiting()
        self._queue_by_target(1, at_least=1)
        return self._targets.take()

    def _next_paced(self) -> LeasedRef | None:
        """Take the next reference whose host has room. The others wait for the pace of theirs."""
        while not self._recorder.full:
            if taken := self._paced.take(1):
                return taken[0]
            entry = None if self.is_crowded else self._pop_waiting()
            if entry is None:
                return None
            if admitted := self._paced.admit([entry]):
                return admitted[0]
        return None

    def _queue_by_target(self, wanted: int, at_least: int = 0) -> None:
        """Move references to the queues of their targets until `wanted` can start, now or after the next request."""
        promising = self._targets.count_promising(wanted)
        while self._waiting and not self._recorder.full and (at_least > 0 or promising < wanted):
            at_least -= 1
            entry = self._pop_waiting()
            if entry is not None and self._check_gate(entry) is not False:
                promising += self._targets.add(self._target(entry.ref), entry)

    def _pop_waiting(self) -> LeasedRef | None:
        """Take the next reference whose chunk is still leased."""
        self._waiting.drop_lost()
        return self._waiting.popleft() if self._waiting else None

    def _check_gate(self, entry: LeasedRef) -> bool | None:
        """True: the reference may start. None: it may start if `_acquire_probe` says so. False: it was postponed or
        failed."""
        check = self._gate.check(entry.ref) if self._gate.is_watching and not entry.probes else 0.0
        if isinstance(check, TaskError):
            self._fail(entry, check)
        elif check:
            self._postpone(entry, check)
        return None if check is None else check == 0.0

    async def _acquire_probe(self, entry: LeasedRef) -> bool:
        """Ask whether the reference may probe a half-open breaker. If not, it was postponed or put back."""
        try:
            wait = await self._gate.acquire_probe(entry)
        except Exception as error:
            self._put_back([entry], error)
            return False
        if wait:
            self._postpone(entry, wait)
        return wait == 0.0

    async def _mark_started(self, entries: Sequence[LeasedRef]) -> bool:
        """Mark the start of redelivered chunks. If that fails, the references are put back."""
        try:
            for entry in entries:
                if entry.chunk.suspect:
                    await self._recorder.mark_started(entry.chunk)
        except Exception as error:
            self._put_back(entries, error)
            return False
        self._backoff = _FIRST_BACKOFF
        return True

    def _put_back(self, entries: Sequence[LeasedRef], error: Exception) -> None:
        """Put references that could not start back to the front, and back off: the failure is not theirs."""
        self._gate.release(entries)
        for entry in reversed(entries):
            self._free(entry)
            self._waiting.appendleft(entry)
        if self._backing_off is None:
            log.warning("no task could start; the lane backs off", run=self.job.run.run_id, error=repr(error))
            self._backing_off = self._spawn(self._back_off())

    async def _back_off(self) -> None:
        pause, self._backoff = self._backoff, min(_MAX_BACKOFF, self._backoff * 2)
        await self._clock.sleep(pause)
        self._backing_off = None
        self._resume()

    def _free_slots(self) -> int:
        """Return how many more references could start. A lane whose references all wait has no slots: it wants one."""
        return self.width - self.active if self.width or self.active else 1

    def _resume(self) -> None:
        """Start what can start now."""
        self.set_width(self.width)
        if self.active == 0:
            # A lane whose references all waited was granted no slots.
            self._owner.request_tick()

    def _measure(self) -> None:
        now = self._clock.monotonic()
        passed = now - self._measured_at
        if passed >= 0.1:
            self._rate += _SMOOTHING * (self._finished / passed - self._rate)
            self._finished = 0
            self._measured_at = now


def _counted_ref(ref: TaskRef, outcome: Outcome) -> TaskRef:
    """Return the reference to record the outcome for. An outcome that spends no attempt counts for the previous
    attempt, so that the retry has the same number."""
    return ref if outcome.spends_attempt else _previous_attempt(ref)


def _previous_attempt(ref: TaskRef) -> TaskRef:
    return msgspec.structs.replace(ref, attempt=ref.attempt - 1)
