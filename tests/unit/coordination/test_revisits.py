"""When a role checks its items again."""

from conveyor.coordination.revisits import FEW, Revisits
from tests.support.clocks import ManualClock


def name(item: tuple[str, int]) -> str:
    return item[0]


def mark(item: tuple[str, int]) -> object:
    return item[1]


def checks_within(seconds: float, moves: bool) -> list[float]:
    """When one item is checked, in passes every two seconds."""
    clock, at = ManualClock(), list[float]()
    visits, began = Revisits(clock, 2.0, 60.0), clock.now()
    while clock.now() - began < seconds:
        for item in visits.due([("a", 1)], name, mark):
            at.append(clock.now() - began)
            visits.checked("a", mark(item), len(at) if moves else 0)
        clock.advance(2.0)
    return at


def test_the_pause_of_a_quiet_item_doubles_up_to_a_limit() -> None:
    # The second check, in the next pass, is the first that can find it unchanged.
    assert checks_within(400.0, moves=False) == [0, 2, 4, 8, 16, 32, 64, 124, 184, 244, 304, 364]


def test_a_clock_that_is_set_back_delays_no_check() -> None:
    clock = ManualClock()
    visits = Revisits(clock, 2.0, 60.0)
    for _ in range(10):
        visits.checked("a", 1, 0, clock.now() + 3600)
    clock.step(-7200)
    clock.advance(60.0)
    assert visits.due([("a", 1)], name, mark) == [("a", 1)]


def test_an_item_that_moves_is_checked_in_every_pass() -> None:
    assert checks_within(20.0, moves=True) == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18]


def test_a_change_ends_the_pause() -> None:
    clock = ManualClock()
    visits = Revisits(clock, 2.0, 60.0)
    for _ in range(10):
        visits.checked("a", 1, 0)
    clock.advance(2.0)
    assert visits.due([("a", 1)], name, mark) == []
    assert visits.due([("a", 2)], name, mark) == [("a", 2)]
    visits.checked("a", 2, 0)
    assert visits.due([("a", 2)], name, mark) == [("a", 2)], "and the pauses start anew"


def test_never_checked_items_come_first_then_changed_then_the_most_overdue() -> None:
    clock = ManualClock()
    visits = Revisits(clock, 2.0, 60.0)
    for item in ("late", "later", "changed"):
        visits.checked(item, 1, 0)
        clock.advance(1.0)
    clock.advance(10.0)
    items = [("later", 1), ("late", 1), ("changed", 2), ("new", 1)]
    assert [item for item, _ in visits.due(items, name, mark)] == ["new", "changed", "late", "later"]


def test_a_known_time_ends_the_pause_once() -> None:
    clock = ManualClock()
    visits = Revisits(clock, 2.0, 60.0)
    by = clock.now() + 5.0
    for _ in range(10):
        visits.checked("a", 1, 0, by)
    clock.advance(4.0)
    assert visits.due([("a", 1)], name, mark) == []
    clock.advance(1.0)
    assert visits.due([("a", 1)], name, mark) == [("a", 1)]
    visits.checked("a", 1, 0, by)
    assert visits.due([("a", 1)], name, mark) == []


def test_items_that_are_gone_are_forgotten() -> None:
    visits = Revisits(ManualClock(), 2.0, 60.0)
    visits.checked("a", 1, 0)
    assert visits.last_found("a") == 0
    visits.due([("b", 1)], name, mark)
    assert visits.last_found("a") is None


def test_many_new_items_wait_until_the_list_is_read_again() -> None:
    clock = ManualClock()
    visits = Revisits(clock, 2.0, 60.0)
    many = [(f"run {number}", 1) for number in range(FEW + 1)]
    assert visits.due(many, name, mark, listed_at=10.0) == []
    assert visits.due([*many, ("later", 1)], name, mark, listed_at=10.0) == [], "the same read of the list"
    # All but one are gone, and a few are new.
    assert visits.due([many[0], ("new", 1)], name, mark, listed_at=12.0) == [many[0], ("new", 1)]


def test_without_the_time_of_the_list_new_items_are_checked_at_once() -> None:
    visits = Revisits(ManualClock(), 2.0, 60.0)
    many = [(f"run {number}", 1) for number in range(FEW + 1)]
    assert visits.due(many, name, mark) == many
