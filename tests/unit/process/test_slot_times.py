"""Slot times: who was served least, as of the beginning of a turn."""

import random
from math import e

import pytest

from conveyor.model import RunId, TenantId
from conveyor.process.slot_times import SlotTimes

A, B, C = TenantId("a"), TenantId("b"), TenantId("c")
A1, A2, B1, C1 = RunId("a1"), RunId("a2"), RunId("b1"), RunId("c1")


def test_an_order_holds_for_a_turn() -> None:
    times = SlotTimes(1.0)
    times.update([(A, A1), (B, B1)], 0.0)
    times.charge(A, A1, 3.0)
    times.update([(A, A1), (B, B1)], 0.9)
    assert times.order(A, A1) == (0.0, 0.0)
    times.update([(A, A1), (B, B1)], 1.0)
    assert times.order(A, A1) > times.order(B, B1)


def test_a_newcomer_is_level_with_the_least_served() -> None:
    times = SlotTimes(1.0)
    times.update([(A, A1), (B, B1)], 0.0)
    times.charge(A, A1, 30.0)
    times.charge(B, B1, 20.0)
    times.update([(A, A1), (B, B1)], 1.0)
    assert times.order(C, C1)[0] == times.order(B, B1)[0], "in the middle of a turn"
    assert times.order(A, A2)[1] == times.order(A, A1)[1]
    times.update([(A, A1), (A, A2), (B, B1), (C, C1)], 2.0)
    assert times.order(C, C1)[0] == times.order(B, B1)[0], "and when the next one begins"
    assert times.order(A, A2)[1] == times.order(A, A1)[1]


def test_to_leave_and_return_brings_no_advantage() -> None:
    times = SlotTimes(1.0)
    times.update([(A, A1), (B, B1)], 0.0)
    times.charge(A, A1, 30.0)
    times.charge(B, B1, 20.0)
    times.update([(B, B1)], 1.0)
    times.update([(A, A1), (B, B1)], 2.0)
    assert times.order(A, A1)[0] > times.order(B, B1)[0]


def test_what_was_long_ago_is_forgotten() -> None:
    times = SlotTimes(1.0)
    times.update([(A, A1)], 0.0)
    times.charge(A, A1, 30.0)
    times.update([(A, A1)], 60.0)
    assert times.order(A, A1)[0] == 15.0
    times.update([(B, B1)], 3600.0)
    assert times.order(A, A1)[0] == times.order(B, B1)[0] == 0.0
    assert not times._runs.keys() - {B1}


# Of the draws of weights: the mean.
MEAN = 1 - 1 / e


def served_by(workers: int, chance: float = MEAN) -> SlotTimes:
    """A is served by so many workers, all others by this one alone."""
    return SlotTimes(1.0, lambda tenant: workers if tenant == A else 1, lambda: chance)


@pytest.mark.parametrize("workers", [2, 8, 10, 100])
def test_a_tenant_is_charged_for_all_workers_that_serve_it(workers: int) -> None:
    times = served_by(workers)
    times.update([(A, A1), (B, B1)], 0.0)
    times.begin([A, B], [A, B])
    times.charge(A, A1, 1.0)
    times.charge(B, B1, workers - 0.1)
    times.update([(A, A1), (B, B1)], 1.0)
    assert times.order(A, A1)[0] == pytest.approx(times.order(B, B1)[0] + 0.1, abs=0.05)
    assert times.order(A, A1)[1] <= times.order(B, B1)[1], "the run had what it had"


def test_what_nobody_else_needed_is_not_held_against_a_tenant() -> None:
    times = served_by(100)
    times.update([(A, A1), (B, B1)], 0.0)
    for turn in range(1, 100):
        times.begin([A], [A])
        times.charge(A, A1, 4.0)
        times.update([(A, A1), (B, B1)], turn)
    assert times.order(A, A1)[0] <= times.order(B, B1)[0] + 400.0, "the last turn, and not each of a hundred"


def test_debts_follow_the_number_of_workers() -> None:
    workers = 1
    times = SlotTimes(1.0, lambda tenant: workers if tenant == A else 1, lambda: MEAN)
    times.update([(A, A1), (B, B1)], 0.0)
    times.begin([A, B], [A, B])
    times.charge(A, A1, 1.0)
    workers = 100
    times.update([(A, A1), (B, B1)], 1.0)
    assert times.order(A, A1)[0] - times.order(B, B1)[0] == pytest.approx(100, abs=2), "it was at all of them"
    workers = 1
    times.update([(A, A1), (B, B1)], 2.0)
    assert times.order(A, A1)[0] - times.order(B, B1)[0] == pytest.approx(1, abs=0.1), "its other runs have finished"


def test_a_tenant_at_every_worker_has_its_part_within_seconds() -> None:
    """A hundred workers begin at the same time, each with the runs of one large tenant and of ten others, and slots for
    four. It has as much of the fleet as each of the others, at all times, and not one slot of each worker at once."""
    workers, others, slots = 100, 10, 4
    chance = random.Random(14).random
    fleet = [SlotTimes(1.0, lambda tenant: workers if tenant == A else 1, chance) for _ in range(workers)]
    tenants = [A, *(TenantId(f"tenant {number}") for number in range(others))]
    by_turn: list[int] = []
    for turn in range(240):
        by_turn.append(0)
        for times in fleet:
            times.update([(tenant, RunId(tenant)) for tenant in tenants], turn)
            dealt = sorted(tenants, key=lambda tenant: times.order(tenant, RunId(tenant)))[:slots]
            times.begin(dealt, tenants)
            for tenant in dealt:
                times.charge(tenant, RunId(tenant), 1.0)
            by_turn[turn] += A in dealt
    share = slots / others
    # In each twenty seconds after the first ones, and in all.
    parts = [sum(by_turn[start : start + 20]) for start in range(40, 240, 20)]
    assert min(parts) > 0, by_turn
    assert max(parts) < 3 * 20 * share, by_turn
    assert 0.6 * share < sum(parts) / 200 < 1.5 * share, by_turn
