"""Instruments: the counters, gauges and histograms of this process. Only the event loop changes them, so they need no
lock.

The number of series is bounded. A label either lists its values, and any other value counts as `other`; or its values
are names in our own code, and MAX_SERIES limits them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import ClassVar

OTHER = "other"
MAX_SERIES = 1000

Labels = tuple[str, ...]
# The values of a label; None if they are names in our own code.
Values = Sequence[str] | None


class Metric:
    """A metric: name, help and labels. The keys of its series are label values, in order."""

    kind: ClassVar[str]

    def __init__(self, name: str, help: str, **labels: Values) -> None:
        self.name = name
        self.help = help
        self.values: Mapping[str, Values] = labels

    @property
    def labels(self) -> Labels:
        return tuple(self.values)

    def known(self) -> Iterable[Labels]:
        """The series that exist from the start: a counter that first appears with 1 shows no increase."""
        if any(values is None for values in self.values.values()):
            return []
        return product(*(values or () for values in self.values.values()))

    def _bounded(self, labels: Labels, count: int) -> Labels:
        """The labels under which a new series is stored."""
        assert len(labels) == len(self.values), self.name
        if count >= MAX_SERIES:
            return (OTHER,) * len(labels)
        pairs = zip(labels, self.values.values(), strict=True)
        return tuple(label if values is None or label in values else OTHER for label, values in pairs)


class Counter(Metric):
    kind = "counter"

    def __init__(self, name: str, help: str, **labels: Values) -> None:
        super().__init__(name, help, **labels)
        self.series: dict[Labels, float] = dict.fromkeys(self.known(), 0.0)

    def add(self, amount: float, *labels: str) -> None:
        if labels not in self.series:
            labels = self._bounded(labels, len(self.series))
        self.series[labels] = self.series.get(labels, 0.0) + amount


class Gauge(Metric):
    kind = "gauge"

    def __init__(self, name: str, help: str, **labels: Values) -> None:
        super().__init__(name, help, **labels)
        self.series: dict[Labels, float] = {}

    def set(self, value: float, *labels: str) -> None:
        if labels not in self.series:
            labels = self._bounded(labels, len(self.series))
        self.series[labels] = value

    def clear(self) -> None:
        """Show no value: another process has the current one."""
        self.series.clear()


class HistogramSeries:
    """One series of a histogram: the count of each bucket, and the sum."""

    __slots__ = ("counts", "sum")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.sum = 0.0


class Histogram(Metric):
    kind = "histogram"

    def __init__(self, name: str, help: str, bounds: Sequence[float], **labels: Values) -> None:
        super().__init__(name, help, **labels)
        self.bounds = tuple(bounds)
        self.series: dict[Labels, HistogramSeries] = {}

    def observe(self, value: float, *labels: str) -> None:
        series = self._series(labels)
        series.counts[bisect_left(self.bounds, value)] += 1
        series.sum += value

    def observe_all(self, values: Iterable[float], *labels: str) -> None:
        """Observe a batch: sort it once, then search once for each bound instead of once for each value."""
        series, ordered, below = self._series(labels), sorted(values), 0
        for place, bound in enumerate(self.bounds):
            upto = bisect_right(ordered, bound, below)
            series.counts[place] += upto - below
            below = upto
        series.counts[-1] += len(ordered) - below
        series.sum += sum(ordered)

    def _series(self, labels: Labels) -> HistogramSeries:
        series = self.series.get(labels)
        if series is None:
            series = self.series.setdefault(
                self._bounded(labels, len(self.series)), HistogramSeries(len(self.bounds) + 1)
            )
        return series
