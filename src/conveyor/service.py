"""The one loop of every background role: tick() -> delay. Errors, back-off, wake-ups and stopping live only here."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import structlog

from conveyor.callers import enter_role
from conveyor.clock import Clock
from conveyor.telemetry import metrics

log = structlog.get_logger()

_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 30.0


class Role(Protocol):
    """A background role. `tick` does what is due and returns how many seconds nothing more will be."""

    name: str
    # Set by the service; a role calls it when there is something to do before its delay is over.
    wake: Callable[[], None]
    # Set by the service when it is to end: a tick that takes long comes to an end between two of its steps.
    stopping: bool

    async def tick(self) -> float: ...

    async def close(self) -> None:
        """Finish or give back what is held; called once, after the last tick."""


class Service:
    """Runs one role until it is told to stop."""

    def __init__(self, role: Role, clock: Clock) -> None:
        self.role = role
        self._clock = clock
        self._wake = asyncio.Event()
        self._stopping = False
        role.wake = self.wake

    def wake(self) -> None:
        """Tick now rather than when the delay is over."""
        self._wake.set()

    def stop(self) -> None:
        """Finish the present tick, close the role, end."""
        self._stopping = self.role.stopping = True
        self._wake.set()

    async def run(self) -> None:
        pause = _FIRST_PAUSE
        # A task of its own runs this: the name is on every line that the role logs.
        structlog.contextvars.bind_contextvars(role=self.role.name)
        enter_role()
        try:
            while not self._stopping:
                self._wake.clear()
                try:
                    delay = await self._tick()
                    pause = _FIRST_PAUSE
                except Exception:
                    log.exception("role failed; it goes on after a pause", role=self.role.name, pause=pause)
                    delay, pause = pause, min(pause * 2, _LONGEST_PAUSE)
                await self._rest(delay)
        finally:
            await self.role.close()

    async def _tick(self) -> float:
        # Without the part that makes the name of one of several unlike the others'.
        role = self.role.name.partition("_")[0]
        began = self._clock.monotonic()
        try:
            delay = await self.role.tick()
        except Exception:
            metrics.TICK_ERRORS.add(1, role)
            raise
        metrics.TICK_SECONDS.observe(self._clock.monotonic() - began, role)
        metrics.TICKED_AT.set(self._clock.now(), role)
        return delay

    async def _rest(self, delay: float) -> None:
        if delay <= 0:
            await asyncio.sleep(0)
            return
        timer = asyncio.ensure_future(self._clock.sleep(delay))
        waker = asyncio.ensure_future(self._wake.wait())
        try:
            await asyncio.wait({timer, waker}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
            waker.cancel()


async def run_until(services: Sequence[Service], stopped: Callable[[], Awaitable[object]]) -> None:
    """Run services side by side until `stopped` returns; then stop them all and wait for each to close."""
    tasks = [asyncio.create_task(service.run(), name=service.role.name) for service in services]
    try:
        await stopped()
    finally:
        await stop_all(services, tasks)


async def stop_all(services: Sequence[Service], tasks: Sequence[asyncio.Task[None]]) -> None:
    """Stop services that run as these tasks, and wait until every role is closed; then raise the first error. Who calls
    this takes the engines away next, which roles need to give back what they hold."""
    for service in services:
        service.stop()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in outcomes:
        if outcome is not None:
            raise outcome
