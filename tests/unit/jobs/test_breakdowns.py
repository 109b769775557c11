"""Breakdowns: what is added in any order and in any parts is the same, and it stays small whatever a run does."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.jobs.breakdowns import (
    MAX_BUCKETS,
    MAX_GROUPS,
    MAX_HOSTS,
    OTHER,
    WINDOW,
    Breakdown,
    FailedAttempt,
    decode_breakdown,
    encode_breakdown,
)
from conveyor.jobs.task_hosts import task_host, task_hosts
from conveyor.model import TaskError

NOW = 1_700_000_000.0
# What Conveyor stores in one document with ease, on every engine.
MAX_BYTES = 100_000

Attempt = tuple[str, float, float, str | None, bool]
ATTEMPTS = st.lists(
    st.tuples(
        st.sampled_from(["a.example", "b.example", ""]),
        st.floats(0.0, 100.0),
        st.floats(0.0, 20 * WINDOW).map(lambda after: NOW + after),
        st.sampled_from([None, None, "timeout", "http_503"]),
        st.booleans(),
    ),
    max_size=40,
)


def failed(
    host: str, code: str = "timeout", *, index: int = 1, message: str = "slow", retried: bool = False
) -> FailedAttempt:
    return FailedAttempt(index, 1, host, TaskError(code, message), None, 0.5, retried)


def add(breakdown: Breakdown, attempt: Attempt) -> None:
    host, seconds, at, code, is_retried = attempt
    if code is None:
        breakdown.add_successes([host], [seconds], at)
    else:
        breakdown.add_failures([FailedAttempt(1, 1, host, TaskError(code, "m"), None, seconds, is_retried)], at)


def plain(breakdown: Breakdown) -> object:
    """Without samples, which are those that came first."""
    raw = msgspec.to_builtins(breakdown)
    groups = {code: {host: group[:2] for host, group in hosts.items()} for code, hosts in raw[2].items()}
    hosts = {host: (*tally[:5], sorted(tally[8].items())) for host, tally in raw[0].items()}
    return hosts, groups, sorted(raw[4].items()), raw[3]


@given(ATTEMPTS, st.integers(1, 5))
def test_parts_in_any_order_are_the_whole(attempts: list[Attempt], parts: int) -> None:
    whole = Breakdown()
    for attempt in attempts:
        add(whole, attempt)
    merged = Breakdown()
    for start in reversed(range(parts)):
        part = Breakdown()
        for attempt in attempts[start::parts]:
            add(part, attempt)
        read = decode_breakdown(encode_breakdown(part))
        assert read is not None
        merged.merge(read)
    while merged.width < whole.width:
        merged._widen()
    assert plain(merged) == plain(whole)
    assert sum(tally.attempts for tally in whole.hosts.values()) == len(attempts)
    assert sum(map(sum, whole.buckets.values())) == len(attempts)


def test_any_number_of_hosts_and_errors_stays_small() -> None:
    breakdown, count = Breakdown(), 0
    for start in range(0, 20_000, 500):
        part = Breakdown()
        hosts = [f"host-{number}.example" for number in range(start, start + 500)]
        part.add_successes(
            [*hosts, *["large.example"] * 500], [0.001 * (number + 1) for number in range(1000)], NOW + start
        )
        part.add_failures(
            [failed(host, f"code_{place % 90}", index=place, message=host * 50) for place, host in enumerate(hosts)],
            NOW,
        )
        count += 1500
        breakdown.merge(part)
    assert len(breakdown.hosts) <= MAX_HOSTS
    assert sum(map(len, breakdown.groups.values())) <= 2 * MAX_GROUPS
    assert len(encode_breakdown(breakdown)) < MAX_BYTES
    assert sum(tally.attempts for tally in [*breakdown.hosts.values(), breakdown.other]) == count
    assert breakdown.hosts["large.example"].succeeded == 20_000
    groups = [group for hosts in breakdown.groups.values() for group in hosts.values()]
    assert sum(group.failed for group in groups) == 20_000
    assert breakdown.groups[OTHER][OTHER].failed > 0


def test_a_long_run_has_wide_buckets() -> None:
    breakdown = Breakdown()
    for hour in range(24 * 30):
        breakdown.add_successes(["a.example"] * 2, [1.0, 2.0], NOW + 3600 * hour)
    assert max(breakdown.buckets) - min(breakdown.buckets) < MAX_BUCKETS
    assert sum(map(sum, breakdown.buckets.values())) == 2 * 24 * 30
    assert breakdown.width >= 3600


def test_throughput_is_that_of_the_last_moments() -> None:
    breakdown = Breakdown()
    first = WINDOW * (NOW // WINDOW)
    for second in range(2 * WINDOW):
        breakdown.add_successes(["a.example"] * 5, [1.0] * 5, first + second)
    tally = breakdown.hosts["a.example"]
    assert tally.rate(first + 2 * WINDOW) == pytest.approx(5.0, rel=0.05)
    assert tally.rate(first + 2.5 * WINDOW) == pytest.approx(5.0 / 1.5, rel=0.05)
    assert tally.rate(first + 10 * WINDOW) == 0.0
    assert (tally.percentile(0.5), tally.percentile(0.95)) == (pytest.approx(1.0, rel=0.1), pytest.approx(1.0, rel=0.1))


def test_samples_differ() -> None:
    breakdown = Breakdown()
    messages = ["slow", "slow", "cut", "reset", "refused"]
    breakdown.add_failures([failed("a.example", index=at, message=text) for at, text in enumerate(messages)], NOW)
    group = breakdown.groups["timeout"]["a.example"]
    assert (group.failed, [sample.index for sample in group.samples]) == (5, [0, 2, 3])


def test_another_version_is_not_overwritten_in_its_own_form() -> None:
    assert decode_breakdown(b"not ours") is None


@given(
    st.lists(
        st.one_of(
            st.sampled_from(
                [
                    "http://a.example",
                    "http://a.example/1",
                    "https://a.example.org/x",
                    "http://a.example:80/",
                    "ftp://x/y",
                ]
            ),
            st.text(max_size=5),
            st.builds(lambda host: {"url": f"http://{host}/"}, st.sampled_from(["B.example", "[::1]:80"])),
        )
    )
)
def test_hosts_of_neighbours_are_those_of_each(inputs: list[object]) -> None:
    texts = [json.dumps(each) for each in inputs]
    assert task_hosts(texts) == [task_host(text) or "" for text in texts]
