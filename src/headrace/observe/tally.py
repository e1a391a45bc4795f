"""A histogram for values that are observed once per token: the same samples on the metrics page, a fifth of the time per observation.

`prometheus_client.Histogram` takes two locks per observation and searches its buckets from the first on. Here all observations are made on
one thread without locks, buckets are found by bisection, and samples are made when the page is read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Tally:
    """One histogram's counts."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """bounds: upper bounds of the buckets, inclusive, ascending; one more bucket has the values beyond the last"""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count `value`, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def add_to(self, family: HistogramMetricFamily, labels: tuple[str, ...]) -> None:
        bounds = [floatToGoString(bound) for bound in (*self._bounds, float("inf"))]  # type: ignore[no-untyped-call]
        family.add_metric(labels, list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)


class TallyCollector(Collector):
    """Tallies of one name, by their labels."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        self._name, self._documentation, self._labels, self._bounds = name, documentation, labels, bounds
        self._tallies: dict[tuple[str, ...], Tally] = {}

    def labels(self, *values: str) -> Tally:
        return self._tallies.setdefault(values, Tally(self._bounds))

    def remove(self, *values: str) -> None:
        self._tallies.pop(values, None)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        for values, tally in self._tallies.items():
            tally.add_to(family, values)
        yield family

    def describe(self) -> Iterable[Metric]:
        return ()
