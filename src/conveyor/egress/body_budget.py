"""Body budget: the memory that large bodies may take together while they are read. A body that may be large waits until
its maximum is free before it is read further, so that readers cannot block each other."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

# Bodies of at most this size need no budget.
SMALL = 256 * 1024
# Copies of a body that there are on its way from the connection to the store, in this process and in the worker.
COPIES = 4
# A body that may be larger than this counts with all its copies. Of smaller ones, few are copied at the same time.
_COUNTS_ONCE = 32 * 1024 * 1024


def largest_body(budget: int, fetchers: int) -> int:
    """The size of the largest body that a fetcher can read within its share of a budget."""
    share = budget // max(1, fetchers)
    return max(min(share, _COUNTS_ONCE), share // COPIES)


class BodyBudget:
    """First come, first served. A reader of a large body awaits `room` before it releases its share, so that no more
    bodies are read than the next stage accepts."""

    def __init__(self, total: int, room: Callable[[], Awaitable[object]] | None = None) -> None:
        self._total = total
        self._room = room
        self._taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def taken(self) -> int:
        return self._taken

    @asynccontextmanager
    async def taking(self, max_bytes: int) -> AsyncIterator[None]:
        """Take this many bytes of the budget while the block runs, or all of it if it has fewer."""
        amount = min(max_bytes if max_bytes <= _COUNTS_ONCE else max_bytes * COPIES, self._total)
        if amount > SMALL:
            await self._take(amount)
        try:
            yield
            if amount > SMALL and self._room is not None:
                await self._room()
        finally:
            if amount > SMALL:
                self._taken -= amount
                self._grant_waiting()

    async def _take(self, amount: int) -> None:
        if not self._waiting and self._taken + amount <= self._total:
            self._taken += amount
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((amount, granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._taken -= amount
            self._grant_waiting()
            raise

    def _grant_waiting(self) -> None:
        while self._waiting:
            amount, granted = self._waiting[0]
            if granted.done():
                self._waiting.popleft()
            elif self._taken + amount <= self._total:
                self._waiting.popleft()
                self._taken += amount
                granted.set_result(None)
            else:
                return
