"""Counts of admitted work: shared through the coordinator, or, while it is away, of this process alone. Work is
accepted without the coordinator; only how much of it is then less exact."""

from collections.abc import Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from conveyor.clock import Clock
from conveyor.coordination.time_limits import call_within
from conveyor.engines.coordinator import Coordinator
from conveyor.errors import Unavailable

T = TypeVar("T")

# How long a request waits for the coordinator, in seconds.
PATIENCE = 1.0
_MAX_NAMES = 16
_UNKNOWN_WORKERS = 1 << 30


class CountsAway(Exception):
    """The coordinator failed, or did not answer in time."""


class AdmissionCounts(Protocol):
    """What admission needs of a Coordinator."""

    async def cached(self, key: str) -> bytes | None: ...

    async def swap(self, key: str, old: bytes | None, new: bytes, ttl: float) -> bool: ...

    async def add_counters(self, name: str, amounts: Mapping[str, int], ttl: float) -> dict[str, int]: ...

    async def permits_in_use(self, semaphore: str) -> int: ...


class SharedCounts:
    """AdmissionCounts of all processes. Every call raises CountsAway if the coordinator does not answer soon."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def cached(self, key: str) -> bytes | None:
        return await _answered(self._coordinator.cached(key))

    async def swap(self, key: str, old: bytes | None, new: bytes, ttl: float) -> bool:
        return await _answered(self._coordinator.swap(key, old, new, ttl))

    async def add_counters(self, name: str, amounts: Mapping[str, int], ttl: float) -> dict[str, int]:
        return await _answered(self._coordinator.add_counters(name, amounts, ttl))

    async def permits_in_use(self, semaphore: str) -> int:
        return await _answered(self._coordinator.permits_in_use(semaphore))


class OwnCounts:
    """AdmissionCounts of this process. It does not know how many workers are alive, and so never too few."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._values: dict[str, tuple[bytes, float]] = {}
        self._counters: dict[str, dict[str, int]] = {}

    async def cached(self, key: str) -> bytes | None:
        value, ends = self._values.get(key, (b"", 0.0))
        return value if self._clock.monotonic() < ends else None

    async def swap(self, key: str, old: bytes | None, new: bytes, ttl: float) -> bool:
        if await self.cached(key) != old:
            return False
        self._values[key] = new, self._clock.monotonic() + ttl
        return True

    async def add_counters(self, name: str, amounts: Mapping[str, int], ttl: float) -> dict[str, int]:
        counters = self._counters.setdefault(name, {})
        for counter, amount in amounts.items():
            counters[counter] = counters.get(counter, 0) + amount
        while len(self._counters) > _MAX_NAMES:
            del self._counters[next(iter(self._counters))]
        return dict(counters)

    async def permits_in_use(self, semaphore: str) -> int:
        return _UNKNOWN_WORKERS


async def _answered(call: Coroutine[Any, Any, T]) -> T:
    try:
        return await call_within(PATIENCE, call)
    except (Unavailable, TimeoutError) as error:
        raise CountsAway(str(error) or "no answer in time") from error
