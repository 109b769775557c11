"""The Coordinator seam: leases, semaphores, rate limits, counters, a cache, and the ready index (ready.py). Primitives
only; coordination/ has the policies.

Losing all of it costs no correctness: Records and Tasks hold whatever must survive.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple, Protocol

import msgspec

from conveyor.engines.ready import ReadyIndex
from conveyor.model import JobId, RunId


def ingest_lease(run_id: RunId, number: int | None = None) -> str:
    """The lease under which one ingester works on a range of a run's list, or splits the list. The name of the split is
    a prefix of the names of the ranges."""
    return f"ingest:{run_id}" if number is None else f"ingest:{run_id}:{number}"


def export_lease(job_id: JobId, export_id: str | None = None) -> str:
    """The lease under which one process makes an export of a job; without an export, the prefix of all of them."""
    return f"export:{job_id}:{export_id or ''}"


class Lease(msgspec.Struct, frozen=True):
    """Time-bounded ownership of a name. `fence` grows with every grant of the name, across restarts too."""

    name: str
    holder: str
    fence: int


class PermitRequest(NamedTuple):
    """How many permits of a semaphore a holder wants, and how many there are."""

    semaphore: str
    want: int
    limit: int


class Coordinator(ReadyIndex, Protocol):
    """All times are by the engine's clock, so holders need no synchronized clocks."""

    async def lease(self, name: str, holder: str, ttl: float) -> Lease | None:
        """Grant the lease unless another holder has it. A holder that asks again gets a new fence."""

    async def renew(self, lease: Lease, ttl: float) -> bool:
        """Renew the lease. False if it expired or another holder has it: the caller must stop."""

    async def release(self, lease: Lease) -> None:
        """Release the lease. A stale lease changes nothing."""

    async def forget_leases(self, prefix: str) -> None:
        """Forget all leases with this prefix and their fences, once the things that they guarded are purged."""

    async def acquire(self, semaphore: str, holder: str, want: int, limit: int, ttl: float) -> int:
        """Set this holder's permits to `want`, or to what `limit` leaves after the other holders. Returns the number.
        The permits expire after `ttl` seconds unless acquired again; 0 releases them."""

    async def acquire_many(self, requests: Sequence[PermitRequest], holder: str, ttl: float) -> list[int]:
        """As `acquire` for each of these semaphores, in one round trip. Each is granted by itself."""

    async def permits_in_use(self, semaphore: str) -> int:
        """The number of permits that all holders have."""

    async def permits_in_use_of(self, semaphores: Sequence[str]) -> list[int]:
        """As `permits_in_use` for each of these semaphores, in one round trip."""

    async def reserve(self, bucket: str, count: int, rate: float, burst: int, within: float = inf) -> float:
        """GCRA: reserve `count` passes at `rate` per second. Returns how many seconds to wait before using them. If
        that is above `within`, and only then, nothing is reserved."""

    async def add_counters(
        self, name: str, amounts: Mapping[str, int], ttl: float, once: str | None = None
    ) -> dict[str, int]:
        """Add to the counters of a name and return all of them. They expire `ttl` seconds after the last addition. An
        addition with the same `once` is applied once."""

    async def add_counters_of(self, additions: Mapping[str, Mapping[str, int]], ttl: float) -> None:
        """Add to the counters of each of these names, in one round trip."""

    async def swap(self, key: str, old: bytes | None, new: bytes, ttl: float) -> bool:
        """Replace a cached value if it is still `old`; None stands for a missing value."""

    async def cache(self, key: str, value: bytes, ttl: float) -> None:
        """Cache a value that can be computed again."""

    async def cached(self, key: str) -> bytes | None:
        """A cached value that has not expired."""
