"""Cells: the counters, gauges and histograms of this process. Changed on the event loop only, without a lock.

The number of series is bounded. A label either says which values it can have, and any other counts as `other`; or its
values are names in our own code, and a cap stands behind that.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import ClassVar

OTHER = "other"
MOST_SERIES = 1000

Labels = tuple[str, ...]
# The values that a label can have; None where they are names in our own code.
Values = Sequence[str] | None


class Metric:
    """What a metric is. Its series stand under the values of its labels, in order."""

    kind: ClassVar[str]

    def __init__(self, name: str, help: str, **labels: Values) -> None:
        self.name = name
        self.help = help
        self.values: Mapping[str, Values] = labels

    @property
    def labels(self) -> Labels:
        return tuple(self.values)

    def known(self) -> Iterable[Labels]:
        """The series that there are from the start: a counter that first shows up as 1 looks as if nothing happened."""
        if any(values is None for values in self.values.values()):
            return []
        return product(*(values or () for values in self.values.values()))

    def _bounded(self, labels: Labels, count: int) -> Labels:
        """The series that a new one counts under."""
        assert len(labels) == len(self.values), self.name
        if count >= MOST_SERIES:
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


class Observed:
    """One series of a histogram: how many fell between its bounds, and their sum."""

    __slots__ = ("counts", "sum")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.sum = 0.0


class Histogram(Metric):
    kind = "histogram"

    def __init__(self, name: str, help: str, bounds: Sequence[float], **labels: Values) -> None:
        super().__init__(name, help, **labels)
        self.bounds = tuple(bounds)
        self.series: dict[Labels, Observed] = {}

    def observe(self, value: float, *labels: str) -> None:
        observed = self._observed(labels)
        observed.counts[bisect_left(self.bounds, value)] += 1
        observed.sum += value

    def observe_all(self, values: Iterable[float], *labels: str) -> None:
        """A batch: sorted once, and then one search for each bound instead of one for each value."""
        observed, ordered, below = self._observed(labels), sorted(values), 0
        for place, bound in enumerate(self.bounds):
            upto = bisect_right(ordered, bound, below)
            observed.counts[place] += upto - below
            below = upto
        observed.counts[-1] += len(ordered) - below
        observed.sum += sum(ordered)

    def _observed(self, labels: Labels) -> Observed:
        found = self.series.get(labels)
        if found is None:
            found = self.series.setdefault(self._bounded(labels, len(self.series)), Observed(len(self.bounds) + 1))
        return found
