"""Instruments, the measured seams and the catalogue."""

import inspect
import random
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from conveyor.engines import access_records, blobs, queue, tasks
from conveyor.engines.queue import ReportsMessageAge
from conveyor.engines.tasks import ReadsByIndex
from conveyor.errors import EngineFailed
from conveyor.notify.callback_monitor import CallbackPass
from conveyor.recover.monitored import Monitored
from conveyor.recover.retention import Removed
from conveyor.recover.sweeper import Swept
from conveyor.settings import Settings
from conveyor.system import System, opened_engines
from conveyor.telemetry import metrics
from conveyor.telemetry.exposition import exposition
from conveyor.telemetry.instruments import MAX_SERIES, OTHER, Counter, Gauge, Histogram
from conveyor.telemetry.seams import PROTOCOLS, measured_engine
from tests.support.clocks import ManualClock


def test_a_batch_counts_as_its_values_one_by_one() -> None:
    chance = random.Random(7)
    bounds = (0.01, 0.1, 1.0, 10.0)
    values = [chance.choice([0.0, *bounds, 99.0, chance.expovariate(1.0)]) for _ in range(5000)]
    batched, single = Histogram("a", "", bounds), Histogram("b", "", bounds)
    batched.observe_all(values[:3000])
    batched.observe_all(values[3000:])
    for value in values:
        single.observe(value)
    assert batched.series[()].counts == single.series[()].counts
    assert batched.series[()].sum == pytest.approx(single.series[()].sum)
    assert sum(batched.series[()].counts) == len(values)


def test_a_value_that_a_label_can_not_have_counts_as_other() -> None:
    counter = Counter("a", "", colour=("red", "green"), size=None)
    counter.add(1, "red", "1")
    counter.add(2, "blue", "1")
    counter.add(3, "pink", "1")
    assert counter.series == {("red", "1"): 1, (OTHER, "1"): 5}


def test_there_are_never_more_series_than_the_cap() -> None:
    counter, gauge, histogram = Counter("a", "", x=None), Gauge("b", "", x=None), Histogram("c", "", (1.0,), x=None)
    for number in range(3 * MAX_SERIES):
        counter.add(1, f"job_{number}")
        gauge.set(1, f"job_{number}")
        histogram.observe(1, f"job_{number}")
    for metric in (counter, gauge, histogram):
        assert len(metric.series) == MAX_SERIES + 1
    assert counter.series[OTHER,] == 2 * MAX_SERIES


@pytest.mark.parametrize(
    ("metric", "counts"),
    [
        (metrics.SWEPT, Swept),
        (metrics.MONITORED, Monitored),
        (metrics.CALLBACKS, CallbackPass),
        (metrics.PURGED, Removed),
    ],
)
def test_label_values_are_the_counts_of_a_pass(metric: Counter, counts: type[msgspec.Struct]) -> None:
    fields = [field.name for field in msgspec.structs.fields(counts) if field.type is int]
    assert [*metric.values.values()] == [tuple(fields)]


def test_the_text_is_cumulative_and_has_every_metric_from_the_start() -> None:
    metrics.ATTEMPT_SECONDS.observe_all([0.002, 0.3, 1e9], "fetch")
    text = exposition("")[0].decode()
    buckets = [line for line in text.splitlines() if line.startswith('conveyor_attempt_seconds_bucket{kind="fetch"')]
    counts = [float(line.rpartition(" ")[2]) for line in buckets]
    assert counts == sorted(counts)
    assert "+Inf" in buckets[-1]
    for metric in metrics.CATALOGUE:
        # The older text names a counter without its ending.
        assert f"# TYPE {metric.name} {metric.kind}" in text, metric.name
    assert "process_resident_memory_bytes" in text
    assert exposition("application/openmetrics-text; version=1.0.0")[0].endswith(b"# EOF\n")


def test_names_and_labels_of_the_catalogue_follow_the_customs_of_prometheus() -> None:
    names = [metric.name for metric in metrics.CATALOGUE]
    assert len(names) == len(set(names))
    for metric in metrics.CATALOGUE:
        assert metric.name.startswith("conveyor_"), metric.name
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.help.endswith("."), metric.name
        assert not {"job", "job_id", "tenant", "host", "url", "run"} & set(metric.labels), metric.name


def _behind(engines: dict[str, Any], seam: str) -> Any:
    if seam in ("atomic_accept", "atomic_flush"):
        return engines["records"]
    return getattr(engines[seam], seam) if seam in engines else getattr(engines["records"].records, seam)


@pytest.mark.parametrize("seam", list(PROTOCOLS))
async def test_a_measured_engine_can_all_that_the_engine_can(settings: Settings, seam: str) -> None:
    clock = ManualClock()
    async with opened_engines(settings, clock) as engines:
        engine = _behind(engines, seam)
        measured = measured_engine(seam, engine, "sqlite", clock)
        for protocol in PROTOCOLS[seam]:
            for name, method in inspect.getmembers(protocol, inspect.isfunction):
                if not name.startswith("_") and hasattr(engine, name):
                    # On the wrapper itself: newer Pythons look for capabilities there and not behind __getattr__.
                    assert name in vars(measured), name
                    assert callable(method)
        for capability in (ReadsByIndex, ReportsMessageAge):
            assert isinstance(measured, capability) == isinstance(engine, capability)


def _capabilities() -> set[type]:
    """What the code asks engines for with isinstance, except what the router of tasks says of itself."""
    modules = (access_records, blobs, queue, tasks)
    named = {
        each for module in modules for each in vars(module).values() if getattr(each, "_is_runtime_protocol", False)
    }
    return named - {tasks.RoutesTasks}


def test_no_capability_is_lost_behind_the_measuring() -> None:
    assert len(_capabilities()) > 8
    assert _capabilities() <= {each for protocols in PROTOCOLS.values() for each in protocols}


async def test_a_capability_without_an_await_is_the_engines_own(settings: Settings) -> None:
    class Keeper:
        def has_arrived(self, name: queue.QueueName) -> bool:
            return True

        async def give_back(self, name: queue.QueueName) -> None:
            pass

    measured: Any = measured_engine("queue", Keeper(), "keeper", ManualClock())
    assert "has_arrived" in vars(measured)
    assert isinstance(measured, queue.KeepsArrivals)
    assert measured.has_arrived(queue.QueueName("any")) is True


class _Failing:
    """An engine of which every call fails."""

    async def counts(self, run: Any) -> Any:
        raise EngineFailed("gone")

    async def recount(self, run: Any) -> Any:
        raise RuntimeError("a mistake")

    def stream(self, key: str, offset: int = 0) -> AsyncIterator[bytes]:
        return _broken()


async def _broken() -> AsyncIterator[bytes]:
    yield b"first"
    raise EngineFailed("cut off")


async def test_what_an_engine_raises_is_counted_by_its_code() -> None:
    clock = ManualClock()
    tasks: Any = measured_engine("tasks", _Failing(), "broken", clock)
    blobs: Any = measured_engine("blobs", _Failing(), "broken", clock)
    with pytest.raises(EngineFailed):
        await tasks.counts(None)
    with pytest.raises(RuntimeError):
        await tasks.recount(None)
    with pytest.raises(EngineFailed):
        async for piece in blobs.stream("key"):
            assert piece == b"first"
    errors = {labels: count for labels, count in metrics.ENGINE_ERRORS.series.items() if labels[1] == "broken"}
    assert errors == {
        ("tasks", "broken", "counts", EngineFailed.code): 1,
        ("tasks", "broken", "recount", "unexpected"): 1,
        ("blobs", "broken", "stream", EngineFailed.code): 1,
    }


async def test_a_stream_that_is_left_early_is_closed(system: System) -> None:
    await system.blobs.put("lists/a", b"x" * (1 << 20))
    pieces = system.blobs.stream("lists/a")
    assert await anext(pieces)
    await pieces.aclose()  # type: ignore[attr-defined]
    assert metrics.ENGINE_SECONDS.series["blobs", "local", "stream"].counts
