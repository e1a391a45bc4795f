"""Prints plans as text and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from headrace.lab.plan.plan import CapacityPlan, Figure
from headrace.policy.placement.layout import Placement, why_not_run
from headrace.policy.placement.load import step_tokens
from headrace.policy.placement.need import Device

SHOWN_LAYOUTS = 12

WORDS = {
    "num_params": "weights, number",
    "num_active_params": "weights of one token",
    "weights_bytes": "weights",
    "memory_bytes": "memory",
    "free_bytes": "memory beside weights",
    "kv_bytes_per_token": "KV of a token",
    "resident_tokens": "tokens in the cache",
    "sequences": "whole sequences there",
    "replicas": "replicas",
    "devices": "devices",
    "prefill_tokens_per_s": "prompts alone",
    "batch": "together, full replica",
    "running": "together, at the load",
    "tpot_s": "TPOT",
    "ttft_s": "TTFT, mean",
    "ttft_p95_s": "TTFT, p95",
    "mbu": "bandwidth used",
    "bandwidth_tokens_per_s": "bandwidth would allow",
    "capacity_tokens_per_s": "capacity",
    "demand_tokens_per_s": "demand",
    "egress_per_1m_tokens": "traffic of 1M tokens",
    "storage_per_month": "storage per month",
    "price_per_hour": "devices per hour",
    "price_per_day": "devices per day",
    "price_per_month": "devices per month",
    "cost_per_1m_at_capacity": "1M tokens at capacity",
    "cost_per_1m_at_demand": "1M tokens at demand",
    "cost_per_1m_at_bandwidth": "1M tokens at bandwidth",
    "load_s": "load of one replica",
    "standby_replicas": "replicas standing by",
    "standby_per_hour": "standing by, per hour",
}

EXPLAINED = frozenset({"num_params", "num_active_params", "replicas", "devices", "egress_per_1m_tokens", "storage_per_month"})


def lines(plan: CapacityPlan, *, model: str, explains: bool = False) -> Iterator[str]:
    need, best = plan.need, plan.best
    if plan.is_met:
        yield f"Chosen: {best.replicas} x {best.layout}, {best.num_devices} {need.device.title}."
        if command := serve_command(plan, model):
            yield f"  {command}"
    else:
        yield f"No layout serves this: {best.reason}."
    yield ""
    yield f"{need.model.name}, {need.dtype} weights, {need.kv_dtype} KV, on {need.device.title}"
    for name, figure in plan.figures.items():
        if explains:
            yield f"  {WORDS[name]:<22} {shown(figure):>18}  = {figure.formula}"
        elif name not in EXPLAINED:
            yield f"  {WORDS[name]:<22} {shown(figure):>18}"
    if plan.sequences:
        yield ""
        yield "  context       " + "".join(f"{_thousands(context):>9}" for context in plan.sequences)
        yield "  sequences     " + "".join(f"{number:>9,}" for number in plan.sequences.values())
    yield ""
    yield from _table(plan)
    yield ""
    for note in plan.notes:
        yield f"- {note}"


DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
KV_DTYPES = {"bf16": "bfloat16", "fp16": "bfloat16", "fp8": "fp8", "int8": "int8"}
"""Planned dtype -> value of --kv-cache-dtype."""


def serve_command(plan: CapacityPlan, model: str) -> str:
    """The command that starts what the plan chose; empty where this version has none."""
    need, best = plan.need, plan.best
    is_run = need.device.is_served and not why_not_run(need.device, best.layout)
    if need.model.is_encoder or not is_run or need.kv_dtype not in KV_DTYPES or need.traffic.context > need.model.max_positions:
        return ""
    flags = {
        "--device": "cpu" if need.device.name == "cpu" else "cuda",
        "--replicas": best.replicas,
        "--max-model-len": need.traffic.context,
        "--max-num-seqs": best.max_num_seqs,
        "--max-num-batched-tokens": max(step_tokens(need), best.max_num_seqs),
        "--gpu-memory-utilization": f"{need.memory_fraction:g}",
        "--kv-cache-dtype": KV_DTYPES[need.kv_dtype],
    }
    if best.layout.tp > 1:
        flags["--tensor-parallel-size"] = best.layout.tp
    if best.layout.pp > 1:
        flags["--pipeline-parallel-size"] = best.layout.pp
    if need.rounding:
        flags["--quantization"] = need.rounding
    elif need.dtype in DTYPES and need.model.stored is None:
        flags["--dtype"] = DTYPES[need.dtype]
    return " ".join(["headrace serve", shlex.quote(model), *(f"{flag} {value}" for flag, value in flags.items())])


def comparison(plans: Sequence[CapacityPlan]) -> Iterator[str]:
    widths = (-10, -16, 7, 11, 9, 9, 9, 9, 9, 9)
    yield _row(widths, "device", "layout", "devices", "capacity", "TPOT", "TTFT", "$/hour", "$/day", "$/1M", "within 2x")
    for plan in plans:
        best, name = plan.best, plan.need.device.name
        if not plan.is_met:
            yield f"  {name:<10} {best.reason}"
            continue
        day = None if best.price_per_hour is None else best.price_per_hour * 24
        prices = _dollars(best.price_per_hour), _dollars(day), _dollars(plan.cost_per_1m_tokens)
        rates = _rate(best.capacity_tokens_per_s), _tpot(best), _ms(best.load.ttft_s)
        yield _row(widths, name, f"{best.replicas} x {best.layout}", best.num_devices, *rates, *prices, _word(plan))
    yield "  within 2x: the capacity is at least half of what memory bandwidth alone would allow."
    yield from (f"  Price of {names}: {source}." for source, names in price_sources([plan.need.device for plan in plans]).items())


def price_sources(devices: Iterable[Device]) -> dict[str, str]:
    sources: dict[str, list[str]] = {}
    for device in devices:
        if device.price_per_hour is not None:
            sources.setdefault(device.price_source, []).append(device.name)
    return {source: ", ".join(names) for source, names in sources.items()}


def _word(plan: CapacityPlan) -> str:
    return "-" if plan.is_near_bandwidth is None else "yes" if plan.is_near_bandwidth else "no"


def as_object(plan: CapacityPlan, model: str) -> dict[str, Any]:
    """Times are seconds, costs dollars; null: not known."""
    need = plan.need
    return {
        "model": need.model.name,
        "gpu": need.device.name,
        "dtype": need.dtype,
        "kv_dtype": need.kv_dtype,
        "context": need.traffic.context,
        "is_met": plan.is_met,
        "is_within_2x_of_bandwidth": plan.is_near_bandwidth,
        "price_source": need.device.price_source or None,
        "command": (serve_command(plan, model) or None) if plan.is_met else None,
        **{name: _number(figure) for name, figure in plan.figures.items()},
        "sequences_by_context": {str(context): number for context, number in plan.sequences.items()},
        "layouts": [_layout(need.device, placement) for placement in plan.placements],
        "formulas": {name: figure.formula for name, figure in plan.figures.items()},
        "notes": list(plan.notes),
    }


def shown(figure: Figure) -> str:
    value = figure.value
    match figure.unit:
        case "bytes":
            return (
                f"{value / 1e9:,.2f} GB" if abs(value) >= 1e8 else f"{value / 1e6:,.2f} MB" if abs(value) >= 1e7 else f"{value:,.0f} bytes"
            )
        case "s":
            return _ms(value)
        case "$":
            return _dollars(value)
    return f"{value:.0%}" if not figure.unit and 0 < value < 1 else f"{_rate(value)} {figure.unit}".strip()


def _table(plan: CapacityPlan) -> Iterator[str]:
    """Layouts that this version does not run stand below the others."""
    apart = [each for each in plan.placements if not plan.need.compares_all and why_not_run(plan.need.device, each.layout)]
    widths = (-16, 8, 7, 6, 10, 10, 9, 9, 5, 9)
    yield _row(widths, "layout", "replicas", "devices", "batch", "tokens/s", "prefill/s", "TPOT", "TTFT", "MBU", "$/hour")
    shown_here = [each for each in plan.placements if each not in apart]
    for each in shown_here[:SHOWN_LAYOUTS]:
        yield from _table_row(widths, each, each.reason)
    if apart:
        yield f"  Not run by this version, and not chosen: {why_not_run(plan.need.device, apart[0].layout)}."
        for each in apart[: SHOWN_LAYOUTS - len(shown_here)]:
            yield from _table_row(widths, each, "")


def _table_row(widths: Sequence[int], each: Placement, reason: str) -> Iterator[str]:
    if not each.batch:
        yield f"  {each.layout!s:<16} {each.reason}"
        return
    rates = _rate(each.capacity_tokens_per_s), _rate(each.prefill_tokens_per_s)
    times = _tpot(each), _ms(each.load.ttft_s), f"{each.mbu:.0%}" if each.mbu else "-", _dollars(each.price_per_hour)
    yield _row(widths, each.layout, each.replicas, each.num_devices, each.batch, *rates, *times)
    if reason:
        yield f"    {reason}"


def _row(widths: Sequence[int], *cells: object) -> str:
    return "  " + " ".join(f"{cell!s:<{-width}}" if width < 0 else f"{cell!s:>{width}}" for width, cell in zip(widths, cells, strict=True))


def _layout(device: Device, each: Placement) -> dict[str, Any]:
    return {
        "tp": each.layout.tp,
        "pp": each.layout.pp,
        "is_run": not why_not_run(device, each.layout),
        "replicas": each.replicas,
        "devices": each.num_devices,
        "resident_tokens": each.resident_tokens,
        "sequences": each.num_sequences,
        "batch": each.batch,
        "running": each.load.running,
        "tpot_s": each.load.tpot_s or None,
        "ttft_s": each.load.ttft_s,
        "ttft_p95_s": each.load.ttft_p95_s,
        "full_tokens_per_s": each.full_tokens_per_s,
        "prefill_tokens_per_s": each.prefill_tokens_per_s,
        "capacity_tokens_per_s": each.capacity_tokens_per_s,
        "mbu": each.mbu or None,
        "price_per_hour": each.price_per_hour,
        "reason": each.reason,
    }


def _number(figure: Figure) -> float | int:
    whole = figure.unit in ("bytes", "tokens") or float(figure.value).is_integer()
    return int(figure.value) if whole else figure.value


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or float(value).is_integer() else f"{value:.3g}"


def _tpot(each: Placement) -> str:
    return _ms(each.load.tpot_s) if each.load.tpot_s else "-"


def _ms(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 10 else f"{seconds * 1e3:,.1f} ms"


def _dollars(value: float | None) -> str:
    return "-" if value is None else f"${value:,.2f}" if value >= 0.1 else f"${value:.3g}"


def _thousands(number: int) -> str:
    return f"{number // 1024}K" if number % 1024 == 0 else f"{number:,}"
