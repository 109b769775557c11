"""The stream of a tenant's jobs, as server-sent events: each of the newest jobs whenever it changes. A client that
reconnects lists the jobs again, so these events have no ids."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from conveyor.jobs.secrets import shown_options
from conveyor.model import Job, JobId, TenantId
from conveyor.read.job_stream import KEEP_ALIVE_SECONDS, RETRY_MILLISECONDS, IsAllowed, Streams, frame
from conveyor.read.status import job_json
from conveyor.states import ENDED
from conveyor.system import System

# Jobs that the stream follows: as many as a page has.
NEWEST = 50
# Seconds between two polls: at least, and per unfinished job, since each costs some reads.
LOOK_SECONDS = 1.5
LOOK_SECONDS_A_JOB = 0.1


class JobsStream:
    """The stream of a tenant's jobs to one client."""

    def __init__(self, system: System, streams: Streams, tenant: TenantId, is_allowed: IsAllowed) -> None:
        self._system = system
        self._streams = streams
        self._tenant = tenant
        self._is_allowed = is_allowed
        # What was last sent of each job, and the job that it was made of; None if it may change without its row.
        self._sent: dict[JobId, tuple[Job | None, bytes]] = {}
        self._active = 0

    async def frames(self) -> AsyncIterator[bytes]:
        """The frames, until the client disconnects, or is no longer allowed to see them."""
        clock = self._system.clock
        with self._streams.place(self._tenant):
            yield f"retry: {RETRY_MILLISECONDS}\n\n".encode()
            sent_at = clock.monotonic()
            while not self._streams.stopping and await self._is_allowed():
                async for change in self._changes():
                    sent_at = clock.monotonic()
                    yield change
                if clock.monotonic() - sent_at >= KEEP_ALIVE_SECONDS:
                    sent_at = clock.monotonic()
                    yield b": still here\n\n"
                await self._streams.rest(clock, max(LOOK_SECONDS, LOOK_SECONDS_A_JOB * self._active))

    async def _changes(self) -> AsyncIterator[bytes]:
        jobs = (await self._system.records.jobs.jobs(self._tenant, None, NEWEST)).items
        current = {job.job_id for job in jobs}
        self._active = sum(job.state not in ENDED for job in jobs)
        # A job below this one may have been pushed down by newer jobs, and is not gone.
        lowest = min(current) if len(jobs) == NEWEST else ""
        for job_id in [job_id for job_id in self._sent if job_id not in current]:
            del self._sent[job_id]
            if job_id > lowest:
                yield frame("gone", {"id": job_id})
        for job in jobs:
            row, text = self._sent.get(job.job_id, (None, b""))
            if row == job:
                continue
            shown = await self._job_json(job)
            encoded = msgspec.json.encode(shown)
            if encoded != text:
                yield frame("job", shown)
            is_settled = job.state in ENDED and shown["run"]["counts"]["pending"] == 0
            self._sent[job.job_id] = (job if is_settled else None, encoded)

    async def _job_json(self, job: Job) -> dict[str, Any]:
        system = self._system
        shown = await job_json(system.records, system.tasks, system.coordinator, system.clock, job)
        return {**shown, "options": shown_options(shown["options"])}
