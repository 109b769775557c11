"""The line of a lane: what comes again before what is new, within the bound, and nothing lost."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.process.retry_first_queue import RetryFirstQueue


@dataclass(frozen=True)
class One:
    number: int
    recovered: bool
    is_lost: bool = False
    is_suspect: bool = False

    @property
    def is_plain(self) -> bool:
        return not (self.is_lost or self.is_suspect)


def filled(ratio: int, again: int, new: int) -> RetryFirstQueue[One]:
    line: RetryFirstQueue[One] = RetryFirstQueue(ratio)
    line.extend(One(number, recovered=False) for number in range(new))
    line.extend(One(number, recovered=True) for number in range(again))
    return line


def drained(line: RetryFirstQueue[One]) -> list[One]:
    return [line.popleft() for _ in range(len(line))]


def test_four_to_one_and_each_in_its_order() -> None:
    taken = drained(filled(4, 8, 4))
    assert "".join("a" if one.recovered else "n" for one in taken) == "aaaanaaaannn"
    assert [one.number for one in taken if one.recovered] == list(range(8))
    assert [one.number for one in taken if not one.recovered] == list(range(4))


@given(ratio=st.integers(1, 6), again=st.integers(0, 30), new=st.integers(0, 30))
def test_neither_starves(ratio: int, again: int, new: int) -> None:
    line = filled(ratio, again, new)
    assert (line.recovered, line.new) == (again, new)
    run = longest = 0
    while line.recovered and line.new:
        run = run + 1 if line.popleft().recovered else 0
        longest = max(longest, run)
    assert longest <= ratio
    rest = drained(line)
    assert line.take_counts == (again, new)
    assert not line
    assert len({one.recovered for one in rest}) <= 1


def test_who_is_put_back_is_next_of_its_kind() -> None:
    line = filled(4, 2, 2)
    first = line.popleft()
    line.appendleft(first)
    assert line.popleft() == first
    line.extendleft([One(8, recovered=False), One(9, recovered=False)])
    assert [one.number for one in drained(line) if not one.recovered] == [9, 8, 0, 1]


def test_from_the_end_new_ones_go_first() -> None:
    line = filled(4, 1, 1)
    assert [line.pop().recovered, line.pop().recovered] == [False, True]
    with pytest.raises(IndexError):
        line.pop()


def test_iterating_and_clearing() -> None:
    line = filled(4, 2, 3)
    assert len(list(line)) == 5
    line.clear()
    assert list(line) == []


def test_plain_items_are_taken_together_up_to_one_that_is_not() -> None:
    line: RetryFirstQueue[One] = RetryFirstQueue(4)
    line.extend(One(number, recovered=False, is_lost=number == 5, is_suspect=number == 7) for number in range(9))
    assert [one.number for one in line.take_plain(3)] == [0, 1, 2]
    assert [one.number for one in line.take_plain(9)] == [3, 4]
    assert line.take_plain(9) == []
    assert line.drop_lost() == 1
    assert [one.number for one in line.take_plain(9)] == [6]
    assert line.take_plain(9) == [] and line.popleft().number == 7
    assert line.take_counts == (0, 7)


def test_no_plain_items_are_taken_while_recovered_ones_wait() -> None:
    line = filled(2, 1, 3)
    assert line.take_plain(3) == []
    assert line.popleft().recovered
    assert [one.number for one in line.take_plain(3)] == [0, 1, 2]
