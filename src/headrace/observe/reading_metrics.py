"""Families of the metrics page made from readings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.observe.tenant_metrics import BUDGET_PREFIX

LABELS = ("model", "replica")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamReading:
    """left_out         malformed fields in its answers
    held_s           seconds until its rate limit allows a new request
    num_running, num_waiting  as its own metrics page reports them
    """

    model: str
    replica: str
    attempts: Mapping[str, int]
    left_out: Mapping[str, int]
    num_open: int
    is_circuit_open: bool
    held_s: float
    num_running: int | None
    num_waiting: int | None


def upstream_families(readings: Iterable[UpstreamReading]) -> Iterator[Metric]:
    readings = list(readings)
    if not readings:
        return
    attempts = CounterMetricFamily("headrace_upstream_attempts", "Requests sent to a foreign server by result.", labels=(*LABELS, "result"))
    left_out = CounterMetricFamily(
        "headrace_upstream_fields_left_out",
        "Malformed fields beside text, calls and ends of a foreign server's answers, by name.",
        labels=(*LABELS, "field"),
    )
    num_open = GaugeMetricFamily("headrace_upstream_requests_open", "Requests under way at a foreign server from here.", labels=LABELS)
    circuit = GaugeMetricFamily("headrace_upstream_circuit_open", "1 while a foreign server gets at most a probe.", labels=LABELS)
    held = GaugeMetricFamily(
        "headrace_upstream_rate_limit_seconds", "Seconds for which a rate limit allows a foreign server no request.", labels=LABELS
    )
    for reading in readings:
        labels = (reading.model, reading.replica)
        for result, count in reading.attempts.items():
            attempts.add_metric((*labels, result), count)
        for field, count in reading.left_out.items():
            left_out.add_metric((*labels, field), count)
        num_open.add_metric(labels, reading.num_open)
        circuit.add_metric(labels, float(reading.is_circuit_open))
        held.add_metric(labels, reading.held_s)
    yield from (attempts, left_out, num_open, circuit, held)


def reported_load_families(readings: Iterable[UpstreamReading]) -> Iterator[Metric]:
    readings = list(readings)
    if not readings:
        return
    reported = GaugeMetricFamily(
        "headrace_upstream_reported_requests", "Requests that a foreign server says it has, by state.", labels=(*LABELS, "state")
    )
    for reading in readings:
        for state, number in (("running", reading.num_running), ("waiting", reading.num_waiting)):
            if number is not None:
                reported.add_metric((reading.model, reading.replica, state), number)
    yield reported


@dataclass(frozen=True, slots=True)
class BudgetReading:
    """Amounts of all tenants together, in the currency of `prices`. used: reserved money included"""

    label: str
    budget: float
    used: float


def budget_families(readings: Iterable[BudgetReading]) -> Iterator[Metric]:
    """Without budgets, and while the limits' store fails, there are no series."""
    text = "Money that all tenants together may use, in the currency of `prices`."
    budget = GaugeMetricFamily(BUDGET_PREFIX, text, labels=("limit",))
    used = GaugeMetricFamily(f"{BUDGET_PREFIX}_used", "What is used or reserved of it.", labels=("limit",))
    for reading in readings:
        budget.add_metric((reading.label,), reading.budget)
        used.add_metric((reading.label,), reading.used)
    yield from (budget, used)


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkReading:
    """waiting_bytes: of all processes here"""

    num_shipped: int
    num_failures: int
    num_damaged_bytes: int
    waiting_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReading:
    num_recorded: int
    dropped: Mapping[str, int]
    sinks: Mapping[str, SinkReading]


def usage_families(reading: UsageReading) -> Iterator[Metric]:
    yield CounterMetricFamily("headrace_usage_records", "Usage records that were written to the spool.", reading.num_recorded)
    dropped = CounterMetricFamily("headrace_usage_dropped", "Usage records that were lost, by reason.", labels=("reason",))
    for reason in sorted({"queue", "disk", *reading.dropped}):
        dropped.add_metric((reason,), reading.dropped.get(reason, 0))
    yield dropped
    shipped = CounterMetricFamily("headrace_usage_shipped", "Usage records that this process gave to a sink.", labels=("sink",))
    failures = CounterMetricFamily("headrace_usage_sink_failures", "Attempts that a sink did not take.", labels=("sink",))
    damaged = CounterMetricFamily("headrace_usage_damaged_bytes", "Bytes of the spool that were no whole record.", labels=("sink",))
    waiting = GaugeMetricFamily("headrace_usage_waiting_bytes", "What waits for a sink on the disk.", labels=("sink",))
    for name, sink in reading.sinks.items():
        shipped.add_metric((name,), sink.num_shipped)
        failures.add_metric((name,), sink.num_failures)
        damaged.add_metric((name,), sink.num_damaged_bytes)
        waiting.add_metric((name,), sink.waiting_bytes)
    yield from (shipped, failures, damaged, waiting)
