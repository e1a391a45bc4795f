"""Tests that no label of a picture lies on another or beyond its edge, with curves and names of all sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from headrace.lab import sweep
from headrace.lab.metrics import LoadRecord, summarize
from headrace.lab.plan import chart as plan_chart
from headrace.lab.plan.catalogue import read_catalogue
from headrace.lab.plan.plan import CapacityPlan, make_plan
from headrace.lab.plan.shapes import find_entry
from headrace.lab.simulate import chart
from headrace.lab.simulate.events import event_reports
from headrace.lab.simulate.load import Spike
from headrace.lab.simulate.site import Death
from headrace.policy.placement.need import Goals, Need, Traffic

pytestmark = pytest.mark.process

LONG = "an-organisation-with-a-name/a-model-that-was-merged-from-several-others-instruct-v2.5-" * 3
FILE = Path("unwritten.svg")


def record(begin_s: float, ttft_s: float, tpot_s: float, *, error: str | None = None) -> LoadRecord:
    chunks = () if error else (begin_s + ttft_s, begin_s + ttft_s + 99 * tpot_s)
    end_s = begin_s + ttft_s + 99 * tpot_s
    return LoadRecord(intended_s=begin_s, sent_s=begin_s, chunk_s=chunks, end_s=end_s, output_tokens=100, error=error)


def steady(seconds: float, factor: float = 1.0) -> list[LoadRecord]:
    return [record(seconds * n / 400, factor * (0.02 + n % 7 / 100), factor * 0.01) for n in range(400)]


def over_time(records: list[LoadRecord], spike: Spike | None, deaths: list[Death]) -> None:
    title = f"3 x {LONG} on TP 1 h100, 20 requests/s"
    chart.write_timeline(FILE, chart.timeline(records), event_reports(records, spike, deaths), title)


def death() -> None:
    records = [record(each.intended_s, 0.0, 0.0, error="refused") if 100 < each.intended_s < 200 else each for each in steady(700)]
    over_time(records, None, [Death(100.0, 0, 100.0), Death(300.0, 1, 0.0), *(Death(400.0 + n, n, 5.0) for n in range(200))])


def over_loads() -> None:
    failed = [record(0.0, 1.0, 0.1, error="refused")] * 400
    runs = [(load, summarize(steady(20, load**3))) for load in (0.5, 1, 2, 9)] + [(12.0, summarize(failed))]
    chart.write_chart(FILE, runs, 6.0, LONG)


def plans(**wanted: Any) -> None:
    catalogue = read_catalogue()
    shape = replace(find_entry("llama-3-8b", catalogue.models)[0], name=LONG)

    def planned(device: str) -> CapacityPlan:
        traffic = Traffic(prompt_tokens=3072, output_tokens=1024)
        need = Need(model=shape, device=catalogue.device(device), dtype="bf16", kv_dtype="bf16", traffic=traffic, **wanted)
        return make_plan(need, catalogue.prices)

    plan_chart.write_chart(FILE, [planned(device) for device in ("b200", "h200", "h100", "a100", "l40s", "a10g", "rtx4090")])


def swept() -> None:
    points = sweep.make_grid((1, 8, 32), (128, 512, 2048), (1, 2, 4, 8, 16, 32, 256), output_tokens=100)
    failed = [record(0.0, 0.0, 0.0, error="400 error")]
    rows = [
        sweep.make_row(
            point,
            failed if point.input_tokens == 2048 else [record(n, 0.02 * point.concurrency, 0.01) for n in range(point.batch_size)],
            price_per_1m=0.2,
        )
        for point in points
    ]
    sweep.write_sweep_chart(FILE, rows, LONG)


def swept_in_vain() -> None:
    point = sweep.SweepPoint(batch_size=1, input_tokens=8, concurrency=1)
    sweep.write_sweep_chart(FILE, [sweep.make_row(point, [record(0.0, 0.0, 0.0, error="400 error")], price_per_1m=0.2)], "all failed")


CASES: dict[str, Callable[[], None]] = {
    "steady": lambda: over_time(steady(0.5), None, []),
    "spike": lambda: over_time(steady(60), Spike(20, 15, 6), []),
    "death": death,
    "days": lambda: over_time(steady(200_000, 1000), None, []),
    "loads": over_loads,
    "plan": lambda: plans(goals=Goals(tpot_s=0.05)),
    "sweep": swept,
    "failed sweep": swept_in_vain,
}


@pytest.mark.parametrize("case", CASES)
def test_no_label_lies_on_another(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    drawn: list[Any] = []
    for module in (chart, plan_chart, sweep):
        monkeypatch.setattr(module, "write_svg", lambda file, draw, **_: drawn.append(draw(pyplot)))
    CASES[case]()
    [figure] = drawn
    figure.canvas.draw()
    boxes = list(_labels(figure))
    assert len(boxes) > 20
    for text, box in boxes:
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1, f"{text!r} is cut off"
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1, f"{text!r} is cut off"
    for (one, first), (other, second) in combinations(boxes, 2):
        assert not first.overlaps(second), f"{one!r} lies on {other!r}"
    for line in (line for axes in figure.axes for line in axes.get_lines()):
        assert max((y for y in line.get_ydata() if y == y), default=0.0) <= line.axes.get_ylim()[1], "a curve is cut off"
    pyplot.close(figure)


def _labels(figure: Any) -> Iterator[tuple[str, Any]]:
    """Every text that is shown, with its box."""
    texts = [figure._suptitle, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        if axes.axison:
            legend = axes.get_legend()
            texts += [axes.title, axes.xaxis.label, axes.yaxis.label, *([] if legend is None else legend.get_texts())]
            for axis in (axes.xaxis, axes.yaxis):
                low, high = sorted(axis.get_view_interval())
                ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
                texts += [tick.label1 for tick in ticks if tick.label1.get_visible() and low <= tick.get_loc() <= high]
    return ((text.get_text(), text.get_window_extent()) for text in texts if text.get_text())
