"""Values in memory that expire. What a call costs does not grow with how many there are."""

import heapq
from typing import Generic, TypeVar

V = TypeVar("V")

# Expired values that one write throws out: more than the one that it may add, so that they go faster than others come.
_AT_ONCE = 4


class Expiring(Generic[V]):
    """Each key stands once in a heap, under the time at which it is looked at next. Writing a value again moves its
    expiry alone; when its time in the heap has come, it is thrown out, or put back under its expiry. A value that has
    expired is not seen, thrown out or not."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[V, float]] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """With those that have expired and were not yet thrown out."""
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
