"""LocalLane: a lane that awaits attempts in this process. Each of its runners takes a few references, has the executor
attempt them, records the outcomes, and goes on, while the lane is wide enough for it."""

from typing import TYPE_CHECKING

import structlog

from conveyor.errors import Unavailable
from conveyor.model import LONG_KINDS, Job, LongTask, Outcome
from conveyor.process.changed_pages import has_base
from conveyor.process.earlier_outcomes import needs_look
from conveyor.process.executors.fetch.fetch_executor import FetchesIfChanged
from conveyor.process.executors.stored_body_executor import is_extract_only
from conveyor.process.lane import Lane, LaneTools, LeasedRef
from conveyor.process.recorder import LeasedChunk
from conveyor.process.retry import WORKER_LOST
from conveyor.process.task_progress import Superseded
from conveyor.process.watchdog import Watchdog, WatchedAttempt

if TYPE_CHECKING:
    from conveyor.process.executors import LocalExecutor

log = structlog.get_logger()

# A long task that probes a breaker and runs for this long shows that its target is up.
_ALIVE_SECONDS = 60.0

Finished = tuple[list[LeasedRef], list[Outcome]]


class NothingAttempted(Exception):
    """The earlier outcomes of the tasks could not be read, and no attempt was made."""


class LocalLane(Lane):
    """Runs up to `width` runners."""

    def __init__(self, job: Job, executor: "LocalExecutor", tools: LaneTools) -> None:
        super().__init__(job, executor.targets(job), tools)
        self._executor = executor
        self._watchdog = Watchdog(tools.clock, tools.stuck_after)
        # Runners that have not taken a reference yet.
        self._starting = 0

    def set_width(self, width: int) -> None:
        self.width = width
        self._paced.set_slots(width)
        if self._backing_off is not None:
            return
        free = width - self.active
        if self._targets.is_limited:
            self._queue_by_target(free)
            startable = self._targets.count_ready(max(0, free))
        elif self._paced.is_on:
            startable = (0 if self.is_crowded else len(self._waiting)) + self._paced.find_ready(max(0, free))
        else:
            startable = -(-len(self._waiting) // self._executor.grain(self.job))
        for _ in range(min(free, startable)):
            self.active += 1
            self._starting += 1
            self._spawn(self._run())
        self._targets.request()

    def shed_long_tasks(self) -> list[LeasedChunk]:
        if self.job.kind not in LONG_KINDS or self.active < self.width:
            return []
        chunks: list[LeasedChunk] = []
        while len(self._waiting) > self._starting:
            chunk = self._waiting.pop().chunk
            if not chunk.lost:
                chunk.lost = True
                chunks.append(chunk)
        return chunks

    def in_progress(self) -> list[int]:
        # Of several in one call only one runs.
        return [attempt.refs[0].index for attempt in self._watchdog.attempts if len(attempt.refs) == 1]

    def long_tasks(self) -> list[LongTask]:
        job = self.job
        if job.kind not in LONG_KINDS:
            return []
        refs = [ref for attempt in self._watchdog.attempts for ref in attempt.refs]
        return [LongTask(job.tenant, job.job_id, job.run.run_id, ref.index) for ref in refs]

    def watch(self) -> list[WatchedAttempt]:
        if self.job.kind in LONG_KINDS and self._gate.is_watching:
            alive_since = self._clock.monotonic() - _ALIVE_SECONDS
            for attempt in self._watchdog.attempts:
                if attempt.started_at <= alive_since:
                    self._gate.mark_alive(attempt.entries)
        if self.job.kind in LONG_KINDS:
            self._paced.grow_while_alive()
        return self._watchdog.check()

    async def _drain(self, grace: float) -> None:
        await self._finish_running(grace)

    async def _run(self) -> None:
        """One runner."""
        self._starting -= 1
        try:
            while self.active <= self.width and self._backing_off is None:
                one_by_one = self._targets.is_limited or self._gate.is_watching or self._paced.is_on
                taken = await self._take_one() if one_by_one else self._take_batch()
                if not taken:
                    return
                await self._attempt(taken)
        finally:
            self.active -= 1
            if self.active >= self.width:
                self._owner.on_slots_freed(self)
            else:
                self._owner.on_slots_idle(self)
            self._targets.request()

    def _take_batch(self) -> list[LeasedRef]:
        """Take as many references as the executor wants in one call."""
        grain = self._executor.grain(self.job)
        taken: list[LeasedRef] = []
        while self._waiting and len(taken) < grain:
            entry = self._waiting.popleft()
            if not entry.chunk.lost:
                taken.append(entry)
        return taken

    async def _take_one(self) -> list[LeasedRef]:
        """Take the next reference whose target has capacity and whose breakers let it through."""
        while self._backing_off is None:
            if self._recorder.full:
                await self._recorder.until_capacity()
            entry = self._next()
            if entry is None:
                break
            may_start = self._check_gate(entry)
            if may_start or (may_start is None and await self._acquire_probe(entry)):
                return [entry]
        return []

    async def _attempt(self, taken: list[LeasedRef]) -> None:
        """Fail what is overdue, mark the start of the rest, run it, free the slots, record the outcomes."""
        finished: Finished | None = None
        try:
            in_time = self._fail_late(taken)
            if in_time and await self._mark_started(in_time):
                self._gate.assign_gateways(in_time)
                finished = await self._execute(in_time)
        finally:
            if finished is None:
                self._gate.release(taken)
            else:
                self._paced.learn(*finished, is_long=self.job.kind in LONG_KINDS)
            for entry in taken:
                self._free(entry)
        if finished is not None:
            entries, outcomes = finished
            self._gate.record(entries, outcomes)
            if self.job.options.extract is None or await self._extract(entries, outcomes):
                self._add_outcomes(entries, outcomes)
            if self._recorder.full:
                await self._recorder.until_capacity()

    async def _execute(self, entries: list[LeasedRef]) -> Finished | None:
        """Have the executor attempt the references. None: the outcomes do not count."""
        refs = [entry.ref for entry in entries]
        try:
            attempting = self._attempt_or_reuse(entries)
            outcomes = await self._watchdog.guard(self.job, entries, refs, entries[0].chunk.generation, attempting)
            assert 0 < len(outcomes) <= len(refs)
            entries = self._take_back(entries, len(outcomes))
            if any(_is_poisoned(outcome) for outcome in outcomes):
                return await self._remove_poisoned(entries, outcomes)
            return entries, outcomes
        except Superseded:
            for entry in entries:
                await self._owner.on_superseded(entry.chunk)
        except NothingAttempted as error:
            self._put_back(entries, error)
        except Exception:
            # An executor must not raise. Once their leases expire, the queue redelivers the chunks as lost starts.
            log.exception("executor failed", run=self.job.run.run_id, indexes=[ref.index for ref in refs])
            for entry in entries:
                entry.chunk.lost = True
        return None

    def _take_back(self, entries: list[LeasedRef], attempted: int) -> list[LeasedRef]:
        """Queue references that were not attempted again, for as many runners as there may be. Returns the others."""
        if attempted < len(entries):
            self._waiting.extendleft(reversed(entries[attempted:]))
            self.set_width(self.width)
        return entries[:attempted]

    async def _attempt_or_reuse(self, entries: list[LeasedRef]) -> list[Outcome]:
        """Have the executor attempt the references that have no stored body to extract from. Raises
        NothingAttempted."""
        refs, gateway = [entry.ref for entry in entries], entries[0].gateway
        if not needs_look(self.job):
            # Several in one call are of executors without gateways.
            return await self._executor.attempt_through(gateway, self.job, refs)
        assert self._earlier is not None
        try:
            if is_extract_only(self.job):
                # It only looks for stored bodies.
                return await self._executor.attempt(self.job, refs)
            stored, pages = await self._earlier.look(self.job, refs)
        except Unavailable as error:
            raise NothingAttempted(error.message) from error
        self._note_earlier(entries, pages)
        others = [entry for entry in entries if entry.ref.index not in stored]
        fetched = iter(await self._fetch(others) if others else [])
        return [stored[ref.index] if ref.index in stored else next(fetched) for ref in refs]

    async def _fetch(self, entries: list[LeasedRef]) -> list[Outcome]:
        refs, gateway = [entry.ref for entry in entries], entries[0].gateway
        if not isinstance(self._executor, FetchesIfChanged):
            return await self._executor.attempt_through(gateway, self.job, refs)
        conditions = [entry.condition for entry in entries]
        outcomes = await self._executor.attempt_if_changed(gateway, self.job, refs, conditions)
        self._reuse_pages(entries, outcomes)
        unchanged = [place for place, outcome in enumerate(outcomes) if outcome.unchanged]
        if has_base(self.job) and unchanged:
            copied = await self._copy_pages([entries[at] for at in unchanged], [outcomes[at] for at in unchanged])
            gone = [place for place, is_copied in zip(unchanged, copied, strict=True) if not is_copied]
            again = [refs[place] for place in gone]
            fetched = await self._executor.attempt_through(gateway, self.job, again) if again else []
            for place, outcome in zip(gone, fetched, strict=True):
                outcomes[place] = outcome
        return outcomes

    async def _remove_poisoned(self, entries: list[LeasedRef], outcomes: list[Outcome]) -> Finished:
        """Hand poison tasks to the worker; returns the others."""
        others: list[LeasedRef] = []
        counted: list[Outcome] = []
        for entry, outcome in zip(entries, outcomes, strict=True):
            if _is_poisoned(outcome) and outcome.error is not None:
                await self._owner.on_poisoned(self.job, entry.chunk, entry.ref, outcome.error.message)
            else:
                others.append(entry)
                counted.append(outcome)
        return others, counted


def _is_poisoned(outcome: Outcome) -> bool:
    return outcome.error is not None and outcome.error.code == WORKER_LOST
