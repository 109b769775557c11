"""Slot times: who was served least, as of the beginning of a turn."""

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


def test_a_tenant_is_charged_for_all_workers_that_serve_it() -> None:
    times = SlotTimes(1.0)
    times.update([(A, A1), (B, B1)], 0.0)
    times.charge(A, A1, 1.0, workers=10)
    times.charge(B, B1, 9.0)
    times.update([(A, A1), (B, B1)], 1.0)
    assert times.order(A, A1)[0] > times.order(B, B1)[0]
    assert times.order(A, A1)[1] < times.order(B, B1)[1], "the run had what it had"
