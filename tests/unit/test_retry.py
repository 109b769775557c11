"""Retry: what is tried again and when, over all options and outcomes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.model import Backoff, Options, Outcome, TaskError
from conveyor.process.retry import MAX_RETRY_AFTER, RETRYABLE_ERRORS, retry_delay
from conveyor.states import TaskStatus

FINAL_ERRORS = [
    "target_refused",
    "bad_url",
    "bad_input",
    "body_too_large",
    "too_many_redirects",
    "bad_redirect",
    "decode_failed",
    "tls_failed",
    "internal",
    "handler_missing",
    "result_not_json",
]

backoffs = st.builds(
    Backoff,
    base=st.floats(0, 1e6),
    rate=st.floats(1, 100),
    cap=st.floats(0, 1e6),
    jitter=st.booleans(),
)
attempts = st.integers(1, 5000)
jitters = st.floats(0, 1, exclude_max=True)
wishes = st.none() | st.floats(-1e9, 1e12)


def failed(code: str, http_status: int | None = None, retry_after: float | None = None) -> Outcome:
    return Outcome(TaskStatus.FAILED, http_status, TaskError(code, ""), retry_after=retry_after)


@given(backoffs, attempts, jitters, wishes, st.sampled_from(sorted(RETRYABLE_ERRORS)))
def test_a_delay_is_within_its_bounds(
    backoff: Backoff, attempt: int, jitter: float, wish: float | None, code: str
) -> None:
    delay = retry_delay(Options(backoff=backoff, attempts=attempt + 1), attempt, failed(code, None, wish), jitter)
    floor = min(max(wish or 0.0, 0.0), MAX_RETRY_AFTER)
    assert delay is not None
    assert math.isfinite(delay)
    assert floor <= delay <= floor + backoff.cap


@given(backoffs, st.integers(1, 50), jitters)
def test_full_jitter_is_a_share_of_the_exponential_bound(backoff: Backoff, attempt: int, jitter: float) -> None:
    delay = retry_delay(Options(backoff=backoff, attempts=100), attempt, failed("timeout"), jitter)
    bound = min(backoff.cap, backoff.base * backoff.rate ** (attempt - 1))
    assert delay == (bound * jitter if backoff.jitter else bound)


@given(st.integers(1, 40), jitters)
def test_the_bound_never_shrinks(attempt: int, jitter: float) -> None:
    options = Options(attempts=1000)
    now, later = (retry_delay(options, number, failed("timeout"), jitter) for number in (attempt, attempt + 1))
    assert now is not None
    assert later is not None
    assert now <= later


@given(st.integers(1, 20), st.integers(1, 20), jitters)
def test_attempts_are_counted(attempt: int, allowed: int, jitter: float) -> None:
    delay = retry_delay(Options(attempts=allowed), attempt, failed("timeout"), jitter)
    assert (delay is None) == (attempt >= allowed)


@given(st.integers(100, 599), st.lists(st.integers(100, 599), max_size=8), jitters)
def test_a_status_is_retried_if_the_job_lists_it(status: int, listed: list[int], jitter: float) -> None:
    delay = retry_delay(Options(retry_statuses=listed), 1, failed(f"http_{status}", status), jitter)
    assert (delay is not None) == (status in listed)


@given(st.integers(100, 599), jitters, wishes)
def test_a_success_is_never_retried(status: int, jitter: float, wish: float | None) -> None:
    options = Options(retry_statuses=[status], success_statuses=[status])
    assert retry_delay(options, 1, Outcome(TaskStatus.SUCCEEDED, status, retry_after=wish), jitter) is None


@pytest.mark.parametrize("code", FINAL_ERRORS)
def test_what_would_end_the_same_way_is_final(code: str) -> None:
    assert retry_delay(Options(), 1, failed(code, 503, retry_after=1.0), 0.5) is None


@pytest.mark.parametrize("code", sorted(RETRYABLE_ERRORS))
def test_what_may_go_another_way_is_tried_again(code: str) -> None:
    assert retry_delay(Options(), 1, failed(code), 0.5) == 0.5


def test_retry_after_does_not_make_an_answer_retryable() -> None:
    assert retry_delay(Options(), 1, failed("http_404", 404, retry_after=1.0), 0.5) is None


def test_tasks_that_were_told_the_same_moment_come_back_apart() -> None:
    outcome = failed("http_429", 429, retry_after=60.0)
    delays = {retry_delay(Options(), 1, outcome, jitter / 10) for jitter in range(10)}
    assert len(delays) == 10
    assert min(delay for delay in delays if delay is not None) == 60.0
