"""TargetQueue: the references of one lane that wait for one target, and the lane's share of that target's limits: slots
(requests at once) and passes (requests a second)."""

from collections import deque
from collections.abc import Iterable
from itertools import takewhile
from math import inf
from typing import Generic, Protocol, TypeVar

from conveyor.coordination.limits import AHEAD, TargetLimits
from conveyor.process.retry_first_queue import RetryFirstQueue, Waits

# How soon to ask again after a refusal or a failed call; each one in a row doubles it.
FIRST_PAUSE = 0.05
# Seconds of a target's passes that a lane reserves at a time: a part of what all workers may, so that each gets some.
RESERVED_SECONDS = AHEAD / 2


class Queued(Waits, Protocol):
    """A reference. `slot` names the target whose slot it has."""

    slot: str | None


T = TypeVar("T", bound=Queued)


class TargetQueue(Generic[T]):
    """`name` is None for references whose target has no limits."""

    def __init__(self, name: str | None, ratio: int, limits: TargetLimits) -> None:
        self.name = name
        self._limits = limits
        self.refs: RetryFirstQueue[T] = RetryFirstQueue(ratio)
        # When each reserved pass may be used.
        self.passes: deque[float] = deque()
        # Slots that this worker has, those in use, and the most that the coordinator may count for it.
        self.slots = 0
        self.running = 0
        self.reported = 0
        # Free slots as of the last count over all targets.
        self.idle = 0
        # Before these times: request no passes, no slots, and report no free slots.
        self.passes_at = 0.0
        self.slots_at = 0.0
        self.report_at = 0.0
        self.pause = FIRST_PAUSE
        # When to check whether other workers wait for a slot; whether the next free slot goes to them; and until when
        # they see this worker wait.
        self.check_waiters_at = inf
        self.yields = False
        self.waiting_until = 0.0
        self.wake_at = inf
        self.is_ready = False
        self.is_requesting = False

    @property
    def free(self) -> int:
        return self.slots - self.running

    @property
    def is_unused(self) -> bool:
        return not (self.refs or self.running or self.reported)

    def pop(self) -> T:
        """Take the next reference, with a slot and a pass if the target has such limits."""
        ref = self.refs.popleft()
        if self.name is not None and self._limits.rate is not None:
            self.passes.popleft()
        if self.name is not None and self._limits.slots is not None:
            self.running += 1
            ref.slot = self.name
        return ref

    def can_start(self, now: float) -> bool:
        """Return whether the next reference has a slot and a pass."""
        if self.name is None or not self.refs:
            return bool(self.refs)
        if self._limits.slots is not None and self.free <= 0:
            return False
        return self._limits.rate is None or (bool(self.passes) and self.passes[0] <= now)

    def count_startable(self, limit: int, now: float) -> int:
        """Return how many references have a slot and a pass, up to the limit."""
        count = min(len(self.refs), limit)
        if self.name is None:
            return count
        if self._limits.slots is not None:
            count = min(count, self.free)
        if self._limits.rate is not None:
            count = bounded_sum((1 for _ in takewhile(lambda due: due <= now, self.passes)), count)
        return max(0, count)

    def count_promising(self, limit: int, now: float) -> int:
        """Return how many references could start after the next request to the coordinator, up to the limit."""
        limits, count = self._limits, min(len(self.refs), limit)
        if self.name is None:
            return count
        if limits.slots is not None:
            count = max(0, min(count, limits.slots - self.running))
        if limits.rate is not None:
            count = min(count, max(1, int(limits.rate * RESERVED_SECONDS), self.count_startable(count, now)))
        return count

    def count_usable_passes(self, share: int) -> int:
        """Return how many passes the references could use soon. `share` is this target's part of the free slots."""
        usable = max(1, share)
        if self._limits.slots is not None:
            usable = min(usable, max(1, self.free))
        return min(usable, len(self.refs))

    def has_surplus(self) -> bool:
        """Return whether slots are left that no reference here can use."""
        return self.reported > self.slots or (self.free > 0 and not (self.refs and self._limits.slots))

    def lacks_slots(self) -> bool:
        """Return whether more slots would help. Slots in use come back by themselves."""
        slots = self._limits.slots
        if slots is None or self.name is None or (self._limits.rate is not None and not self.passes):
            return False
        return bool(self.refs) and self.free <= 0 and self.slots < slots

    def lacks_passes(self, usable: int) -> bool:
        """Return whether the reserved passes are soon used up."""
        rate, passes = self._limits.rate, len(self.passes)
        if rate is None or self.name is None:
            return False
        return passes < usable and passes <= rate * RESERVED_SECONDS / 2


def bounded_sum(numbers: Iterable[int], limit: int) -> int:
    """Return the sum, or the limit if the sum is larger."""
    total = 0
    for number in numbers:
        total += number
        if total >= limit:
            return limit
    return total
