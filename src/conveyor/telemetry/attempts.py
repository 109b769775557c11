"""Counts, times and traces attempts, once for each batch of outcomes that is written together."""

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

from conveyor.model import Job, JobKind, Outcome, TaskRef
from conveyor.states import TaskStatus
from conveyor.telemetry import metrics, traces

# Maximum number of tasks of a batch that get a span.
_MAX_SPANS = 5


class RecordedAttempt(Protocol):
    """One attempt. With a delay, the task is retried."""

    ref: TaskRef
    outcome: Outcome
    delay: float | None


def record_attempts(job: Job, attempts: Sequence[RecordedAttempt], began: float, now: float) -> None:
    """Record attempts of one run whose outcomes were written between `began` and `now`."""
    count_attempts(job.kind, attempts, now)
    if traces.is_traced(job.job_id):
        _trace(job, attempts, began, now)


def count_attempts(kind: JobKind, attempts: Sequence[RecordedAttempt], now: float) -> None:
    """Count and time attempts of runs of one kind whose outcomes were written by now."""
    spent = [attempt for attempt in attempts if attempt.outcome.spends_attempt]
    final = [attempt for attempt in spent if attempt.delay is None]
    succeeded = [attempt.outcome.status for attempt in final].count(TaskStatus.SUCCEEDED)
    for outcome, count in (
        ("succeeded", succeeded),
        ("failed", len(final) - succeeded),
        ("retried", len(spent) - len(final)),
        ("waited", len(attempts) - len(spent)),
    ):
        if count:
            metrics.ATTEMPTS.add(count, kind, outcome)
    if spent:
        # Sorted once: most tasks finish with their first attempt, and the second histogram then has the same values.
        seconds = sorted([attempt.outcome.elapsed for attempt in spent])
        metrics.ATTEMPT_SECONDS.observe_all(seconds, kind)
        if len(final) < len(spent) or any(attempt.ref.since for attempt in final):
            seconds = [now - attempt.ref.since if attempt.ref.since else attempt.outcome.elapsed for attempt in final]
        if final:
            metrics.TASK_SECONDS.observe_all(seconds, kind)


def count_successes(kind: JobKind, refs: Sequence[TaskRef], elapsed: Sequence[float], now: float) -> None:
    """As `count_attempts`, of attempts that all succeeded."""
    seconds = sorted(elapsed)
    metrics.ATTEMPTS.add(len(refs), kind, "succeeded")
    metrics.ATTEMPT_SECONDS.observe_all(seconds, kind)
    if any(ref.since for ref in refs):
        pairs = zip(refs, elapsed, strict=True)
        seconds = [now - ref.since if ref.since else duration for ref, duration in pairs]
    metrics.TASK_SECONDS.observe_all(seconds, kind)


def _trace(job: Job, attempts: Sequence[RecordedAttempt], began: float, now: float) -> None:
    """One span for the batch, from the start of its longest attempt; and one for each of a few failed or slow tasks."""
    slowest = sorted(attempts, key=lambda attempt: attempt.outcome.elapsed, reverse=True)
    failed = [attempt for attempt in slowest if attempt.outcome.error is not None]
    longest = slowest[0].outcome.elapsed
    counts = {"conveyor.attempts": len(attempts), "conveyor.failed": len(failed), "conveyor.write_seconds": now - began}
    job_id, run_id = job.job_id, job.run.run_id
    batch = traces.span("batch", job_id, run_id, began - longest, now, counts)
    chosen = {id(attempt): attempt for attempt in chain(failed[:_MAX_SPANS], slowest[:_MAX_SPANS])}
    for attempt in list(chosen.values())[:_MAX_SPANS]:
        outcome = attempt.outcome
        attributes: dict[str, str | int | float | bool] = {
            "conveyor.index": attempt.ref.index,
            "conveyor.attempt": attempt.ref.attempt,
            "conveyor.status": outcome.status.label,
        }
        if outcome.http_status is not None:
            attributes["http.response.status_code"] = outcome.http_status
        if outcome.error is not None:
            attributes["error.type"] = outcome.error.code
        error = None if outcome.error is None else outcome.error.code
        traces.span("task", job_id, run_id, began - outcome.elapsed, began, attributes, error=error, parent_id=batch)
