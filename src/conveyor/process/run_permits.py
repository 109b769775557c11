"""RunPermits: how many tasks of each run this worker may run at once, within the run's concurrency. All workers share
the semaphores; the worker asks for those of all its runs in one round trip."""

import asyncio
from collections.abc import Mapping

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.engines.coordinator import Coordinator, PermitRequest
from conveyor.errors import ConveyorError

log = structlog.get_logger()

# Permits that nobody has changed are renewed after this long.
_RENEW_SECONDS = 1.0
# How long a tick waits for the coordinator, and how long it does without after that.
_PATIENCE = 2.0
_AWAY_SECONDS = 2.0


class PermitWish(msgspec.Struct, frozen=True):
    """How many permits of a semaphore the worker could use, and how many there are."""

    want: int
    limit: int


class _Grant(msgspec.Struct, frozen=True):
    wish: PermitWish
    granted: int
    at: float


class RunPermits:
    """The permits of one worker, by semaphore. While the coordinator is away, the worker keeps those that it
    has."""

    def __init__(self, coordinator: Coordinator, clock: Clock, holder: str, ttl: float) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._holder = holder
        self._ttl = ttl
        self._grants: dict[str, _Grant] = {}
        self._away_until = 0.0

    async def acquire(self, wishes: Mapping[str, PermitWish]) -> Mapping[str, int]:
        """Return how many permits of each semaphore the worker has."""
        now = self._clock.monotonic()
        asked = {name: wish for name, wish in wishes.items() if not self._is_fresh(name, wish, now)}
        if asked and now >= self._away_until:
            await self._ask(asked, now)
        is_away = self._clock.monotonic() < self._away_until
        return {name: min(wish.want, self._granted(name, is_away=is_away)) for name, wish in wishes.items()}

    def has(self, name: str) -> bool:
        """Whether the semaphore was asked for, so that permits of it may have to be given back."""
        return name in self._grants

    def forget(self, name: str) -> None:
        """The worker has given up the semaphore."""
        self._grants.pop(name, None)

    def _granted(self, name: str, *, is_away: bool) -> int:
        """What was granted. While the coordinator is away, one permit of a semaphore that was never asked for."""
        grant = self._grants.get(name)
        return int(is_away) if grant is None else grant.granted

    def _is_fresh(self, name: str, wish: PermitWish, now: float) -> bool:
        """Whether the last answer still holds: it was all that was wanted."""
        grant = self._grants.get(name)
        if grant is None or grant.wish != wish or grant.granted < wish.want:
            return grant is None and wish.want == 0
        return wish.want == 0 or now - grant.at < min(_RENEW_SECONDS, self._ttl / 3)

    async def _ask(self, asked: Mapping[str, PermitWish], now: float) -> None:
        requests = [PermitRequest(name, wish.want, wish.limit) for name, wish in asked.items()]
        try:
            async with asyncio.timeout(_PATIENCE):
                granted = await self._coordinator.acquire_many(requests, self._holder, self._ttl)
        except (ConveyorError, TimeoutError) as error:
            log.warning("slots not renewed; each run keeps those that it has", error=repr(error))
            self._away_until = self._clock.monotonic() + _AWAY_SECONDS
            return
        for (name, wish), count in zip(asked.items(), granted, strict=True):
            self._grants[name] = _Grant(wish, count, now)
