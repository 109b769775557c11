"""Revisits: when a role checks each of its items again. One that it never checked comes first. One that has changed is
due in the next pass; one that stays the same is due after a pause, which doubles up to a limit. So a thousand quiet
runs cost a few calls a second, and a busy one is followed closely. Of many new items most are gone by the time the list
is read again: those are not checked before.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import TypeVar

import msgspec

from conveyor.clock import Clock

T = TypeVar("T")

# New items that are checked at once. If there are more, they wait for the next read of the list.
FEW = 32


class _Visit(msgspec.Struct, frozen=True):
    """An item as it was when it was last checked."""

    mark: object
    found: object
    pause: float
    # On the monotonic clock, as no wall clock that is set back may keep an item from its checks.
    due_at: float


class Revisits:
    """The items of one role. Lives as long as the role."""

    def __init__(self, clock: Clock, first: float, longest: float) -> None:
        """The pauses after the first check and the last that found nothing new."""
        self._clock = clock
        self._first = first
        self._longest = longest
        self._visits: dict[str, _Visit] = {}
        # Items that were never checked, and as of when they were first listed.
        self._new: dict[str, float] = {}

    def due(
        self,
        items: Sequence[T],
        name: Callable[[T], str],
        mark: Callable[[T], object],
        listed_at: float | None = None,
    ) -> list[T]:
        """The items to check now: never checked ones first, then changed ones, then those whose pause is over, the most
        overdue first. `mark` changes with what the caller knows of an item before it checks it. Others are forgotten.
        Many new items wait until a list has them that was read after `listed_at`; without it none does."""
        now, order = self._clock.monotonic(), list[tuple[float, T]]()
        visits: dict[str, _Visit] = {}
        new = self._new_items([name(item) for item in items], inf if listed_at is None else listed_at)
        for item in items:
            visit = self._visits.get(name(item))
            if visit is None:
                if name(item) not in new:
                    order.append((-inf, item))
                continue
            visits[name(item)] = visit
            if visit.mark != mark(item):
                order.append((0.0, item))
            elif visit.due_at <= now:
                order.append((visit.due_at, item))
        self._visits = visits
        return [item for _, item in sorted(order, key=lambda pair: pair[0])]

    def _new_items(self, names: Sequence[str], listed_at: float) -> set[str]:
        """Items that are not checked yet because they are new, like many others."""
        unchecked = [name for name in names if name not in self._visits]
        self._new = {name: self._new.get(name, listed_at) for name in unchecked}
        new = {name for name, first in self._new.items() if first == listed_at < inf}
        return new if len(new) > FEW else set()

    def last_found(self, name: str) -> object | None:
        """What the last check of an item found; None if it was never checked."""
        visit = self._visits.get(name)
        return None if visit is None else visit.found

    def checked(self, name: str, mark: object, found: object, by: float = inf) -> None:
        """Note a check, and what it found. `by` is when the item is due at the latest."""
        before = self._visits.get(name)
        pause = 0.0
        if before is not None and (before.mark, before.found) == (mark, found):
            pause = min(max(before.pause * 2, self._first), self._longest)
        # A time that has passed is over: it does not make an item due in every pass.
        left = by - self._clock.now()
        due_at = self._clock.monotonic() + min(pause, left if left > 0 else inf)
        self._visits[name] = _Visit(mark, found, pause, due_at)
