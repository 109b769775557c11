"""Joint calls: calls of one kind that are made in the same turn of the event loop become one round trip."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from conveyor.callers import is_in_role

V = TypeVar("V")
T = TypeVar("T")

_MAX_IN_ONE_CALL = 256


class JointCalls(Generic[V, T]):
    """`work` does what several callers ask for, and returns the result of each; if it fails, it fails for all of them.
    Roles and requests do not join, because requests may have to wait for a connection."""

    def __init__(self, work: Callable[[Sequence[V]], Awaitable[Sequence[T]]]) -> None:
        self._work = work
        self._waiting: dict[bool, list[tuple[V, asyncio.Future[T]]]] = {True: [], False: []}
        self._running: set[asyncio.Task[None]] = set()

    async def call(self, item: V) -> T:
        """Do this with what others ask for now; returns the result for this item."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        role = is_in_role()
        if not self._waiting[role]:
            # A task runs after the callers that are about to run in this turn.
            task = loop.create_task(self._run(role))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        self._waiting[role].append((item, answer))
        return await answer

    async def _run(self, role: bool) -> None:
        waiting, self._waiting[role] = self._waiting[role], []
        # A caller may be gone by now.
        wanted = [(item, answer) for item, answer in waiting if not answer.done()]
        for start in range(0, len(wanted), _MAX_IN_ONE_CALL):
            await self._do(wanted[start : start + _MAX_IN_ONE_CALL])

    async def _do(self, batch: Sequence[tuple[V, "asyncio.Future[T]"]]) -> None:
        try:
            results = await self._work([item for item, _ in batch])
        except Exception as error:
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(error)
            return
        except BaseException:
            for _, answer in batch:
                answer.cancel()
            raise
        for (_, answer), result in zip(batch, results, strict=True):
            if not answer.done():
                answer.set_result(result)
