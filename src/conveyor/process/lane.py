"""Lane: one run's work inside one worker. References wait here; runners take them, a few at once or one by one."""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from typing import Protocol

import structlog

from conveyor.clock import Clock
from conveyor.coordination.limits import TargetLimits
from conveyor.model import LONG_KINDS, Job, Outcome, TaskRef
from conveyor.process.executors import WORKER_LOST, Executor
from conveyor.process.progress import Superseded
from conveyor.process.recorder import HeldChunk, Recorder

log = structlog.get_logger()

# Seconds of work that a lane holds ahead of its runners.
_AHEAD = 0.3
_SMOOTHING = 0.3
# References that wait for their targets, before no more are taken from the queue.
_MOST_PARKED = 5000


class Held:
    """A reference that waits its turn. `reserved`: its target has promised it a pass."""

    __slots__ = ("chunk", "ref", "reserved")

    def __init__(self, chunk: HeldChunk, ref: TaskRef) -> None:
        self.chunk = chunk
        self.ref = ref
        self.reserved = False


class Exits(Protocol):
    """Where references go that have no outcome to record."""

    async def overtaken(self, chunk: HeldChunk) -> None:
        """Another attempt has the task of this message, and a message of its own."""

    async def condemned(self, job: Job, chunk: HeldChunk, ref: TaskRef, why: str) -> None:
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
        exits: Exits | None = None,
    ) -> None:
        self.job = job
        self.width = 0
        self.active = 0
        self.chunks: dict[str, HeldChunk] = {}
        self.next_poll = 0.0
        self.poll_pause = 0.0
        self._executor = executor
        self._recorder = recorder
        self._limits = limits
        self._clock = clock
        self._hungry = hungry
        self._exits = exits
        self._waiting: deque[Held] = deque()
        # References whose target has its turn later.
        self._parked: list[tuple[float, int, Held]] = []
        self._parkings = 0
        # Runners that have not yet taken anything.
        self._starting = 0
        self._running: set[asyncio.Task[None]] = set()
        self._timer: asyncio.Task[None] | None = None
        self._rate = 0.0
        self._ended = 0
        self._measured_at = clock.monotonic()
        self._low = 0

    @property
    def want(self) -> int:
        """Slots that it could use now."""
        return self.active + len(self._waiting)

    @property
    def crowded(self) -> bool:
        """So many wait for their targets that no more are taken from the queue."""
        return len(self._parked) >= _MOST_PARKED

    def shortage(self) -> int:
        """How many more references it should hold, from what it gets done in a moment."""
        self._measure()
        if self.job.kind in LONG_KINDS:
            # One to grow by: what waits here for hours could run elsewhere.
            full = self._waiting or self._parked or self.active >= self.job.options.concurrency
            return 0 if full else 1
        goal = max(2 * self.width, int(self._rate * _AHEAD))
        self._low = goal // 2
        return 0 if self.crowded else max(0, goal - len(self._waiting))

    def feed(self, chunk: HeldChunk, refs: list[TaskRef]) -> None:
        self.chunks[chunk.receipt] = chunk
        self._waiting.extend([Held(chunk, ref) for ref in refs])

    def spread(self, width: int) -> None:
        """Run with `width` runners: more start now, too many end after what they are doing."""
        self.width = width
        for _ in range(min(width - self.active, -(-len(self._waiting) // self._executor.grain(self.job)))):
            self.active += 1
            self._starting += 1
            task = asyncio.create_task(self._run())
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def follow(self, job: Job) -> None:
        """Take over what was changed of the job. References that wait for their targets ask again, by the new limits;
        what runs ends by the old ones."""
        self.job = job
        if not self._limits.follow(job):
            return
        self._waiting.extendleft(held for _, _, held in sorted(self._parked, reverse=True))
        self._parked.clear()
        for held in self._waiting:
            held.reserved = False
        self.spread(self.width)
        self._hungry()

    def surplus(self) -> list[HeldChunk]:
        """Give up long tasks that wait for a slot which nobody knows the end of: others may have one free."""
        if self.job.kind not in LONG_KINDS or self.active < self.width:
            return []
        chunks: list[HeldChunk] = []
        while len(self._waiting) > self._starting:
            chunk = self._waiting.pop().chunk
            if not chunk.lost:
                chunk.lost = True
                chunks.append(chunk)
        return chunks

    def forget_done(self) -> None:
        self.chunks = {receipt: chunk for receipt, chunk in self.chunks.items() if chunk.left > 0 and not chunk.lost}

    async def keep_targets(self) -> None:
        """Hold on to the slots of targets whose tasks take long."""
        await self._limits.refresh()

    async def stop(self, grace: float) -> list[HeldChunk]:
        """Start nothing more, give what runs `grace` seconds, and return the messages that are not done."""
        self.width = 0
        self._waiting.clear()
        self._parked.clear()
        if self._timer is not None:
            self._timer.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=grace)
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
        return [chunk for chunk in self.chunks.values() if not chunk.lost]

    async def _run(self) -> None:
        self._starting -= 1
        try:
            while self.active <= self.width:
                held = await self._take_limited() if self._limits.limited else self._take()
                if not held:
                    return
                await self._attempt(held)
        finally:
            self.active -= 1

    async def _attempt(self, held: list[Held]) -> None:
        chunks = [one.chunk for one in held]
        refs = [one.ref for one in held]
        try:
            for chunk in chunks:
                if chunk.suspect:
                    await self._recorder.mark_started(chunk)
            outcomes = await self._executor.attempt(self.job, refs)
            assert len(outcomes) == len(refs)
            if any(_is_verdict(outcome) for outcome in outcomes):
                held, outcomes = await self._without_condemned(held, outcomes)
        except Superseded:
            for chunk in chunks:
                assert self._exits is not None
                await self._exits.overtaken(chunk)
                chunk.lost = True
            return
        except Exception:
            # An executor promises not to raise. Let go of the chunks: they come again, and the lost start counts.
            log.exception("executor failed", run=self.job.run.run_id, indexes=[ref.index for ref in refs])
            for chunk in chunks:
                chunk.lost = True
            return
        finally:
            if self._limits.limited:
                await self._limits.leave(self._executor.target(refs[0]))
        self._record(held, outcomes)
        if self._recorder.full:
            await self._recorder.room()

    async def _without_condemned(self, held: list[Held], outcomes: list[Outcome]) -> tuple[list[Held], list[Outcome]]:
        left: list[tuple[Held, Outcome]] = []
        for one, outcome in zip(held, outcomes, strict=True):
            if _is_verdict(outcome) and outcome.error is not None:
                assert self._exits is not None
                await self._exits.condemned(self.job, one.chunk, one.ref, outcome.error.message)
            else:
                left.append((one, outcome))
        return [one for one, _ in left], [outcome for _, outcome in left]

    def _record(self, held: list[Held], outcomes: list[Outcome]) -> None:
        refs = [_counted(one.ref, outcome) for one, outcome in zip(held, outcomes, strict=True)]
        self._recorder.add(self.job, [one.chunk for one in held], refs, outcomes)
        self._ended += len(held)
        if len(self._waiting) <= self._low and self._clock.monotonic() >= self.next_poll:
            self._hungry()

    def _take(self) -> list[Held]:
        grain = self._executor.grain(self.job)
        held: list[Held] = []
        while self._waiting and len(held) < grain:
            one = self._waiting.popleft()
            if not one.chunk.lost:
                held.append(one)
        return held

    async def _take_limited(self) -> list[Held]:
        """The next reference whose target may be asked now; others are parked until their turn."""
        while self._waiting:
            one = self._waiting.popleft()
            if one.chunk.lost:
                continue
            target = self._executor.target(one.ref)
            wait = 0.0 if one.reserved else await self._limits.reserve(target)
            one.reserved = True
            wait = wait or await self._limits.enter(target)
            if wait == 0:
                return [one]
            self._park(one, wait)
        return []

    def _park(self, held: Held, wait: float) -> None:
        self._parkings += 1
        heapq.heappush(self._parked, (self._clock.monotonic() + wait, self._parkings, held))
        if self._parked[0][1] == self._parkings:
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.create_task(self._unpark_after(self._parked[0][0] - self._clock.monotonic()))

    async def _unpark_after(self, delay: float) -> None:
        await self._clock.sleep(max(0.0, delay))
        self._timer = None
        now = self._clock.monotonic()
        while self._parked and self._parked[0][0] <= now:
            self._waiting.appendleft(heapq.heappop(self._parked)[2])
        if self._parked:
            self._set_timer()
        self.spread(self.width)
        if self.active == 0:
            # A lane that only waits is dealt no slots.
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
    return ref if outcome.spend else TaskRef(ref.index, ref.input, ref.attempt - 1)
