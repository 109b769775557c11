"""A process that runs one job which needs the monitor, submitted or found again, until it is killed or the job has
ended and nothing of it is left to look after:

stuck    three long tasks, one of which hangs the first time that it is run
overdue  tasks that fail the first time and would come again in an hour; the job has a deadline of a second
expired  a task that never ends; the job has a deadline of a second, and no second chance
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from conveyor.accept.spec import JobSpec
from conveyor.embedded import Embedded
from conveyor.engines.records import Records
from conveyor.jobs import active_jobs
from conveyor.jobs.deadlines import DEADLINE
from conveyor.jobs.idempotency import IdempotentRequest
from conveyor.model import BEAT, BEAT_TENANT, Backoff, Job, JobId, JobKind, Outcome, TaskError, TaskRef, TenantId
from conveyor.process import feeder, worker
from conveyor.process.executors import LocalExecutor
from conveyor.process.task_progress import ProgressBook
from conveyor.recover import overdue_runs as deadlines
from conveyor.recover import sweeper
from conveyor.settings import Settings
from conveyor.states import ENDED, TaskStatus
from conveyor.system import System, open_system

TENANT = TenantId("acme")
TOTAL = 20
HANGS = 1


class Scripted(LocalExecutor):
    """Fails, or hangs, where the scenario says so, and the first time only: what was tried is kept on disk."""

    def __init__(self, system: System, directory: Path, scenario: str) -> None:
        self._book = ProgressBook(system.records, system.clock, system.settings)
        self._directory = directory
        self._scenario = scenario

    def grain(self, job: Job) -> int:
        return 1

    def target(self, ref: TaskRef) -> str | None:
        return None

    async def attempt(self, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        (ref,) = refs
        if self._scenario == "stuck":
            await self._long(job, ref)
        elif self._scenario == "expired" and ref.index == HANGS:
            await asyncio.Event().wait()
        elif self._scenario == "overdue" and ref.index % 5 == 2 and self._is_first(ref):
            return [Outcome(TaskStatus.FAILED, error=TaskError("handler_raised", "at first"))]
        return [Outcome(TaskStatus.SUCCEEDED, body=b"done")]

    async def close(self) -> None:
        pass

    async def _long(self, job: Job, ref: TaskRef) -> None:
        track = await self._book.begin(job, ref)
        await track.save(track.done + 1, 10)
        if ref.index == HANGS and self._is_first(ref):
            await asyncio.Event().wait()
        # Long enough that the worker says what it runs.
        await asyncio.sleep(0.25)
        await track.remove()

    def _is_first(self, ref: TaskRef) -> bool:
        mark = self._directory / f"tried-{ref.index}"
        if mark.exists():
            return False
        mark.touch()
        return True


def spec_of(scenario: str) -> JobSpec:
    tasks = [msgspec.Raw(b'"https://a.example/%d"' % index) for index in range(3 if scenario == "stuck" else TOTAL)]
    if scenario == "stuck":
        return JobSpec(kind=JobKind.DOWNLOAD, tasks=tasks)
    backoff = Backoff(base=3600, cap=3600, jitter=False)
    return JobSpec(kind=JobKind.PYTHON, handler="x", tasks=tasks, chunk_size=5, deadline=1, backoff=backoff)


async def work(directory: Path, scenario: str, crash_at: str | None) -> None:
    settings = Settings.load(
        {},
        data=directory / "data",
        fetchers=0,
        crash_at=crash_at,
        idempotency_lease_seconds=0.0,
        lease_seconds=0.6,
        stuck_after=0.5,
        monitor_seconds=0.05,
        deadline_tries=0 if scenario == "expired" else 5,
        max_lost_starts=10,
    )
    async with open_system(settings) as system:
        embedded = Embedded(system, dict.fromkeys(JobKind, Scripted(system, directory, scenario)))
        request = IdempotentRequest("POST /v1/jobs", "once", "the same")
        accepted = await embedded.submit.submit(TENANT, spec_of(scenario), request)
        (directory / "job").write_text(accepted.subject)
        async with embedded.running():
            while not await _done(embedded, system.records, JobId(accepted.subject)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def _done(embedded: Embedded, records: Records, job_id: JobId) -> bool:
    """Ended, cleared up, and no deadline or dead worker left to be found."""
    job = await embedded.job(TENANT, job_id)
    beats = (await records.documents.documents(BEAT, BEAT_TENANT, None, 10)).items
    late = await records.documents.due_documents(DEADLINE, 1e12, 1)
    return job.state in ENDED and not (beats or late or await records.jobs.unswept_jobs(1))


def prepare() -> None:
    worker._LOOK_FOR_RUNS = feeder._LONGEST_POLL = feeder._TRIAL_PAUSE = 0.02
    sweeper._EVERY = 0.05
    active_jobs.FRESH_SECONDS = 0.0
    deadlines._REDO = 0.5


def run(directory: Path, scenario: str, crash_at: str | None) -> None:
    asyncio.run(work(directory, scenario, crash_at))
