"""Draws plans: tokens per second and TPOT over the batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.core.errors import ConfigError
from headrace.lab.plan.plan import CapacityPlan
from headrace.lab.svg import label_log_axis, title_of, write_svg
from headrace.policy.placement.load import at_running
from headrace.policy.placement.need import MAX_NUM_SEQS
from headrace.policy.placement.roofline import Roofline

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_chart(file: Path, plans: Sequence[CapacityPlan]) -> None:
    """Raises ConfigError."""
    drawn = [plan for plan in plans if plan.best.num_sequences]
    if not drawn:
        raise ConfigError("--plot", f"nothing is there to draw: {plans[0].best.reason}")
    write_svg(file, lambda pyplot: _figure(pyplot, drawn))


def curve(plan: CapacityPlan) -> tuple[list[int], list[float], list[float]]:
    """(batches of one replica, tokens/s per device, seconds per token)."""
    need, best = plan.need, plan.best
    latency = Roofline(need.model, need.device, best.layout, need.dtype, need.kv_dtype)
    most = min(best.num_sequences, MAX_NUM_SEQS)
    batches = sorted({best.batch or 1, *(round(most ** (step / 60)) for step in range(61))})
    loads = [at_running(need, latency, batch) for batch in batches]
    return batches, [load.tokens_per_s / best.layout.num_devices for load in loads], [load.tpot_s for load in loads]


def _figure(pyplot: Any, drawn: Sequence[CapacityPlan]) -> Figure:
    figure, (rates, times) = pyplot.subplots(1, 2, figsize=(11, 5.2), layout="constrained")
    for plan in drawn:
        best = plan.best
        batches, per_device, seconds = curve(plan)
        label = f"{plan.need.device.name}, {best.layout}"
        (line,) = rates.plot(batches, per_device, label=label)
        times.plot(batches, [1e3 * each for each in seconds], color=line.get_color(), label=label)
        if best.batch:
            rates.plot(best.load.running, best.load.tokens_per_s / best.layout.num_devices, "o", color=line.get_color())
            times.plot(best.load.running, 1e3 * best.load.tpot_s, "o", color=line.get_color())
    goal = drawn[0].need.goals.tpot_s
    if goal is not None:
        times.axhline(1e3 * goal, color="grey", linestyle="--", label="goal")
    rates.set_title("Tokens/s per device (dot: the planned load)")
    times.set_title("TPOT (ms)")
    for axes in (rates, times):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        label_log_axis(axes.yaxis)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("sequences decoded together, per replica")
        axes.grid(alpha=0.3, which="both")
    figure.legend(handles=times.get_legend_handles_labels()[0], loc="outside lower center", ncols=4)
    figure.suptitle(title_of(f"{drawn[0].need.model.name}, weights in {drawn[0].need.dtype}"))
    return figure  # type: ignore[no-any-return]
