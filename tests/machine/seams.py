"""The five seams as the machine has them: every call may take its time, may fail once, before or after it took effect,
and is never heard of again from a process that has died."""

import asyncio
import dataclasses
import inspect
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

from conveyor.engines.records import Records
from conveyor.errors import EngineFailed
from conveyor.system import System
from conveyor.telemetry.seams import PROTOCOLS

BEFORE, AFTER, SLOW = "before", "after", "slow"
# What a call takes that is slow: long enough for others to act in between, shorter than any lease.
_SLOW_SECONDS = 3.0
# The methods of every seam, and whether each is awaited; the others are streams.
METHODS: dict[str, dict[str, bool]] = {
    seam: {
        method: inspect.iscoroutinefunction(function)
        for protocol in protocols
        for method, function in inspect.getmembers(protocol, inspect.isfunction)
        if not method.startswith("_")
    }
    for seam, protocols in PROTOCOLS.items()
}
# Every call of every seam, by its name.
CALLS = sorted(f"{seam}.{method}" for seam, methods in METHODS.items() for method in methods)


# In the place of a name: any call that was not made before in this example. What is rarely called is rarely tested.
NEW = "new"


class Latency(NamedTuple):
    """How long calls take, at least and at most, and which part of them that concerns."""

    part: float = 0.0
    least: float = 0.0
    most: float = 0.0


class Arm(NamedTuple):
    """The `nth` call from now of one method fails, before or after it took effect, or is slow to."""

    call: str
    nth: int
    when: str


Watch = Callable[[str, tuple[Any, ...], dict[str, Any], Any], None]


class Faults:
    """What befalls calls. `watch` is shown each that took effect."""

    def __init__(self, seed: int, latency: Latency, watch: Watch) -> None:
        self._random = random.Random(seed)
        self._latency = latency
        self._watch = watch
        self._arms: dict[str, list[Arm]] = {}
        self.seen: Counter[str] = Counter()
        # Calls that failed.
        self.fired: list[str] = []

    def arm(self, arm: Arm) -> None:
        self._arms.setdefault(arm.call, []).append(arm)

    def off(self) -> None:
        self._arms.clear()
        self._latency = Latency()

    async def meet(self, call: str) -> str | None:
        """Take the call's time; how it fails, if it does."""
        self.seen[call] += 1
        due = [*self._due(call), *(self._due(NEW) if self.seen[call] == 1 else [])]
        await self.linger()
        if SLOW in due:
            await asyncio.sleep(_SLOW_SECONDS)
        fails = [when for when in due if when != SLOW]
        self.fired += [call] * len(fails)
        return fails[0] if fails else None

    def _due(self, name: str) -> list[str]:
        arms = self._arms.get(name)
        if not arms:
            return []
        self._arms[name] = [arm._replace(nth=arm.nth - 1) for arm in arms if arm.nth > 1]
        return [arm.when for arm in arms if arm.nth <= 1]

    async def linger(self) -> None:
        part, least, most = self._latency
        if part and self._random.random() < part:
            await asyncio.sleep(self._random.uniform(least, most))

    def took_effect(self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self._watch(call, args, kwargs, result)


class Alive:
    """Whether a process is: what it asks for after its death never happens."""

    def __init__(self) -> None:
        self.dead = False

    def check(self) -> None:
        if self.dead:
            raise asyncio.CancelledError("the process is dead")


class _Seam:
    """Methods are set on it; whatever is no part of the seam is the engine's."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def faulty(system: System, faults: Faults, alive: Alive) -> System:
    """The system as one process sees it."""
    parts: Any = {
        part.name: _faulty(part.name, getattr(system.records, part.name), faults, alive)
        for part in dataclasses.fields(Records)
    }
    engines = {seam: getattr(system, seam) for seam in PROTOCOLS if seam not in parts}
    seams = {seam: _faulty(seam, engine, faults, alive) for seam, engine in engines.items() if engine}
    return dataclasses.replace(system, records=Records(**parts), **seams)


def _faulty(seam: str, engine: Any, faults: Faults, alive: Alive) -> Any:
    wrapper = _Seam(engine)
    for method, awaited in METHODS[seam].items():
        inner = getattr(engine, method, None)
        if inner is not None:
            wrap = _call if awaited else _stream
            setattr(wrapper, method, wrap(f"{seam}.{method}", inner, faults, alive))
    return wrapper


def _call(
    name: str, inner: Callable[..., Awaitable[Any]], faults: Faults, alive: Alive
) -> Callable[..., Awaitable[Any]]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        alive.check()
        fails = await faults.meet(name)
        alive.check()
        if fails == BEFORE:
            raise _failure(name, BEFORE)
        result = await inner(*args, **kwargs)
        faults.took_effect(name, args, kwargs, result)
        await faults.linger()
        alive.check()
        if fails == AFTER:
            raise _failure(name, AFTER)
        return result

    return call


def _stream(name: str, inner: Callable[..., Any], faults: Faults, alive: Alive) -> Callable[..., AsyncIterator[Any]]:
    async def stream(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        alive.check()
        fails = await faults.meet(name)
        if fails == BEFORE:
            raise _failure(name, BEFORE)
        pieces = inner(*args, **kwargs)
        try:
            async for piece in pieces:
                alive.check()
                yield piece
                if fails == AFTER:
                    raise _failure(name, AFTER)
        finally:
            await pieces.aclose()

    return stream


def _failure(name: str, when: str) -> EngineFailed:
    return EngineFailed(f"{name} failed {when} it took effect, as it was armed to.")
