"""Durations: a small latency histogram of each run, in the coordinator, and lost with it. Its buckets are a tenth
apart, so a percentile is exact within that."""

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec
import structlog

from conveyor.engines.coordinator import Coordinator
from conveyor.errors import ConveyorError
from conveyor.model import RunId

log = structlog.get_logger()

# Seconds of the first bucket, and the ratio of each to the one before.
_FIRST = 0.001
_GROWTH = 1.1
# Where a duration is nearer to the next step, for all that a task can take.
_BOUNDS = tuple(_FIRST * _GROWTH ** (step + 0.5) for step in range(250))
_KEEP_SECONDS = 86_400.0


class TaskTime(msgspec.Struct, frozen=True):
    """Percentiles of the seconds that tasks took in their last attempt."""

    p50: float
    p95: float


def steps_of(seconds: Iterable[float]) -> list[int]:
    """The bucket of each duration."""
    return [bisect_left(_BOUNDS, duration) for duration in seconds]


def seconds_of_step(step: int) -> float:
    """About how long what is in this bucket took."""
    return float(f"{_FIRST * _GROWTH**step:.3g}")


def percentile(steps: Iterable[tuple[int, int]], share: float) -> float:
    """The percentile of a histogram that is not empty: pairs of bucket and count, in order."""
    pairs = list(steps)
    below = itertools.accumulate(count for _, count in pairs)
    wanted = share * sum(count for _, count in pairs)
    step = next(step for (step, _), number in zip(pairs, below, strict=True) if number >= wanted)
    return seconds_of_step(step)


async def count_durations(coordinator: Coordinator, seconds: Mapping[RunId, Iterable[float]]) -> None:
    """Add durations of each run. A coordinator that fails is logged and not raised: the caller has more to do."""
    additions = {_name(run_id): _amounts(durations) for run_id, durations in seconds.items()}
    additions = {name: amounts for name, amounts in additions.items() if amounts}
    try:
        if additions:
            await coordinator.add_counters_of(additions, _KEEP_SECONDS)
    except ConveyorError as error:
        log.warning("task durations not stored", runs=len(additions), error=str(error))


async def read_histogram(coordinator: Coordinator, run_id: RunId) -> list[tuple[float, int]]:
    """Return the buckets: seconds, and how many tasks took about that long; the shortest first."""
    return [(seconds_of_step(step), count) for step, count in await _steps(coordinator, run_id)]


async def task_time(coordinator: Coordinator, run_id: RunId) -> TaskTime | None:
    """Return the percentiles of a run; None if it has no durations."""
    steps = await _steps(coordinator, run_id)
    return TaskTime(percentile(steps, 0.5), percentile(steps, 0.95)) if steps else None


async def mean_seconds(coordinator: Coordinator, run_id: RunId) -> float | None:
    """Return the mean of a run; None if it has no durations."""
    histogram = await read_histogram(coordinator, run_id)
    count = sum(count for _, count in histogram)
    return sum(seconds * count for seconds, count in histogram) / count if count else None


def _amounts(seconds: Iterable[float]) -> dict[str, int]:
    """How many durations there are more, by the name of their bucket."""
    counts = Counter(steps_of(duration for duration in seconds if duration > 0))
    return {str(step): count for step, count in counts.items()}


async def _steps(coordinator: Coordinator, run_id: RunId) -> list[tuple[int, int]]:
    counts = await coordinator.add_counters(_name(run_id), {}, _KEEP_SECONDS)
    return sorted((int(step), count) for step, count in counts.items())


def _name(run_id: RunId) -> str:
    return f"durations:{run_id}"
