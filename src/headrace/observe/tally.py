"""Counts what happens for each request or token, as counters and histograms.

`prometheus_client` takes a lock for each number that it changes; here one thread counts without locks, with equal samples.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)


class Count:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def inc(self, number: int = 1) -> None:
        self.value += number


class Tally:
    def __init__(self, bounds: Sequence[float]) -> None:
        """bounds: inclusive upper bounds, ascending; one more bucket counts what is above"""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def add_to(self, family: HistogramMetricFamily, labels: tuple[str, ...]) -> None:
        add_histogram(family, labels, self._bounds, self._counts, self._sum)


def add_histogram(
    family: HistogramMetricFamily, labels: tuple[str, ...], bounds: Sequence[float], counts: Sequence[int], total: float
) -> None:
    """counts  not accumulated"""
    names = [floatToGoString(bound) for bound in (*bounds, float("inf"))]  # type: ignore[no-untyped-call]
    family.add_metric(labels, list(zip(names, accumulate(counts), strict=True)), total)


class ReadCollector(Collector, Generic[T]):
    def __init__(self, families: Callable[[T], Iterable[Metric]], read: Callable[[], T]) -> None:
        self._families = families
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._families(self._read())


class _Labelled(Collector, Generic[T]):
    def __init__(self, label_names: Sequence[str], make: Callable[[], T]) -> None:
        self._label_names = label_names
        self._make = make
        self._by_labels: dict[tuple[str, ...], T] = {}
        if not label_names:
            self.labels()  # the page shows it before the first request, at zero

    def labels(self, *values: str) -> T:
        series = self._by_labels.get(values)
        if series is None:
            series = self._by_labels[values] = self._make()
        return series

    def remove(self, *leading: str) -> None:
        for labels in [labels for labels in self._by_labels if labels[: len(leading)] == leading]:
            del self._by_labels[labels]


class CountCollector(_Labelled[Count]):
    def __init__(self, name: str, documentation: str, labels: Sequence[str] = ()) -> None:
        super().__init__(labels, Count)
        self._name, self._documentation = name, documentation

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._documentation, labels=self._label_names)
        for values, count in self._by_labels.items():
            family.add_metric(values, count.value)
        yield family


class OutcomeCounter(CountCollector, Generic[E]):
    """Every outcome has a series from the start."""

    def __init__(self, registry: CollectorRegistry, name: str, documentation: str, outcomes: type[E], label: str = "outcome") -> None:
        super().__init__(name, documentation, (label,))
        self._by_outcome = {outcome: self.labels(outcome.value) for outcome in outcomes}
        registry.register(self)

    def __call__(self, outcome: E) -> None:
        self._by_outcome[outcome].inc()


class TallyCollector(_Labelled[Tally]):
    def __init__(self, name: str, documentation: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        super().__init__(labels, lambda: Tally(bounds))
        self._name, self._documentation = name, documentation

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._label_names)
        for values, tally in self._by_labels.items():
            tally.add_to(family, values)
        yield family
