"""HostLanes: the lanes of one worker that send requests to one host, and how they share its limit. They get equal parts
of it, or take turns if there are more lanes than requests at once.

A lane without slots that runs nothing has no part in it, and looks for room when it gets some.
"""

from itertools import islice
from math import ceil
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from conveyor.coordination.pace import HostPace

# The largest limit, and more than any lane sends.
LARGEST = 10_000
# References that a lane which keeps to its part sends ahead, beside as many as run.
_AHEAD = 128


class PaceUser(Protocol):
    """A lane, as the pace of a host sees it. It may send more references than it runs at once."""

    @property
    def slots(self) -> int:
        """Tasks that the lane may run at once now, as far as the worker is concerned."""

    @property
    def width(self) -> int:
        """Tasks that the lane runs at once at most: its slots, or less if it keeps to its part."""

    @property
    def bound(self) -> int:
        """Tasks that the lane may ever run at once."""

    @property
    def keeps_part(self) -> bool:
        """Whether the lane runs no more than its part of the limit, however many references it has sent."""

    def on_room(self, pace: "HostPace") -> None:
        """References that wait for this host may start now."""

    def on_lower(self, pace: "HostPace") -> None:
        """The host is paused, or gets fewer requests than were sent: those that have not started must wait."""


class HostLanes:
    """`limit` is how many requests at once the host gets from them."""

    __slots__ = (
        "_ahead",
        "_is_divided",
        "_known",
        "_parts",
        "_slots",
        "_turns",
        "in_flight",
        "in_use",
        "limit",
        "users",
        "waiting",
    )

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # What was sent, how much of it runs at once, and what lanes that keep to their parts have sent beyond those.
        self.in_flight = 0
        self.in_use = 0
        self._ahead = 0
        # What each lane has in flight, the lanes with references that wait, and those of them that have slots, in the
        # order of their turns.
        self.users: dict[PaceUser, int] = {}
        self.waiting: dict[PaceUser, None] = {}
        self._turns: dict[PaceUser, None] = {}
        # Of lanes that have slots or something in flight: their slots, what of each runs and what is sent ahead.
        self._known: dict[PaceUser, tuple[int, int, int]] = {}
        # All slots; and the lanes' parts of the limit, if there are more slots than that and they were asked for.
        self._slots = 0
        self._parts: dict[PaceUser, int] | None = None
        # Whether lanes that keep to their parts know them as they are now.
        self._is_divided = False

    @property
    def is_idle(self) -> bool:
        return not (self.users or self.waiting)

    @property
    def takes_turns(self) -> bool:
        """Whether there are more lanes than requests at once."""
        return len(self._known) > self.limit

    def set_limit(self, limit: int) -> None:
        if limit != self.limit:
            self.limit, self._parts, self._is_divided = limit, None, False

    def room(self, user: PaceUser) -> int:
        """Return how many more references this lane may send. A lane that cannot run more than its part may send ahead
        as it likes, and one that keeps to it some."""
        lanes = len(self._known) + (user not in self._known)
        if lanes > self.limit:
            # They take turns.
            return int(user in islice(self._turns, max(0, self.limit - self._exact)))
        if user.keeps_part:
            part = self.part(user)
            return LARGEST if part == LARGEST else max(0, 2 * part + _AHEAD - self.users.get(user, 0))
        share = ceil(self.limit / lanes)
        if share >= user.bound:
            return LARGEST
        return max(0, min(self.limit - self._exact, share - self.users.get(user, 0)))

    def share(self, user: PaceUser) -> int:
        """Return how many requests at once this lane may count on."""
        lanes = len(self._known) + (user not in self._known)
        return max(1, self.limit // lanes)

    def part(self, user: PaceUser) -> int:
        """Return how many requests at once this lane may make now, if it keeps to that."""
        is_known = user in self._known
        if self._slots + (0 if is_known else user.slots) <= self.limit:
            return LARGEST
        lanes = len(self._known) + (not is_known)
        if lanes >= self.limit:
            return 1
        if not is_known:
            return self.limit // lanes
        if self._parts is None:
            self._parts = self._divide()
        return self._parts[user]

    def wait(self, user: PaceUser, *, is_waiting: bool) -> None:
        """Note whether references of a lane wait; its turn is after that of the others."""
        self.waiting.pop(user, None)
        self._turns.pop(user, None)
        if is_waiting:
            self.waiting[user] = None
        self.note_width(user)

    def start(self, user: PaceUser, count: int) -> None:
        """Count references as sent."""
        self.users[user] = self.users.get(user, 0) + count
        self.in_flight += count
        self.note_width(user)

    def finish(self, user: PaceUser, count: int) -> None:
        """Count references as no longer sent."""
        left = self.users.get(user, 0) - count
        self.in_flight -= count
        if left > 0:
            self.users[user] = left
        else:
            self.users.pop(user, None)
        self.note_width(user, count)

    def find_next(self, finished: PaceUser | None = None) -> list[PaceUser]:
        """Return the lanes that may send more of what waits. With `finished` it is because this lane sends less."""
        waiting, found = list(self._turns), []
        if waiting and (lanes := len(self._known)) <= self.limit:
            # What one of them sends leaves the parts of the others as they are.
            is_new, self._is_divided = finished is None or not self._is_divided, True
            known = waiting if is_new else [finished] if finished in self._turns else []
            found = [user for user in known if user.keeps_part and self.room(user) > 0]
            # A lane that has its share leaves the rest to those behind it.
            share = ceil(self.limit / lanes)
            others = [user for user in waiting if not user.keeps_part]
            waiting = [user for user in others if share >= user.bound or self.users.get(user, 0) < share]
        return found + waiting[: max(0, self.limit - self._exact)]

    def note_width(self, user: PaceUser, finished: int = 0) -> None:
        """Note the slots and the width of a lane, and what it has sent. What runs beyond a width that has become less
        goes on: in use is less only as references are finished."""
        slots, runs, ahead = self._known.get(user, (-1, 0, 0))
        count = self.users.get(user, 0)
        waits = user in self.waiting and user.slots > 0
        if count or waits:
            new_slots, new_runs = user.slots, min(count, max(user.width, runs - finished))
            new_ahead = count - new_runs if user.keeps_part else 0
            self._known[user] = new_slots, new_runs, new_ahead
        else:
            new_slots, new_runs, new_ahead = -1, 0, 0
            self._known.pop(user, None)
        if waits:
            self._turns.setdefault(user)
        else:
            self._turns.pop(user, None)
        if new_slots != slots:
            self._slots += max(0, new_slots) - max(0, slots)
            self._parts, self._is_divided = None, False
        self.in_use += new_runs - runs
        self._ahead += new_ahead - ahead

    @property
    def _exact(self) -> int:
        """What is in flight, without what waits in lanes that keep to their parts."""
        return self.in_flight - self._ahead

    def _divide(self) -> dict[PaceUser, int]:
        """Divide the limit equally among the lanes; what one has no slots for is for the others."""
        parts: dict[PaceUser, int] = {}
        limit, left = self.limit, len(self._known)
        for user in sorted(self._known, key=lambda user: self._known[user][0]):
            parts[user] = max(1, min(self._known[user][0], ceil(limit / left)))
            limit -= parts[user]
            left -= 1
        return parts
