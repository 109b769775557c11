"""UnrecordedLimit: how many outcomes may wait for the store. What is not recorded is attempted again after a crash, so
that is at most what the store records in a part of a second.

The store is measured while it records, and only then: over all of the time it would seem to record no more than runners
hand over, which wait for this limit. And a flush that ends soon enough lowers it not at all, however few outcomes it
had: most of its time may be for the flush and not for the outcomes, and then smaller flushes record less and end no
sooner.
"""

# The limit is what the store records in so many seconds.
_SECONDS = 0.3
# It is lowered when outcomes waited for longer than this.
LATE_SECONDS = 0.45
_LEAST = 128
_MOST = 8000
_SMOOTHING = 0.3
_MEASURE_SECONDS = 0.1
# Before the first measurement.
_FIRST = 1200.0


class UnrecordedLimit:
    """Flushes may overlap. All times are by the same clock."""

    def __init__(self) -> None:
        self._limit = _FIRST
        self._flushes = 0
        # Of this measurement: outcomes that were recorded, seconds with a flush under way, and whether any was late.
        self._recorded = 0
        self._busy = 0.0
        self._is_late = False
        self._measured_at = 0.0

    @property
    def count(self) -> int:
        return int(self._limit)

    def begin_flush(self, now: float) -> None:
        self._measure_until(now)
        self._flushes += 1

    def end_flush(self, now: float, count: int, since: float) -> None:
        """A flush has recorded so many outcomes, of which the first was there since then."""
        self._measure_until(now)
        self._flushes -= 1
        self._recorded += count
        self._is_late |= now - since > LATE_SECONDS
        if self._busy >= _MEASURE_SECONDS:
            self._adapt(self._recorded / self._busy)
            self._recorded, self._busy, self._is_late = 0, 0.0, False

    def _measure_until(self, now: float) -> None:
        if self._flushes:
            self._busy += now - self._measured_at
        self._measured_at = now

    def _adapt(self, rate: float) -> None:
        goal = max(self._limit, rate * _SECONDS)
        if self._is_late:
            goal = min(goal, rate * LATE_SECONDS)
        self._limit = min(_MOST, max(_LEAST, self._limit + _SMOOTHING * (goal - self._limit)))
