"""Shows usage records on the metrics page: the numbers recorded, dropped, shipped and waiting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkReading:
    """One sink of usage records when the metrics page is asked for. waiting_bytes: of all processes here; other fields: of this process"""

    num_shipped: int
    num_failures: int
    num_damaged_bytes: int
    waiting_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReading:
    """dropped: records by reason;  sinks: by name"""

    num_recorded: int
    dropped: Mapping[str, int]
    sinks: Mapping[str, SinkReading]


def usage_families(reading: UsageReading) -> Iterator[Metric]:
    """Metrics of this gateway's ledger."""
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
