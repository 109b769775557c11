"""Limits: how many tasks of a run go at once, and how many requests a second, and at once, one host may get from one
job."""

from conveyor.engines.coordinator import Coordinator
from conveyor.model import Job, RunId

# How soon a target whose slots are all taken is asked for again.
_TRY_AGAIN = 0.05
# A holder that died frees its slots after this long.
_HOLD_SECONDS = 60.0


def run_slots(run_id: RunId) -> str:
    """The semaphore of a run's concurrency; what is held of it is also the count of what runs."""
    return f"run:{run_id}"


class TargetLimits:
    """The limits of one job, as one worker sees them; shared with other workers through the coordinator."""

    def __init__(self, coordinator: Coordinator, job: Job, holder: str) -> None:
        self._coordinator = coordinator
        self._holder = holder
        self._prefix = f"target:{job.tenant}:{job.job_id}:"
        self._version = job.version
        self._rate = job.options.rate_per_host
        self._most = job.options.concurrency_per_host
        self._running: dict[str, int] = {}

    @property
    def limited(self) -> bool:
        """Also while slots are held from before a limit was lifted."""
        return self._rate is not None or self._most is not None or bool(self._running)

    @property
    def slots(self) -> bool:
        """Whether targets have slots now, which are taken by who enters."""
        return self._most is not None

    def follow(self, job: Job) -> bool:
        """Take over changed options. True if the passes that were reserved are not good any more: with other options
        the targets have other buckets, in which nobody stands in line yet."""
        if job.version == self._version:
            return False
        stale = self._rate is not None
        self._version = job.version
        self._rate = job.options.rate_per_host
        self._most = job.options.concurrency_per_host
        return stale or self._rate is not None

    async def reserve(self, target: str | None) -> float:
        """Reserve the next pass to the target at its rate; returns how long until it may be used."""
        if self._rate is None or target is None:
            return 0.0
        return await self._coordinator.reserve(f"{self._prefix}{self._version}:{target}", 1, self._rate, 1)

    async def enter(self, target: str | None) -> float:
        """Take one of the target's slots; a number above 0 says that none is free and when to ask again."""
        if self._most is None or target is None:
            return 0.0
        # Counted before it is asked for: another runner may ask while the answer is on its way.
        want = self._running[target] = self._running.get(target, 0) + 1
        if await self._hold(target, want) < want:
            self._count_down(target)
            return _TRY_AGAIN
        return 0.0

    async def leave(self, target: str | None) -> None:
        """Give a slot back that was taken."""
        if target is not None:
            await self._hold(target, self._count_down(target))

    async def refresh(self) -> None:
        """Hold on to the slots of tasks that take long."""
        for target, count in list(self._running.items()):
            await self._hold(target, count)

    def _count_down(self, target: str) -> int:
        left = self._running.pop(target) - 1
        if left:
            self._running[target] = left
        return left

    async def _hold(self, target: str, count: int) -> int:
        # Without a limit any more, what is held is all that there can be.
        most = count if self._most is None else self._most
        return await self._coordinator.hold(self._prefix + target, self._holder, count, most, _HOLD_SECONDS)
