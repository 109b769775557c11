"""Earlier outcomes: what a task of a rerun has from the runs before. Gets references of a rerun, reads the rows of the
earlier runs in one batch for each run, and returns outcomes whose bodies are stored and that need no request, only
`extract`; and of a run that compares, the pages to compare with."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from conveyor.egress.lru import Lru
from conveyor.engines.records import Records
from conveyor.engines.tasks import Tasks
from conveyor.jobs.latest_outcomes import is_extractable, latest_outcomes
from conveyor.model import EXTRACT_FAILED, Job, Outcome, Run, RunId, Task, TaskRef, task_id
from conveyor.process.base_pages import BasePages
from conveyor.process.changed_pages import EarlierPage, compares, earlier_page, has_base
from conveyor.states import TaskStatus

_MAX_RUNS = 256


class KnownOutcomes(NamedTuple):
    """What tasks have from earlier runs, by index: outcomes that need no request, and pages to compare with."""

    stored: dict[int, Outcome]
    pages: dict[int, EarlierPage]


class EarlierOutcomes:
    """One for each worker."""

    def __init__(self, records: Records, tasks: Tasks) -> None:
        self._records = records
        self._tasks = tasks
        self._base = BasePages(records, tasks)
        # The runs before a run; they are final.
        self._runs: Lru[RunId, list[Run]] = Lru(_MAX_RUNS)

    async def look(self, job: Job, refs: Sequence[TaskRef]) -> KnownOutcomes:
        """What these tasks have from earlier runs, or from the job to compare with."""
        if has_base(job):
            return KnownOutcomes({}, await self._base.find(job, refs))
        runs = await self._earlier_runs(job)
        latest = await self._latest(job, runs, refs)
        stored = _stored(job, latest) if may_have_stored(job) else {}
        pages: dict[int, EarlierPage] = {}
        if compares(job):
            changes = _extract_changes(job, runs)
            for task in latest:
                page = earlier_page(job, task, extracts_again=_is_before(task, runs, changes))
                if page is not None and task.index not in stored:
                    pages[task.index] = page
        return KnownOutcomes(stored, pages)

    async def stored(self, job: Job, refs: Sequence[TaskRef]) -> dict[int, Outcome]:
        """The tasks whose body is stored and that need no request, by index: of a rerun that only extracts, all whose
        fetch succeeded; of another one, those whose extraction failed."""
        return _stored(job, await self._latest(job, await self._earlier_runs(job), refs))

    async def _earlier_runs(self, job: Job) -> list[Run]:
        runs = self._runs.get(job.run.run_id)
        if runs is None:
            earlier = [run for run in await self._records.jobs.runs(job.job_id) if run.number < job.run.number]
            runs = self._runs.put(job.run.run_id, earlier)
        return runs

    async def _latest(self, job: Job, runs: Sequence[Run], refs: Sequence[TaskRef]) -> list[Task]:
        keys = [job.key_of(run) for run in runs]
        first = await self._tasks.at(keys[0], sorted(ref.index for ref in refs))
        return await latest_outcomes(self._tasks, keys, first)


def needs_look(job: Job) -> bool:
    """Whether to look at the earlier outcomes of tasks before they are attempted."""
    return may_have_stored(job) or compares(job)


def may_have_stored(job: Job) -> bool:
    """Whether tasks of the run may have a stored body to extract from. A rerun of damaged bodies fetches them all."""
    lineage = job.run.lineage
    return job.options.extract is not None and lineage is not None and not lineage.damaged


def _stored(job: Job, latest: Sequence[Task]) -> dict[int, Outcome]:
    lineage = job.run.lineage
    assert lineage is not None
    found = [task for task in latest if is_extractable(task)]
    if not lineage.extract_only:
        found = [task for task in found if task.error_code == EXTRACT_FAILED]
    return {task.index: _outcome(task) for task in found}


def _extract_changes(job: Job, runs: Sequence[Run]) -> list[int]:
    """The numbers of the runs since which `extract` is another one."""
    reruns = [run for run in (*runs, job.run) if run.lineage is not None]
    return [run.number for run in reruns if run.lineage is not None and "extract" in run.lineage.overrides]


def _is_before(task: Task, runs: Sequence[Run], changes: Sequence[int]) -> bool:
    """Whether the outcome is of a run before one of these."""
    if not changes:
        return False
    number = next(run.number for run in runs if task_id(run.run_id, task.index) == task.task_id)
    return number < changes[-1]


def _outcome(task: Task) -> Outcome:
    detail = msgspec.structs.replace(task.detail, error=None, body=None, extracted=None, dead_lettered=False)
    return Outcome(
        TaskStatus.SUCCEEDED,
        task.http_status,
        detail=msgspec.json.encode(detail).decode(),
        kept=task.detail.body,
    )
