"""Revisits: when a role checks each of its items again. One that it never checked comes first. One that has changed is
due in the next pass; one that stays the same is due after a pause, which doubles up to a limit. So a thousand quiet
runs cost a few calls a second, and a busy one is followed closely.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import TypeVar

import msgspec

from conveyor.clock import Clock

T = TypeVar("T")


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

    def due(self, items: Sequence[T], name: Callable[[T], str], mark: Callable[[T], object]) -> list[T]:
        """The items to check now: never checked ones first, then changed ones, then those whose pause is over, the most
        overdue first. `mark` changes with what the caller knows of an item before it checks it. Others are
        forgotten."""
        now, order = self._clock.monotonic(), list[tuple[float, T]]()
        visits: dict[str, _Visit] = {}
        for item in items:
            visit = self._visits.get(name(item))
            if visit is None:
                order.append((-inf, item))
                continue
            visits[name(item)] = visit
            if visit.mark != mark(item):
                order.append((0.0, item))
            elif visit.due_at <= now:
                order.append((visit.due_at, item))
        self._visits = visits
        return [item for _, item in sorted(order, key=lambda pair: pair[0])]

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
