"""Earlier outcomes: what a task of a rerun has from the runs before. Gets references of a rerun, reads the rows of the
earlier runs in one batch for each run, and returns outcomes whose bodies are stored: they need no request, only
`extract`."""

from collections.abc import Sequence

import msgspec

from conveyor.egress.lru import Lru
from conveyor.engines.records import Records
from conveyor.engines.tasks import Tasks
from conveyor.jobs.latest_outcomes import is_extractable, latest_outcomes
from conveyor.model import EXTRACT_FAILED, Job, Outcome, RunId, RunKey, Task, TaskRef
from conveyor.states import TaskStatus

_MAX_RUNS = 256


class EarlierOutcomes:
    """One for each worker."""

    def __init__(self, records: Records, tasks: Tasks) -> None:
        self._records = records
        self._tasks = tasks
        # The runs before a run; they are final.
        self._runs: Lru[RunId, list[RunKey]] = Lru(_MAX_RUNS)

    async def stored(self, job: Job, refs: Sequence[TaskRef]) -> dict[int, Outcome]:
        """The tasks whose body is stored and that need no request, by index: of a rerun that only extracts, all whose
        fetch succeeded; of another one, those whose extraction failed."""
        lineage = job.run.lineage
        assert lineage is not None
        found = {
            task.index: task
            for task in await self._latest(job, [ref.index for ref in refs])
            if is_extractable(task) and (lineage.extract_only or task.error_code == EXTRACT_FAILED)
        }
        return {index: _outcome(task) for index, task in found.items()}

    async def _latest(self, job: Job, indexes: Sequence[int]) -> list[Task]:
        runs = self._runs.get(job.run.run_id)
        if runs is None:
            earlier = [run for run in await self._records.jobs.runs(job.job_id) if run.number < job.run.number]
            runs = self._runs.put(job.run.run_id, [job.key_of(run) for run in earlier])
        return await latest_outcomes(self._tasks, runs, await self._tasks.at(runs[0], sorted(indexes)))


def may_have_stored(job: Job) -> bool:
    """Whether tasks of the run may have a stored body to extract from. A rerun of damaged bodies fetches them all."""
    lineage = job.run.lineage
    return job.options.extract is not None and lineage is not None and not lineage.damaged


def _outcome(task: Task) -> Outcome:
    detail = msgspec.structs.replace(task.detail, error=None, body=None, extracted=None, dead_lettered=False)
    return Outcome(
        TaskStatus.SUCCEEDED,
        task.http_status,
        detail=msgspec.json.encode(detail).decode(),
        kept=task.detail.body,
    )
