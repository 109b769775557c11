"""How many outcomes may wait for the store: what it records in a part of a second, and no less for its own sake."""

import itertools
from collections.abc import Callable, Iterator

import pytest

from conveyor.process.unrecorded_limit import UnrecordedLimit

LEAST = 128
# Outcomes are collected for so long before they are flushed.
LINGER = 0.05


class Store:
    """Runners hand over as many outcomes as the limit allows, again and again; the store takes `seconds` for them."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.limit = UnrecordedLimit()
        self.seconds = seconds
        self.now = 100.0

    def record(self, count: int | None = None) -> float:
        """One flush. Returns the outcomes a second that were recorded, from the first one to the end of the flush."""
        count = self.limit.count if count is None else count
        since = self.now
        self.now += LINGER
        self.limit.begin_flush(self.now)
        self.now += self.seconds(count)
        self.limit.end_flush(self.now, count, since)
        return count / (self.now - since)

    def rates(self) -> Iterator[float]:
        return (self.record() for _ in itertools.count())


def _affine(latency: float, each: float) -> Callable[[int], float]:
    return lambda count: latency + count * each


@pytest.mark.parametrize("latency", [0.1, 0.2, 0.3, 0.35])
def test_a_store_whose_flushes_take_long_whatever_their_size_gets_no_smaller_ones(latency: float) -> None:
    store = Store(_affine(latency, 20e-6))
    first, *_, last = itertools.islice(store.rates(), 300)
    assert store.limit.count >= 1200
    assert last > 0.99 * first


@pytest.mark.parametrize("latency", [0.0, 0.05, 0.2, 0.3, 0.4, 0.6])
@pytest.mark.parametrize("each", [10e-6, 100e-6, 1e-3, 10e-3])
def test_no_more_waits_than_is_recorded_in_half_a_second(latency: float, each: float) -> None:
    store = Store(_affine(latency, each))
    *_, last = itertools.islice(store.rates(), 300)
    assert store.limit.count <= max(LEAST, 0.5 * last)


def test_a_store_that_became_slow_has_less_waiting_soon() -> None:
    store = Store(_affine(0.01, 20e-6))
    for _ in range(100):
        store.record()
    assert store.limit.count == 8000
    store.seconds = _affine(0.01, 1e-3)
    for _ in range(12):
        store.record()
    assert store.limit.count <= 600


def test_what_few_outcomes_come_lowers_nothing() -> None:
    store = Store(_affine(0.01, 20e-6))
    for _ in range(100):
        store.record()
    for _ in range(100):
        store.record(3)
    assert store.limit.count == 8000


def test_a_limit_that_was_lowered_rises_again() -> None:
    store = Store(_affine(2.0, 0.0))
    for _ in range(30):
        store.record()
    assert store.limit.count == LEAST
    store.seconds = _affine(0.02, 20e-6)
    for _ in range(100):
        store.record()
    assert store.limit.count == 8000


def test_flushes_that_overlap_are_measured_by_the_time_that_one_is_under_way() -> None:
    limit = UnrecordedLimit()
    # Two at once, 4,000 in 0.4 s, then nothing for an hour, which is no time of the store.
    limit.begin_flush(10.0)
    limit.begin_flush(10.0)
    limit.end_flush(10.05, 2000, 10.0)
    limit.end_flush(10.09, 2000, 10.0)
    limit.begin_flush(3600.0)
    limit.end_flush(3600.31, 4000, 3600.0)
    assert limit.count == int(1200 + 0.3 * (8000 / 0.4 * 0.3 - 1200))
