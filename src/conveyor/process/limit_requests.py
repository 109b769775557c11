"""LimitRequests: a lane's calls to the coordinator about the limits of one target. Gets a target's queue, asks, and
writes the answer into the queue."""

from typing import Any

import structlog

from conveyor.clock import Clock
from conveyor.coordination.limits import AHEAD, WAITER_SECONDS, TargetLimits
from conveyor.process.target_queue import FIRST_PAUSE, RESERVED_SECONDS, TargetQueue

log = structlog.get_logger()

LONGEST_PAUSE = 1.0
# How long a worker keeps the slots of a target before it checks whether another worker waits for them.
CHECK_WAITERS_SECONDS = 5.0
# Times closer than this are equal.
TICK = 1e-6


class LimitRequests:
    """One for each lane."""

    def __init__(self, limits: TargetLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._failing = False

    async def hold_slots(self, target: TargetQueue[Any], share: int, startable: int) -> None:
        """Hold the slots that are in use and those that the next references can use; free the others.

        `share` of the target's references may get a new slot; free slots are kept for up to `startable`.
        """
        name, limit, queued = target.name, self._limits.slots, len(target.refs)
        if name is None or (limit is None and not target.reported):
            return
        want = target.running
        if limit is not None:
            useful = min(queued, max(share, min(target.free, startable)))
            want += max(0, min(useful, limit - target.running))
        # Slots that go back must not be used while the call is in flight.
        target.slots = min(target.slots, want)
        target.reported = max(target.reported, want)
        granted = await self._limits.hold(name, want)
        if granted > target.slots:
            target.pause = FIRST_PAUSE
        target.slots = target.reported = granted
        target.report_at = 0.0
        if granted >= want:
            return
        target.slots_at = self._next_try(target)
        if target.waiting_until - LONGEST_PAUSE <= self._clock.monotonic() + TICK:
            target.waiting_until = self._clock.monotonic() + WAITER_SECONDS
            await self._limits.join_waiters(name)

    async def reserve_passes(self, target: TargetQueue[Any], usable: int) -> None:
        """Reserve passes up to `usable`, a moment ahead."""
        rate, name = self._limits.rate, target.name
        assert rate is not None
        assert name is not None
        count = max(1, min(usable - len(target.passes), int(rate * RESERVED_SECONDS)))
        wait = await self._limits.reserve(name, count)
        if self._limits.rate != rate:
            return
        now, jitter = self._clock.monotonic(), self._clock.jitter()
        if wait > AHEAD:
            # Ask before the pass is due: asking late would waste rate. With jitter, so that workers do not all ask at
            # once.
            target.passes_at = now + wait - AHEAD * (1 + 2 * jitter) / 4
            return
        own = max(0.0, target.passes[-1] - now) if target.passes else 0.0
        target.passes.extend(now + wait + number / rate for number in range(count))
        # If other workers had the passes before these, leave them a chance at the next ones.
        is_shared = wait > own + 1 / rate + TICK
        target.passes_at = now + wait + jitter * min(1 / rate, RESERVED_SECONDS) if is_shared else 0.0

    async def check_waiters(self, target: TargetQueue[Any]) -> None:
        """Check whether another worker waits for a slot. If so, the next free one goes to it."""
        assert target.name is not None
        target.check_waiters_at = self._clock.monotonic() + CHECK_WAITERS_SECONDS
        own = int(target.waiting_until > self._clock.monotonic())
        target.yields = target.slots > 0 and await self._limits.waiters(target.name) > own

    async def free_slots(self, name: str) -> None:
        """Free all slots of a target. If the call fails, they expire."""
        try:
            await self._limits.hold(name, 0)
        except Exception as error:
            self._log_failure(error)

    def succeed(self) -> None:
        """The coordinator answers."""
        self._failing = False

    def back_off(self, target: TargetQueue[Any], error: Exception) -> None:
        """A call failed: ask again after a pause."""
        self._log_failure(error)
        target.slots_at = target.passes_at = target.report_at = self._next_try(target)
        target.check_waiters_at = max(target.check_waiters_at, target.report_at)

    def _next_try(self, target: TargetQueue[Any]) -> float:
        pause, target.pause = target.pause, min(LONGEST_PAUSE, target.pause * 2)
        return self._clock.monotonic() + pause

    def _log_failure(self, error: Exception) -> None:
        """Log once, until the coordinator answers again."""
        if not self._failing:
            log.warning("target limits not available: the coordinator fails", error=repr(error))
        self._failing = True
