"""The verification of an installation, or of one of its jobs: every job with its runs, bodies, lists and exports, then
the schedules and dead letters, then the objects that nothing refers to. It reads only, unless it is told to repair."""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from conveyor.engines.tasks import TaskFilter
from conveyor.errors import NotFound
from conveyor.jobs.job_counts import forget_job_counts, job_counts
from conveyor.jobs.row_counts import RowCounts
from conveyor.model import Job, JobId, Page, Run, TenantId
from conveyor.read.latest import latest_batches
from conveyor.system import System
from conveyor.verify.file_check import FileCheck
from conveyor.verify.findings import UNREADABLE, Finding, FindingKind, Findings, Pacing, error_text
from conveyor.verify.message_check import MessageCheck
from conveyor.verify.orphan_objects import OrphanObjects
from conveyor.verify.run_check import RunCheck, count_text

_JOBS = 200
_UNSWEPT = 10_000
_MAX_FAILURES = 20
# No task engine has this id.
_NO_STORE = "~"
# The tenant of `conveyor run`, which needs no key.
_LOCAL = TenantId("local")


class Installation:
    """Verifies what one System stores. `findings` grows on the way."""

    def __init__(self, system: System, findings: Findings, share: float = 1.0, repair: bool = False) -> None:
        self._system = system
        self._findings = findings
        self._repair = repair
        self._pacing = Pacing(system.clock, share)
        self._runs = RunCheck(system, findings, self._pacing, repair)
        self._messages = MessageCheck(system, findings, self._pacing)
        self._files = FileCheck(system, findings, self._pacing)
        self._orphans = OrphanObjects(system, findings, self._pacing)
        self._tenants: set[TenantId] = {_LOCAL}

    async def verify(self, job_id: JobId | None = None) -> None:
        """Check everything, or one job. Raises NotFound for an unknown job."""
        self._tenants |= {key.tenant for key in await self._system.records.access.keys(None)}
        only = None if job_id is None else await self._find(job_id)
        if only is not None:
            self._findings.checked.tasks_total = await self._rows_of(only)
            await self._check_job(only)
        else:
            await self._check_all()
        async for orphans in self._orphans.find(only):
            for info in orphans:
                detail = "No row refers to the object."
                self._findings.add(Finding(FindingKind.ORPHAN, detail, key=info.key, size=info.size))
        self._findings.step()

    async def _check_all(self) -> None:
        """All but the orphans."""
        await self._messages.begin()
        async for job in self._all_jobs():
            self._findings.checked.tasks_total += await self._rows_of(job)
            self._findings.step()
        async for job in self._all_jobs():
            self._tenants.add(job.tenant)
            await self._check_job(job)
        for tenant in sorted(self._tenants):
            await self._files.check_schedules(tenant)
        await self._messages.end()
        await self._messages.check_dead_letters()

    async def remove_orphans(self, job_id: JobId | None = None) -> None:
        """Find the orphans once more, and remove them."""
        only = None if job_id is None else await self._find(job_id)
        of_kind = self._findings.by_kind[FindingKind.ORPHAN]
        async for orphans in self._orphans.find(only):
            await self._system.blobs.delete([info.key for info in orphans])
            of_kind.repaired = min(of_kind.count, of_kind.repaired + len(orphans))

    async def _find(self, job_id: JobId) -> Job:
        keys = [(tenant, job_id) for tenant in sorted(self._tenants)]
        for job in await self._system.records.jobs.jobs_of(keys):
            return job
        async for job in self._all_jobs():
            if job.job_id == job_id:
                return job
        raise NotFound(f"Unknown job {job_id}.")

    async def _all_jobs(self) -> AsyncIterator[Job]:
        """Jobs of all tenants, each once: first those that may finish meanwhile."""
        jobs = self._system.records.jobs
        early = {job.job_id: job for job in await jobs.active_jobs()}
        early |= {job.job_id: job for job in await jobs.unswept_jobs(_UNSWEPT)}
        for job in early.values():
            yield job
        cursor: str | None = None
        while True:
            page: Page[Job] = await jobs.finished_jobs(_NO_STORE, cursor, _JOBS)
            for job in page.items:
                if job.job_id not in early:
                    yield job
            cursor = page.next_cursor
            if cursor is None:
                return

    async def _rows_of(self, job: Job) -> int:
        return sum(run.total for run in await self._runs_of(job))

    async def _runs_of(self, job: Job) -> list[Run]:
        return [job.run] if job.run.number == 1 else await self._system.records.jobs.runs(job.job_id)

    async def _check_job(self, listed: Job) -> None:
        """Check one job. One that is deleted or expires meanwhile leaves no findings."""
        before = self._findings.mark()
        try:
            job = await self._system.records.jobs.job(listed.tenant, listed.job_id)
            if job is None:
                self._findings.checked.tasks_total -= await self._rows_of(listed)
                return
            await self._check_stored(job)
            if await self._system.records.jobs.job(listed.tenant, listed.job_id) is None:
                self._findings.restore(before)
        except UNREADABLE as error:
            self._findings.fail(f"Job {listed.job_id}: {error_text(error)}")
            if len(self._findings.failures) >= _MAX_FAILURES:
                raise

    async def _check_stored(self, job: Job) -> None:
        runs = await self._runs_of(job)
        self._messages.see(runs)
        are_right = [await self._runs.check(job, run) for run in runs]
        if len(runs) > 1 and all(are_right):
            await self._check_latest(job, runs)
        await self._files.check_lists(job, runs)
        await self._files.check_exports(job)
        self._findings.checked.jobs += 1
        self._findings.step()

    async def _check_latest(self, job: Job, runs: Sequence[Run]) -> None:
        """Compare the counts of a job that was rerun with the latest outcomes of its tasks."""
        records, tasks = self._system.records, self._system.tasks
        keys = [job.key_of(run) for run in runs]
        rows = RowCounts()
        async with aclosing(latest_batches(tasks, keys, TaskFilter(), None)) as batches:
            async for batch, _ in batches:
                rows.add(batch)
                await self._pacing.rest()
        counted = rows.counts
        shown = (await job_counts(records, tasks, job)).counts
        now = await records.jobs.job(job.tenant, job.job_id)
        if shown == counted or now is None or now.run.run_id != job.run.run_id:
            return
        if self._repair:
            for key in keys:
                await tasks.recount(key)
            await forget_job_counts(self._system.coordinator, job)
        detail = f"The job counts {count_text(shown)}; the latest outcomes of its tasks are {count_text(counted)}."
        self._findings.add(Finding(FindingKind.COUNTS, detail, job.job_id, repaired=self._repair))
