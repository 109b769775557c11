"""PacedRefs: the references of one lane that wait for the pace of their hosts (coordination/pace.py).

A lane asks before it sends a batch: what a host has room for may go, the rest waits here, by host, so that other hosts
are served meanwhile. Finished attempts make room, and what they say about their hosts is learned, in batches too.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from math import inf
from typing import Any, Generic, Protocol, TypeVar

from conveyor.clock import Clock
from conveyor.coordination.host_lanes import LARGEST
from conveyor.coordination.pace import HostPace
from conveyor.coordination.paces import Paces
from conveyor.model import LONG_KINDS, PACED_KINDS, Job, Outcome, Pace, TaskRef
from conveyor.process.limit_requests import TICK
from conveyor.process.retry_first_queue import RetryFirstQueue, Waits
from conveyor.process.target_queue import bounded_sum

# The status by which a host asks for fewer requests, and errors that too many requests may cause, among others.
_REFUSAL = "http_429"
_FAILURES = frozenset({"http_503", "timeout", "connect_timeout", "connect_failed", "read_failed"})
# Where the host of a URL in an input may begin, and how many beginnings of inputs a lane remembers.
_AUTHORITY = len('"https://')
_MAX_PREFIXES = 2000
# References of a host that is paused for longer than this many seconds do not wait here.
_LONG_PAUSE = 5.0
# When the lane is full: for how many seconds starts are counted, how much of a host stays (what it starts in so many
# seconds, and this many at least), and how long the rest is postponed, in seconds.
_COUNT_SECONDS = 5.0
_STAY_SECONDS = 10.0
_LEAST_STAY, _LEAST_LONG_STAY = 100, 4
_SHORTEST_DELAY, _LONGEST_DELAY = 5.0, 60.0

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class Paced(Waits, Protocol):
    """A reference. `pace` is that of its host, while it is sent."""

    pace: HostPace | None

    @property
    def ref(self) -> TaskRef: ...


T = TypeVar("T", bound=Paced)


class PacedRefs(Generic[T]):
    """`resume` makes the lane start those that can, `hold_back` has references returned that were sent and have not
    started, `postpone` requeues one with a delay in seconds, and `spawn` runs a task of the lane.

    A lane whose runners are told how many tasks to run at once calls `keep_part`. It may send ahead then, while it has
    references of one host alone; with those of several, which of them run is not known here.
    """

    def __init__(
        self,
        paces: Paces | None,
        job: Job,
        target: Callable[[TaskRef], str | None],
        clock: Clock,
        ratio: int,
        resume: Callable[[], None],
        hold_back: Callable[[], None],
        postpone: Callable[[T, float], None],
        spawn: Spawn,
    ) -> None:
        self._paces = paces
        self._tenant = job.tenant
        self._target = target
        self._clock = clock
        self._ratio = ratio
        self._resume = resume
        self._hold_back = hold_back
        self._postpone = postpone
        self._spawn = spawn
        self.bound = job.options.concurrency
        self.is_on = self._wanted(job)
        self._least_stay = _LEAST_LONG_STAY if job.kind in LONG_KINDS else _LEAST_STAY
        self._held: dict[HostPace, RetryFirstQueue[T]] = {}
        self._count = 0
        # How many tasks the lane may run at once as far as the worker is concerned, and how many it runs at most.
        self.slots = 0
        self.width = 0
        # Whether the lane keeps to its part of a pace if it can, and the only host so far.
        self._may_keep = False
        self._only: HostPace | None = None
        self._is_mixed = False
        # Hosts that may have room.
        self._ready: dict[HostPace, None] = {}
        self._prefixes: dict[str, HostPace] = {}
        # Hosts that references are sent to.
        self._used: set[HostPace] = set()
        # Since when starts are counted, and how many have started of each host whose references have waited since then.
        self._started: dict[HostPace, int] = {}
        self._counted_from = -inf
        self._is_resuming = False
        # Whether the part of the lane has become less.
        self._has_news = False
        self._timer: asyncio.Task[None] | None = None
        self._timer_at = inf
        self._closed = False

    def __len__(self) -> int:
        return self._count

    @property
    def keeps_part(self) -> bool:
        return self._may_keep and not self._is_mixed

    @property
    def part(self) -> int:
        """How many tasks the lane may run at once by the pace of its only host."""
        if not self.is_on or self._only is None or not self.keeps_part:
            return LARGEST
        return self._only.lanes.part(self)

    @property
    def share(self) -> int:
        """How many tasks at once the lane may count on by that."""
        if not self.is_on or self._only is None or not self.keeps_part:
            return LARGEST
        return self._only.lanes.share(self)

    def keep_part(self) -> None:
        """The lane will run no more than `part`."""
        self._may_keep = True

    def expect(self, ref: TaskRef) -> None:
        """A reference was received: its host may be the only one."""
        if self.is_on and self._only is None:
            self._only = self._pace_of(ref)[0]

    def set_slots(self, slots: int) -> None:
        """Set how many tasks the lane may run at once. If it keeps to its part, `set_width` says how many it runs."""
        if slots == self.slots:
            return
        had_slots, self.slots = self.slots > 0, slots
        self.set_width(min(self.width, slots) if self.keeps_part else slots)
        if had_slots is (slots > 0):
            return
        now = self._clock.monotonic()
        for pace in self._held:
            if had_slots:
                # Its turn is another lane's.
                self._ready.pop(pace, None)
                pace.wake(now)
            elif pace.room(self, now) > 0:
                self._ready[pace] = None

    def set_width(self, width: int) -> None:
        """Set how many tasks the lane runs at once, at most."""
        self.width = width
        for pace in self._used | self._held.keys():
            pace.lanes.note_width(self)

    @property
    def has_ready(self) -> bool:
        return bool(self._ready)

    def follow(self, job: Job) -> bool:
        """Apply the job's changed options. Returns whether the references that wait are to be drained: it is off."""
        self.bound = job.options.concurrency
        self.is_on = self._wanted(job)
        return not self.is_on and self._count > 0

    def admit(self, entries: Sequence[T], limit: int = LARGEST) -> list[T]:
        """Return those that may start now, at most `limit`. The others wait here."""
        if self.keeps_part:
            self._note_hosts(entries)
        now = self._clock.monotonic()
        admitted: list[T] = []
        # How many more of each host may start, and those that do.
        rooms: dict[HostPace, int] = {}
        counts: dict[HostPace, int] = {}
        pace: HostPace | None = None
        prefix = "\0"
        for entry in entries:
            if not entry.ref.input.startswith(prefix):
                pace, prefix = self._pace_of(entry.ref)
                if pace is not None and pace not in rooms:
                    rooms[pace] = 0 if pace in self._held else pace.room(self, now)
            if pace is None:
                admitted.append(entry)
            elif rooms[pace] > 0 and len(admitted) < limit:
                rooms[pace] -= 1
                counts[pace] = counts.get(pace, 0) + 1
                entry.pace = pace
                admitted.append(entry)
            else:
                rooms[pace] = 0
                self._hold(pace, entry)
        for pace, count in counts.items():
            self._start(pace, count)
        return admitted

    def take(self, limit: int) -> list[T]:
        """Take references that waited and may start now, from each host in turn."""
        now = self._clock.monotonic()
        taken: list[T] = []
        while self._ready and len(taken) < limit:
            pace = next(iter(self._ready))
            del self._ready[pace]
            queue = self._held.get(pace)
            if queue is None:
                continue
            self._count -= queue.drop_lost()
            room, count = min(pace.room(self, now), limit - len(taken)), 0
            while queue and count < room:
                entry = queue.popleft()
                entry.pace = pace
                taken.append(entry)
                count += 1
                self._count -= 1 + queue.drop_lost()
            self._start(pace, count)
            if pace in self._started:
                self._started[pace] += count
            self._note_waiting(pace, queue)
            if not count and not queue:
                # Those that it was woken for are lost: the turn is another lane's.
                pace.wake(now)
            if count and queue and pace.room(self, now) > 0:
                self._ready[pace] = None
        return taken

    def find_ready(self, limit: int) -> int:
        """Find those that wait and may start now, so that `take` returns them. Returns how many, up to the limit."""
        now = self._clock.monotonic()
        count = 0
        for pace, queue in self._held.items():
            if count >= limit:
                break
            if room := pace.room(self, now):
                self._ready[pace] = None
                count += min(len(queue), room)
        return min(count, limit)

    def count_promising(self, limit: int) -> int:
        """Return how many of those that wait might start soon: the pace may double with the next outcomes."""
        if not self._held:
            return 0
        now = self._clock.monotonic()
        hosts = ((pace, queue) for pace, queue in self._held.items() if now >= pace.paused_until)
        return bounded_sum(
            (min(len(queue), max(1, 2 * int(pace.limit) - pace.lanes.in_flight)) for pace, queue in hosts), limit
        )

    def release(self, entries: Sequence[T]) -> None:
        """These references are no longer sent."""
        if not self._used:
            return
        now = self._clock.monotonic()
        for pace, places in _by_pace(entries).items():
            pace.finish(self, len(places), now)
            if self not in pace.lanes.users:
                self._used.discard(pace)
        for entry in entries:
            entry.pace = None

    def learn(
        self, entries: Sequence[T], outcomes: Sequence[Outcome], lag: float = 0.0, *, is_long: bool = False
    ) -> None:
        """Learn from finished attempts. Call it before `release`. How long a download takes says nothing."""
        if not self._used:
            return
        now = self._clock.monotonic()
        for pace, places in _by_pace(entries).items():
            seconds: list[float] = []
            for place in places:
                entry, outcome = entries[place], outcomes[place]
                code = None if outcome.error is None else outcome.error.code
                if code == _REFUSAL:
                    pace.refuse(now, outcome.retry_after)
                elif code in _FAILURES:
                    pace.fail(now, outcome.retry_after, is_retry=entry.ref.attempt > 1)
                elif (code is None or code.startswith("http_")) and outcome.spends_attempt:
                    seconds.append(0.0 if is_long else outcome.elapsed)
            if seconds:
                pace.learn(seconds, now, lag)

    def learn_pages(self, entries: Sequence[T], elapsed: Sequence[float], lag: float = 0.0) -> None:
        """Learn from attempts that succeeded, each in so many seconds. Call it before `release`."""
        if not self._used:
            return
        now = self._clock.monotonic()
        for pace, places in _by_pace(entries).items():
            pace.learn([elapsed[place] for place in places], now, lag)

    def on_room(self, pace: HostPace) -> None:
        """References that wait for this host may start now."""
        if pace not in self._held or self._closed:
            return
        self._ready[pace] = None
        self._resume_later()

    def on_lower(self, pace: HostPace) -> None:
        """The host is paused, or gets fewer requests than were sent: those that have not started must wait."""
        if self._closed:
            return
        if pace in self._held:
            now = self._clock.monotonic()
            if pace.paused_until - now > _LONG_PAUSE:
                self._postpone_all(pace, pace.paused_until - now)
            self._set_timer()
        if pace not in self._used or pace.lanes.in_flight <= pace.limit:
            return
        if self.keeps_part and not pace.lanes.takes_turns and self._clock.monotonic() >= pace.paused_until:
            # Its runners are told that fewer may run.
            self._has_news = True
            self._resume_later()
        else:
            self._hold_back()

    def grow_while_alive(self) -> None:
        """Let hosts have more at once whose attempts take long, and do not fail."""
        now = self._clock.monotonic()
        for pace in list(self._held):
            pace.grow_while_alive(now)

    def thin_out(self) -> None:
        """Postpone what hosts cannot take soon, so that references of other hosts find a place. Call it while the lane
        is full. Of a host that is new here nothing is known yet, nor of any while the lane has no slots."""
        now = self._clock.monotonic()
        seconds = now - self._counted_from
        if seconds < _COUNT_SECONDS and self.slots:
            return
        if seconds < 2 * _COUNT_SECONDS and self.slots:
            for pace, started in self._started.items():
                queue, rate = self._held[pace], started / seconds
                stay = max(self._least_stay, int(rate * _STAY_SECONDS))
                delay = max(_SHORTEST_DELAY, min(_LONGEST_DELAY, stay / rate if rate else _LONGEST_DELAY))
                excess = [queue.pop() for _ in range(len(queue) - stay)]
                self._postpone_each(excess, delay)
        self._started = dict.fromkeys(self._held, 0)
        self._counted_from = now if self.slots else -inf

    def drain(self) -> list[T]:
        """Remove and return all references that wait."""
        entries: list[T] = []
        paces = list(self._held)
        for pace, queue in self._held.items():
            pace.lanes.wait(self, is_waiting=False)
            entries += queue
        self._held.clear()
        self._ready.clear()
        self._started.clear()
        self._count = 0
        now = self._clock.monotonic()
        for pace in paces:
            # The turn of this lane may be that of another now.
            pace.wake(now)
        return entries

    def stop(self) -> None:
        """Start nothing more, and forget the references that wait."""
        self._closed = True
        self.drain()
        if self._timer is not None:
            self._timer.cancel()

    def close(self) -> None:
        """Forget what was sent."""
        self.stop()
        now = self._clock.monotonic()
        for pace in self._used:
            pace.finish(self, pace.lanes.users.get(self, 0), now)
        self._used.clear()

    def _wanted(self, job: Job) -> bool:
        """A limit that the job names is kept, and nothing is to be found."""
        options = job.options
        has_limits = options.rate_per_host is not None or options.concurrency_per_host is not None
        is_auto = options.pace is Pace.AUTO and job.kind in PACED_KINDS
        return self._paces is not None and is_auto and not has_limits

    def _pace_of(self, ref: TaskRef) -> tuple[HostPace | None, str]:
        """Return the pace of a reference's host, and how inputs with that host begin."""
        assert self._paces is not None
        text = ref.input
        # The authority of a URL ends at the first slash after the two of its scheme, if not before.
        prefix = text[: text.find("/", _AUTHORITY) + 1] if text.startswith('"http') else ""
        known = self._prefixes.get(prefix)
        if known is not None and not known.is_dropped:
            return known, prefix
        host = self._target(ref)
        if host is None:
            return None, "\0"
        pace = self._paces.of(self._tenant, host)
        if prefix:
            if len(self._prefixes) >= _MAX_PREFIXES:
                self._prefixes.clear()
            self._prefixes[prefix] = pace
        return pace, prefix or "\0"

    def _hold(self, pace: HostPace, entry: T) -> None:
        queue = self._held.get(pace)
        if queue is None:
            now = self._clock.monotonic()
            if pace.paused_until - now > _LONG_PAUSE:
                self._postpone(entry, pace.paused_until - now)
                return
            queue = self._held[pace] = RetryFirstQueue(self._ratio)
            pace.lanes.wait(self, is_waiting=True)
            if pace.paused_until > now:
                self._set_timer()
            elif pace.room(self, now) > 0:
                self._ready[pace] = None
        queue.append(entry)
        self._count += 1

    def _start(self, pace: HostPace, count: int) -> None:
        if count:
            pace.start(self, count)
            self._used.add(pace)

    def _note_waiting(self, pace: HostPace, queue: RetryFirstQueue[T]) -> None:
        """Give up the turn at a host, or wait for the next."""
        pace.lanes.wait(self, is_waiting=bool(queue))
        if not queue:
            del self._held[pace]
            self._started.pop(pace, None)

    def _postpone_all(self, pace: HostPace, delay: float) -> None:
        """Postpone all references that wait for a host."""
        queue = self._held.pop(pace)
        pace.lanes.wait(self, is_waiting=False)
        self._ready.pop(pace, None)
        self._started.pop(pace, None)
        self._postpone_each(list(queue), delay)

    def _postpone_each(self, entries: Sequence[T], delay: float) -> None:
        self._count -= len(entries)
        for entry in entries:
            if not entry.is_lost:
                self._postpone(entry, delay)

    def _note_hosts(self, entries: Sequence[T]) -> None:
        """Note whether there are references of another host than before. Those of one alone may be sent ahead."""
        prefix = "\0"
        for entry in entries:
            if entry.ref.input.startswith(prefix):
                continue
            pace, prefix = self._pace_of(entry.ref)
            if pace is None:
                continue
            if self._only is not None and self._only.host != pace.host:
                self._mix_hosts()
                return
            self._only = pace

    def _mix_hosts(self) -> None:
        self._is_mixed = True
        if self._used:
            for used in self._used:
                used.lanes.note_width(self)
            # More of the first host were sent than it may have at once.
            self._hold_back()
            self._has_news = True
            self._resume_later()

    def _resume_later(self) -> None:
        if not self._is_resuming:
            self._is_resuming = True
            asyncio.get_running_loop().call_soon(self._resume_now)

    def _resume_now(self) -> None:
        self._is_resuming = False
        if (self._ready or self._has_news) and not self._closed:
            self._has_news = False
            self._resume()

    def _set_timer(self) -> None:
        """Look again when the first pause of a host ends for which references wait."""
        now = self._clock.monotonic()
        at = min((pace.paused_until for pace in self._held if pace.paused_until > now), default=inf)
        if at == self._timer_at or self._closed:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = at
        if at < inf:
            # A loop ends a sleep up to its resolution early; without that tick it would then look again and again.
            self._timer = self._spawn(self._end_pause(at - now + TICK))

    async def _end_pause(self, seconds: float) -> None:
        await self._clock.sleep(seconds)
        self._timer, self._timer_at = None, inf
        now = self._clock.monotonic()
        for pace in self._held:
            if pace.paused_until <= now:
                self._ready[pace] = None
        self._set_timer()
        self._resume()


def _by_pace(entries: Sequence[T]) -> dict[HostPace, Sequence[int]]:
    """The places of these references by the pace of their host."""
    paces = [entry.pace for entry in entries]
    first = paces[0] if paces else None
    if first is not None and paces.count(first) == len(paces):
        return {first: range(len(paces))}
    places: dict[HostPace, list[int]] = {}
    for place, pace in enumerate(paces):
        if pace is not None:
            places.setdefault(pace, []).append(place)
    return dict(places)
