"""Line: the references that wait in one lane. Those that come again (retried, parked, reclaimed, stuck) go before new
ones, within a bound, so that neither starves."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar


class Waits(Protocol):
    """What stands in a line."""

    @property
    def recovered(self) -> bool:
        """Whether it came by the recovery queue."""


T = TypeVar("T", bound=Waits)


class RetryFirstQueue(Generic[T]):
    """As a deque. `ratio` of those that come again are taken, then a new one, for as long as there are both."""

    def __init__(self, ratio: int) -> None:
        self._ratio = ratio
        self._again: deque[T] = deque()
        self._new: deque[T] = deque()
        # Taken of those that come again since the last new one.
        self._streak = 0
        self._taken = [0, 0]

    def __len__(self) -> int:
        return len(self._again) + len(self._new)

    def __iter__(self) -> Iterator[T]:
        yield from self._again
        yield from self._new

    @property
    def again(self) -> int:
        return len(self._again)

    @property
    def new(self) -> int:
        return len(self._new)

    @property
    def taken(self) -> tuple[int, int]:
        """How many were taken in all: of those that come again, and new ones."""
        return self._taken[0], self._taken[1]

    @property
    def owes_new(self) -> bool:
        """Whether it is the turn of a new one, should there be any."""
        return self._streak >= self._ratio

    def append(self, one: T) -> None:
        (self._again if one.recovered else self._new).append(one)

    def extend(self, many: Iterable[T]) -> None:
        for one in many:
            self.append(one)

    def appendleft(self, one: T) -> None:
        (self._again if one.recovered else self._new).appendleft(one)

    def extendleft(self, many: Iterable[T]) -> None:
        for one in many:
            self.appendleft(one)

    def popleft(self) -> T:
        if self._again and not (self._new and self.owes_new):
            self._streak += 1
            self._taken[0] += 1
            return self._again.popleft()
        self._streak = 0
        self._taken[1] += 1
        return self._new.popleft()

    def pop(self) -> T:
        """The one that would be taken last."""
        return self._new.pop() if self._new else self._again.pop()

    def clear(self) -> None:
        self._again.clear()
        self._new.clear()
