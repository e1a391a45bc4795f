"""Draws simulations: loads as curves, or one load over the time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.lab.metrics import Distribution, LoadRecord, LoadReport, distribution
from headrace.lab.simulate.events import EventReport
from headrace.lab.svg import label_log_axis, title_of, write_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BIN_REQUESTS = 40
"""Requests in one point of a curve, in the mean: enough for a p95."""

MIN_BINS, MAX_BINS = 10, 60
QUANTILES = ("p50", "p95", "p99")
MAX_NAMED = 6

UNITS = ((36_000.0, "h", 3600.0), (600.0, "min", 60.0), (0.0, "s", 1.0))
"""Seconds from which on an axis has this unit, the unit, its seconds."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Times are those of the requests that arrived in a bin; nan where failed requests decide, or there are too few."""

    bin_s: float
    begin_s: Sequence[float]
    ttft_s: Mapping[str, Sequence[float]]
    tpot_s: Mapping[str, Sequence[float]]
    rates: Mapping[str, Sequence[float]]


def timeline(records: Sequence[LoadRecord]) -> Timeline:
    end_s = max(record.end_s for record in records) or 1.0
    num_bins = min(MAX_BINS, max(MIN_BINS, len(records) // BIN_REQUESTS))
    bin_s = end_s / num_bins
    arrived: list[list[LoadRecord]] = [[] for _ in range(num_bins)]
    rates = {name: [0.0] * num_bins for name in ("arrived", "answered", "failed")}
    for record in records:
        first, last = (min(num_bins - 1, int(at / bin_s)) for at in (record.intended_s, record.end_s))
        arrived[first].append(record)
        rates["arrived"][first] += 1 / bin_s
        rates["answered" if record.is_finished else "failed"][last] += 1 / bin_s
    return Timeline(
        bin_s=bin_s,
        begin_s=[number * bin_s for number in range(num_bins)],
        ttft_s=_quantiles([record.ttft_s for record in each] for each in arrived),
        tpot_s=_quantiles([tpot for record in each if (tpot := record.tpot_s) is not None] for each in arrived),
        rates=rates,
    )


def _quantiles(bins: Iterable[list[float]]) -> dict[str, list[float]]:
    distributions = [distribution(samples) for samples in bins]
    return {name: [_drawn(each, name) for each in distributions] for name in QUANTILES[:2]}


def _drawn(samples: Distribution, name: str) -> float:
    value = samples.known(name)
    return value if value is not None and math.isfinite(value) else math.nan


def write_chart(file: Path, runs: Sequence[tuple[float, LoadReport]], price_per_hour: float | None, title: str) -> None:
    """runs: (requests per second, report). Raises ConfigError."""
    write_svg(file, lambda pyplot: _over_loads(pyplot, runs, price_per_hour, title))


def write_timeline(file: Path, shown: Timeline, events: Sequence[EventReport], title: str) -> None:
    write_svg(file, lambda pyplot: _over_time(pyplot, shown, events, title))


def _over_time(pyplot: Any, shown: Timeline, events: Sequence[EventReport], title: str) -> Figure:
    figure, panels = pyplot.subplots(3, 1, figsize=(11, 9), layout="constrained", sharex=True)
    end_s = shown.begin_s[-1] + shown.bin_s
    unit, unit_s = next((name, seconds) for least, name, seconds in UNITS if end_s > least)
    times = [(begin + shown.bin_s / 2) / unit_s for begin in shown.begin_s]
    curves = (
        ("Time to first token (ms)", {name: [1e3 * each for each in values] for name, values in shown.ttft_s.items()}),
        ("Time per token (ms)", {name: [1e3 * each for each in values] for name, values in shown.tpot_s.items()}),
        ("Requests per second", shown.rates),
    )
    for axes, (name, lines) in zip(panels, curves, strict=True):
        for label, values in lines.items():
            axes.plot(times, values, ".-", label=label)
        for event in events:
            axes.axvspan(event.begin_s / unit_s, max(event.end_s, event.begin_s + shown.bin_s / 4) / unit_s, color="grey", alpha=0.2)
        axes.set_title(name)
        axes.set_ylim(0, 1.1 * max((each for values in lines.values() for each in values if each > 0), default=1.0))  # nan is not
        axes.set_xlim(0, end_s / unit_s)
        axes.grid(alpha=0.3)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    named = [*(event.event for event in events[:MAX_NAMED]), *([f"{len(events) - MAX_NAMED} more"] if len(events) > MAX_NAMED else [])]
    shaded = f"; grey: {', '.join(named)}" if events else ""
    panels[-1].set_xlabel(title_of(f"time since the start ({unit}); a point is of the requests in {shown.bin_s:.3g} s{shaded}"))
    figure.suptitle(title_of(title))
    return figure  # type: ignore[no-any-return]


def _over_loads(pyplot: Any, runs: Sequence[tuple[float, LoadReport]], price_per_hour: float | None, title: str) -> Figure:
    figure, panels = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
    (ttft, tpot), (rates, cost) = panels
    loads = [load for load, _ in runs]
    for axes, name, measures in (
        (ttft, "Time to first token (ms)", [report.ttft_s for _, report in runs]),
        (tpot, "Time per token (ms)", [report.tpot_s for _, report in runs]),
    ):
        curves = {quantile: [1e3 * _drawn(measure, quantile) for measure in measures] for quantile in QUANTILES}
        for quantile, values in curves.items():
            axes.plot(loads, values, "o-", label=quantile)
        has_gap = any(math.isnan(value) for values in curves.values() for value in values)
        axes.set_title(f"{name}; a gap: too few were answered" if has_gap else name)
        axes.set_yscale("log")
        label_log_axis(axes.yaxis)
        axes.legend()
    rates.plot(loads, [report.request_throughput for _, report in runs], "o-", label="answered")
    if all(report.goodput is not None for _, report in runs):
        rates.plot(loads, [report.goodput for _, report in runs], "o-", label="within the goals")
    rates.plot(loads, loads, "--", color="grey", label="offered")
    rates.set_title("Requests per second")
    rates.legend()
    if price_per_hour is None:
        cost.set_axis_off()
    else:
        cost.plot(loads, [price_per_hour / 3600 / max(report.output_throughput, 1e-9) * 1e6 for _, report in runs], "o-")
        cost.set_title("Dollars per 1M output tokens")
    for axes in (ttft, tpot, rates, cost):
        axes.set_xlabel("offered requests per second")
        axes.grid(alpha=0.3, which="both")
    figure.suptitle(title_of(title))
    return figure  # type: ignore[no-any-return]
