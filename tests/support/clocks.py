"""Clocks that tests can move. `JumpingClock` goes on by itself, so nothing hangs, and jumps when told to; `EagerClock`
jumps where others sleep; `ManualClock` stands still until it is told to move."""

import asyncio
import heapq
import itertools
import random
import time

from conveyor.clock import sortable_id


class JumpingClock:
    """The real clock plus what it was advanced by; ids come from a seed."""

    def __init__(self, seed: int = 1) -> None:
        self._offset = 0.0
        self._random = random.Random(seed)
        self._jumped = asyncio.Event()

    def advance(self, seconds: float) -> None:
        """Let `seconds` have passed; who sleeps looks at the clock again."""
        self._offset += seconds
        self._jumped.set()
        self._jumped = asyncio.Event()

    def now(self) -> float:
        return time.time() + self._offset

    def monotonic(self) -> float:
        return time.monotonic() + self._offset

    def jitter(self) -> float:
        return self._random.random()

    def new_id(self, prefix: str) -> str:
        return sortable_id(prefix, self.now(), self._random.getrandbits(80))

    async def sleep(self, seconds: float) -> None:
        deadline = self.monotonic() + seconds
        while (left := deadline - self.monotonic()) > 0:
            try:
                await asyncio.wait_for(self._jumped.wait(), left)
            except TimeoutError:
                return
        await asyncio.sleep(0)


class EagerClock(JumpingClock):
    """Nobody waits: a sleep is a jump. Not for roles, which would do nothing but sleep."""

    async def sleep(self, seconds: float) -> None:
        self.advance(max(0.0, seconds))
        await asyncio.sleep(0)


class ManualClock:
    """Time moves only by `advance`; chance and ids come from a seed, and ids made in one moment sort by their making.

    `sleep` wakes when the clock has been advanced past its end, sleepers in the order of their deadlines.
    """

    def __init__(self, start: float = 1_800_000_000.0, seed: int = 1) -> None:
        self._start = start
        self._passed = 0.0
        self._stepped = 0.0
        self._random = random.Random(seed)
        self._made = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._naps = itertools.count()

    def now(self) -> float:
        return self._start + self._passed + self._stepped

    def monotonic(self) -> float:
        # Far from `now`, so that mixing up the two shows.
        return 1000.0 + self._passed

    def jitter(self) -> float:
        return self._random.random()

    def new_id(self, prefix: str) -> str:
        return sortable_id(prefix, self.now(), next(self._made) << 48 | self._random.getrandbits(48))

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        nap: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._passed + seconds, next(self._naps), nap))
        await nap

    def advance(self, seconds: float) -> None:
        """Let `seconds` have passed, at once; who slept until then runs when the caller next awaits."""
        if seconds < 0:
            raise ValueError("time does not go back")
        self._passed += seconds
        while self._sleepers and self._sleepers[0][0] <= self._passed:
            nap = heapq.heappop(self._sleepers)[2]
            if not nap.done():
                nap.set_result(None)

    def step(self, seconds: float) -> None:
        """Set the wall clock forward or back; no time passes."""
        self._stepped += seconds

    @property
    def sleepers(self) -> int:
        """How many wait for the clock now."""
        return sum(not nap.done() for _, _, nap in self._sleepers)

    def next_wake(self) -> float | None:
        """Seconds until the first of them wakes."""
        return min((at - self._passed for at, _, nap in self._sleepers if not nap.done()), default=None)
