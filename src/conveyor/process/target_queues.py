"""TargetQueues: the references of one lane whose targets have limits, in one queue for each target.

A reference stays in its queue until it starts, so none is in hand while a request to the coordinator is in flight. One
task makes the requests, for whole targets: it reserves passes a moment ahead, and holds only a few more slots than the
lane can use. A slot that becomes free goes to the next reference of its target without a call, unless targets wait that
have not been asked for yet: those are next. After a refusal the lane asks again, with a growing pause. A worker that
has had slots of a target for a while gives one back when another worker waits for it.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from itertools import islice
from math import inf
from typing import Any, Generic

from conveyor.clock import Clock
from conveyor.coordination.limits import TargetLimits
from conveyor.process.limit_requests import CHECK_WAITERS_SECONDS, LONGEST_PAUSE, TICK, LimitRequests
from conveyor.process.target_queue import T, TargetQueue, bounded_sum

# How long a worker asks for no slot of a target after it gave one to another worker, which asks within this time.
_YIELD_SECONDS = 2 * LONGEST_PAUSE
# Slots that a lane holds beyond those that it can use at once, for the targets that are next.
_IDLE_SLOTS = 2
_REQUESTS_AT_ONCE = 64

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class TargetQueues(Generic[T]):
    """`free_slots` returns how many more references the lane could start now, `resume` makes it start those that can,
    and `spawn` runs a task of the lane."""

    def __init__(
        self,
        limits: TargetLimits,
        clock: Clock,
        ratio: int,
        free_slots: Callable[[], int],
        resume: Callable[[], None],
        spawn: Spawn,
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._ratio = ratio
        self._free_slots = free_slots
        self._resume = resume
        self._spawn = spawn
        self._requests = LimitRequests(limits, clock)
        self._targets: dict[str | None, TargetQueue[T]] = {}
        self._count = 0
        self._idle = 0
        # Targets whose next reference can start, and those whose next one might start soon.
        self._ready: deque[TargetQueue[T]] = deque()
        self._promising: dict[TargetQueue[T], None] = {}
        # Targets to make requests for: once the lane has free slots, or in any case.
        self._wanting: dict[TargetQueue[T], None] = {}
        self._reporting: dict[TargetQueue[T], None] = {}
        # Targets by the time at which to look at them again.
        self._times: list[tuple[float, int, TargetQueue[T]]] = []
        self._number = 0
        self._timer: asyncio.Task[None] | None = None
        self._requesting: asyncio.Task[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        return self._count

    @property
    def is_limited(self) -> bool:
        """Whether targets have limits, or references wait from when they had."""
        return self._limits.rate is not None or self._limits.slots is not None or bool(self._targets)

    @property
    def has_targets(self) -> bool:
        """Whether references wait for a target, or a slot of one is in use."""
        return bool(self._targets)

    def add(self, name: str | None, ref: T) -> bool:
        """Queue a reference for its target; None has no limits. Returns whether the target's next might start soon."""
        target = self._targets.get(name)
        if target is None:
            target = self._targets[name] = TargetQueue(name, self._ratio, self._limits)
        target.refs.append(ref)
        self._count += 1
        self._place(target)
        return target in self._promising

    def take(self) -> T | None:
        """Take the next reference that can start, from each target in turn."""
        while self._ready:
            target = self._ready.popleft()
            target.is_ready = False
            ref = None
            # They must not use a slot or a pass.
            self._count -= target.refs.drop_lost()
            if target.can_start(self._now()):
                ref = target.pop()
                self._count -= 1
            self._place(target)
            if ref is not None:
                return ref
        return None

    def count_ready(self, limit: int) -> int:
        """Return how many references could start now, up to the limit."""
        now = self._now()
        return bounded_sum((target.count_startable(limit, now) for target in self._ready), limit)

    def count_promising(self, limit: int) -> int:
        """Return how many references might start soon, up to the limit: their passes are almost due, or the coordinator
        has not been asked for their targets."""
        if not self._promising:
            return 0
        now = self._now()
        return bounded_sum((target.count_promising(limit, now) for target in self._promising), limit)

    def free_slot(self, ref: T) -> None:
        """Free the slot of a reference, if it has one."""
        name, ref.slot = ref.slot, None
        target = None if name is None else self._targets.get(name)
        if target is None:
            return
        target.running -= 1
        if target.yields:
            target.yields = False
            target.slots = max(target.running, target.slots - 1)
            target.slots_at = self._now() + _YIELD_SECONDS
        elif self._wanting and target not in self._wanting and self._spare() <= 0:
            target.slots = max(target.running, target.slots - 1)
        self._place(target)
        self.request()

    def retain(self, stays: Callable[[T], bool]) -> None:
        """Remove the references that do not stay. The others keep their order, and what their targets have for them."""
        for target in list(self._targets.values()):
            kept = [ref for ref in target.refs if stays(ref)]
            removed = len(target.refs) - len(kept)
            if removed:
                self._count -= removed
                target.refs.clear()
                target.refs.extend(kept)
                self._place(target)
        self.request()

    def follow(self) -> None:
        """The limits have changed: forget reserved passes and ask again."""
        for target in list(self._targets.values()):
            target.passes.clear()
            target.passes_at = target.slots_at = 0.0
            self._place(target)
        self.request()
        self._resume()

    def renew_slots(self) -> None:
        """Renew all slots before they expire."""
        self._reporting.update((target, None) for target in self._targets.values() if target.slots)
        self.request()

    def request(self) -> None:
        """Ask the coordinator for what the lane can use now."""
        wants = self._reporting or (self._wanting and self._spare() > 0)
        if self._requesting is None and not self._closed and wants:
            self._requesting = self._spawn(self._request_all())

    def stop(self) -> None:
        """Start nothing more, and forget the references."""
        self._closed = True
        for task in (self._timer, self._requesting):
            if task is not None:
                task.cancel()
        self._count = 0
        self._ready.clear()
        self._promising.clear()
        for target in self._targets.values():
            target.refs.clear()

    async def close(self) -> None:
        """Free all slots."""
        self.stop()
        names = [name for name, target in self._targets.items() if name is not None and target.reported]
        self._targets.clear()
        for start in range(0, len(names), _REQUESTS_AT_ONCE):
            batch = names[start : start + _REQUESTS_AT_ONCE]
            await asyncio.gather(*(self._requests.free_slots(name) for name in batch))

    def _now(self) -> float:
        return self._clock.monotonic() + TICK

    def _place(self, target: TargetQueue[T]) -> None:
        """Note what a target needs next: to start, a request, or a look at a later time."""
        if self._closed:
            return
        now = self._now()
        self._count_idle(target)
        self._plan_check(target, now)
        if not target.is_ready and target.can_start(now):
            target.is_ready = True
            self._ready.append(target)
        if target.is_ready or (target.passes and target.refs):
            self._promising[target] = None
        if target.is_requesting:
            # It is placed again with the answer.
            return
        report_at = target.report_at if target.has_surplus() else inf
        request_at = target.slots_at if target.lacks_slots() else inf
        request_at = min(request_at, target.passes_at if self._lacks_passes(target) else inf)
        if min(report_at, target.check_waiters_at) <= now:
            self._reporting[target] = None
        if request_at <= now:
            self._wanting[target] = self._promising[target] = None
        else:
            self._wanting.pop(target, None)
        if request_at > now and not (target.is_ready or target.passes):
            self._promising.pop(target, None)
        due = target.passes[0] if target.passes and not target.is_ready else inf
        times = (report_at, target.check_waiters_at, request_at, due)
        self._look_again(target, min((at for at in times if at > now), default=inf))
        if target.is_unused and self._targets.get(target.name) is target:
            del self._targets[target.name]

    def _count_idle(self, target: TargetQueue[T]) -> None:
        # A slot without a pass is of no use yet, and must not keep the lane from asking for passes.
        idle = max(0, target.free) if self._limits.rate is None or target.passes else 0
        self._idle, target.idle = self._idle + idle - target.idle, idle

    def _plan_check(self, target: TargetQueue[T], now: float) -> None:
        """Drop passes that no reference needs, and plan the next check for other workers that wait."""
        if not target.refs:
            target.passes.clear()
        if not target.refs or target.slots == 0:
            target.check_waiters_at = inf
        elif target.check_waiters_at == inf:
            target.check_waiters_at = now + CHECK_WAITERS_SECONDS

    def _lacks_passes(self, target: TargetQueue[T]) -> bool:
        return self._limits.rate is not None and target.lacks_passes(self._usable(target))

    def _usable(self, target: TargetQueue[T]) -> int:
        return target.count_usable_passes(self._free_slots() // max(1, len(self._promising)))

    def _look_again(self, target: TargetQueue[T], at: float) -> None:
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
        self._timer = self._spawn(self._look_after(self._times[0][0] - self._clock.monotonic()))

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
        self.request()
        self._resume()

    def _spare(self) -> int:
        """Return for how many more references to make requests. Reserved passes block no other worker; slots do."""
        free = max(0, self._free_slots())
        return max(1, free) if self._limits.slots is None else free + _IDLE_SLOTS - self._idle

    async def _request_all(self) -> None:
        try:
            while batch := self._next_requests():
                await asyncio.gather(*(self._request_one(target, share) for target, share in batch))
                self._resume()
        finally:
            self._requesting = None

    def _next_requests(self) -> list[tuple[TargetQueue[T], int]]:
        """Return the next targets, each with how many of its references the lane could start; 0: only report."""
        reports = [(target, 0) for target in _pop(self._reporting, _REQUESTS_AT_ONCE) if not target.is_requesting]
        spare = self._spare()
        limit = spare if self._limits.slots is not None else _REQUESTS_AT_ONCE
        targets = _pop(self._wanting, min(limit, _REQUESTS_AT_ONCE - len(reports)))
        reported = {target for target, _ in reports}
        share = max(1, min(spare, self._free_slots()) // max(1, len(targets)))
        return reports + [(target, share) for target in targets if target not in reported]

    async def _request_one(self, target: TargetQueue[T], share: int) -> None:
        target.is_requesting = True
        try:
            if share and self._lacks_passes(target) and target.passes_at <= self._now():
                await self._requests.reserve_passes(target, self._usable(target))
            if not share or (target.lacks_slots() and target.slots_at <= self._now()):
                await self._requests.hold_slots(target, share, self._free_slots())
            if target.check_waiters_at <= self._now():
                await self._requests.check_waiters(target)
            self._requests.succeed()
        except Exception as error:
            self._requests.back_off(target, error)
        finally:
            target.is_requesting = False
            self._place(target)


def _pop(targets: dict[TargetQueue[T], None], count: int) -> list[TargetQueue[T]]:
    first = list(islice(targets, max(0, count)))
    for target in first:
        del targets[target]
    return first
