"""The active jobs, as the housekeeping roles of one process read them: together, and the less often the more there are,
so that the reads of a fleet stay few however many jobs and processes it has."""

import asyncio

from conveyor.clock import Clock
from conveyor.coordination.buckets import ALL_BUCKETS, Buckets
from conveyor.engines.records import JobRecords
from conveyor.model import Job

# Seconds after which the jobs are read again: the fewest, and the most.
FRESH_SECONDS = 2.0
_STALE_SECONDS = 15.0
# Rows that all processes together read in a second.
_ROWS_A_SECOND = 100


class ActiveJobs:
    """Shared by the roles of a process."""

    def __init__(
        self, jobs: JobRecords, clock: Clock, buckets: Buckets = ALL_BUCKETS, fresh_seconds: float = 0.0
    ) -> None:
        """With `fresh_seconds` 0 every call reads them."""
        self._jobs = jobs
        self._clock = clock
        self._buckets = buckets
        self._fresh_seconds = fresh_seconds
        self._read: list[Job] = []
        # When the jobs were read, in monotonic time.
        self._read_at: float | None = None
        self._reading = asyncio.Lock()

    async def read(self) -> list[Job]:
        """The jobs whose latest run has not finished, as of a few seconds ago. A caller writes on conditions only."""
        async with self._reading:
            if self._read_at is None or self._clock.monotonic() - self._read_at >= self._max_age():
                at = self._clock.monotonic()
                self._read = await self._jobs.active_jobs()
                self._read_at = at
            return self._read

    @property
    def listed_at(self) -> float | None:
        """When the jobs of the last call were read; None if every call reads them."""
        return self._read_at if self._fresh_seconds else None

    def _max_age(self) -> float:
        if not self._fresh_seconds:
            return 0.0
        seconds = max(self._fresh_seconds, len(self._read) / _ROWS_A_SECOND) * self._buckets.processes
        return min(seconds, _STALE_SECONDS)
