"""Turnover: whether the small runs that a worker serves keep its slots busy and end soon. Then the next runs of their
tenants wait in the ready index, and not in lanes: each lane costs every tick a look, whether it has a slot or not."""

from collections import deque
from collections.abc import Iterable
from math import inf

from conveyor.clock import Clock
from conveyor.process.lane import Lane

# What waits here is done soon if it takes this many seconds at the present rate, which is that of the last second.
_SOON_SECONDS = 0.5
_RATE_SECONDS = 1.0
# How long a full worker waits for its first outcome, as when its processes start.
_FIRST_SECONDS = 3.0
# That they end soon holds for so long: runs that end hurry the looks, and each would take a look at all lanes.
_HOLD_SECONDS = 0.05


class Turnover:
    """One for each worker. It is asked at every look for runs."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Since when every look found the worker without a free slot.
        self._full_since = inf
        # How many outcomes there were at the looks of the last second.
        self._counts: deque[tuple[float, int]] = deque()
        self._quick_until = -inf

    @property
    def is_full(self) -> bool:
        """Whether the last look found the worker without a free slot."""
        return self._full_since < inf

    def note_look(self, outcomes: int, *, is_full: bool) -> None:
        """The worker looks for runs. It has had so many outcomes until now."""
        now = self._clock.monotonic()
        self._full_since = min(self._full_since, now) if is_full else inf
        self._counts.append((now, outcomes))
        while len(self._counts) > 1 and self._counts[1][0] <= now - _RATE_SECONDS:
            self._counts.popleft()

    def is_quick(self, lanes: Iterable[Lane], new_runs: int, slots: int) -> bool:
        """Whether runs that are here as a whole, and new ones, have enough for all slots and end soon. A worker that
        became full just now does not know how long tasks take: it waits for a moment before it takes more."""
        now = self._clock.monotonic()
        if now >= self._quick_until and self._is_quick(lanes, new_runs, slots):
            self._quick_until = now + _HOLD_SECONDS
        return now < self._quick_until

    def _is_quick(self, lanes: Iterable[Lane], new_runs: int, slots: int) -> bool:
        left = new_runs + sum(_left(lane) for lane in lanes)
        if left < slots:
            return False
        (began, before), (ended, outcomes) = self._counts[0], self._counts[-1]
        if ended - self._full_since < (_RATE_SECONDS if outcomes > before else _FIRST_SECONDS):
            return True
        return left * (ended - began) <= (outcomes - before) * _SOON_SECONDS


def _left(lane: Lane) -> int:
    """Tasks that wait or run. Of a run that has more in its queue, or may have, nobody knows when it ends."""
    if not lane.was_fed:
        return 1
    return lane.demand if lane.has_whole_run else 0
