"""The executor of reruns that only extract: an attempt is a look at what earlier runs have stored, without a request.
It has no targets, and so no limits and no breakers. The lane has `extract` called with the bodies, as after a fetch."""

from collections.abc import Sequence

import msgspec

from conveyor.model import EXTRACT_FAILED, Breaking, Job, Outcome, TaskError, TaskRef
from conveyor.process.earlier_outcomes import EarlierOutcomes
from conveyor.process.executors import LocalExecutor
from conveyor.states import TaskStatus

_GRAIN = 32


class StoredBodyExecutor(LocalExecutor):
    """Finds the stored bodies of tasks."""

    def __init__(self, earlier: EarlierOutcomes) -> None:
        self._earlier = earlier

    def grain(self, job: Job) -> int:
        return _GRAIN

    def target(self, ref: TaskRef) -> str | None:
        return None

    async def attempt(self, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        stored = await self._earlier.stored(job, refs)
        return [stored.get(ref.index) or _missing() for ref in refs]


def is_extract_only(job: Job) -> bool:
    """Whether the run makes no requests."""
    return job.run.lineage is not None and job.run.lineage.extract_only


def without_targets(job: Job) -> Job:
    """The job as limits and breakers see a run without requests."""
    options = msgspec.structs.replace(
        job.options,
        rate_per_host=None,
        concurrency_per_host=None,
        upstream=None,
        gateway=None,
        breaker=Breaking(enabled=False),
    )
    return msgspec.structs.replace(job, options=options)


def _missing() -> Outcome:
    error = TaskError(EXTRACT_FAILED, "no body of the task is stored. Rerun it with a request")
    return Outcome(TaskStatus.FAILED, error=error)
