"""Attempts whose outcome is written: counted, timed and traced, once for each batch that was written together."""

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

from conveyor.model import Job, Outcome, TaskRef
from conveyor.states import TaskStatus
from conveyor.telemetry import metrics, traces

# Tasks of a batch that get a span each.
_SHOWN = 5


class RecordedAttempt(Protocol):
    """One attempt; with a delay, the task is tried again."""

    ref: TaskRef
    outcome: Outcome
    delay: float | None


def recorded(job: Job, attempts: Sequence[RecordedAttempt], began: float, now: float) -> None:
    """These outcomes of one run were written, which took from `began` until now."""
    kind = job.kind
    made = [one for one in attempts if one.outcome.spend]
    ended = [one for one in made if one.delay is None]
    succeeded = [one.outcome.status for one in ended].count(TaskStatus.SUCCEEDED)
    for outcome, count in (
        ("succeeded", succeeded),
        ("failed", len(ended) - succeeded),
        ("retried", len(made) - len(ended)),
        ("waited", len(attempts) - len(made)),
    ):
        if count:
            metrics.ATTEMPTS.add(count, kind, outcome)
    if made:
        # In order once: most tasks end with their first attempt, and the second histogram then has the same values.
        seconds = sorted([one.outcome.elapsed for one in made])
        metrics.ATTEMPT_SECONDS.observe_all(seconds, kind)
        if len(ended) < len(made) or any(one.ref.since for one in ended):
            seconds = [now - one.ref.since if one.ref.since else one.outcome.elapsed for one in ended]
        if ended:
            metrics.TASK_SECONDS.observe_all(seconds, kind)
    if traces.is_traced(job.job_id):
        _trace(job, attempts, began, now)


def _trace(job: Job, attempts: Sequence[RecordedAttempt], began: float, now: float) -> None:
    """The batch as one span, from when the first of its attempts began; and the tasks of it that are worth a look."""
    slowest = sorted(attempts, key=lambda one: one.outcome.elapsed, reverse=True)
    failed = [one for one in slowest if one.outcome.error is not None]
    longest = slowest[0].outcome.elapsed
    counts = {"conveyor.attempts": len(attempts), "conveyor.failed": len(failed), "conveyor.write_seconds": now - began}
    job_id, run_id = job.job_id, job.run.run_id
    batch = traces.span("batch", job_id, run_id, began - longest, now, counts)
    shown = list({id(one): one for one in chain(failed[:_SHOWN], slowest[:_SHOWN])}.values())[:_SHOWN]
    for one in shown:
        outcome = one.outcome
        attributes: dict[str, str | int | float | bool] = {
            "conveyor.index": one.ref.index,
            "conveyor.attempt": one.ref.attempt,
            "conveyor.status": outcome.status.label,
        }
        if outcome.http_status is not None:
            attributes["http.response.status_code"] = outcome.http_status
        if outcome.error is not None:
            attributes["error.type"] = outcome.error.code
        error = None if outcome.error is None else outcome.error.code
        traces.span("task", job_id, run_id, began - outcome.elapsed, began, attributes, error=error, parent_id=batch)
