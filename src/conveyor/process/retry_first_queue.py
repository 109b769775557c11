"""RetryFirstQueue: the references that wait in one lane. Recovered ones (retried, postponed, requeued) go before new
ones, up to a ratio, so that neither starves."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar


class Waits(Protocol):
    """An item of the queue."""

    @property
    def recovered(self) -> bool:
        """Whether it came from the recovery queue."""

    @property
    def is_lost(self) -> bool:
        """Whether its message may be another worker's by now."""

    @property
    def is_plain(self) -> bool:
        """Whether nothing is to be done before it starts: it is not lost, and was not delivered before."""


T = TypeVar("T", bound=Waits)


class RetryFirstQueue(Generic[T]):
    """Used like a deque. While it has both, each new item follows `ratio` recovered ones."""

    def __init__(self, ratio: int) -> None:
        self._ratio = ratio
        self._recovered: deque[T] = deque()
        self._new: deque[T] = deque()
        # Recovered items that were taken since the last new one.
        self._streak = 0
        self._take_counts = [0, 0]

    def __len__(self) -> int:
        return len(self._recovered) + len(self._new)

    def __iter__(self) -> Iterator[T]:
        yield from self._recovered
        yield from self._new

    @property
    def recovered(self) -> int:
        return len(self._recovered)

    @property
    def new(self) -> int:
        return len(self._new)

    @property
    def take_counts(self) -> tuple[int, int]:
        """How many recovered and how many new items were taken so far."""
        return self._take_counts[0], self._take_counts[1]

    @property
    def is_new_due(self) -> bool:
        """Whether a new item is next, if there is one."""
        return self._streak >= self._ratio

    def append(self, item: T) -> None:
        (self._recovered if item.recovered else self._new).append(item)

    def extend(self, items: Iterable[T]) -> None:
        for item in items:
            self.append(item)

    def appendleft(self, item: T) -> None:
        (self._recovered if item.recovered else self._new).appendleft(item)

    def extendleft(self, items: Iterable[T]) -> None:
        for item in items:
            self.appendleft(item)

    def popleft(self) -> T:
        if self._recovered and not (self._new and self.is_new_due):
            self._streak += 1
            self._take_counts[0] += 1
            return self._recovered.popleft()
        self._streak = 0
        self._take_counts[1] += 1
        return self._new.popleft()

    def take_plain(self, limit: int) -> list[T]:
        """Take items as `popleft` does, up to `limit`, up to the first that is not plain, and none while recovered ones
        wait."""
        new = self._new
        taken: list[T] = []
        if not self._recovered:
            while new and len(taken) < limit and new[0].is_plain:
                taken.append(new.popleft())
        if taken:
            self._streak = 0
            self._take_counts[1] += len(taken)
        return taken

    def drop_lost(self) -> int:
        """Remove lost items from the front, and return how many: the next item is not lost."""
        count = len(self)
        for items in (self._recovered, self._new):
            while items and items[0].is_lost:
                items.popleft()
        return count - len(self)

    def pop(self) -> T:
        """Remove the item that would be taken last."""
        return self._new.pop() if self._new else self._recovered.pop()

    def clear(self) -> None:
        self._recovered.clear()
        self._new.clear()
