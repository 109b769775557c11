"""Whether a failed attempt is tried again, and when. Gets the job's options and what the attempt came to, hands on
a delay in seconds, or None when the outcome is final. It keeps no state: chance comes in as `jitter`."""

from conveyor.model import Backoff, Options, Outcome
from conveyor.states import TaskStatus

# A target may ask for more patience than this; a job has a deadline too.
MAX_RETRY_AFTER = 3600.0

# What may well go another way next time. Not here, because the same attempt would end the same way: target_refused,
# bad_url, body_too_large, too_many_redirects, bad_redirect, decode_failed, tls_failed, internal; handler_missing and
# result_not_json; content_encoded, checksum_mismatch, export_failed, export_timeout and export_api_failed.
# `http_<status>` is decided by the job's own list of statuses.
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


def retry_delay(options: Options, attempt: int, outcome: Outcome, jitter: float) -> float | None:
    """Seconds until the next attempt after the `attempt`-th (from 1) ended so, or None: the outcome is terminal.

    `jitter` is in [0, 1). What the target asked for by Retry-After comes on top of the backoff: tasks that were all
    told the same moment should not all come back in it. An outcome that spends no attempt only waits as long as it
    says.
    """
    if not outcome.spend:
        return _wish(outcome.retry_after)
    if outcome.status is not TaskStatus.FAILED or attempt >= options.attempts or not is_retryable(options, outcome):
        return None
    return backoff_delay(options.backoff, attempt, jitter, outcome.retry_after)


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
    return error.code in RETRYABLE_ERRORS


def _bound(backoff: Backoff, attempt: int) -> float:
    try:
        grown = backoff.base * backoff.rate ** (attempt - 1)
    except OverflowError:
        return backoff.cap
    return max(0.0, min(backoff.cap, grown))


def _wish(retry_after: float | None) -> float:
    return 0.0 if retry_after is None else max(0.0, min(retry_after, MAX_RETRY_AFTER))
