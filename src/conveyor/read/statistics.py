"""Statistics of a run: how its counts went, how long its tasks took, what they failed with. All of it was gathered on
the way, so that it costs the same at any size; of times long ago, and after a coordinator was lost, there is less."""

import asyncio
from typing import Any

from conveyor.clock import Clock, iso_text
from conveyor.coordination.durations import histogram
from conveyor.coordination.history import Moment, history, moment
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.records import Records
from conveyor.engines.tasks import Tasks
from conveyor.model import Counts, EventRecord, Job, Run
from conveyor.states import ENDED

TOP_ERRORS = 100

# Notices of a job that are looked at for counts.
_NOTICES = 500


async def statistics_json(
    records: Records, tasks: Tasks, coordinator: Coordinator, clock: Clock, job: Job, run: Run
) -> dict[str, Any]:
    """Of one of the job's runs."""
    key = job.key_of(run)
    counts, errors, durations, kept, told = await asyncio.gather(
        tasks.counts(key),
        tasks.error_codes(key, TOP_ERRORS),
        histogram(coordinator, run.run_id),
        history(coordinator, run.run_id),
        records.notices(job.tenant, job.job_id, None, _NOTICES),
    )
    until = run.ended_at if run.state in ENDED and run.ended_at is not None else clock.now()
    noted = [found for event in told.items if event.run_id == run.run_id and (found := _noted(event))]
    return {
        "run_id": run.run_id,
        "samples": [_sample_json(each) for each in _in_order(run, [*kept, *noted], moment(until, counts))],
        "durations": [{"seconds": seconds, "count": count} for seconds, count in durations],
        "errors": [{"code": code, "count": count} for code, count in errors],
    }


def _noted(event: EventRecord) -> Moment | None:
    """The counts that a notice carries: those of quarters, failures and ends."""
    counts = event.data.get("counts")
    if not isinstance(counts, dict):
        return None
    return moment(event.at, Counts(*(int(counts.get(name, 0)) for name in ("succeeded", "failed", "cancelled"))))


def _in_order(run: Run, found: list[Moment], last: Moment) -> list[Moment]:
    """From the run's beginning to `last`. What was told late and so would go back is left out."""
    moments = [Moment(run.created_at, 0, 0, 0)]
    for each in sorted(found, key=lambda found: (found.at, found.ended)):
        if moments[-1].at < each.at < last.at and moments[-1].ended <= each.ended <= last.ended:
            moments.append(each)
    return [*moments, last]


def _sample_json(each: Moment) -> dict[str, Any]:
    return {
        "at": iso_text(each.at),
        "succeeded": each.succeeded,
        "failed": each.failed,
        "cancelled": each.cancelled,
    }
