"""`headrace plan` says whether a model fits, for how many users, in which layout, how fast and at what cost, before hardware is there."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.exits import CommandExitCode, UsageRefused
from headrace.core.option import options
from headrace.engine.config import EngineConfig, default_on

if TYPE_CHECKING:
    from headrace.lab.plan.catalogue import Catalogue
    from headrace.lab.plan.plan import CapacityPlan, Standby
    from headrace.policy.placement.model import ModelShape
    from headrace.policy.placement.need import Device, Goals, Need

SLO_NAMES = {"ttft": "ttft_s", "ttft_p95": "ttft_p95_s", "tpot": "tpot_s"}

MAX_NUM_USERS = 10**9
MAX_NUM_DEVICES = 10**6
MAX_CONTEXT = 2**26

LAYOUTS = ("runnable", "all")

ROUNDED = ("fp8", "int8", "int4")
"""`headrace serve --quantization` has them too."""

MIN_MEMORY_FRACTION = 0.01
GOAL_LIMITS_S = (1e-6, 1e6)
LOAD_LIMITS_GBPS = (1e-3, 1e6)


def plan(
    model: Annotated[str, typer.Argument(help="A folder, a .gguf file, a bundled model or a catalogue's name.", show_default=False)],
    gpu: Annotated[str | None, typer.Option("--gpu", help="As h100, or several: h100,a100; default: all with a price, compared.")] = None,
    count: Annotated[int | None, typer.Option("--count", min=1, max=MAX_NUM_DEVICES, help="Devices; default: what it takes.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Weights: fp32, bf16, fp16, fp8, int8, int4; default: the model's.")] = None,
    kv_dtype: Annotated[str, typer.Option("--kv-dtype", help="KV cache: fp32, bf16, fp16, fp8, int8.")] = "bf16",
    context: Annotated[int | None, typer.Option("--context", min=2, max=MAX_CONTEXT, help="Tokens of prompt and answer.")] = None,
    input_len: Annotated[int | None, typer.Option("--input-len", min=1, max=MAX_CONTEXT, help="Tokens of a prompt.")] = None,
    output_len: Annotated[int | None, typer.Option("--output-len", min=1, max=MAX_CONTEXT, help="Tokens of an answer.")] = None,
    users: Annotated[int | None, typer.Option("--users", min=1, max=MAX_NUM_USERS, help="Users served at the same time.")] = None,
    tokens_per_user: Annotated[float | None, typer.Option("--tokens-per-user", help="Tokens per second that each of them sees.")] = None,
    requests_per_second: Annotated[float | None, typer.Option("--requests-per-second", help="Load, with its prompts counted.")] = None,
    requests_per_day: Annotated[float | None, typer.Option("--requests-per-day", help="The same, in the mean of a day.")] = None,
    peak: Annotated[float, typer.Option("--peak", help="Load of the busiest time over the mean of a day; devices are for the peak.")] = 1.0,
    slo: Annotated[str | None, typer.Option("--slo", help="Goals: ttft_p95=500ms,tpot=40ms; also ttft, the mean.")] = None,
    prices: Annotated[
        Path | None, typer.Option("--prices", help="TOML: egress_per_gb, storage_per_gb_month, then [gpu] and h100 = 2.5.")
    ] = None,
    catalogue: Annotated[Path | None, typer.Option("--catalogue", help="TOML with more devices and models (docs/planning.md).")] = None,
    memory_fraction: Annotated[float | None, typer.Option("--memory-fraction", help="Of weights and KV; default: the engine's.")] = None,
    load_gbps: Annotated[float | None, typer.Option("--load-gbps", help="GB/s at which a replica loads; default: 2.")] = None,
    standby: Annotated[int, typer.Option("--standby", min=0, max=MAX_NUM_DEVICES, help="Replicas kept loaded, priced apart.")] = 0,
    layouts: Annotated[str, typer.Option("--layouts", help="runnable: those that this version runs; all.")] = "runnable",
    explain: Annotated[bool, typer.Option("--explain", help="Show the formula of every number.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write tokens/s and TPOT over the batch as SVG.")] = None,
) -> None:
    """Plan memory, layout, speed and cost of a model on devices that you may not have yet; exit 1 when nothing serves it."""
    from headrace.cli.planner.model import AskedTraffic, find_model
    from headrace.lab.plan.catalogue import read_catalogue
    from headrace.lab.plan.plan import make_plan
    from headrace.policy.placement.need import Need

    known = read_catalogue(catalogue, prices)
    _check(dtype, kv_dtype, memory_fraction, layouts, plot)
    waiting = _standby(standby, load_gbps, count)
    planned = find_model(model, known.models, dtype)
    asked = AskedTraffic(context, input_len, output_len, users, tokens_per_user, requests_per_second, requests_per_day, peak)
    first, *others = _devices(gpu, known)
    need = Need(
        model=planned.shape,
        device=first,
        dtype=planned.dtype,
        kv_dtype=kv_dtype,
        traffic=asked.traffic(planned.shape),
        goals=_goals(slo, planned.shape),
        num_devices=count,
        memory_fraction=_fraction(first, memory_fraction),
        compares_all=layouts == "all",
        rounding=dtype if dtype in ROUNDED else "",
    )
    needs = [need, *(replace(need, device=device, memory_fraction=_fraction(device, memory_fraction)) for device in others)]
    notes = (*planned.notes, *asked.notes)
    plans = sorted([make_plan(each, known.prices, [*notes, *_age_notes(each)], waiting) for each in needs], key=_cheapness)
    if plot is not None:
        _draw(plot, plans)
    _print(plans, model if planned.is_here else f"./{planned.shape.name}", explain, as_json)
    if not plans[0].is_met:
        raise typer.Exit(CommandExitCode.FAILED)


def _standby(num_replicas: int, load_gbps: float | None, count: int | None) -> Standby:
    from headrace.lab.plan.plan import Standby
    from headrace.policy.placement.roofline import LOAD_BYTES_PER_S

    low, high = LOAD_LIMITS_GBPS
    if load_gbps is not None and not low <= load_gbps <= high:
        raise UsageRefused(f"--load-gbps: expected a rate from {low:g} to {high:g} GB/s, got {load_gbps:g}.")
    if num_replicas and count is not None:
        raise UsageRefused(f"--standby: it takes devices beside the {count} of --count, all of which serve. Leave one of them out.")
    return Standby(num_replicas, LOAD_BYTES_PER_S if load_gbps is None else load_gbps * 1e9)


def _fraction(device: Device, asked: float | None) -> float:
    if asked is not None:
        return asked
    return float(str(default_on("cpu" if device.name == "cpu" else "cuda", dict(options(EngineConfig))["memory_fraction"])))


def _draw(file: Path, plans: list[CapacityPlan]) -> None:
    from headrace.lab.plan.chart import write_chart

    if (shape := plans[0].need.model).is_encoder:
        raise UsageRefused(f"--plot: {shape.name} generates nothing, so it has no batch to draw over.")
    write_chart(file, plans)


def _print(plans: list[CapacityPlan], model: str, explain: bool, as_json: bool) -> None:
    """model: as `headrace serve` is to name it"""
    from headrace.lab.plan.report import as_object, comparison, lines

    if as_json:
        several = {"plans": [as_object(each, model) for each in plans], "cheapest": plans[0].need.device.name}
        print(json.dumps(several if len(plans) > 1 else as_object(plans[0], model), indent=2, allow_nan=False))
        return
    if len(plans) > 1:
        print("\n".join(["Cheapest first:", *comparison(plans), ""]))
    print("\n".join(lines(plans[0], model=model, explains=explain)))


def _devices(gpu: str | None, known: Catalogue) -> list[Device]:
    if gpu is None:
        return [
            device for device in known.devices.values() if device.price_per_hour is not None and device.is_served and device.name != "cpu"
        ]
    names = [name.strip() for name in gpu.split(",") if name.strip()]
    if not names:
        raise UsageRefused(f"--gpu: {gpu!r} names no device. Known: {', '.join(sorted(known.devices))}.")
    return list({device.name: device for device in map(known.device, names)}.values())


def _cheapness(plan: CapacityPlan) -> tuple[bool, float, int]:
    """Plans that serve the traffic first, then cost per token, or cost per hour if a rate is asked for."""
    cost = plan.dollars_per_hour if plan.need.traffic.tokens_per_s else plan.cost_per_1m_tokens
    return not plan.is_met, math.inf if cost is None else cost, plan.best.num_devices


def _goals(slo: str | None, shape: ModelShape) -> Goals:
    from headrace.policy.placement.need import Goals

    values: dict[str, float] = {}
    for part in (slo or "").split(","):
        if not part.strip():
            continue
        goal = re.fullmatch(r"\s*([a-z0-9_]+)\s*=\s*(\d+(?:\.\d+)?)\s*(ms|s)\s*", part)
        if goal is None or goal[1] not in SLO_NAMES or not float(goal[2]):
            raise UsageRefused(f"--slo: {part.strip()!r} is no goal. Write {', '.join(SLO_NAMES)} as ttft_p95=500ms, with commas between.")
        if SLO_NAMES[goal[1]] in values:
            raise UsageRefused(f"--slo: {goal[1]} is given twice.")
        seconds = float(goal[2]) / (1000 if goal[3] == "ms" else 1)
        low, high = GOAL_LIMITS_S
        if not low <= seconds <= high:
            raise UsageRefused(f"--slo: {goal[1]} must be from {low:g} to {high:g} s, got {seconds:g} s.")
        values[SLO_NAMES[goal[1]]] = seconds
    if shape.is_encoder and "tpot_s" in values:
        raise UsageRefused(f"--slo: {shape.name} generates nothing, so it has no tpot. ttft is the time of one input.")
    return Goals(**values)


def _check(dtype: str | None, kv_dtype: str, memory_fraction: float | None, layouts: str, plot: Path | None) -> None:
    from headrace.policy.placement.model import KV_BYTES, WEIGHT_BYTES

    if dtype is not None and dtype not in WEIGHT_BYTES:
        raise UsageRefused(f"--dtype: {dtype!r} is not known. One of {', '.join(WEIGHT_BYTES)}.")
    if kv_dtype not in KV_BYTES:
        raise UsageRefused(f"--kv-dtype: {kv_dtype!r} is not known. One of {', '.join(KV_BYTES)}.")
    if memory_fraction is not None and not MIN_MEMORY_FRACTION <= memory_fraction <= 1:
        raise UsageRefused(f"--memory-fraction: expected a share from {MIN_MEMORY_FRACTION:g} to 1, got {memory_fraction:g}.")
    if layouts not in LAYOUTS:
        raise UsageRefused(f"--layouts: {layouts!r} is not known. One of {', '.join(LAYOUTS)}.")
    if plot is not None and plot.suffix.lower() != ".svg":
        raise UsageRefused(f"--plot: an SVG is written, so the file must end in .svg, got {plot}.")


def _age_notes(need: Need) -> list[str]:
    from headrace.lab.plan.catalogue import is_old

    today = datetime.now(UTC).strftime("%Y-%m")
    device = need.device
    if not is_old(device.as_of, today):
        return []
    remedy = "" if device.price_per_hour is None else ": look up its price"
    return [f"The entry of {device.name} is of {device.as_of} ({device.source}), more than a year old{remedy}."]
