"""Limits: how many tasks of a run go at once, and how many requests a second, and at once, one host may get from one
job."""

from conveyor.engines.coordinator import Coordinator
from conveyor.model import Job, RunId

# Passes are reserved at most so many seconds ahead, over all workers: what a worker that dies takes along.
AHEAD = 0.5
# A holder that died frees its slots after this long, at least.
_HOLD_SECONDS = 60.0
# For how long a worker counts as one that waits for a slot, unless it says so again.
WAITER_SECONDS = 5.0
_ANY = 1_000_000


def run_slots(run_id: RunId) -> str:
    """The semaphore of a run's concurrency; what is held of it is also the count of what runs."""
    return f"run:{run_id}"


class TargetLimits:
    """The limits of one job, as one worker asks for them; shared with other workers through the coordinator."""

    def __init__(self, coordinator: Coordinator, job: Job, holder: str, hold_seconds: float = _HOLD_SECONDS) -> None:
        self._coordinator = coordinator
        self._holder = holder
        self._hold_seconds = max(_HOLD_SECONDS, hold_seconds)
        self._prefix = f"target:{job.tenant}:{job.job_id}:"
        self.rate = job.options.rate_per_host
        self.slots = job.options.concurrency_per_host

    def follow(self, job: Job) -> bool:
        """Take over changed options. True if a limit is another now."""
        before = self.rate, self.slots
        self.rate = job.options.rate_per_host
        self.slots = job.options.concurrency_per_host
        return before != (self.rate, self.slots)

    async def reserve(self, target: str, count: int) -> float:
        """Reserve the target's next passes; returns how long until the first may be used, the others follow at the
        rate. Above AHEAD nothing was reserved: then it says when there will be a pass."""
        assert self.rate is not None
        # Each rate has a bucket of its own: with a higher one, nobody waits for what the lower one had promised.
        bucket = f"{self._prefix}{self.rate!r}:{target}"
        return await self._coordinator.reserve(bucket, count, self.rate, count, AHEAD)

    async def hold(self, target: str, count: int) -> int:
        """Set how many of the target's slots this worker has, as far as the others leave them; returns it."""
        # Without a limit any more, what is held is all that there can be.
        limit = count if self.slots is None else self.slots
        return await self._coordinator.hold(self._prefix + target, self._holder, count, limit, self._hold_seconds)

    async def join_waiters(self, target: str) -> None:
        """Have other workers know for a while that this one waits for a slot of the target."""
        await self._coordinator.hold(self._waiters(target), self._holder, 1, _ANY, WAITER_SECONDS)

    async def waiters(self, target: str) -> int:
        """How many workers wait for a slot of the target."""
        return await self._coordinator.held(self._waiters(target))

    def _waiters(self, target: str) -> str:
        return f"waiters:{self._prefix}{target}"
