"""Retention: removes what has expired or was deleted, a bounded step at a time, and can be interrupted anywhere.

Readers compare expiry themselves and see none of it any more; this only gives the space back. The job's own row goes
last: while it is there, the rest is found again.
"""

from collections.abc import Callable, Sequence

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.engines.blobs import Blobs
from conveyor.engines.coordinator import Coordinator, ingest_lease
from conveyor.engines.queue import Queue, run_queue
from conveyor.engines.records import Records
from conveyor.engines.tasks import Tasks
from conveyor.faults import crashpoint
from conveyor.letters import read_letter
from conveyor.model import UPLOADS, Job

log = structlog.get_logger()

# Seconds that workers and ingesters have to see that a job is gone: what they write after it is removed stays.
SETTLE_SECONDS = 15.0

_EVERY = 5.0
_JOBS = 10
_ROWS = 5000
_BLOBS = 1000
_LETTERS = 1000


class Removed(msgspec.Struct):
    """What one pass removed."""

    jobs: int = 0
    tasks: int = 0
    blobs: int = 0
    letters: int = 0
    uploads: int = 0


class Retention:
    """A role."""

    def __init__(
        self, records: Records, tasks: Tasks, queue: Queue, coordinator: Coordinator, blobs: Blobs, clock: Clock
    ) -> None:
        self.name = "retention"
        self.wake: Callable[[], None] = lambda: None
        self.stopping = False
        self._records = records
        self._tasks = tasks
        self._queue = queue
        self._coordinator = coordinator
        self._blobs = blobs
        self._clock = clock

    async def tick(self) -> float:
        removed = await self.run_once()
        if removed == Removed():
            return _EVERY
        log.info("removed", **msgspec.structs.asdict(removed))
        return 0.0

    async def close(self) -> None:
        """Nothing is held between ticks."""

    async def run_once(self) -> Removed:
        removed = Removed()
        hidden = await self._records.hidden_jobs(self._clock.now() - SETTLE_SECONDS, _JOBS)
        emptied = [job for job in hidden if await self._empty(job, removed)]
        if emptied:
            await self._discard_letters(emptied, removed)
        for job in emptied:
            await self._forget(job, removed)
        for upload in await self._records.sweep_expired(_BLOBS):
            await self._blobs.delete([upload.key])
            removed.uploads += 1
        return removed

    async def _empty(self, job: Job, removed: Removed) -> bool:
        """Remove some of a job; True when nothing was left but its rows in the records."""
        crashpoint("retention.remove.before")
        await self._queue.drop(run_queue(job.run.run_id))
        tasks = await self._tasks.delete(job.key, _ROWS)
        removed.tasks += tasks
        blobs = 0
        for prefix in _prefixes(job):
            blobs += await self._blobs.delete_prefix(prefix, _BLOBS)
        removed.blobs += blobs
        return not tasks and not blobs

    async def _discard_letters(self, jobs: Sequence[Job], removed: Removed) -> None:
        gone = {job.job_id for job in jobs}
        cursor: str | None = None
        while True:
            page = await self._queue.dead_letters(cursor, _LETTERS)
            read = [letter for letter in map(read_letter, page.items) if letter is not None]
            theirs = [letter.message_id for letter in read if letter.job_id in gone]
            if theirs:
                removed.letters += await self._queue.discard(theirs)
            cursor = page.next_cursor
            if cursor is None:
                return

    async def _forget(self, job: Job, removed: Removed) -> None:
        # An upload may serve several jobs, and expires with the last of them.
        if job.source is not None and not job.source.key.startswith(UPLOADS):
            await self._blobs.delete([job.source.key])
        await self._coordinator.forget(ingest_lease(job.run.run_id))
        crashpoint("retention.forget.before")
        await self._records.forget_job(job.job_id)
        removed.jobs += 1


def _prefixes(job: Job) -> list[str]:
    """All that was ever written for a job: bodies, lines that were no task, and batches of an open job."""
    return [f"{kind}/{job.tenant}/{job.job_id}" for kind in ("results", "invalid", "lists")]
