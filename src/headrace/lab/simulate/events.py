"""Says what clients saw before, during and after a spike or a replica's death."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from headrace.lab.metrics import Distribution, LoadRecord, distribution
from headrace.lab.simulate.load import Spike
from headrace.lab.simulate.site import Death

SHOWN = ("p50", "p95")
COLUMNS = ("requests", "failed", "TTFT p50", "p95 (ms)", "TPOT p50", "p95 (ms)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanReport:
    requests: int
    failed: int
    ttft_s: Distribution
    tpot_s: Distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class EventReport:
    """Seconds from the start; requests around the event.

    during  open at its beginning, its end or between
    """

    event: str
    begin_s: float
    end_s: float
    has_standby: bool
    before: SpanReport
    during: SpanReport
    after: SpanReport


def event_reports(records: Sequence[LoadRecord], spike: Spike | None, deaths: Sequence[Death]) -> list[EventReport]:
    """Every request is in one span of each event."""
    events = [(death.at, death.at + death.back_s, f"death of replica {death.replica}", death.has_standby) for death in deaths]
    if spike is not None:
        events.append((spike.begin_s, spike.begin_s + spike.seconds, f"spike of {spike.factor:g} times the load", False))
    return [_report(records, *event) for event in sorted(events)]


def _report(records: Sequence[LoadRecord], begin_s: float, end_s: float, name: str, has_standby: bool) -> EventReport:
    before = [record for record in records if record.end_s < begin_s]
    after = [record for record in records if record.intended_s > end_s]
    during = [record for record in records if record.end_s >= begin_s and record.intended_s <= end_s]
    return EventReport(
        event=name,
        begin_s=begin_s,
        end_s=end_s,
        has_standby=has_standby,
        before=_span(before),
        during=_span(during),
        after=_span(after),
    )


def _span(records: Sequence[LoadRecord]) -> SpanReport:
    return SpanReport(
        requests=len(records),
        failed=sum(not record.is_finished for record in records),
        ttft_s=distribution(record.ttft_s for record in records),
        tpot_s=distribution(tpot for record in records if (tpot := record.tpot_s) is not None),
    )


def event_lines(report: EventReport) -> Iterator[str]:
    """A dash: too few requests; "failed": they were not answered"""
    when = f"from {report.begin_s:g} to {report.end_s:g} s" if report.end_s > report.begin_s else f"at {report.begin_s:g} s"
    yield f"{report.event}, {when}{', taken over by a standby' if report.has_standby else ''}"
    yield " " * 8 + "".join(f"{name:>10}" for name in COLUMNS)
    for name, span in (("before", report.before), ("during", report.during), ("after", report.after)):
        times = [_cell(samples, quantile) for samples in (span.ttft_s, span.tpot_s) for quantile in SHOWN]
        yield f"{name:8}" + "".join(f"{cell:>10}" for cell in (f"{span.requests:,}", f"{span.failed:,}", *times))


def _cell(samples: Distribution, name: str) -> str:
    value = samples.known(name)
    return "-" if value is None else "failed" if math.isinf(value) else f"{value * 1000:,.1f}"


def with_standby(deaths: Sequence[Death], num_standby: int) -> list[Death]:
    """A dead replica is the next standby, once it is back."""
    free_at, outages = [0.0] * num_standby, []
    for death in sorted(deaths, key=lambda each: each.at):
        back_at = death.at + death.back_s
        if free_at and free_at[0] < back_at:
            taken_at = max(death.at, heapq.heapreplace(free_at, back_at))
            outages.append(replace(death, back_s=taken_at - death.at, has_standby=True))
        else:
            outages.append(death)
    return outages
