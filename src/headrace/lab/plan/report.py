"""Prints plans as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from headrace.lab.plan.plan import CapacityPlan, Figure
from headrace.policy.placement.layout import Placement

SHOWN_LAYOUTS = 12


def lines(plan: CapacityPlan, *, explains: bool = False) -> Iterator[str]:
    """One plan as text. explains: with the formula of every number"""
    need, best = plan.need, plan.best
    yield f"{need.model.name}, {need.dtype} weights, {need.kv_dtype} KV, on {need.device.title}"
    yield ""
    if explains:
        for name, figure in plan.figures.items():
            yield f"  {name:<22} {shown(figure):>16}  = {figure.formula}"
    else:
        for name in _SUMMARY:
            if name in plan.figures:
                yield f"  {name:<22} {shown(plan.figures[name]):>16}"
    if plan.sequences:
        yield ""
        yield "  context       " + "".join(f"{_thousands(context):>9}" for context in plan.sequences)
        yield "  sequences     " + "".join(f"{number:>9,}" for number in plan.sequences.values())
    yield ""
    yield from _table(plan.placements)
    yield ""
    verdict = (
        f"Chosen: {best.replicas} x {best.layout}, {best.num_devices} device(s)."
        if plan.is_met
        else f"No layout serves this: {best.reason}."
    )
    yield verdict
    for note in plan.notes:
        yield f"- {note}"


_SUMMARY = (
    "weights_bytes",
    "kv_bytes_per_token",
    "memory_bytes",
    "free_bytes",
    "resident_tokens",
    "sequences",
    "batch",
    "tpot_s",
    "ttft_s",
    "ttft_p95_s",
    "prefill_tokens_per_s",
    "tokens_per_s",
    "mbu",
    "price_per_hour",
    "price_per_month",
    "cost_per_1k_tokens",
    "cost_per_1m_tokens",
)


def comparison(plans: Sequence[CapacityPlan]) -> Iterator[str]:
    """The best layout of each device as text, the cheapest first."""
    widths = (-10, -18, 7, 10, 9, 9, 9, 8)
    yield _row(widths, "device", "layout", "devices", "tokens/s", "TPOT", "TTFT", "$/hour", "$/1M")
    for plan in plans:
        best, name = plan.best, plan.need.device.name
        if not plan.is_met:
            yield f"  {name:<10} {best.reason}"
            continue
        layout = f"{best.replicas} x {best.layout}"
        rate, prices = _rate(best.tokens_per_s), (_dollars(best.price_per_hour), _dollars(plan.cost_per_1m_tokens))
        yield _row(widths, name, layout, best.num_devices, rate, _tpot(best), _ms(best.ttft_s), *prices)


def as_object(plan: CapacityPlan) -> dict[str, Any]:
    """The plan as plain data. Counts are integers, times seconds, sizes bytes, costs dollars; null: not known."""
    need = plan.need
    return {
        "model": need.model.name,
        "gpu": need.device.name,
        "dtype": need.dtype,
        "kv_dtype": need.kv_dtype,
        "context": need.traffic.context,
        "is_met": plan.is_met,
        "cost_per_1m_tokens": None,
        "cost_per_1k_tokens": None,
        **{name: _number(figure) for name, figure in plan.figures.items()},
        "sequences_by_context": {str(context): number for context, number in plan.sequences.items()},
        "layouts": [_layout(placement) for placement in plan.placements],
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


def _table(placements: Sequence[Placement]) -> Iterator[str]:
    widths = (-16, 8, 7, 6, 10, 10, 9, 9, 5, 9)
    yield _row(widths, "layout", "replicas", "devices", "batch", "tokens/s", "prefill/s", "TPOT", "TTFT", "MBU", "$/hour")
    for each in placements[:SHOWN_LAYOUTS]:
        if not each.batch:
            yield f"  {each.layout!s:<16} {each.reason}"
            continue
        rates = _rate(each.tokens_per_s), _rate(each.prefill_tokens_per_s)
        times = _tpot(each), _ms(each.ttft_s), f"{each.mbu:.0%}" if each.mbu else "-", _dollars(each.price_per_hour)
        row = _row(widths, each.layout, each.replicas, each.num_devices, each.batch, *rates, *times)
        yield f"{row}  {each.reason}".rstrip()


def _row(widths: Sequence[int], *cells: object) -> str:
    """A line of a table. A negative width aligns its cell to the left."""
    return "  " + " ".join(f"{cell!s:<{-width}}" if width < 0 else f"{cell!s:>{width}}" for width, cell in zip(widths, cells, strict=True))


def _layout(each: Placement) -> dict[str, Any]:
    return {
        "tp": each.layout.tp,
        "pp": each.layout.pp,
        "replicas": each.replicas,
        "devices": each.num_devices,
        "resident_tokens": each.resident_tokens,
        "sequences": each.num_sequences,
        "batch": each.batch,
        "tpot_s": each.tpot_s or None,
        "ttft_s": each.ttft_s,
        "ttft_p95_s": each.ttft_p95_s,
        "decode_tokens_per_s": each.decode_tokens_per_s,
        "prefill_tokens_per_s": each.prefill_tokens_per_s,
        "tokens_per_s": each.tokens_per_s,
        "mbu": each.mbu or None,
        "price_per_hour": each.price_per_hour,
        "reason": each.reason,
    }


def _number(figure: Figure) -> float | int:
    return int(figure.value) if figure.unit in ("bytes", "tokens", "sequences") or float(figure.value).is_integer() else figure.value


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or float(value).is_integer() else f"{value:.3g}"


def _tpot(each: Placement) -> str:
    """The TPOT as text; encoders have none."""
    return _ms(each.tpot_s) if each.tpot_s else "-"


def _ms(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 10 else f"{seconds * 1e3:,.1f} ms"


def _dollars(value: float | None) -> str:
    return "-" if value is None else f"${value:,.2f}" if value >= 0.1 else f"${value:.3g}"


def _thousands(number: int) -> str:
    return f"{number // 1024}K" if number % 1024 == 0 else f"{number:,}"
