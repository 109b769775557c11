"""Lanes whose references are attempted by fetchers, on the fake clock: the fetchers run inside the test, and attempts
end together, as pages of one server do. At every moment something that can run is running."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from conveyor.accept.option_changes import change_options
from conveyor.model import Job, JobKind, Pace
from conveyor.process.executors.fetch.fetchers import Fetchers
from tests.support.in_process_fetchers import Launcher
from tests.support.small_fleet import Fleet, open_fleet

# Of the fake clock: what a worker may take to see that something changed, and to be dealt slots.
LONGEST_STALL = 1.0


class Site:
    """Fetchers of one fleet, and how long nothing was attempted while there was something to attempt."""

    def __init__(self, fleet: Fleet, launcher: Launcher) -> None:
        self._fleet = fleet
        self._launcher = launcher
        self.longest_stall = 0.0

    @property
    def running(self) -> int:
        return self._launcher.running()

    async def step(self) -> None:
        """Let all attempts end in one step of the loop, and everybody act on it."""
        await self._fleet.breathe()
        self._launcher.end(1_000_000)
        await self._fleet.step()

    async def serve(self, *jobs: Job, tasks: int) -> None:
        """Until so many tasks have ended."""
        done, since = -1, self._fleet.clock.now()
        while True:
            now, ended = self._fleet.clock.now(), 0
            for job in jobs:
                ended += (await self._fleet.counts(job)).ended
            if ended > done:
                done, since = ended, now
            self.longest_stall = max(self.longest_stall, now - since)
            if done >= tasks or now - since > 10.0:
                return
            await self.step()


@asynccontextmanager
async def fetching(fetchers: int = 2, **settings: int) -> AsyncIterator[tuple[Fleet, Site]]:
    async with open_fleet(fetchers=fetchers, allow_private_targets=True) as fleet:
        launcher = Launcher()
        executor = Fetchers(fleet.system.settings, fleet.clock, launcher)
        executor.open()
        try:
            service = fleet.start(fleet.worker(executor, kinds=[JobKind.FETCH], **settings))
            yield fleet, Site(fleet, launcher)
            await fleet.stop(service)
        finally:
            await executor.close()


async def submitted(fleet: Fleet, tasks: int, **options: int) -> Job:
    """These are about slots: hosts take whatever is sent."""
    urls = [f"http://site.test/{number}" for number in range(tasks)]
    return await fleet.submit(urls, kind=JobKind.FETCH, handler=None, pace=Pace.FIXED, **options)


async def test_thirty_jobs_at_once_never_stand_still() -> None:
    """The first job has all slots for a moment; then each has some."""
    async with fetching(worker_concurrency=64) as (fleet, site):
        jobs = [await submitted(fleet, 300, concurrency=64)]
        await fleet.until(lambda: site.running == 64)
        jobs += [await submitted(fleet, 20) for _ in range(29)]
        # Slots are dealt again while what had them all goes on; then all of it ends at once.
        await fleet.passing(1.0)
        await site.serve(*jobs, tasks=300 + 29 * 20)
        assert site.longest_stall <= LONGEST_STALL
        for job in await fleet.ended(*jobs):
            await fleet.check(job)


async def test_a_job_whose_concurrency_is_lowered_does_not_stand_still() -> None:
    async with fetching() as (fleet, site):
        job = await submitted(fleet, 400, concurrency=16)
        await site.serve(job, tasks=50)
        for concurrency in (3, 1, 2, 1):
            await change_options(fleet.system, await fleet.job(job.job_id), {"concurrency": concurrency})
            await fleet.passing(1.0)
            await site.serve(job, tasks=(await fleet.counts(job)).ended + 40)
        await change_options(fleet.system, await fleet.job(job.job_id), {"concurrency": 16})
        await site.serve(job, tasks=400)
        assert site.longest_stall <= LONGEST_STALL
        await fleet.check((await fleet.ended(job))[0])
