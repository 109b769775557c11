"""Retry policy: whether to retry a failed attempt, and after how many seconds. Pure; `jitter` brings the randomness."""

from conveyor.model import Backoff, Options, Outcome, TaskError, TaskRef
from conveyor.states import TaskStatus

# The longest Retry-After that is honoured, in seconds.
MAX_RETRY_AFTER = 3600.0

# The code of a poison task: it kills every process that runs it, and is dead-lettered.
WORKER_LOST = "worker_lost"
# Errors that a retry may not meet again. A retry would meet all others: target_refused, bad_url, body_too_large,
# too_many_redirects, bad_redirect, decode_failed, tls_failed, internal; handler_missing and result_not_json;
# extract_failed; checksum_mismatch, export_failed, export_timeout and export_api_failed. The job's `retry_statuses`
# decide about `http_<status>`, and its `retry_errors`, if it has them, about everything else.
RETRYABLE_ERRORS = frozenset(
    {
        "timeout",
        "connect_timeout",
        "connect_failed",
        "dns_failed",
        "read_failed",
        "gateway_failed",
        "handler_raised",
        "process_failed",
        "too_slow",
        "range_failed",
        "file_changed",
    }
)
# Errors that are never retried, whatever the job says.
FINAL_ERRORS = frozenset({"deadline", "target_down", "stuck", "blocked_by_robots", "robots_unavailable", WORKER_LOST})
# Errors that end the retries, or the waiting, of a task whose next attempt might have succeeded.
_EXHAUSTED_ERRORS = frozenset({"deadline", "target_down", "robots_unavailable", "export_api_failed", "export_timeout"})
# Errors of a target that is down. Not 429: that target is up and says when to retry.
OUTAGE_ERRORS = frozenset(
    {"timeout", "connect_timeout", "connect_failed", "dns_failed", "read_failed", "gateway_failed"}
)
# Jitter on the delay of an outage, as a share of it, so that tasks do not all retry in one moment.
_OUTAGE_JITTER = 0.1


def retry_delay(options: Options, attempt: int, outcome: Outcome, jitter: float) -> float | None:
    """Return the seconds until the retry after this outcome of the `attempt`-th attempt (from 1), or None: no retry.

    `jitter` is in [0, 1). Retry-After is added to the backoff, so that tasks that got the same Retry-After do not all
    retry in the same moment. An outcome that spends no attempt waits only its `retry_after`. With `outage`, a task
    whose target is down gets a few quick retries and then a long wait.
    """
    if not outcome.spends_attempt:
        return _bounded(outcome.retry_after)
    if outcome.status is not TaskStatus.FAILED or attempt >= options.attempts or not is_retryable(options, outcome):
        return None
    outage = options.outage
    if outage is None or not is_outage(outcome):
        return backoff_delay(options.backoff, attempt, jitter, outcome.retry_after)
    if attempt % outage.quick_tries == 0:
        return max(outage.delay * (1 + _OUTAGE_JITTER * jitter), _bounded(outcome.retry_after))
    return backoff_delay(options.backoff, attempt % outage.quick_tries, jitter, outcome.retry_after)


def longest_delay(options: Options) -> float:
    """Return the longest delay of a retry under these options, in seconds."""
    outage = 0.0 if options.outage is None else options.outage.delay * (1 + _OUTAGE_JITTER)
    return max(options.backoff.cap + MAX_RETRY_AFTER, outage)


def is_exhausted(options: Options, outcome: Outcome) -> bool:
    """Return whether a task that fails with this outcome would have been retried, had it attempts or time left."""
    error = outcome.error
    return error is not None and (error.code in _EXHAUSTED_ERRORS or is_retryable(options, outcome))


def is_outage(outcome: Outcome) -> bool:
    """Return whether the target is to blame, because it was down."""
    if outcome.error is None:
        return False
    if outcome.error.code.startswith("http_"):
        return outcome.http_status is not None and outcome.http_status >= 500
    return outcome.error.code in OUTAGE_ERRORS


def too_late(options: Options, ref: TaskRef, begins: float) -> bool:
    """Return whether a retry that begins at this time is past the task's deadline."""
    return options.task_deadline is not None and ref.since > 0 and begins >= ref.since + options.task_deadline


def late(options: Options, cause: TaskError | None) -> TaskError:
    """Return the error of a task that is past its deadline."""
    last = "" if cause is None else f"; at last: {cause.message}"
    return TaskError("deadline", f"no attempt succeeded within {options.task_deadline:g} seconds{last}")


def backoff_delay(backoff: Backoff, attempt: int, jitter: float, retry_after: float | None) -> float:
    """Return the seconds until the retry after the `attempt`-th attempt: the backoff plus Retry-After."""
    longest = _longest_backoff(backoff, attempt)
    return (longest * jitter if backoff.jitter else longest) + _bounded(retry_after)


def is_retryable(options: Options, outcome: Outcome) -> bool:
    """Return whether the job retries this error."""
    error = outcome.error
    if error is None:
        return False
    if error.code.startswith("http_"):
        return outcome.http_status in options.retry_statuses
    if options.retry_errors is not None:
        return error.code in options.retry_errors and error.code not in FINAL_ERRORS
    return error.code in RETRYABLE_ERRORS


def _longest_backoff(backoff: Backoff, attempt: int) -> float:
    try:
        grown = backoff.base * backoff.rate ** (attempt - 1)
    except OverflowError:
        return backoff.cap
    return max(0.0, min(backoff.cap, grown))


def _bounded(retry_after: float | None) -> float:
    return 0.0 if retry_after is None else max(0.0, min(retry_after, MAX_RETRY_AFTER))
