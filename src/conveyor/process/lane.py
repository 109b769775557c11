"""Lane: one run's work inside one worker. References wait here; runners take them, a few at once or one by one."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.coordination.limits import TargetLimits
from conveyor.model import LONG_KINDS, Job, LongTask, Outcome, TaskError, TaskRef
from conveyor.process.executors import WORKER_LOST, Executor
from conveyor.process.gate import Gate
from conveyor.process.recorder import LeasedChunk, Recorder
from conveyor.process.retry import late, too_late
from conveyor.process.retry_first_queue import RetryFirstQueue
from conveyor.process.target_queues import TargetQueues
from conveyor.process.task_progress import Superseded
from conveyor.process.watchdog import Watchdog, WatchedAttempt
from conveyor.states import TaskStatus

log = structlog.get_logger()

# Seconds of work that a lane holds ahead of its runners.
_AHEAD = 0.3
_SMOOTHING = 0.3
# References that wait for their targets, before no more are taken from the queue.
_MOST_PARKED = 5000
# How long a lane rests when a call failed before a task could start: twice as long each time in a row.
_FIRST_REST = 0.1
_LONGEST_REST = 5.0
# The target of a long task that was let through to try it is there if the task goes on for so long.
_MOVING_SECONDS = 60.0


class LeasedRef:
    """A reference that waits its turn. `slot`: the target of which it has one; `canaries`: breakers that it tries, see
    Gate."""

    __slots__ = ("canaries", "chunk", "ref", "slot")

    def __init__(self, chunk: LeasedChunk, ref: TaskRef) -> None:
        self.chunk = chunk
        self.ref = ref
        self.slot: str | None = None
        self.canaries: tuple[str, ...] = ()

    @property
    def recovered(self) -> bool:
        return self.chunk.recovered


class Exits(Protocol):
    """Where references go that have no outcome to record."""

    async def overtaken(self, chunk: LeasedChunk) -> None:
        """Another attempt has one task of this message, and a message of its own."""

    async def condemned(self, job: Job, chunk: LeasedChunk, ref: TaskRef, why: str) -> None:
        """The task takes every process along that runs it."""


class Lane:
    """Made by the worker when a run has work, dropped when the run has ended or is paused."""

    def __init__(
        self,
        job: Job,
        executor: Executor,
        recorder: Recorder,
        limits: TargetLimits,
        clock: Clock,
        hungry: Callable[[], None],
        gate: Gate,
        exits: Exits | None = None,
        *,
        recovery_ratio: int = 4,
        stuck_after: float = 600.0,
    ) -> None:
        self.job = job
        self.width = 0
        self.active = 0
        self.chunks: dict[str, LeasedChunk] = {}
        # When the run's queue is next asked, and the one of what comes again.
        self.next_poll = 0.0
        self.poll_pause = 0.0
        self.next_recovery = 0.0
        self.recovery_pause = 0.0
        self._executor = executor
        self._recorder = recorder
        self._limits = limits
        self._clock = clock
        self._hungry = hungry
        self._gate = gate
        self._exits = exits
        self._waiting: RetryFirstQueue[LeasedRef] = RetryFirstQueue(recovery_ratio)
        self._watchdog = Watchdog(clock, stuck_after)
        # References that were fed since the last look, and sent back for their targets.
        self._fed = 0
        self._sidelined = 0
        # References whose targets have limits.
        self._targets: TargetQueues[LeasedRef] = TargetQueues(
            limits, clock, recovery_ratio, self._room, self._go_on, self._start
        )
        # Runners that have not yet taken anything.
        self._starting = 0
        self._running: set[asyncio.Task[None]] = set()
        # Set while the lane rests because a call failed.
        self._resting: asyncio.Task[None] | None = None
        self._rest = _FIRST_REST
        self._rate = 0.0
        self._ended = 0
        self._measured_at = clock.monotonic()
        self._low = 0

    @property
    def want(self) -> int:
        """Slots that it could use now."""
        return self.active + len(self._waiting) + self._targets.hopeful(self.job.options.concurrency)

    @property
    def crowded(self) -> bool:
        """So many wait for their targets that no more are taken from the queue."""
        return len(self._targets) >= _MOST_PARKED

    @property
    def owes_new(self) -> bool:
        """Whether it is the turn of a new task, after so many that came again."""
        return self._waiting.owes_new

    @property
    def taken(self) -> tuple[int, int]:
        """How many were taken up that came again, and how many new ones."""
        return self._waiting.taken

    def shortage(self) -> tuple[int, int]:
        """How many more references it should hold, of those that come again and of new ones, from what it gets done
        in a moment."""
        self._measure()
        if self.job.kind in LONG_KINDS:
            # One to grow by: what waits here for hours could run elsewhere.
            full = self._waiting or self._targets or self.active >= self.job.options.concurrency
            return (0, 0) if full else (1, 1)
        goal = max(2 * self.width, int(self._rate * _AHEAD))
        self._low = goal // 2
        if self.crowded:
            return 0, 0
        return max(0, goal - self._waiting.again), max(0, goal - self._waiting.new)

    def held_up(self) -> bool:
        """Whether nothing that was fed since the last look could start: there may be others further on."""
        fed, self._fed = self._fed, 0
        sidelined, self._sidelined = self._sidelined, 0
        return 0 < fed <= sidelined

    def closed_until(self) -> float | None:
        """When anything of the run can go on, if nothing can now."""
        return self._gate.closed_until()

    def feed(self, chunk: LeasedChunk, refs: list[TaskRef]) -> None:
        self.chunks[chunk.receipt] = chunk
        self._waiting.extend([LeasedRef(chunk, ref) for ref in refs])
        self._fed += len(refs)

    def spread(self, width: int) -> None:
        """Run with `width` runners: more start now, too many end after what they are doing."""
        self.width = width
        if self._resting is not None:
            return
        room = width - self.active
        if self._targets.limited:
            self._sort(room)
            startable = self._targets.ready(max(0, room))
        else:
            startable = -(-len(self._waiting) // self._executor.grain(self.job))
        for _ in range(min(room, startable)):
            self.active += 1
            self._starting += 1
            self._start(self._run())
        self._targets.ask()

    def follow(self, job: Job) -> None:
        """Take over what was changed of the job. References that wait for their targets go on by the new limits; what
        runs ends by the old ones."""
        self.job = job
        self._gate.follow(job)
        if self._limits.follow(job):
            self._targets.follow()
            self._hungry()

    def surplus(self) -> list[LeasedChunk]:
        """Give up long tasks that wait for a slot which nobody knows the end of: others may have one free."""
        if self.job.kind not in LONG_KINDS or self.active < self.width:
            return []
        chunks: list[LeasedChunk] = []
        while len(self._waiting) > self._starting:
            chunk = self._waiting.pop().chunk
            if not chunk.lost:
                chunk.lost = True
                chunks.append(chunk)
        return chunks

    def forget_done(self) -> None:
        self.chunks = {receipt: chunk for receipt, chunk in self.chunks.items() if chunk.left > 0 and not chunk.lost}

    def held_bytes(self) -> int:
        """What its messages weigh."""
        return sum(chunk.size for chunk in self.chunks.values() if chunk.left > 0 and not chunk.lost)

    def keep_targets(self) -> None:
        """Hold on to the slots of targets whose tasks take long."""
        self._targets.keep()

    def hold_back(self) -> None:
        """A target was found to be down: what has not begun asks again."""
        self._waiting.extendleft(reversed(self._targets.drain()))

    def long_tasks(self) -> list[LongTask]:
        """Those that run now."""
        job = self.job
        if job.kind not in LONG_KINDS:
            return []
        refs = [ref for attempt in self._watchdog.attempts for ref in attempt.refs]
        return [LongTask(job.tenant, job.job_id, job.run.run_id, ref.index) for ref in refs]

    def watch(self) -> list[WatchedAttempt]:
        """Break off what took too long. Returns what ran so long that another attempt may have it by now."""
        if self.job.kind in LONG_KINDS and self._gate.watching:
            begun = self._clock.monotonic() - _MOVING_SECONDS
            for attempt in self._watchdog.attempts:
                if attempt.begun <= begun:
                    self._gate.moving(attempt.held)
        return self._watchdog.look()

    async def stop(self, grace: float) -> list[LeasedChunk]:
        """Start nothing more, give what runs `grace` seconds, and return the messages that are not done."""
        self.width = 0
        self._waiting.clear()
        self._targets.stop()
        if self._resting is not None:
            self._resting.cancel()
        await self._drain(grace)
        await self._targets.close()
        self._gate.close()
        return [chunk for chunk in self.chunks.values() if not chunk.lost]

    async def _drain(self, grace: float) -> None:
        """Give what runs so long, then break it off."""
        if self._running:
            await asyncio.wait(self._running, timeout=grace)
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    def _start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("work of a lane failed", run=self.job.run.run_id, exc_info=error)

    async def _run(self) -> None:
        self._starting -= 1
        try:
            while self.active <= self.width and self._resting is None:
                slowly = self._targets.limited or self._gate.watching
                held = await self._take_slowly() if slowly else self._take()
                if not held:
                    return
                await self._attempt(held)
        finally:
            self.active -= 1
            self._targets.ask()

    async def _attempt(self, held: list[LeasedRef]) -> None:
        taken = held
        held = self._in_time(held)
        refs = [one.ref for one in held]
        outcomes: list[Outcome] | None = None
        try:
            if not held or not await self._mark_started(held):
                return
            making = self._executor.attempt(self.job, refs)
            outcomes = await self._watchdog.guard(self.job, held, refs, held[0].chunk.turn, making)
            assert len(outcomes) == len(refs)
            if any(_is_verdict(outcome) for outcome in outcomes):
                held, outcomes = await self._without_condemned(held, outcomes)
        except Superseded:
            for one in held:
                assert self._exits is not None
                await self._exits.overtaken(one.chunk)
            return
        except Exception:
            # An executor promises not to raise. Let go of the chunks: they come again, and the lost start counts.
            log.exception("executor failed", run=self.job.run.run_id, indexes=[ref.index for ref in refs])
            for one in held:
                one.chunk.lost = True
            return
        finally:
            if outcomes is None:
                self._gate.gone(taken)
            for one in taken:
                self._targets.leave(one)
        self._record(held, outcomes)
        if self._recorder.full:
            await self._recorder.room()

    async def _without_condemned(
        self, held: list[LeasedRef], outcomes: list[Outcome]
    ) -> tuple[list[LeasedRef], list[Outcome]]:
        left: list[tuple[LeasedRef, Outcome]] = []
        for one, outcome in zip(held, outcomes, strict=True):
            if _is_verdict(outcome) and outcome.error is not None:
                assert self._exits is not None
                await self._exits.condemned(self.job, one.chunk, one.ref, outcome.error.message)
            else:
                left.append((one, outcome))
        return [one for one, _ in left], [outcome for _, outcome in left]

    def _in_time(self, held: list[LeasedRef]) -> list[LeasedRef]:
        """Those for which it is not too late; the others end."""
        options = self.job.options
        if options.task_deadline is None:
            return held
        now = self._clock.now()
        over = [one for one in held if too_late(options, one.ref, now)]
        for one in over:
            self._refuse(one, late(options, None))
        return held if not over else [one for one in held if one not in over]

    def _refuse(self, one: LeasedRef, error: TaskError) -> None:
        """End a task without an attempt."""
        self._gate.gone([one])
        self._sidelined += 1
        self._send_off(one, Outcome(TaskStatus.FAILED, error=error))

    def _sideline(self, one: LeasedRef, wait: float) -> None:
        """Send a task back to the queue for a while, as the attempt that it was."""
        self._sidelined += 1
        self._send_off(one, Outcome(TaskStatus.PENDING, retry_after=wait, spend=False))

    def _send_off(self, one: LeasedRef, outcome: Outcome) -> None:
        self._targets.leave(one)
        self._recorder.add(self.job, [one.chunk], [_uncounted(one.ref)], [outcome])

    def _record(self, held: list[LeasedRef], outcomes: list[Outcome]) -> None:
        self._gate.saw(held, outcomes)
        refs = [_counted(one.ref, outcome) for one, outcome in zip(held, outcomes, strict=True)]
        self._recorder.add(self.job, [one.chunk for one in held], refs, outcomes)
        self._ended += len(held)
        low = len(self._waiting) <= self._low and self._clock.monotonic() >= min(self.next_poll, self.next_recovery)
        if low or self._gate.urgent:
            self._hungry()

    def _take(self) -> list[LeasedRef]:
        grain = self._executor.grain(self.job)
        held: list[LeasedRef] = []
        while self._waiting and len(held) < grain:
            one = self._waiting.popleft()
            if not one.chunk.lost:
                held.append(one)
        return held

    async def _take_slowly(self) -> list[LeasedRef]:
        """The next reference whose target may be asked now."""
        while self._resting is None:
            if self._recorder.full:
                await self._recorder.room()
            one = self._next()
            if one is None:
                break
            goes = self._goes(one)
            if goes or (goes is None and await self._enter(one)):
                return [one]
        return []

    def _next(self) -> LeasedRef | None:
        """Take the next reference that can start; those whose targets have their turn later are queued for them."""
        if not self._targets.limited:
            return self._popleft()
        self._sort(1, at_least=1)
        return self._targets.take()

    def _sort(self, room: int, at_least: int = 0) -> None:
        """Queue references for their targets until so many can start, or might once their targets were asked."""
        hopeful = self._targets.hopeful(room)
        while self._waiting and not self._recorder.full and (at_least > 0 or hopeful < room):
            at_least -= 1
            one = self._popleft()
            if one is not None and self._goes(one) is not False:
                hopeful += self._targets.add(self._executor.target(one.ref), one)

    def _popleft(self) -> LeasedRef | None:
        """The next reference in line, without those of messages that others have now."""
        while self._waiting:
            one = self._waiting.popleft()
            if not one.chunk.lost:
                return one
            self._gate.gone([one])
        return None

    def _goes(self, one: LeasedRef) -> bool | None:
        """Whether the reference's target is there; None: it is to ask whether it may try it. If not, it has gone back
        to the queue, or ended."""
        verdict = self._gate.verdict(one.ref) if self._gate.watching and not one.canaries else 0.0
        if isinstance(verdict, TaskError):
            self._refuse(one, verdict)
        elif verdict:
            self._sideline(one, verdict)
        return None if verdict is None else verdict == 0.0

    async def _enter(self, one: LeasedRef) -> bool:
        """Whether the reference may try a target that is half-open. If not, it is back in line or in the queue."""
        try:
            wait = await self._gate.enter(one)
        except Exception as error:
            self._put_back([one], error)
            return False
        if wait:
            self._sideline(one, wait)
        return wait == 0.0

    async def _mark_started(self, held: Sequence[LeasedRef]) -> bool:
        """Have it known that work begins on messages that came before. If that fails, they are back in line."""
        try:
            for one in held:
                if one.chunk.suspect:
                    await self._recorder.mark_started(one.chunk)
        except Exception as error:
            self._put_back(held, error)
            return False
        self._rest = _FIRST_REST
        return True

    def _put_back(self, held: Sequence[LeasedRef], error: Exception) -> None:
        """These were taken and could not be started, for no fault of theirs: they are next when the lane has rested."""
        self._gate.gone(held)
        for one in reversed(held):
            self._targets.leave(one)
            self._waiting.appendleft(one)
        if self._resting is None:
            log.warning("no task could start; the lane rests", run=self.job.run.run_id, error=repr(error))
            self._resting = self._start(self._rest_and_go_on())

    async def _rest_and_go_on(self) -> None:
        rest, self._rest = self._rest, min(_LONGEST_REST, self._rest * 2)
        await self._clock.sleep(rest)
        self._resting = None
        self._go_on()

    def _room(self) -> int:
        """How many more could start now. A lane that only waits is dealt no slots: one is what it asks for."""
        return self.width - self.active if self.width or self.active else 1

    def _go_on(self) -> None:
        """Something can start again."""
        self.spread(self.width)
        if self.active == 0:
            # Who only waited is dealt no slots.
            self._hungry()

    def _measure(self) -> None:
        now = self._clock.monotonic()
        passed = now - self._measured_at
        if passed >= 0.1:
            self._rate += _SMOOTHING * (self._ended / passed - self._rate)
            self._ended = 0
            self._measured_at = now


def _is_verdict(outcome: Outcome) -> bool:
    return outcome.error is not None and outcome.error.code == WORKER_LOST


def _counted(ref: TaskRef, outcome: Outcome) -> TaskRef:
    """The reference that its outcome counts for. One that spends no attempt is the end of the attempt before, so that
    the next is this one again."""
    return ref if outcome.spend else _uncounted(ref)


def _uncounted(ref: TaskRef) -> TaskRef:
    return msgspec.structs.replace(ref, attempt=ref.attempt - 1)
