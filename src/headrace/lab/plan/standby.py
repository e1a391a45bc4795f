"""Adds to a plan how long one more replica takes to load, and what replicas cost that stand by for a spike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.lab.plan.figure import Figure
from headrace.policy.placement.layout import Placement
from headrace.policy.placement.loading import LOAD_BYTES_PER_S, START_S, load_seconds
from headrace.policy.placement.need import Need


@dataclass(frozen=True, slots=True)
class Standby:
    """num_replicas: loaded and without load, beside those that serve; load_bytes_per_s: at which a replica reads its weights"""

    num_replicas: int = 0
    load_bytes_per_s: float = LOAD_BYTES_PER_S


NO_STANDBY = Standby()


def standby_figures(need: Need, best: Placement, standby: Standby) -> dict[str, Figure]:
    weights, rate = need.model.weights_bytes(need.dtype), standby.load_bytes_per_s
    source = "assumed, --load-gbps sets it" if rate == LOAD_BYTES_PER_S else "--load-gbps"
    formula = f"{START_S:g} s to start (assumed) + {weights / 1e9:,.1f} GB of weights / {rate / 1e9:g} GB/s ({source})"
    figures = {"load_s": Figure(load_seconds(weights, rate), "s", formula)}
    if not standby.num_replicas:
        return figures
    num_devices = standby.num_replicas * best.layout.num_devices
    figures["standby_replicas"] = Figure(standby.num_replicas, "", f"{num_devices} devices beside those that serve (--standby)")
    if (price := need.device.price_per_hour) is not None:
        figures["standby_per_hour"] = Figure(num_devices * price, "$", f"{num_devices} devices x ${price:g}, not part of the other costs")
    return figures


def standby_note(figures: Mapping[str, Figure]) -> str:
    load = f"an assumed {figures['load_s'].value:,.0f} s"
    if "standby_replicas" not in figures:
        return f"No replica stands by: a spike of one replica beyond capacity waits {load} until it has loaded, longer without a machine."
    return f"{figures['standby_replicas'].value:g} replica(s) stand by; a spike beyond them waits {load} until one more has loaded."
