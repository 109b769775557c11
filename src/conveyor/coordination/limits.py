"""Limits: how many tasks of a run may run at once, and how many requests, at once and a second, one job may make to one
target."""

from conveyor.engines.coordinator import Coordinator
from conveyor.model import Job, RunId

# How many seconds ahead passes are reserved at most, over all workers. A worker that dies wastes no more than that.
AHEAD = 0.5
# The slots of a worker that died expire after at least this long.
_HOLD_SECONDS = 60.0
# How long a worker counts as waiting for a slot, unless it renews that.
WAITER_SECONDS = 5.0
_NO_LIMIT = 1_000_000


def run_slots(run_id: RunId) -> str:
    """Return the name of the semaphore of a run's concurrency. Its count is also the number of running tasks."""
    return f"run:{run_id}"


class TargetLimits:
    """The target limits of one job, for one worker. All workers share them through the coordinator."""

    def __init__(self, coordinator: Coordinator, job: Job, holder: str, hold_seconds: float = _HOLD_SECONDS) -> None:
        self._coordinator = coordinator
        self._holder = holder
        self._hold_seconds = max(_HOLD_SECONDS, hold_seconds)
        self._prefix = f"target:{job.tenant}:{job.job_id}:"
        self.rate = job.options.rate_per_host
        self.slots = job.options.concurrency_per_host

    def follow(self, job: Job) -> bool:
        """Apply the job's changed options. Returns whether a limit has changed."""
        before = self.rate, self.slots
        self.rate = job.options.rate_per_host
        self.slots = job.options.concurrency_per_host
        return before != (self.rate, self.slots)

    async def reserve(self, target: str, count: int) -> float:
        """Reserve the target's next passes. Returns the seconds until the first may be used; the others follow at the
        rate. Above AHEAD nothing was reserved, and the seconds are until the next free pass."""
        assert self.rate is not None
        # Each rate has its own bucket: after the rate was raised, no worker waits for passes of the lower one.
        bucket = f"{self._prefix}{self.rate!r}:{target}"
        return await self._coordinator.reserve(bucket, count, self.rate, count, AHEAD)

    async def hold(self, target: str, count: int) -> int:
        """Hold up to `count` slots of the target, as far as other workers leave them. Returns how many."""
        # The limit was removed: the slots in use are the limit.
        limit = count if self.slots is None else self.slots
        return await self._coordinator.acquire(self._prefix + target, self._holder, count, limit, self._hold_seconds)

    async def join_waiters(self, target: str) -> None:
        """Show other workers for a while that this one waits for a slot of the target."""
        await self._coordinator.acquire(self._waiters(target), self._holder, 1, _NO_LIMIT, WAITER_SECONDS)

    async def waiters(self, target: str) -> int:
        """Count the workers that wait for a slot of the target."""
        return await self._coordinator.permits_in_use(self._waiters(target))

    def _waiters(self, target: str) -> str:
        return f"waiters:{self._prefix}{target}"
