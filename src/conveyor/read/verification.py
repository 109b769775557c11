"""Verification: counts the rows of a job and compares its counters with them. Unlike a status, it costs more the larger
the job is."""

from typing import Any

import msgspec

from conveyor.engines.coordinator import Coordinator
from conveyor.engines.records import Records
from conveyor.engines.tasks import Tasks
from conveyor.errors import Forbidden
from conveyor.jobs.job_counts import forget_job_counts
from conveyor.model import Counts, Job
from conveyor.states import ENDED

# Rows that any key may have counted.
MAX_VERIFIED_ROWS = 100_000


async def check_verifiable(records: Records, tasks: Tasks, job: Job) -> None:
    """Raise Forbidden if a tenant's own key may not have the rows of this job counted: that reads every one of them."""
    rows = 0
    for run in await records.jobs.runs(job.job_id):
        rows += max(run.total, (await tasks.counts(job.key_of(run))).ended)
    if rows > MAX_VERIFIED_ROWS:
        raise Forbidden(
            f"The job has more than {MAX_VERIFIED_ROWS} task rows. Use an administrator's key to have them counted."
        )


async def verify_json(records: Records, tasks: Tasks, coordinator: Coordinator, job: Job) -> dict[str, Any]:
    """Count the rows of every run, compare the stored counts with them, and repair the counts. In an unfinished run,
    tasks finish between the two reads: then only stored counts above the rows are known to be wrong."""
    runs: list[dict[str, Any]] = []
    for run in await records.jobs.runs(job.job_id):
        stored = await tasks.counts(job.key_of(run))
        counted = await tasks.recount(job.key_of(run))
        exact = run.state in ENDED and counted.ended == run.total
        runs.append(
            {
                "run": run.run_id,
                "number": run.number,
                "kept": stored,
                "counted": counted,
                "drift": count_drift(stored, counted, exact),
                "exact": exact,
            }
        )
    await forget_job_counts(coordinator, job)
    return {"drift": sum(run["drift"] for run in runs), "runs": runs}


def count_drift(stored: Counts, counted: Counts, exact: bool) -> int:
    """By how much stored counts differ from the rows; of a run that is not over (`exact`), by how much they lead."""
    pairs = zip(msgspec.structs.astuple(stored), msgspec.structs.astuple(counted), strict=True)
    return sum(abs(ours - truth) if exact else max(0, ours - truth) for ours, truth in pairs)
