"""Draws simulated runs over the load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.lab.metrics import LoadReport
from headrace.lab.svg import write_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_chart(file: Path, runs: Sequence[tuple[float, LoadReport]], price_per_hour: float | None, title: str) -> None:
    """Write an SVG of latencies by load. runs: (requests per second, report). Raises ConfigError as `write_svg`."""
    write_svg(file, lambda pyplot: _figure(pyplot, runs, price_per_hour, title))


def _figure(pyplot: Any, runs: Sequence[tuple[float, LoadReport]], price_per_hour: float | None, title: str) -> Figure:
    figure, panels = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
    (ttft, tpot), (rates, cost) = panels
    loads = [load for load, _ in runs]
    for axes, name, measures in (
        (ttft, "Time to first token (ms)", [report.ttft_s for _, report in runs]),
        (tpot, "Time per token (ms)", [report.tpot_s for _, report in runs]),
    ):
        for quantile in ("p50", "p90", "p99"):
            axes.plot(loads, [1e3 * measure.quantiles[quantile] for measure in measures], "o-", label=quantile)
        axes.set_title(name)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
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
    figure.suptitle(title)
    return figure  # type: ignore[no-any-return]
