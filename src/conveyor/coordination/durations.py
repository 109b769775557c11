"""How long tasks take: a small histogram of each run, kept by the coordinator and lost with it. Its steps are a tenth
apart, so that a quantile is right within that."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable

import msgspec
import structlog

from conveyor.engines.coordinator import Coordinator
from conveyor.errors import ConveyorError
from conveyor.model import RunId

log = structlog.get_logger()

# Seconds of the first step, and how much longer each is than the one before.
_FIRST = 0.001
_GROWTH = 1.1
_STEP = 1 / math.log(_GROWTH)
_KEEP_SECONDS = 86_400.0


class TaskTime(msgspec.Struct, frozen=True):
    """Seconds that half of the tasks, and 95 of a hundred, took at most in their last attempt."""

    p50: float
    p95: float


async def count_durations(coordinator: Coordinator, run_id: RunId, seconds: Iterable[float]) -> None:
    """Add what some tasks took. That it can not be kept is no reason to fail for whoever has more to do."""
    steps = Counter(str(_step(each)) for each in seconds if each > 0)
    try:
        if steps:
            await coordinator.tally(_name(run_id), steps, _KEEP_SECONDS)
    except ConveyorError as error:
        log.warning("task times were not kept", run=run_id, error=str(error))


async def histogram(coordinator: Coordinator, run_id: RunId) -> list[tuple[float, int]]:
    """How many tasks took about so many seconds, the shortest first."""
    return [(_seconds(step), count) for step, count in await _steps(coordinator, run_id)]


async def task_time(coordinator: Coordinator, run_id: RunId) -> TaskTime | None:
    """None if nothing is known."""
    steps = await _steps(coordinator, run_id)
    return TaskTime(_quantile(steps, 0.5), _quantile(steps, 0.95)) if steps else None


async def _steps(coordinator: Coordinator, run_id: RunId) -> list[tuple[int, int]]:
    kept = await coordinator.tally(_name(run_id), {}, _KEEP_SECONDS)
    return sorted((int(step), count) for step, count in kept.items())


def _name(run_id: RunId) -> str:
    return f"durations:{run_id}"


def _step(seconds: float) -> int:
    return max(0, round(math.log(seconds / _FIRST) * _STEP))


def _quantile(steps: list[tuple[int, int]], share: float) -> float:
    below = itertools.accumulate(count for _, count in steps)
    wanted = share * sum(count for _, count in steps)
    step = next(step for (step, _), number in zip(steps, below, strict=True) if number >= wanted)
    return _seconds(step)


def _seconds(step: int) -> float:
    return float(f"{_FIRST * _GROWTH**step:.3g}")
