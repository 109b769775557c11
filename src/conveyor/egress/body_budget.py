"""Budget: the memory that large bodies may take together while they are read. A body that may be large waits for all
that it may need before it is read on, so that those who wait hold nothing that another waits for."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

# Bodies of which this is the most are read as they come.
SMALL = 256 * 1024


class BodyBudget:
    """In the order of asking. `room` is awaited by who has read a large body and still holds its bytes: so none is
    taken in while those before it can not be passed on."""

    def __init__(self, total: int, room: Callable[[], Awaitable[object]] | None = None) -> None:
        self._total = total
        self._room = room
        self._taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def taken(self) -> int:
        return self._taken

    @asynccontextmanager
    async def taking(self, most: int) -> AsyncIterator[None]:
        """Hold so many bytes; more than there are in all counts as all of them."""
        amount = min(most, self._total)
        if amount > SMALL:
            await self._take(amount)
        try:
            yield
            if amount > SMALL and self._room is not None:
                await self._room()
        finally:
            if amount > SMALL:
                self._taken -= amount
                self._pass_on()

    async def _take(self, amount: int) -> None:
        if not self._waiting and self._taken + amount <= self._total:
            self._taken += amount
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((amount, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._taken -= amount
            self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            amount, turn = self._waiting[0]
            if turn.done():
                self._waiting.popleft()
            elif self._taken + amount <= self._total:
                self._waiting.popleft()
                self._taken += amount
                turn.set_result(None)
            else:
                return
