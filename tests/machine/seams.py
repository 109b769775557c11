"""The five seams as the machine has them: every call may take its time, may fail once, before or after it took effect,
and is never heard of again from a process that has died."""

import asyncio
import dataclasses
import inspect
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any, NamedTuple

from conveyor.engines.records import Records
from conveyor.errors import EngineFailed
from conveyor.system import System
from conveyor.telemetry.seams import PROTOCOLS, is_stream

BEFORE, AFTER, SLOW = "before", "after", "slow"
# What a call takes that is slow: long enough for others to act in between, shorter than any lease.
_SLOW_SECONDS = 3.0
# Of calls that have trouble all the time: what the slow ones take, so that several in a row are still shorter than a
# lease, and which part they are; which part fails, and how many at most: exports and ingests do not try for ever.
_TROUBLE_SECONDS = 1.2
_SLOW_PART = 0.5
_FLAKY_PART = 0.4
_MOST_FAILURES = 4
_FRESH = 2
_MEANWHILE_PART = 0.5
# The methods of every seam that are calls of its engine, and whether each is awaited; the others are streams.
METHODS: dict[str, dict[str, bool]] = {
    seam: {
        method: inspect.iscoroutinefunction(function)
        for protocol in protocols
        for method, function in inspect.getmembers(protocol, inspect.isfunction)
        if not method.startswith("_") and (inspect.iscoroutinefunction(function) or is_stream(function))
    }
    for seam, protocols in PROTOCOLS.items()
}
# Every call of every seam, by its name.
CALLS = sorted(f"{seam}.{method}" for seam, methods in METHODS.items() for method in methods)


# In the place of a name: any call that was not made before in this example. What is rarely called is rarely tested.
NEW = "new"


# Whoever is no role.
CLIENT = "client"
# With these a role decides about a job, whose id comes first, by what it read before.
DECISIONS = frozenset(
    {"ingests.seal", "ingests.split", "jobs.latch", "jobs.mark_swept", "jobs.move_run", "jobs.set_total"}
)


class Latency(NamedTuple):
    """How long calls take, at least and at most, and which part of them that concerns."""

    part: float = 0.0
    least: float = 0.0
    most: float = 0.0


class Trouble(NamedTuple):
    """What has trouble all through an example: some calls are slow again and again, others fail a few times, every call
    of some roles is slow, as if they were far away, or any call may fail when it is made for the first times (`fresh`).
    So a call that is rarely made has its trouble in some examples whenever it is made. Or clients are quick
    (`meanwhile`): they do something to a job between what a role read of it and the call that follows from that."""

    slow: Collection[str] = ()
    flaky: Collection[str] = ()
    far: Collection[str] = ()
    fresh: bool = False
    meanwhile: bool = False


class Arm(NamedTuple):
    """The `nth` call from now of one method fails, before or after it took effect, or is slow to."""

    call: str
    nth: int
    when: str


Watch = Callable[[str, tuple[Any, ...], dict[str, Any], Any], None]
# What a client does to the job of this id, with something random to choose by.
Meddle = Callable[[Any, random.Random], Awaitable[None]]


class Faults:
    """What befalls calls. `watch` is shown each that took effect, `meddle` gets in before some do."""

    def __init__(self, seed: int, latency: Latency, trouble: Trouble, watch: Watch, meddle: Meddle) -> None:
        self._random = random.Random(seed)
        self._latency = latency
        self._trouble = trouble
        self._watch = watch
        self._meddle = meddle
        self._arms: dict[str, list[Arm]] = {}
        self.seen: Counter[str] = Counter()
        # By method and sort of thing: how often it was asked for, and failed.
        self._asked: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        # Calls that failed, and how many were slow.
        self.fired: list[str] = []
        self.slowed = 0

    def arm(self, arm: Arm) -> None:
        self._arms.setdefault(arm.call, []).append(arm)

    def off(self) -> None:
        self._arms.clear()
        self._latency = Latency()
        self._trouble = Trouble()

    async def meet(self, call: str, role: str = CLIENT, args: tuple[Any, ...] = ()) -> str | None:
        """Take the time of a role's call; how it fails, if it does."""
        self.seen[call] += 1
        due = [*self._due(call), *(self._due(NEW) if self.seen[call] == 1 else []), *self._troubles(call, args)]
        await self.linger()
        if SLOW in due or self._is_slow(call, role):
            self.slowed += 1
            await asyncio.sleep(_SLOW_SECONDS if SLOW in due else _TROUBLE_SECONDS)
        fails = [when for when in due if when != SLOW]
        self.fired += [call] * len(fails)
        return fails[0] if fails else None

    def _due(self, name: str) -> list[str]:
        arms = self._arms.get(name)
        if not arms:
            return []
        self._arms[name] = [arm._replace(nth=arm.nth - 1) for arm in arms if arm.nth > 1]
        return [arm.when for arm in arms if arm.nth <= 1]

    def _is_slow(self, call: str, role: str) -> bool:
        slow = call in self._trouble.slow or role in self._trouble.far
        return slow and self._random.random() < _SLOW_PART

    def _troubles(self, call: str, args: tuple[Any, ...]) -> list[str]:
        """What is rarely asked for has its troubles, however often the same method is called for something else."""
        subject = f"{call} {_sort_of(args)}"
        self._asked[subject] += 1
        flaky = call in self._trouble.flaky and self._failed[subject] < _MOST_FAILURES
        fresh = self._trouble.fresh and self._asked[subject] <= _FRESH
        fails = (flaky or fresh) and self._random.random() < _FLAKY_PART
        self._failed[subject] += fails
        return [self._random.choice([BEFORE, AFTER])] if fails else []

    async def linger(self) -> None:
        part, least, most = self._latency
        if part and self._random.random() < part:
            await asyncio.sleep(self._random.uniform(least, most))

    async def meddle(self, call: str, role: str, args: tuple[Any, ...]) -> None:
        """Have a client get in before a role's call that decides about a job."""
        wanted = self._trouble.meanwhile and role != CLIENT and call in DECISIONS
        if wanted and self._random.random() < _MEANWHILE_PART:
            await self._meddle(args[0], self._random)

    def took_effect(self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self._watch(call, args, kwargs, result)


class Alive:
    """Whether a process of this role is: what it asks for after its death never happens."""

    def __init__(self, role: str = CLIENT) -> None:
        self.role = role
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
        fails = await faults.meet(name, alive.role, args)
        alive.check()
        if fails == BEFORE:
            raise _failure(name, BEFORE)
        await faults.meddle(name, alive.role, args)
        alive.check()
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
        fails = await faults.meet(name, alive.role, args)
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


def _sort_of(args: tuple[Any, ...]) -> str:
    """What a call is for: the names of semaphores, buckets, leases and queues begin with that."""
    return args[0].partition(":")[0] if args and isinstance(args[0], str) and ":" in args[0] else ""


def _failure(name: str, when: str) -> EngineFailed:
    return EngineFailed(f"{name} failed {when} it took effect, as it was armed to.")
