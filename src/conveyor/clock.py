"""Time and randomness, passed in. No other module asks the operating system for either."""

import asyncio
import os
import random
import time
from datetime import UTC, datetime
from math import inf
from typing import Protocol

# Seconds by which the clocks of processes may differ. A stored time that lies further in the future than its writer
# could set it, and this much more, was set by a clock that was ahead: nothing waits for it.
CLOCK_SLACK = 60.0

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_TIME_CHARS = 10
# Ten bits are two characters.
_PAIRS = tuple(first + second for first in _ALPHABET for second in _ALPHABET)
_SHIFTS = range(120, -1, -10)
_ENTROPY_BYTES = 4000


class Clock(Protocol):
    """The source of time, randomness and ids."""

    def now(self) -> float:
        """Seconds since 1970, for times that are stored or shown."""

    def monotonic(self) -> float:
        """Seconds that never decrease, for waits and deadlines inside one process."""

    def jitter(self) -> float:
        """A number in [0, 1)."""

    def new_id(self, prefix: str) -> str:
        """A unique id whose text sorts by the time at which it was made."""

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""


def sortable_id(prefix: str, now: float, entropy: int) -> str:
    """48 bits of milliseconds and 80 bits of entropy, in an alphabet that sorts as it counts."""
    number = (int(now * 1000) << 80) | (entropy & ((1 << 80) - 1))
    return f"{prefix}_{''.join([_PAIRS[number >> shift & 1023] for shift in _SHIFTS])}"


def time_of_id(text: str) -> float:
    """When an id was made; `text` is what follows its prefix."""
    number = 0
    for char in text[:_TIME_CHARS]:
        number = number << 5 | _ALPHABET.index(char)
    return number / 1000


def iso_text(at: float) -> str:
    """A time as it is shown everywhere: ISO 8601 in UTC, to the millisecond, with Z."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def seconds_since(at: float, now: float) -> float:
    """The seconds since a stored time. Infinite if a clock that was ahead set it: when it was is not known."""
    passed = now - at
    return passed if passed >= -CLOCK_SLACK else inf


class ClockSteps:
    """Tells when the wall clock of this process was set, or its machine was suspended."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ahead: float | None = None

    def look(self) -> float:
        """By how many seconds it was set since the last look; 0 if by less than the slack."""
        ahead = self._clock.now() - self._clock.monotonic()
        step = 0.0 if self._ahead is None else ahead - self._ahead
        self._ahead = ahead
        return step if abs(step) > CLOCK_SLACK else 0.0


class _Entropy:
    """Random bytes of the operating system, many at a time: a call for each id would hand over the interpreter lock."""

    def __init__(self) -> None:
        self._left = memoryview(b"")
        # Two processes must not take the same.
        os.register_at_fork(after_in_child=self._forget)

    def take(self, count: int) -> int:
        """A number of so many random bytes."""
        if len(self._left) < count:
            self._left = memoryview(os.urandom(_ENTROPY_BYTES))
        taken, self._left = self._left[:count], self._left[count:]
        return int.from_bytes(taken, "big")

    def _forget(self) -> None:
        self._left = memoryview(b"")


_entropy = _Entropy()


class SystemClock:
    """The machine's own clock and entropy."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def jitter(self) -> float:
        return random.random()

    def new_id(self, prefix: str) -> str:
        return sortable_id(prefix, time.time(), _entropy.take(10))

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
