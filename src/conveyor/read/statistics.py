"""Statistics of a job: the counts of a run over time, the latency of its tasks, and the errors of the job. They were
collected while runs worked, so the cost does not depend on their size. The coordinator has the finest samples, for a
day; the breakdown of the run (jobs/breakdowns.py) has what is kept."""

import asyncio
from typing import Any

from conveyor.clock import Clock, iso_text
from conveyor.coordination.durations import read_histogram, seconds_of_step
from conveyor.coordination.history import Moment, history, moment
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.records import Records
from conveyor.engines.tasks import Tasks
from conveyor.jobs.breakdowns import Breakdown
from conveyor.jobs.job_counts import job_counts, run_counts
from conveyor.model import Counts, EventRecord, Job, Run
from conveyor.read.breakdown_views import read_breakdown, series_json, total_tally
from conveyor.read.runs import LATEST_PER_TASK
from conveyor.states import ENDED

TOP_ERRORS = 100

# Events of a job that are read for counts.
_EVENTS = 500


async def statistics_json(
    records: Records, tasks: Tasks, coordinator: Coordinator, clock: Clock, job: Job, chosen: Run | None
) -> dict[str, Any]:
    """The statistics of one of the job's runs; without one, of the latest run, with the errors of the job."""
    run = chosen or job.run
    # Before the counts, so that it has no more than they have.
    breakdown = (await read_breakdown(records, tasks, coordinator, job, run)).breakdown
    counting = (
        job_counts(records, tasks, job, coordinator, TOP_ERRORS)
        if chosen is None
        else run_counts(tasks, job, run, TOP_ERRORS)
    )
    counted, durations, samples, events = await asyncio.gather(
        counting,
        read_histogram(coordinator, run.run_id),
        history(coordinator, run.run_id),
        records.outbox.events(job.tenant, job.job_id, None, _EVENTS),
    )
    until = run.ended_at if run.state in ENDED and run.ended_at is not None else clock.now()
    reported = [sample for event in events.items if event.run_id == run.run_id and (sample := _sample_in(event))]
    return {
        "run_id": run.run_id,
        "view": LATEST_PER_TASK if chosen is None else run.run_id,
        "samples": [
            _sample_json(sample)
            for sample in _in_order(run, [*samples, *reported, *_sums(breakdown)], moment(until, counted.run))
        ],
        "series": series_json(breakdown),
        "durations": [{"seconds": seconds, "count": count} for seconds, count in durations or _latency(breakdown)],
        "errors": [{"code": code, "count": count} for code, count in counted.top_errors(TOP_ERRORS)],
    }


def _sample_in(event: EventRecord) -> Moment | None:
    """The counts in an event: progress events, failures and final events have them."""
    counts = event.data.get("counts")
    if not isinstance(counts, dict):
        return None
    return moment(event.at, Counts(*(int(counts.get(name, 0)) for name in ("succeeded", "failed", "cancelled"))))


def _sums(breakdown: Breakdown) -> list[Moment]:
    """The counts at the end of each interval of a breakdown: they are durable, and all there is after a restart."""
    moments: list[Moment] = []
    width, end, succeeded, failed = float(breakdown.width), 0, 0, 0
    for number, counts in sorted(breakdown.buckets.items()):
        if number > end:
            # Nothing moved since the last one.
            moments.append(Moment(number * width, succeeded, failed, 0))
        succeeded, failed, end = succeeded + counts[0], failed + counts[1], number + 1
        moments.append(Moment(end * width, succeeded, failed, 0))
    return moments


def _latency(breakdown: Breakdown) -> list[tuple[float, int]]:
    """The latency of all attempts, where that of the last ones is lost."""
    return [(seconds_of_step(step), count) for step, count in sorted(total_tally(breakdown).steps.items())]


def _in_order(run: Run, samples: list[Moment], last: Moment) -> list[Moment]:
    """From the start of the run to `last`, without late samples by which the counts would decrease."""
    moments = [Moment(run.created_at, 0, 0, 0)]
    for sample in sorted(samples, key=lambda sample: (sample.at, sample.ended)):
        if moments[-1].at < sample.at < last.at and moments[-1].ended <= sample.ended <= last.ended:
            moments.append(sample)
    return [*moments, last]


def _sample_json(sample: Moment) -> dict[str, Any]:
    return {
        "at": iso_text(sample.at),
        "succeeded": sample.succeeded,
        "failed": sample.failed,
        "cancelled": sample.cancelled,
    }
