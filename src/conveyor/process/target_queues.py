"""TargetQueues: the references of one lane whose targets have limits, in a queue for each target.

A reference stays in its queue until it starts, so that none is in hand while the coordinator is asked. One task asks,
for whole targets: for passes a moment ahead, and for few more slots than the lane can use. A slot that is left goes to
the next reference of its target without a call, unless targets wait that were not asked yet: these are next. A target
that refuses is asked again after a pause that grows, and a worker that has had slots of a target for a while gives one
back when another worker waits for it.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from itertools import islice, takewhile
from math import inf
from typing import Any, Generic, Protocol, TypeVar

import structlog

from conveyor.clock import Clock
from conveyor.coordination.limits import AHEAD, WAITER_SECONDS, TargetLimits
from conveyor.process.retry_first_queue import RetryFirstQueue, Waits

log = structlog.get_logger()

# How soon a target is asked again that had no slot, or when the coordinator failed: twice as long each time.
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0
# How long a worker keeps the slots of a target before it looks whether another waits for them, and for how long it then
# leaves the one that it gives back: the other asks within this time.
_LOOK_SECONDS = 5.0
_YIELD_SECONDS = 2 * _LONGEST_PAUSE
# Slots that a lane has beyond those that it can use at once: of targets that are next.
_IDLE_SLOTS = 2
# Targets that are asked for at once.
_ASKED_AT_ONCE = 64
# Seconds of a target's passes that a lane reserves at a time: part of what all workers may, so that each gets some.
_IN_HAND = AHEAD / 2
# Times that are so close are the same.
_TICK = 1e-6


class Queued(Waits, Protocol):
    """A reference. `slot` names the target of which it has one."""

    slot: str | None


T = TypeVar("T", bound=Queued)
Start = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class _Target(Generic[T]):
    """One target: its queue, and what the lane has of it."""

    def __init__(self, name: str | None, ratio: int) -> None:
        self.name = name
        self.queue: RetryFirstQueue[T] = RetryFirstQueue(ratio)
        # When each pass that was reserved may be used.
        self.passes: deque[float] = deque()
        # Slots that this worker has, how many of them are in use, and how many the coordinator may think that it has.
        self.slots = 0
        self.running = 0
        self.told = 0
        # As many as it was last counted with of the slots that are not in use.
        self.idle = 0
        # Before these times it is not asked for more passes, or slots, nor told of slots that are free again; and how
        # long it then rests if it refuses.
        self.passes_at = 0.0
        self.slots_at = 0.0
        self.tell_at = 0.0
        self.pause = _FIRST_PAUSE
        # When to look for other workers that wait; whether a slot goes back to them; until when they see this one wait.
        self.look_at = inf
        self.yields = False
        self.waits_until = 0.0
        self.wake_at = inf
        self.is_ready = False
        self.is_asking = False

    @property
    def free(self) -> int:
        return self.slots - self.running


class TargetQueues(Generic[T]):
    """`room` says how many more references the lane could start now, `wake` has it take those that can, and `start`
    runs a task of the lane's."""

    def __init__(
        self,
        limits: TargetLimits,
        clock: Clock,
        ratio: int,
        room: Callable[[], int],
        wake: Callable[[], None],
        start: Start,
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._ratio = ratio
        self._room = room
        self._wake = wake
        self._start = start
        self._targets: dict[str | None, _Target[T]] = {}
        self._count = 0
        self._idle = 0
        # Targets of which a reference can start, and those of which one soon might; those that are to be asked once the
        # lane has room; and those that the coordinator is told something of in any case.
        self._ready: deque[_Target[T]] = deque()
        self._hopeful: dict[_Target[T], None] = {}
        self._asks: dict[_Target[T], None] = {}
        self._chores: dict[_Target[T], None] = {}
        # Targets by the time at which to look at them again.
        self._times: list[tuple[float, int, _Target[T]]] = []
        self._number = 0
        self._timer: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._failing = False
        self._closed = False

    def __len__(self) -> int:
        return self._count

    @property
    def limited(self) -> bool:
        """Whether targets have limits; also while anything is left from when they had."""
        return self._limits.rate is not None or self._limits.slots is not None or bool(self._targets)

    def add(self, name: str | None, one: T) -> bool:
        """Queue a reference for its target; None has no limits. Whether the target's next might soon start."""
        target = self._targets.get(name)
        if target is None:
            target = self._targets[name] = _Target(name, self._ratio)
        target.queue.append(one)
        self._count += 1
        self._place(target)
        return target in self._hopeful

    def take(self) -> T | None:
        """The next reference that can start: targets take turns."""
        while self._ready:
            target = self._ready.popleft()
            target.is_ready = False
            one = self._take_of(target) if self._can_start(target) else None
            self._place(target)
            if one is not None:
                return one
        return None

    def ready(self, limit: int) -> int:
        """How many could start now, counted up to the limit."""
        return _total((self._startable(target, limit) for target in self._ready), limit)

    def hopeful(self, limit: int) -> int:
        """The same, with those that might soon: their passes are due in a moment, or their targets were not asked."""
        return _total((self._hope(target, limit) for target in self._hopeful), limit)

    def leave(self, one: T) -> None:
        """Take the slot of a reference back, if it has one."""
        name, one.slot = one.slot, None
        target = None if name is None else self._targets.get(name)
        if target is None:
            return
        target.running -= 1
        if target.yields:
            target.yields = False
            target.slots = max(target.running, target.slots - 1)
            target.slots_at = self._now() + _YIELD_SECONDS
        elif self._asks and target not in self._asks and self._spare() <= 0:
            target.slots = max(target.running, target.slots - 1)
        self._place(target)
        self.ask()

    def drain(self) -> list[T]:
        """Take all references out."""
        found: list[T] = []
        for target in list(self._targets.values()):
            found += target.queue
            target.queue.clear()
            self._place(target)
        self._count = 0
        self.ask()
        return found

    def follow(self) -> None:
        """The limits are others now: passes that were reserved are not good any more."""
        for target in list(self._targets.values()):
            target.passes.clear()
            target.passes_at = target.slots_at = 0.0
            self._place(target)
        self.ask()
        self._wake()

    def keep(self) -> None:
        """Have slots renewed that are held for long."""
        self._chores.update((target, None) for target in self._targets.values() if target.slots)
        self.ask()

    def ask(self) -> None:
        """Ask the coordinator for what can be used now."""
        if self._asking is None and not self._closed and (self._chores or (self._asks and self._spare() > 0)):
            self._asking = self._start(self._ask_all())

    def stop(self) -> None:
        """Start nothing more: forget the references."""
        self._closed = True
        for task in (self._timer, self._asking):
            if task is not None:
                task.cancel()
        self._count = 0
        self._ready.clear()
        self._hopeful.clear()
        for target in self._targets.values():
            target.queue.clear()

    async def close(self) -> None:
        """Give all slots back. If the coordinator does not answer, they expire."""
        self.stop()
        names = [name for name, target in self._targets.items() if name is not None and target.told]
        self._targets.clear()
        for start in range(0, len(names), _ASKED_AT_ONCE):
            freeing = [self._limits.hold(name, 0) for name in names[start : start + _ASKED_AT_ONCE]]
            for error in await asyncio.gather(*freeing, return_exceptions=True):
                if isinstance(error, Exception):
                    self._failed(error)

    def _now(self) -> float:
        return self._clock.monotonic() + _TICK

    def _take_of(self, target: _Target[T]) -> T:
        one = target.queue.popleft()
        self._count -= 1
        if target.name is not None and self._limits.rate is not None:
            target.passes.popleft()
        if target.name is not None and self._limits.slots is not None:
            target.running += 1
            one.slot = target.name
        return one

    def _can_start(self, target: _Target[T]) -> bool:
        """Whether the target's next reference has all that it needs."""
        if target.name is None or not target.queue:
            return bool(target.queue)
        if self._limits.slots is not None and target.free <= 0:
            return False
        return self._limits.rate is None or (bool(target.passes) and target.passes[0] <= self._now())

    def _startable(self, target: _Target[T], limit: int) -> int:
        count = min(len(target.queue), limit)
        if target.name is None:
            return count
        if self._limits.slots is not None:
            count = min(count, target.free)
        if self._limits.rate is not None:
            now = self._now()
            count = _total((1 for _ in takewhile(lambda due: due <= now, target.passes)), count)
        return max(0, count)

    def _hope(self, target: _Target[T], limit: int) -> int:
        limits, count = self._limits, min(len(target.queue), limit)
        if target.name is None:
            return count
        if limits.slots is not None:
            count = max(0, min(count, limits.slots - target.running))
        if limits.rate is not None:
            count = min(count, max(1, int(limits.rate * _IN_HAND), self._startable(target, count)))
        return count

    def _place(self, target: _Target[T]) -> None:
        """Say where the target stands: it can go on, it is to be asked, or there is a time at which to look again."""
        if self._closed:
            return
        now = self._now()
        idle = max(0, target.free)
        self._idle, target.idle = self._idle + idle - target.idle, idle
        if not target.queue:
            target.passes.clear()
        if not target.queue or target.slots == 0:
            target.look_at = inf
        elif target.look_at == inf:
            target.look_at = now + _LOOK_SECONDS
        if not target.is_ready and self._can_start(target):
            target.is_ready = True
            self._ready.append(target)
        if target.is_ready or (target.passes and target.queue):
            self._hopeful[target] = None
        if target.is_asking:
            # It is placed again with the answer.
            return
        told_at = target.tell_at if self._has_surplus(target) else inf
        asked_at = target.slots_at if self._lacks_slots(target) else inf
        asked_at = min(asked_at, target.passes_at if self._lacks_passes(target) else inf)
        if min(told_at, target.look_at) <= now:
            self._chores[target] = None
        if asked_at <= now:
            self._asks[target] = self._hopeful[target] = None
        else:
            self._asks.pop(target, None)
        if asked_at > now and not (target.is_ready or target.passes):
            self._hopeful.pop(target, None)
        due = target.passes[0] if target.passes and not target.is_ready else inf
        times = (told_at, target.look_at, asked_at, due)
        self._look_again(target, min((at for at in times if at > now), default=inf))
        if not (target.queue or target.running or target.told) and self._targets.get(target.name) is target:
            del self._targets[target.name]

    def _has_surplus(self, target: _Target[T]) -> bool:
        """Whether there are slots that nobody here can use."""
        return target.told > target.slots or (target.free > 0 and not (target.queue and self._limits.slots))

    def _lacks_slots(self, target: _Target[T]) -> bool:
        """Whether more slots would help. Those in use come back by themselves."""
        slots = self._limits.slots
        if slots is None or target.name is None or (self._limits.rate is not None and not target.passes):
            return False
        return bool(target.queue) and target.free <= 0 and target.slots < slots

    def _lacks_passes(self, target: _Target[T]) -> bool:
        """Whether the passes in hand are soon used up."""
        rate, passes = self._limits.rate, len(target.passes)
        if rate is None or target.name is None:
            return False
        return passes < self._usable(target) and passes <= rate * _IN_HAND / 2

    def _usable(self, target: _Target[T]) -> int:
        """How many passes the target's references could use soon: its part of what the lane could start."""
        usable = max(1, self._room() // max(1, len(self._hopeful)))
        if self._limits.slots is not None:
            usable = min(usable, max(1, target.free))
        return min(usable, len(target.queue))

    def _look_again(self, target: _Target[T], at: float) -> None:
        if at == target.wake_at:
            return
        target.wake_at = at
        if at == inf:
            return
        self._number += 1
        heapq.heappush(self._times, (at, self._number, target))
        if self._times[0][1] == self._number:
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._start(self._look_after(self._times[0][0] - self._clock.monotonic()))

    async def _look_after(self, delay: float) -> None:
        await self._clock.sleep(max(0.0, delay))
        self._timer = None
        now = self._now()
        while self._times and self._times[0][0] <= now:
            at, _, target = heapq.heappop(self._times)
            if target.wake_at == at:
                target.wake_at = inf
                self._place(target)
        if self._times and self._timer is None:
            self._set_timer()
        self.ask()
        self._wake()

    def _spare(self) -> int:
        """For how many more references targets may be asked. Passes that wait for the lane hold up nobody; slots do."""
        room = max(0, self._room())
        return max(1, room) if self._limits.slots is None else room + _IDLE_SLOTS - self._idle

    async def _ask_all(self) -> None:
        try:
            while asked := self._next_asked():
                await asyncio.gather(*(self._ask(target, share) for target, share in asked))
                self._wake()
        finally:
            self._asking = None

    def _next_asked(self) -> list[tuple[_Target[T], int]]:
        """The targets to ask next, each with how many references of it the lane could start."""
        asked = [(target, 0) for target in _pop(self._chores, _ASKED_AT_ONCE) if not target.is_asking]
        spare = self._spare()
        most = spare if self._limits.slots is not None else _ASKED_AT_ONCE
        targets = _pop(self._asks, min(most, _ASKED_AT_ONCE - len(asked)))
        busy = {target for target, _ in asked}
        share = max(1, min(spare, self._room()) // max(1, len(targets)))
        return asked + [(target, share) for target in targets if target not in busy]

    async def _ask(self, target: _Target[T], share: int) -> None:
        target.is_asking = True
        try:
            if share and self._lacks_passes(target) and target.passes_at <= self._now():
                await self._ask_passes(target)
            if not share or (self._lacks_slots(target) and target.slots_at <= self._now()):
                await self._ask_slots(target, share)
            if target.look_at <= self._now():
                await self._look_for_waiters(target)
            self._failing = False
        except Exception as error:
            self._failed(error)
            target.slots_at = target.passes_at = target.tell_at = self._next_try(target)
            target.look_at = max(target.look_at, target.tell_at)
        finally:
            target.is_asking = False
            self._place(target)

    async def _ask_slots(self, target: _Target[T], share: int) -> None:
        """Have as many slots as are in use and can be, and give back the others."""
        name, limit, queued = target.name, self._limits.slots, len(target.queue)
        if name is None or (limit is None and not target.told):
            return
        want = target.running
        if limit is not None:
            useful = min(queued, max(share, min(target.free, self._room())))
            want += max(0, min(useful, limit - target.running))
        # What goes back is not handed out any more while the answer is on its way.
        target.slots = min(target.slots, want)
        target.told = max(target.told, want)
        granted = await self._limits.hold(name, want)
        if granted > target.slots:
            target.pause = _FIRST_PAUSE
        target.slots = target.told = granted
        target.tell_at = 0.0
        if granted >= want:
            return
        target.slots_at = self._next_try(target)
        if target.waits_until - _LONGEST_PAUSE <= self._now():
            target.waits_until = self._clock.monotonic() + WAITER_SECONDS
            await self._limits.join_waiters(name)

    async def _ask_passes(self, target: _Target[T]) -> None:
        rate, name = self._limits.rate, target.name
        assert rate is not None
        assert name is not None
        count = max(1, min(self._usable(target) - len(target.passes), int(rate * _IN_HAND)))
        wait = await self._limits.reserve(name, count)
        if self._limits.rate != rate:
            return
        now, chance = self._clock.monotonic(), self._clock.jitter()
        if wait > AHEAD:
            # Before it is due: whoever asks late uses less than the rate allows. Not all workers in one moment.
            target.passes_at = now + wait - AHEAD * (1 + 2 * chance) / 4
            return
        own = max(0.0, target.passes[-1] - now) if target.passes else 0.0
        target.passes.extend(now + wait + number / rate for number in range(count))
        # If others had the passes before these, they have their chance at those after them.
        is_shared = wait > own + 1 / rate + _TICK
        target.passes_at = now + wait + chance * min(1 / rate, _IN_HAND) if is_shared else 0.0

    async def _look_for_waiters(self, target: _Target[T]) -> None:
        """See whether another worker waits for what this one has all the time."""
        assert target.name is not None
        target.look_at = self._clock.monotonic() + _LOOK_SECONDS
        own = int(target.waits_until > self._clock.monotonic())
        target.yields = target.slots > 0 and await self._limits.waiters(target.name) > own

    def _next_try(self, target: _Target[T]) -> float:
        pause, target.pause = target.pause, min(_LONGEST_PAUSE, target.pause * 2)
        return self._clock.monotonic() + pause

    def _failed(self, error: Exception) -> None:
        """Said once, until the coordinator answers again."""
        if not self._failing:
            log.warning("limits of targets could not be asked for", error=repr(error))
        self._failing = True


def _total(numbers: Iterator[int], limit: int) -> int:
    """Their sum, or the limit if it is more."""
    total = 0
    for number in numbers:
        total += number
        if total >= limit:
            return limit
    return total


def _pop(targets: dict[_Target[T], None], count: int) -> list[_Target[T]]:
    first = list(islice(targets, max(0, count)))
    for target in first:
        del targets[target]
    return first
