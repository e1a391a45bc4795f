"""Tests that counts and tallies show what the library's own counters and histograms show."""

from __future__ import annotations

from enum import StrEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.exposition import generate_latest

from headrace.observe.tally import CountCollector, OutcomeCounter, TallyCollector

pytestmark = pytest.mark.pure

BOUNDS = (0.01, 0.1, 1, 2.5, 10)
values = st.sampled_from(BOUNDS) | st.floats(0, 20)


@given(st.lists(st.tuples(st.sampled_from(["r0", "r1"]), values, st.integers(1, 3)), max_size=20))
def test_the_page_is_the_same_as_with_a_histogram(observed: list[tuple[str, float, int]]) -> None:
    disable_created_metrics()  # type: ignore[no-untyped-call]
    plain, ours = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("gap_seconds", "Gaps.", ("model", "replica"), buckets=BOUNDS, registry=plain)
    tallies = TallyCollector("gap_seconds", "Gaps.", ("model", "replica"), BOUNDS)
    ours.register(tallies)
    for replica, value, count in observed:
        tallies.labels("m", replica).observe(value, count)
        for _ in range(count):
            histogram.labels("m", replica).observe(value)
    shown, expected = _samples(ours), _samples(plain)
    assert shown.keys() == expected.keys()
    assert all(abs(shown[name] - expected[name]) < 1e-9 * (1 + expected[name]) for name in expected)
    assert [line for line in generate_latest(ours).splitlines() if b"#" in line] == [
        line for line in generate_latest(plain).splitlines() if b"#" in line
    ]


@given(st.lists(st.tuples(st.sampled_from(["r0", "r1"]), st.sampled_from(["stop", "length"]), st.integers(1, 3)), max_size=20))
def test_the_page_is_the_same_as_with_a_counter(counted: list[tuple[str, str, int]]) -> None:
    disable_created_metrics()  # type: ignore[no-untyped-call]
    plain, ours = CollectorRegistry(), CollectorRegistry()
    counter = Counter("requests", "Requests.", ("replica", "outcome"), registry=plain)
    counts = CountCollector("requests", "Requests.", ("replica", "outcome"))
    ours.register(counts)
    for replica, outcome, number in counted:
        counter.labels(replica, outcome).inc(number)
        counts.labels(replica, outcome).inc(number)
    assert generate_latest(ours) == generate_latest(plain)


class Fate(StrEnum):
    KEPT = "kept"
    LOST = "lost"


def test_each_outcome_is_shown_before_it_is_counted() -> None:
    ours = CollectorRegistry()
    count = OutcomeCounter(ours, "turns", "Turns.", Fate)
    count(Fate.KEPT)
    assert _samples(ours) == {'turns_total{outcome="kept"}': 1.0, 'turns_total{outcome="lost"}': 0.0}


def test_a_series_without_labels_is_shown_at_zero() -> None:
    disable_created_metrics()  # type: ignore[no-untyped-call]
    plain, ours = CollectorRegistry(), CollectorRegistry()
    Histogram("lag_seconds", "Lag.", buckets=BOUNDS, registry=plain)
    ours.register(TallyCollector("lag_seconds", "Lag.", (), BOUNDS))
    assert generate_latest(ours) == generate_latest(plain)


def test_series_are_removed_by_their_first_labels() -> None:
    ours = CollectorRegistry()
    counts = CountCollector("requests", "Requests.", ("replica", "outcome"))
    ours.register(counts)
    for replica, outcome in (("r0", "stop"), ("r0", "length"), ("r1", "stop")):
        counts.labels(replica, outcome).inc()
    counts.remove("r0")
    assert _samples(ours) == {'requests_total{outcome="stop",replica="r1"}': 1.0}


def _samples(registry: CollectorRegistry) -> dict[str, float]:
    lines = generate_latest(registry).decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}
