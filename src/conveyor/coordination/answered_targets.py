"""Which targets answered lately: an answer of 500 and more is no outage of a target that also gives others.

A worker knows this of the targets of its own attempts. It tells the other workers of a few targets that answer often:
those are the ones that other workers also try."""

import msgspec

from conveyor.clock import Clock
from conveyor.engines.coordinator import Coordinator

_MAX_TARGETS = 10_000
# Answers in one half of the window after which a worker shares that a target answers, and how many targets one call
# of `share` is about.
_ANSWERS_TO_SHARE = 5
_MAX_SHARED = 20


class _Answers(msgspec.Struct):
    """Answers of a target in one half of the window: when the last one was, how many, and whether that was shared."""

    at: float = 0.0
    count: int = 0
    is_shared: bool = False


class AnsweredTargets:
    """As one worker knows them; `window` is in seconds."""

    def __init__(self, coordinator: Coordinator, clock: Clock, window: float) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._window = window
        # The half of the window that it is now and when it ends; its targets, and those of the half before.
        self._half = -1
        self._half_ends = 0.0
        self._now: dict[str, _Answers] = {}
        self._before: dict[str, _Answers] = {}
        self._to_share: list[str] = []

    def note(self, key: str, count: int) -> None:
        """Note answers below 500."""
        now = self._clock.now()
        if now >= self._half_ends:
            self._turn()
        answers = self._now.get(key)
        if answers is None:
            if len(self._now) >= _MAX_TARGETS:
                # A breaker may open for errors of a target that also answers.
                return
            answers = self._now[key] = _Answers()
        answers.at = now
        answers.count += count
        if not answers.is_shared and answers.count >= _ANSWERS_TO_SHARE and len(self._to_share) < _MAX_SHARED:
            answers.is_shared = True
            self._to_share.append(key)

    async def share(self) -> None:
        """Tell other workers which targets answer."""
        self._turn()
        keys, self._to_share = self._to_share, []
        for key in keys:
            await self._coordinator.cache(_shared_key(key), str(self._clock.now()).encode(), self._window)

    async def has_answered(self, key: str, since: float) -> bool:
        """Return whether the target answered at any worker within the window, and not before `since`."""
        self._turn()
        since = max(since, self._clock.now() - self._window)
        answers = self._now.get(key) or self._before.get(key)
        if answers is not None and answers.at >= since:
            return True
        shared = await self._coordinator.cached(_shared_key(key))
        return shared is not None and float(shared) >= since

    def _turn(self) -> None:
        """Forget the answers of earlier halves."""
        half = int(self._clock.now() / (self._window / 2))
        if half != self._half:
            self._before = self._now if half == self._half + 1 else {}
            self._now, self._half, self._half_ends = {}, half, (half + 1) * self._window / 2


def _shared_key(key: str) -> str:
    return f"answered:{key}"
