"""A dictionary of expiring values in memory. The cost of a call does not grow with the number of values."""

import heapq
from typing import Generic, TypeVar

V = TypeVar("V")

# Expired values that one write evicts: more than the one value that it adds, so that evictions keep up.
_AT_ONCE = 4


class Expiring(Generic[V]):
    """Each key is in a heap once, under the time of its next check. Writing a value again changes only its expiry; at
    the next check, the key is evicted or pushed back under its new expiry. Readers never see an expired value, evicted
    or not."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[V, float]] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """The number of values, expired ones that are not evicted yet included."""
        return len(self._values)

    def get(self, key: str, now: float) -> V | None:
        entry = self._values.get(key)
        return entry[0] if entry is not None and entry[1] > now else None

    def put(self, key: str, value: V, until: float, now: float) -> None:
        if key not in self._values:
            heapq.heappush(self._heap, (until, key))
        self._values[key] = (value, until)
        self._throw_out(now)

    def _throw_out(self, now: float) -> None:
        for _ in range(_AT_ONCE):
            if not self._heap or self._heap[0][0] > now:
                return
            _, key = self._heap[0]
            until = self._values[key][1]
            if until > now:
                heapq.heapreplace(self._heap, (until, key))
            else:
                heapq.heappop(self._heap)
                del self._values[key]
