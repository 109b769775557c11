"""Whether a failed attempt is tried again, and when. Gets the job's options and what the attempt came to, hands on
a delay in seconds, or None when the outcome is final. It keeps no state: chance comes in as `jitter`."""

from conveyor.model import Backoff, Options, Outcome, TaskError, TaskRef
from conveyor.states import TaskStatus

# A target may ask for more patience than this; a job has a deadline too.
MAX_RETRY_AFTER = 3600.0

# What may well go another way next time. Not here, because the same attempt would end the same way: target_refused,
# bad_url, body_too_large, too_many_redirects, bad_redirect, decode_failed, tls_failed, internal; handler_missing and
# result_not_json; content_encoded, checksum_mismatch, export_failed, export_timeout and export_api_failed.
# `http_<status>` is decided by the job's own list of statuses, and all others by its `retry_errors` if it has them.
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
# The end of a task, whatever the job says.
FINAL_ERRORS = frozenset({"deadline", "target_down", "stuck", "worker_lost"})
# What a target that is away looks like. Not 429: it is there, and says when to come again.
OUTAGE_ERRORS = frozenset(
    {"timeout", "connect_timeout", "connect_failed", "dns_failed", "read_failed", "gateway_failed"}
)
# How much longer than its delay a task of an outage waits at most: not all come back in one moment.
_SPREAD = 0.1


def retry_delay(options: Options, attempt: int, outcome: Outcome, jitter: float) -> float | None:
    """Seconds until the next attempt after the `attempt`-th (from 1) ended so, or None: the outcome is terminal.

    `jitter` is in [0, 1). What the target asked for by Retry-After comes on top of the backoff: tasks that were all
    told the same moment should not all come back in it. An outcome that spends no attempt only waits as long as it
    says. With `outage`, a target that is away gets a few quick tries, and then all tasks wait long.
    """
    if not outcome.spend:
        return _wish(outcome.retry_after)
    if outcome.status is not TaskStatus.FAILED or attempt >= options.attempts or not is_retryable(options, outcome):
        return None
    outage = options.outage
    if outage is None or not is_outage(outcome):
        return backoff_delay(options.backoff, attempt, jitter, outcome.retry_after)
    if attempt % outage.quick_tries == 0:
        return max(outage.delay * (1 + _SPREAD * jitter), _wish(outcome.retry_after))
    return backoff_delay(options.backoff, attempt % outage.quick_tries, jitter, outcome.retry_after)


def is_outage(outcome: Outcome) -> bool:
    """Whether the target was away, and not the task at fault."""
    if outcome.error is None:
        return False
    if outcome.error.code.startswith("http_"):
        return outcome.http_status is not None and outcome.http_status >= 500
    return outcome.error.code in OUTAGE_ERRORS


def too_late(options: Options, ref: TaskRef, begins: float) -> bool:
    """Whether a task that was attempted before may not begin another attempt then."""
    return options.task_deadline is not None and ref.since > 0 and begins >= ref.since + options.task_deadline


def late(options: Options, cause: TaskError | None) -> TaskError:
    """How a task ends for which it is too late."""
    last = "" if cause is None else f"; at last: {cause.message}"
    return TaskError("deadline", f"no attempt succeeded within {options.task_deadline:g} seconds{last}")


def backoff_delay(backoff: Backoff, attempt: int, jitter: float, wish: float | None) -> float:
    """Seconds until the next attempt after the `attempt`-th, with what the target wished for on top."""
    bound = _bound(backoff, attempt)
    return (bound * jitter if backoff.jitter else bound) + _wish(wish)


def is_retryable(options: Options, outcome: Outcome) -> bool:
    """Whether such a failure may go another way next time."""
    error = outcome.error
    if error is None:
        return False
    if error.code.startswith("http_"):
        return outcome.http_status in options.retry_statuses
    if options.retry_errors is not None:
        return error.code in options.retry_errors and error.code not in FINAL_ERRORS
    return error.code in RETRYABLE_ERRORS


def _bound(backoff: Backoff, attempt: int) -> float:
    try:
        grown = backoff.base * backoff.rate ** (attempt - 1)
    except OverflowError:
        return backoff.cap
    return max(0.0, min(backoff.cap, grown))


def _wish(retry_after: float | None) -> float:
    return 0.0 if retry_after is None else max(0.0, min(retry_after, MAX_RETRY_AFTER))
