"""The watch: at every moment, something that can run is running.

It goes by the site's own ledger and by what `/v1/jobs` counts. A job waits while it may run and nothing of it moves: it
is not paused, and more is left of it than what the site is just answering or asked to have retried. The server stalls
while a job waits and nothing moves of any.
"""

import asyncio
import time
from typing import Any

from conveyor.client import AsyncClient
from tests.everyday.figures import Figures
from tests.everyday.mix import RETRY_SECONDS, Job
from tests.everyday.site import Site

_LOOK_SECONDS = 0.05
# A client that watches its jobs asks about so often.
_SAMPLE_SECONDS = 0.5


class Watched:
    """A job from the answer to its submission until its client has seen it end."""

    def __init__(self, job: Job, job_id: str) -> None:
        self.job = job
        self.job_id = job_id
        self.paused = False
        self.ended = False
        self.counted = 0
        self.pending = job.size
        self.moved_at = time.monotonic()

    def moved(self) -> None:
        self.moved_at = time.monotonic()


class Watch:
    """Samples until it is stopped."""

    def __init__(self, client: AsyncClient, site: Site, figures: Figures) -> None:
        self._client = client
        self._site = site
        self._figures = figures
        self._jobs: dict[str, Watched] = {}
        # Whatever of the seconds that pass is the measuring loop's own lateness.
        self._late = 0.0

    def began(self, job: Job, job_id: str) -> Watched:
        watched = self._jobs[job_id] = Watched(job, job_id)
        return watched

    def over(self, watched: Watched) -> None:
        self._jobs.pop(watched.job_id, None)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look())
            group.create_task(self._sample())

    async def _look(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            late = now - before - _LOOK_SECONDS
            before = now
            self._figures.longest_lag = max(self._figures.longest_lag, late)
            if late > _LOOK_SECONDS:
                # Nobody could move while this process, and the site in it, stood still.
                self._excuse(late)
                continue
            self._measure(now)

    def _excuse(self, late: float) -> None:
        self._site.moved_at += late
        for watched in self._jobs.values():
            watched.moved_at += late
            self._site.jobs[watched.job.number].moved_at += late

    def _measure(self, now: float) -> None:
        figures = self._figures
        waits = [
            (now - self._last_moved(watched), watched) for watched in self._jobs.values() if self._waits(watched, now)
        ]
        if not waits:
            return
        longest, watched = max(waits, key=lambda wait: wait[0])
        if longest > figures.longest_wait:
            figures.longest_wait, figures.waiting_job = longest, str(watched.job)
        last = max(self._last_moved(each) for each in self._jobs.values())
        figures.longest_stall = max(figures.longest_stall, now - max(last, self._site.moved_at))

    def _last_moved(self, watched: Watched) -> float:
        return max(watched.moved_at, self._site.jobs[watched.job.number].moved_at)

    def _waits(self, watched: Watched, now: float) -> bool:
        if watched.paused or watched.ended or watched.pending == 0:
            return False
        ledger = self._site.jobs[watched.job.number]
        if watched.job.kind == "fetch" and len(ledger.requests) >= watched.job.size:
            return ledger.in_flight == 0 and now - ledger.retry_at > RETRY_SECONDS
        return True

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(_SAMPLE_SECONDS)
            if not self._jobs:
                continue
            page = await self._client.request("GET", "/v1/jobs", query={"limit": 200})
            for item in page["items"]:
                if (watched := self._jobs.get(item["id"])) is not None:
                    self._seen(watched, item)

    def _seen(self, watched: Watched, item: dict[str, Any]) -> None:
        counts = item["run"]["counts"]
        ended = counts["succeeded"] + counts["failed"] + counts["cancelled"]
        if ended != watched.counted:
            watched.counted = ended
            watched.moved()
        watched.pending = max(item["run"]["total"], watched.job.size) - ended
