"""The counts of a job: its tasks by their latest outcome over all its runs.

They are kept, not scanned. A rerun counts the outcomes of its own tasks, and with each succeeded or failed one the
earlier outcome that it replaces. The counts of a job are those of its first run, plus the outcomes of each rerun, minus
those that it replaces.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from conveyor.engines.coordinator import Coordinator
from conveyor.engines.records import Records
from conveyor.engines.tasks import MAX_CODES, Tasks
from conveyor.model import Counts, Job, Lineage, Replaced, Run
from conveyor.states import TaskStatus

# How long the sum over the runs before the latest is cached: they have finished, and only a repair changes them.
_CACHED_SECONDS = 600.0
# Runs whose counts are read together.
_TOGETHER = 20


class JobCounts(msgspec.Struct, frozen=True):
    """The tasks of a job, those of them that have finished by status, failed ones by error code, and the invalid lines
    of its list."""

    total: int
    counts: Counts
    codes: dict[str, int] = {}
    invalid: int = 0
    # The counts of its latest run alone.
    run: Counts = Counts()

    def top_errors(self, limit: int) -> list[tuple[str, int]]:
        """The most frequent error codes of failed tasks."""
        ordered = sorted(self.codes.items(), key=lambda entry: (-entry[1], entry[0]))
        return ordered[:limit] if self.counts.failed else []


class _RunCounts(msgspec.Struct, frozen=True):
    """What one run counts."""

    counts: Counts
    codes: list[tuple[str, int]]
    replaced: Replaced


_job_counts = msgspec.json.Decoder(JobCounts)


async def job_counts(
    records: Records, tasks: Tasks, job: Job, coordinator: Coordinator | None = None, top_errors: int = MAX_CODES
) -> JobCounts:
    """The counts of the job, with at least the `top_errors` most frequent error codes. The coordinator caches the sum
    over the runs before the latest."""
    run = job.run
    if run.number == 1:
        return await run_counts(tasks, job, run, top_errors)
    before = await _cached(coordinator, job)
    if before is None:
        before = await _sum_before(records, tasks, job, coordinator)
    return _add(before, run, await _read(tasks, job, run))


def counts_json(counted: JobCounts) -> dict[str, Any]:
    """The counts of a job as its events have them, beside those of the run."""
    return {"total": counted.total, "counts": msgspec.structs.asdict(counted.counts)}


async def run_counts(tasks: Tasks, job: Job, run: Run, limit: int) -> JobCounts:
    """The counts of one run alone, in the form of those of a job."""
    key = job.key_of(run)
    if limit == 0:
        counts = await tasks.counts(key)
        return JobCounts(run.total, counts, {}, run.invalid, counts)
    counts, codes = await asyncio.gather(tasks.counts(key), tasks.error_codes(key, limit))
    return JobCounts(run.total, counts, dict(codes), run.invalid, counts)


async def forget_job_counts(coordinator: Coordinator, job: Job) -> None:
    """Drop the cached sum: counts of an earlier run were repaired."""
    await coordinator.cache(_key(job), b"", _CACHED_SECONDS)


async def _sum_before(records: Records, tasks: Tasks, job: Job, coordinator: Coordinator | None) -> JobCounts:
    """The counts before the latest run."""
    runs = [run for run in await records.jobs.runs(job.job_id) if run.number < job.run.number]
    read: list[_RunCounts] = []
    for start in range(0, len(runs), _TOGETHER):
        read += await asyncio.gather(*(_read(tasks, job, run) for run in runs[start : start + _TOGETHER]))
    total = JobCounts(0, Counts())
    for run, of_run in zip(runs, read, strict=True):
        total = _add(total, run, of_run)
    is_settled = all(of_run.counts.ended >= run.total for run, of_run in zip(runs, read, strict=True))
    # Before the latch, the rerun may not have looked yet: tasks of the run before it may still finish.
    if coordinator is not None and is_settled and job.run.last_batch:
        await coordinator.cache(_key(job), msgspec.json.encode(total), _CACHED_SECONDS)
    return total


async def _cached(coordinator: Coordinator | None, job: Job) -> JobCounts | None:
    raw = None if coordinator is None else await coordinator.cached(_key(job))
    try:
        return _job_counts.decode(raw) if raw else None
    except msgspec.MsgspecError:
        # The form of another version.
        return None


def _key(job: Job) -> str:
    return f"job-counts:{job.run.run_id}"


async def _read(tasks: Tasks, job: Job, run: Run) -> _RunCounts:
    key = job.key_of(run)
    # Before the counts: of a task that finishes in between, only the replaced outcome is unknown.
    replaced = await tasks.replaced(key) if run.number > 1 else Replaced()
    counts, codes = await asyncio.gather(tasks.counts(key), tasks.error_codes(key, MAX_CODES))
    return _RunCounts(counts, codes, replaced)


def _add(before: JobCounts, run: Run, of_run: _RunCounts) -> JobCounts:
    """The counts after a run, from those before it."""
    counts = of_run.counts
    if run.number == 1:
        return JobCounts(max(run.total, counts.ended), counts, dict(of_run.codes), run.invalid, counts)
    replaced = _all_replaced(before.counts, run.lineage, of_run)
    codes = Counter(before.codes)
    codes.update(dict(of_run.codes))
    codes.subtract(replaced.codes)
    # What a rerun cancels has an outcome from before.
    after = Counts(
        max(before.counts.succeeded + counts.succeeded - replaced.counts.succeeded, 0),
        max(before.counts.failed + counts.failed - replaced.counts.failed, 0),
        max(before.counts.cancelled - replaced.counts.cancelled, 0),
        max(before.counts.unchanged + counts.unchanged - replaced.counts.unchanged, 0),
    )
    kept = {code: count for code, count in codes.most_common(MAX_CODES) if count > 0}
    return JobCounts(before.total, after, kept, before.invalid, counts)


def _all_replaced(before: Counts, lineage: Lineage | None, of_run: _RunCounts) -> Replaced:
    """The replaced outcomes. Where the run did not count them, because it is of an earlier version or the task has just
    finished, its selection says what they were."""
    replaced = of_run.replaced
    missing = of_run.counts.succeeded + of_run.counts.failed - replaced.counts.ended
    if missing <= 0 or lineage is None:
        return replaced
    codes = Counter(replaced.codes)
    if lineage.error_code is not None:
        codes[lineage.error_code] += missing
    statuses: Sequence[TaskStatus] = lineage.statuses or (
        TaskStatus.FAILED,
        TaskStatus.CANCELLED,
        TaskStatus.SUCCEEDED,
    )
    by_name = msgspec.structs.asdict(replaced.counts)
    for status in statuses:
        part = min(missing, max(getattr(before, status.label) - by_name[status.label], 0))
        by_name[status.label] += part
        missing -= part
    return Replaced(Counts(**by_name), dict(codes))
