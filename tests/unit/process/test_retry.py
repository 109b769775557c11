"""Retry: what is tried again and when, over all options and outcomes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.model import Backoff, InputJson, Options, Outage, Outcome, TaskError, TaskRef
from conveyor.process.retry import MAX_RETRY_AFTER, RETRYABLE_ERRORS, retry_delay, too_late
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


class TestOutage:
    OPTIONS = Options(
        attempts=10, backoff=Backoff(base=1, rate=2, jitter=False), outage=Outage(quick_tries=3, delay=900)
    )

    @pytest.mark.parametrize(("attempt", "delay"), [(1, 1), (2, 2), (3, 900), (4, 1), (5, 2), (6, 900), (9, 900)])
    def test_a_few_quick_tries_and_then_a_long_wait(self, attempt: int, delay: float) -> None:
        assert retry_delay(self.OPTIONS, attempt, failed("connect_failed"), 0.0) == delay
        assert retry_delay(self.OPTIONS, attempt, failed("http_503", 503), 0.0) == delay

    def test_not_all_come_back_in_one_moment(self) -> None:
        assert retry_delay(self.OPTIONS, 3, failed("timeout"), 0.5) == pytest.approx(945)

    def test_a_target_may_ask_for_more(self) -> None:
        assert retry_delay(self.OPTIONS, 3, failed("http_503", 503, 2000), 0.0) == 2000

    def test_other_failures_are_tried_as_ever(self) -> None:
        assert retry_delay(self.OPTIONS, 3, failed("http_429", 429), 0.0) == 4
        assert retry_delay(self.OPTIONS, 3, failed("handler_raised"), 0.0) == 4

    def test_attempts_are_spent_all_the_same(self) -> None:
        assert retry_delay(self.OPTIONS, 10, failed("connect_failed"), 0.0) is None


def test_a_job_may_choose_the_errors_that_are_tried_again() -> None:
    options = Options(retry_errors=["tls_failed", "stuck", "deadline"])
    assert retry_delay(options, 1, failed("tls_failed"), 0.0) is not None
    assert retry_delay(options, 1, failed("timeout"), 0.0) is None
    assert retry_delay(options, 1, failed("http_503", 503), 0.0) is not None, "statuses have a list of their own"
    for code in ("stuck", "deadline", "worker_lost", "target_down"):
        assert retry_delay(options, 1, failed(code), 0.0) is None


def test_too_late_is_counted_from_the_first_attempt() -> None:
    options = Options(task_deadline=100)
    begun = TaskRef(0, InputJson("1"), 2, since=1000)
    assert not too_late(options, begun, 1099)
    assert too_late(options, begun, 1100)
    assert not too_late(options, TaskRef(0, InputJson("1")), 1e12), "one that never began has all its time"
    assert not too_late(Options(), begun, 1e12)
