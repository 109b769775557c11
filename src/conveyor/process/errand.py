"""Errand: something that a worker does again and again beside its ticks. An engine that does not answer holds up the
errands that need it, and nothing else."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from conveyor.clock import Clock

log = structlog.get_logger()

_FIRST_PAUSE = 0.2
_MAX_PAUSE = 5.0


class Errand:
    """Calls `work`, which returns the seconds until its next call. After a failure the pause grows."""

    def __init__(self, name: str, work: Callable[[], Awaitable[float]], clock: Clock) -> None:
        self._name = name
        self._work = work
        self._clock = clock
        self._hurried = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._running is None:
            self._running = asyncio.create_task(self._run(), name=self._name)

    def hurry(self) -> None:
        """Do it as soon as possible; once more, if it is under way."""
        self._hurried.set()

    async def close(self) -> None:
        """Stop, whatever is under way."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def _run(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            self._hurried.clear()
            try:
                delay = await self._work()
                pause = _FIRST_PAUSE
            except Exception as error:
                log.warning("errand failed", errand=self._name, pause=pause, error=repr(error))
                delay, pause = pause, min(_MAX_PAUSE, 2 * pause)
            await self._rest(delay)

    async def _rest(self, delay: float) -> None:
        if delay <= 0 or self._hurried.is_set():
            await asyncio.sleep(0)
            return
        timer = asyncio.ensure_future(self._clock.sleep(delay))
        waker = asyncio.ensure_future(self._hurried.wait())
        try:
            await asyncio.wait({timer, waker}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
            waker.cancel()
