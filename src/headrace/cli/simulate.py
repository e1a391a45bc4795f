"""`headrace simulate`: a deployment under load before it exists, on virtual time, with the product's own decisions."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.bench_common import AsJson, Flag, Seed, make_shape
from headrace.cli.exits import CommandExitCode, UsageRefused

if TYPE_CHECKING:
    from headrace.engine.config import EngineConfig
    from headrace.gateway.config import GatewayConfig
    from headrace.lab.datasets import WorkloadShape
    from headrace.lab.metrics import LoadReport, Slo
    from headrace.lab.simulate.build import SimulatedModel
    from headrace.lab.simulate.load import Arrival, Spike
    from headrace.lab.simulate.site import Death

GATEWAY_S = 0.002
"""Seconds that a gateway adds to a request, before its engine and behind it: 1.2 to 2.6 ms were measured (docs/experiments.md)."""


REPLACED_BY_TRACE = {
    "duration": "--duration",
    "input_len": "--input-len",
    "output_len": "--output-len",
    "range_ratio": "--random-range-ratio",
    "prefix_len": "--prefix-len",
    "spike": "--spike",
    "plot": "--plot",
}
"""Parameters, and their flags, that say what a trace says itself, or draw what needs several loads."""


def simulate(
    context: typer.Context,
    config: Annotated[Path | None, typer.Argument(help="A file of `headrace serve`; default: one replica of --model.")] = None,
    model: Annotated[str | None, Flag("--model", help="Served name in the file; without one a folder or a name of the catalogue.")] = None,
    gpu: Annotated[str | None, Flag("--gpu", help="Device whose roofline gives the steps' times.")] = None,
    steps: Annotated[Path | None, Flag("--steps", help="Steps' times measured by `headrace bench steps`, instead of --gpu.")] = None,
    tp: Annotated[int | None, Flag("--tp", min=1, help="Devices of one replica; default: the fewest that the model fits on.")] = None,
    replicas: Annotated[int | None, Flag("--replicas", min=1, max=256, help="Default: the file's.")] = None,
    load: Annotated[str | None, Flag("--load", help="Requests per second; several with commas are simulated one by one.")] = None,
    trace: Annotated[Path | None, Flag("--trace", help="JSON lines: timestamp (ms), input_length, output_length, hash_ids.")] = None,
    duration: Annotated[float, Flag("--duration", help="Seconds in which requests arrive.")] = 60.0,
    input_len: Annotated[int, Flag("--random-input-len", "--input-len", help="Prompt tokens, prefix included.")] = 512,
    output_len: Annotated[int, Flag("--random-output-len", "--output-len")] = 128,
    range_ratio: Annotated[float, Flag("--random-range-ratio", help="Lengths vary by this share, 0..1.")] = 0.5,
    prefix_len: Annotated[int, Flag("--random-prefix-len", "--prefix-len", help="Tokens at the prompts' beginning that are shared.")] = 0,
    spike: Annotated[str | None, Flag("--spike", help="BEGIN:SECONDS:FACTOR, as 30:20:3: three times the load for 20 s.")] = None,
    kill: Annotated[
        list[str] | None, Flag("--kill", help="SECOND:REPLICA:BACK, as 30:0:90: replica 0 dies, and is back 90 s later.")
    ] = None,
    goodput: Annotated[list[str] | None, Flag("--goodput", help="ttft:MS, tpot:MS or e2el:MS; again for more.")] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
    plot: Annotated[Path | None, Flag("--plot", help="Write TTFT, TPOT, goodput and cost over the load as SVG.")] = None,
) -> None:
    """Simulate a deployment under load: what users would see, without hardware and much faster than time passes."""
    from headrace.lab.metrics import parse_slo

    if trace is not None:
        for name, flag in REPLACED_BY_TRACE.items():
            source = context.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                raise UsageRefused(f"{flag}: a trace has its own times and lengths, and is one load; give --load instead of --trace.")
    try:
        slo = parse_slo(goodput) if goodput else None
        shape = make_shape("random", input_len, output_len, range_ratio, prefix_len, 1, 2000)
    except ValueError as error:
        raise UsageRefused(str(error)) from error
    site = _site(config, model, gpu, steps, tp, replicas)
    deaths = [_death(text, site.replicas) for text in kill or ()]
    loads = _arrivals(load, trace, duration, shape, seed, _spike(spike))
    reports = [(rate, _report(site, arrivals, deaths, slo, seed)) for rate, arrivals in loads]
    if plot is not None:
        from headrace.lab.simulate.chart import write_chart

        write_chart(plot, [(rate, report) for rate, report in reports if rate is not None], site.price_per_hour, site.described)
    _print(site, reports, as_json)
    if not any(report.finished for _, report in reports):
        raise typer.Exit(CommandExitCode.FAILED)


def _report(site: _Site, arrivals: Iterator[Arrival], deaths: Sequence[Death], slo: Slo | None, seed: int) -> LoadReport:
    from headrace.lab.metrics import summarize
    from headrace.lab.simulate.site import SimulatedSite

    failover_s = site.gateway.timeouts.failover_s
    models = [site.model] * site.replicas
    simulated = SimulatedSite(models, rules=site.gateway.admission, gateway_s=GATEWAY_S, failover_s=failover_s, seed=seed)
    records = simulated.run(arrivals, deaths)
    if not records:
        raise UsageRefused("No request arrives: give more seconds (--duration) or a higher --load, or a trace that has one.")
    return summarize(records, slo)


def _print(site: _Site, reports: Sequence[tuple[float | None, LoadReport]], as_json: bool) -> None:
    from headrace.lab.report import failures, lines, to_plain

    if as_json:
        found = [{"load": rate, "report": report} for rate, report in reports]
        print(json.dumps(to_plain({"site": site.described, "price_per_hour": site.price_per_hour, "runs": found}), indent=1))
        return
    print(f"Simulated: {site.described}")
    for rate, report in reports:
        if rate is not None and len(reports) > 1:
            print(f"Load {rate:g} requests/s")
        print("\n".join([*(lines(report) if report.finished else failures(report)), ""]))


@dataclass(frozen=True, slots=True)
class _Site:
    """price_per_hour: of all replicas; None where no device with a price is named"""

    model: SimulatedModel
    replicas: int
    gateway: GatewayConfig
    described: str
    price_per_hour: float | None


def _site(file: Path | None, model: str | None, gpu: str | None, steps: Path | None, tp: int | None, replicas: int | None) -> _Site:
    from headrace.lab.plan.catalogue import read_catalogue
    from headrace.lab.plan.shapes import find_model
    from headrace.lab.simulate.build import measured_model, planned_model
    from headrace.lab.simulate.step_times import read_steps
    from headrace.policy.placement.layout import Need, Traffic

    if (gpu is None) == (steps is None):
        raise UsageRefused("Give --gpu, whose roofline is used, or --steps, a file of measured times: exactly one of them.")
    engine, count, gateway = _section(file, model)
    count = replicas or count
    known = read_catalogue()
    shape, dtype = find_model(engine.model, known.models)
    if shape.is_encoder:
        raise UsageRefused(f"--model: {shape.name} generates nothing; `headrace plan` says how many inputs it reads.")
    if steps is not None:
        measured = read_steps(steps)
        described = f"{count} x {shape.name}, steps of {steps}"
        return _Site(measured_model(engine, measured.latency, shape, measured.num_blocks), count, gateway, described, None)
    device = known.device(gpu or "")
    traffic = Traffic(prompt_tokens=1, output_tokens=1)
    need = Need(model=shape, device=device, dtype=dtype, kv_dtype="bf16", traffic=traffic, memory_fraction=0.9)
    simulated, best = planned_model(engine, need, tp)
    price = device.price_per_hour
    described = f"{count} x {shape.name} on {best.layout} {device.name}, {simulated.num_blocks * engine.block_size:,} tokens of KV each"
    return _Site(simulated, count, gateway, described, None if price is None else price * count * best.layout.num_devices)


def _section(file: Path | None, model: str | None) -> tuple[EngineConfig, int, GatewayConfig]:
    """The engine's options, replicas and admission of the model. Folders need not exist: a name of the catalogue will do."""
    from headrace.bundled import DEFAULT_MODEL
    from headrace.cli.config import decoded
    from headrace.cli.config_yaml import read_yaml
    from headrace.engine.config import EngineConfig
    from headrace.gateway.config import GatewayConfig

    if file is None:
        return EngineConfig(model=model or DEFAULT_MODEL).checked(), 1, GatewayConfig(models=())
    config = decoded(read_yaml(file))
    sections = [
        section for section in config.models if section.engine is not None and model in (None, section.served_name, *section.aliases)
    ]
    if not sections or sections[0].engine is None:
        named = ", ".join(section.served_name for section in config.models if section.engine is not None)
        raise UsageRefused(f"{file}: no model with engines is named {model}; there are: {named or 'none'}.")
    return sections[0].engine.checked(), sections[0].replicas, config.gateway


def _arrivals(
    load: str | None, trace: Path | None, duration: float, shape: WorkloadShape, seed: int, spike: Spike | None
) -> Iterator[tuple[float | None, Iterator[Arrival]]]:
    from headrace.lab.simulate.load import drawn, expected_requests, read_trace
    from headrace.lab.simulate.site import MAX_REQUESTS

    if (load is None) == (trace is None):
        raise UsageRefused("Give --load, requests per second, or --trace, a file: exactly one of them.")
    if trace is not None:
        yield None, read_trace(trace)
        return
    if not 0 < duration < math.inf:
        raise UsageRefused(f"--duration: expected a number of seconds above 0, got {duration:g}.")
    for rate in _rates(load or ""):
        if (count := expected_requests(rate, duration, spike)) > MAX_REQUESTS:
            raise UsageRefused(
                f"--load: {rate:g} requests/s for {duration:g} s are {count:,.0f} requests; one simulation takes {MAX_REQUESTS:,}."
            )
        yield rate, drawn(rate, duration, shape, seed=seed, spike=spike)


def _rates(text: str) -> Sequence[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise UsageRefused(f"--load: {text!r} is no list of requests per second. Write 2 or 1,2,4.")
    return rates


def _spike(text: str | None) -> Spike | None:
    from headrace.lab.simulate.load import Spike

    if text is None:
        return None
    begin, seconds, factor = _three(text, "--spike", "BEGIN:SECONDS:FACTOR")
    if not factor > 0 or not seconds > 0:
        raise UsageRefused(f"--spike: {text!r} has no seconds or no factor above 0.")
    return Spike(begin, seconds, factor)


def _death(text: str, replicas: int) -> Death:
    from headrace.lab.simulate.site import Death

    at, replica, back_s = _three(text, "--kill", "SECOND:REPLICA:BACK")
    if not replica.is_integer() or replica >= replicas:
        raise UsageRefused(f"--kill: {text!r} names replica {replica:g}; there are replicas 0 to {replicas - 1}.")
    return Death(at, int(replica), back_s)


def _three(text: str, flag: str, form: str) -> tuple[float, float, float]:
    found = re.fullmatch(r"(\d{1,9}(?:\.\d+)?):(\d{1,9}(?:\.\d+)?):(\d{1,9}(?:\.\d+)?)", text)
    if found is None:
        raise UsageRefused(f"{flag}: {text!r} is not {form}, three numbers.")
    return float(found[1]), float(found[2]), float(found[3])
