"""Coordinator: leases, semaphores, rate limits and a cache. Primitives; the policies stand in coordination/.

Losing all of it costs no correctness: what must not be lost is in Records and Tasks.
"""

from collections.abc import Mapping
from math import inf
from typing import Protocol

import msgspec

from conveyor.model import JobId, RunId


def ingest_lease(run_id: RunId, number: int | None = None) -> str:
    """Names what one ingester does at a time: a range of a run's list, or its split. The second is the beginning of
    the first."""
    return f"ingest:{run_id}" if number is None else f"ingest:{run_id}:{number}"


def export_lease(job_id: JobId, export_id: str | None = None) -> str:
    """Names the making of one export of a job; without it, the beginning of all of them."""
    return f"export:{job_id}:{export_id or ''}"


class Lease(msgspec.Struct, frozen=True):
    """A right that lapses. `fence` grows with every grant of the same name, over restarts too."""

    name: str
    holder: str
    fence: int


class Coordinator(Protocol):
    """Times are the engine's own clock, so that holders need not agree on theirs."""

    async def lease(self, name: str, holder: str, ttl: float) -> Lease | None:
        """Grant the lease if nobody else holds it; a holder that asks again gets a new fence."""

    async def renew(self, lease: Lease, ttl: float) -> bool:
        """Prolong it. False if it lapsed or another holds it: the holder must stop."""

    async def release(self, lease: Lease) -> None:
        """Give it back. A stale lease changes nothing."""

    async def forget(self, prefix: str) -> None:
        """Forget all leases whose names begin so, and their fences: what they guarded is gone."""

    async def hold(self, semaphore: str, holder: str, want: int, limit: int, ttl: float) -> int:
        """Set what this holder holds to as much of `want` as `limit` leaves after the others; returns it. It lapses
        after `ttl` unless set again. 0 lets go."""

    async def held(self, semaphore: str) -> int:
        """What all holders hold together."""

    async def reserve(self, bucket: str, count: int, rate: float, burst: int, within: float = inf) -> float:
        """GCRA: reserve `count` passes at `rate` a second; returns how long to wait before using them. If that is above
        `within`, and only then, nothing is reserved."""

    async def tally(self, name: str, amounts: Mapping[str, int], ttl: float, once: str | None = None) -> dict[str, int]:
        """Add to the named counters and return all of that name; they lapse `ttl` seconds after the last addition.
        What was added under the same `once` before is not added again."""

    async def swap(self, key: str, old: bytes | None, new: bytes, ttl: float) -> bool:
        """Replace a cached value if it is still `old`; None stands for none."""

    async def cache(self, key: str, value: bytes, ttl: float) -> None:
        """Keep a value that can be made again."""

    async def cached(self, key: str) -> bytes | None:
        """A kept value, if it has not lapsed."""
