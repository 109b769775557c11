"""The metrics of this process as text for Prometheus, with the process metrics of prometheus-client."""

from collections.abc import Iterable
from functools import cache

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from conveyor import __version__
from conveyor.telemetry import child_processes, metrics
from conveyor.telemetry.instruments import Counter, Gauge, Histogram


def exposition(accept: str) -> tuple[bytes, str]:
    """The text and its media type, as negotiated by the Accept header."""
    metrics.INFO.set(1, __version__)
    child_processes.set_gauges()
    encode, media_type = choose_encoder(accept)
    return encode(_registry()), media_type


@cache
def _registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_Instruments())
    return registry


class _Instruments(Collector):
    def collect(self) -> Iterable[Metric]:
        return [_family(metric) for metric in metrics.CATALOGUE]


def _family(metric: Counter | Gauge | Histogram) -> Metric:
    if isinstance(metric, Histogram):
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, observed in metric.series.items():
            below, buckets = 0, []
            for bound, count in zip((*map(str, metric.bounds), "+Inf"), observed.counts, strict=True):
                below += count
                buckets.append((bound, float(below)))
            histogram.add_metric(labels, buckets, observed.sum)
        return histogram
    kind = CounterMetricFamily if isinstance(metric, Counter) else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in metric.series.items():
        family.add_metric(labels, value)
    return family
