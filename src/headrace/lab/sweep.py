"""Measures a running server at the points of a grid: batch size x prompt tokens x concurrency, each point in a closed loop.

`lab.loadgen` sends and `lab.metrics` computes; the rows, the table and the picture are here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.lab.metrics import LoadRecord, LoadReport, summarize
from headrace.lab.svg import label_log_axis, title_of, write_svg

LIMITS = {"points": 200, "requests": 100_000, "tokens": 50_000_000}
"""The largest grid. Prompts of one batch are in memory at once, at 36 bytes a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    batch_size: int
    input_tokens: int
    concurrency: int

    def __str__(self) -> str:
        return f"batch {self.batch_size}, prompts of {self.input_tokens}, concurrency {self.concurrency}"


def make_grid(
    batch_sizes: Iterable[int], input_tokens: Iterable[int], concurrencies: Iterable[int], *, output_tokens: int
) -> list[SweepPoint]:
    """The points, without doubles: of a batch no more requests can be in flight than it has. Raises ValueError."""
    points = [
        SweepPoint(batch_size=batch, input_tokens=length, concurrency=concurrency)
        for batch in sorted(set(batch_sizes))
        for length in sorted(set(input_tokens))
        for concurrency in sorted({min(batch, each) for each in concurrencies})
    ]
    sizes = {
        "points": len(points),
        "requests": sum(point.batch_size for point in points),
        "tokens": sum(point.batch_size * (point.input_tokens + output_tokens) for point in points),
    }
    if any(sizes[name] > limit for name, limit in LIMITS.items()):
        size, most = (", ".join(f"{count:,} {name}" for name, count in counts.items()) for counts in (sizes, LIMITS))
        raise ValueError(f"the grid has {size}; one sweep takes at most {most}. Give fewer or smaller values, or several sweeps.")
    return points


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow(SweepPoint):
    """What one point gave. Of failed requests: no tokens, and a mean is infinite.

    seconds         from the first request sent to the last answer's end
    ms_per_request  `seconds` over the answered requests: of the batch, not of one request alone
    ttft_ms         mean, from when the request got its place
    dollars         of prompt and output tokens
    """

    seconds: float
    ms_per_request: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: float
    tpot_ms: float
    dollars: float
    cached_tokens: int
    failed: int
    report: LoadReport


def make_row(point: SweepPoint, records: Sequence[LoadRecord], *, price_per_1m: float) -> SweepRow:
    """price_per_1m: dollars"""
    report = summarize(records)
    return SweepRow(
        **asdict(point),
        seconds=report.duration_s,
        ms_per_request=report.duration_s / report.finished * 1000 if report.finished else math.inf,
        output_tokens_per_s=report.output_throughput,
        total_tokens_per_s=report.total_throughput,
        ttft_ms=report.ttft_s.mean * 1000,
        tpot_ms=report.tpot_s.mean * 1000,
        dollars=(report.prompt_tokens + report.output_tokens) * price_per_1m / 1e6,
        cached_tokens=report.cached_tokens,
        failed=report.offered - report.finished,
        report=report,
    )


COLUMNS = {
    "batch": ("batch_size", ",d"),
    "prompt": ("input_tokens", ",d"),
    "concurrency": ("concurrency", ",d"),
    "seconds": ("seconds", ",.2f"),
    "ms/request": ("ms_per_request", ",.1f"),
    "output tok/s": ("output_tokens_per_s", ",.1f"),
    "total tok/s": ("total_tokens_per_s", ",.1f"),
    "TTFT ms": ("ttft_ms", ",.1f"),
    "TPOT ms": ("tpot_ms", ",.2f"),
    "dollars": ("dollars", ".6f"),
    "cached": ("cached_tokens", ",d"),
    "failed": ("failed", ",d"),
}
"""Heading -> field of `SweepRow`, format."""


def heading() -> str:
    return "  ".join(f"{name:>{_width(name)}}" for name in COLUMNS)


def line_of(row: SweepRow) -> str:
    """Ends in VOID where the client itself was late."""
    cells = [(name, getattr(row, field), form) for name, (field, form) in COLUMNS.items()]
    words = [f"{format(value, form) if math.isfinite(value) else '-':>{_width(name)}}" for name, value, form in cells]
    return "  ".join(words if row.report.is_valid else [*words, "VOID"])


def _width(name: str) -> int:
    return max(len(name), 8)


PANELS = (("output tokens/s", "output_tokens_per_s"), ("TTFT, mean (ms)", "ttft_ms"), ("TPOT, mean (ms)", "tpot_ms"))


def write_sweep_chart(file: Path, rows: Sequence[SweepRow], title: str) -> None:
    """Raises ConfigError."""
    write_svg(file, lambda pyplot: _figure(pyplot, rows, title), flag="--svg")


def _figure(pyplot: Any, rows: Sequence[SweepRow], title: str) -> Any:
    """A figure of matplotlib: a column of panels per prompt length, a curve per batch size, over the concurrency."""
    lengths = sorted({row.input_tokens for row in rows})
    size = (max(8.0, 1.0 + 3.5 * len(lengths)), 9.0)
    figure, panels = pyplot.subplots(len(PANELS), len(lengths), figsize=size, layout="constrained", sharey="row", squeeze=False)
    for panels_of_measure, (name, field) in zip(panels, PANELS, strict=True):
        panels_of_measure[0].set_ylabel(name)
        for axes, length in zip(panels_of_measure, lengths, strict=True):
            for batch, points in _curves(rows, length, field):
                axes.plot(*zip(*points, strict=True), "o-", label=f"batch of {batch:,}")
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.grid(alpha=0.3, which="both")
        if any(0 < getattr(row, field) < math.inf for row in rows):
            panels_of_measure[0].set_yscale("log")
            label_log_axis(panels_of_measure[0].yaxis)
    for axes, length in zip(panels[0], lengths, strict=True):
        axes.set_title(f"prompts of {length:,} tokens")
    for axes in panels[-1]:
        axes.set_xlabel("requests in flight")
    figure.legend(handles=panels[0][0].get_legend_handles_labels()[0], loc="outside lower center", ncols=4)
    figure.suptitle(title_of(title))
    return figure


def _curves(rows: Sequence[SweepRow], length: int, field: str) -> Iterator[tuple[int, list[tuple[int, float]]]]:
    """(batch size, (concurrency, value) of each point); nan, which is not drawn, where a value is infinite or 0."""
    for batch in sorted({row.batch_size for row in rows}):
        found = [(row.concurrency, getattr(row, field)) for row in rows if (row.batch_size, row.input_tokens) == (batch, length)]
        yield batch, [(concurrency, value if 0 < value < math.inf else math.nan) for concurrency, value in found]
