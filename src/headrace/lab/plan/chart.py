"""Plans as a picture: tokens per second and TPOT over the batch, one line per device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.lab.plan.plan import CapacityPlan
from headrace.lab.svg import write_svg
from headrace.policy.placement.layout import MAX_NUM_SEQS
from headrace.policy.placement.roofline import Roofline

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_chart(file: Path, plans: Sequence[CapacityPlan]) -> None:
    """Write an SVG of the plans that have a layout. Raises ConfigError as `write_svg` does."""
    write_svg(file, lambda pyplot: _figure(pyplot, plans))


def _figure(pyplot: Any, plans: Sequence[CapacityPlan]) -> Figure:
    figure, (rates, times) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    drawn = [plan for plan in plans if plan.best.num_sequences]
    for plan in drawn:
        need, best = plan.need, plan.best
        latency = Roofline(need.model, need.device, best.layout, need.dtype, need.kv_dtype)
        most = min(best.num_sequences, MAX_NUM_SEQS)
        batches = sorted({round(most ** (step / 60)) for step in range(61)})
        seconds = [latency.decode_s(batch, need.traffic.context) for batch in batches]
        label = f"{need.device.name}, {best.layout}"
        (line,) = rates.plot(
            batches, [batch / each / best.layout.num_devices for batch, each in zip(batches, seconds, strict=True)], label=label
        )
        times.plot(batches, [1e3 * each for each in seconds], label=label)
        if best.batch:
            rates.plot(
                best.batch,
                best.batch / latency.decode_s(best.batch, need.traffic.context) / best.layout.num_devices,
                "o",
                color=line.get_color(),
            )
    goal = drawn[0].need.goals.tpot_s if drawn else None
    if goal is not None:
        times.axhline(1e3 * goal, color="grey", linestyle="--", label="goal")
    rates.set_title("Tokens/s per device (dot: planned batch)")
    times.set_title("Time per token (ms)")
    for axes in (rates, times):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("sequences decoded together, per replica")
        axes.grid(alpha=0.3, which="both")
    times.yaxis.set_minor_formatter("{x:g}")
    if drawn:
        rates.legend(fontsize=8)
    return figure  # type: ignore[no-any-return]
