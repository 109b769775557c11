"""The stream of a tenant's jobs: each of the newest ones whenever it looks different, as server-sent events. Who was
cut off lists the jobs again; so nothing has an id here."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from conveyor.model import Job, JobId, TenantId
from conveyor.read.job_stream import KEEP_ALIVE_SECONDS, RETRY_MILLISECONDS, Streams, frame
from conveyor.read.status import job_json, without_secrets
from conveyor.states import ENDED
from conveyor.system import System

# Jobs that are looked at: as many as a page has.
NEWEST = 50
# Between two looks, at least, and for each job that is under way: to look at one costs some reads.
LOOK_SECONDS = 1.5
LOOK_SECONDS_A_JOB = 0.1


class JobsStream:
    """One client's look at the jobs of a tenant."""

    def __init__(self, system: System, streams: Streams, tenant: TenantId) -> None:
        self._system = system
        self._streams = streams
        self._tenant = tenant
        # As they were last sent, and as what they were read; None for one of which more is to come, whatever its row
        # says.
        self._sent: dict[JobId, tuple[Job | None, bytes]] = {}
        self._active = 0

    async def frames(self) -> AsyncIterator[bytes]:
        """The frames, for as long as somebody listens."""
        clock = self._system.clock
        with self._streams.place(self._tenant):
            yield f"retry: {RETRY_MILLISECONDS}\n\n".encode()
            said = clock.monotonic()
            while not self._streams.stopping:
                async for each in self._news():
                    said = clock.monotonic()
                    yield each
                if clock.monotonic() - said >= KEEP_ALIVE_SECONDS:
                    said = clock.monotonic()
                    yield b": still here\n\n"
                await self._streams.rest(clock, max(LOOK_SECONDS, LOOK_SECONDS_A_JOB * self._active))

    async def _news(self) -> AsyncIterator[bytes]:
        jobs = (await self._system.records.jobs.jobs(self._tenant, None, NEWEST)).items
        there = {job.job_id for job in jobs}
        self._active = sum(job.state not in ENDED for job in jobs)
        # A job below those that are looked at was pushed down by newer ones, and is not gone.
        lowest = min(there) if len(jobs) == NEWEST else ""
        for job_id in [job_id for job_id in self._sent if job_id not in there]:
            del self._sent[job_id]
            if job_id > lowest:
                yield frame("gone", {"id": job_id})
        for job in jobs:
            row, text = self._sent.get(job.job_id, (None, b""))
            if row == job:
                continue
            shown = await self._shown(job)
            now = msgspec.json.encode(shown)
            if now != text:
                yield frame("job", shown)
            settled = job.state in ENDED and shown["run"]["counts"]["pending"] == 0
            self._sent[job.job_id] = (job if settled else None, now)

    async def _shown(self, job: Job) -> dict[str, Any]:
        system = self._system
        found = await job_json(system.records, system.tasks, system.coordinator, system.clock, job)
        return {**found, "options": without_secrets(found["options"])}
