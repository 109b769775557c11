"""The loop of every background role: tick() -> delay. Error handling, backoff, wake-ups and stopping are only here."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import structlog

from conveyor.callers import enter_role
from conveyor.clock import Clock
from conveyor.telemetry import metrics

log = structlog.get_logger()

_FIRST_PAUSE = 0.2
_MAX_PAUSE = 30.0


class Role(Protocol):
    """A background role. `tick` does the work that is due and returns the seconds until the next tick."""

    name: str
    # Set by the service; a role calls it to be ticked before its delay is over.
    wake: Callable[[], None]
    # Set by the service when it stops: a long tick returns between two of its steps.
    stopping: bool

    async def tick(self) -> float: ...

    async def close(self) -> None:
        """Finish or requeue work in flight. Called once, after the last tick."""


class Service:
    """Runs one role until `stop` is called."""

    def __init__(self, role: Role, clock: Clock) -> None:
        self.role = role
        self._clock = clock
        self._wake = asyncio.Event()
        self._stopping = False
        # Since when every tick has failed, in monotonic time.
        self._failing_since: float | None = None
        role.wake = self.wake

    def wake(self) -> None:
        """Tick now, without waiting for the delay."""
        self._wake.set()

    def stop(self) -> None:
        """Finish the current tick, close the role and return from `run`."""
        self._stopping = self.role.stopping = True
        self._wake.set()

    def failing_seconds(self) -> float:
        """For how long every tick has failed; 0 if the last one did not."""
        return 0.0 if self._failing_since is None else self._clock.monotonic() - self._failing_since

    async def run(self) -> None:
        pause = _FIRST_PAUSE
        # This runs in its own task, so every log line of the role has its name.
        structlog.contextvars.bind_contextvars(role=self.role.name)
        enter_role()
        try:
            while not self._stopping:
                self._wake.clear()
                try:
                    delay = await self._tick()
                    pause = _FIRST_PAUSE
                except Exception:
                    log.exception("role tick failed", role=self.role.name, pause=pause)
                    delay, pause = pause, min(pause * 2, _MAX_PAUSE)
                await self._rest(delay)
        finally:
            await self.role.close()

    async def _tick(self) -> float:
        # The name without its number: all loops of a role share one label.
        role = self.role.name.partition("_")[0]
        began = self._clock.monotonic()
        try:
            delay = await self.role.tick()
        except Exception:
            metrics.TICK_ERRORS.add(1, role)
            if self._failing_since is None:
                self._failing_since = began
            raise
        self._failing_since = None
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
    """Run services concurrently until `stopped` returns; then stop all of them and wait until they are closed."""
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
