"""Time and randomness, passed in. No other module asks the operating system for either."""

import asyncio
import random
import secrets
import time
from datetime import UTC, datetime
from math import inf
from typing import Protocol

# Seconds by which the clocks of processes may differ. A stored time that lies further in the future than its writer
# could set it, and this much more, was set by a clock that was ahead: nothing waits for it.
CLOCK_SLACK = 60.0

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_TIME_CHARS = 10
_RANDOM_CHARS = 16


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
    chars = []
    for _ in range(_TIME_CHARS + _RANDOM_CHARS):
        chars.append(_ALPHABET[number & 31])
        number >>= 5
    return f"{prefix}_{''.join(reversed(chars))}"


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


class SystemClock:
    """The machine's own clock and entropy."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def jitter(self) -> float:
        return random.random()

    def new_id(self, prefix: str) -> str:
        return sortable_id(prefix, time.time(), secrets.randbits(80))

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
