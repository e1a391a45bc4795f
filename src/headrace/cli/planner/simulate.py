"""`headrace simulate` runs a deployment under load before it exists: on virtual time, with the admission, routing and scheduling code that
serves.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.bundled import DEFAULT_MODEL
from headrace.cli.bench.common import AsJson, Flag, Seed, make_shape, refuse_beside_trace
from headrace.cli.exits import CommandExitCode, UsageRefused
from headrace.core.errors import counted
from headrace.engine.config import EngineConfig

if TYPE_CHECKING:
    from headrace.gateway.config import GatewayConfig
    from headrace.lab.datasets import WorkloadShape
    from headrace.lab.metrics import LoadReport, Slo
    from headrace.lab.simulate.build import SimulatedModel
    from headrace.lab.simulate.chart import Timeline
    from headrace.lab.simulate.events import EventReport
    from headrace.lab.simulate.load import Arrival, Spike
    from headrace.lab.simulate.scaling import ScalingReport
    from headrace.lab.simulate.site import Death
    from headrace.policy.placement.model import ModelShape
    from headrace.policy.placement.need import Traffic
    from headrace.policy.scaling.autoscaler import ScalingRules

GATEWAY_S = 0.002
"""Seconds that a gateway adds, before the engine and behind it: 1.2 to 2.6 ms were measured (docs/experiments.md)."""

MAX_REPLICAS = 256
HOLD_S = 60.0
"""Beside the time that a replica takes to load, how long a request may wait where replicas are added."""


REPLACED_BY_TRACE = ("duration", "input_len", "output_len", "range_ratio", "prefix_len", "spike")


def simulate(
    context: typer.Context,
    config: Annotated[Path | None, typer.Argument(help="A file of `headrace serve`; default: one replica of --model.")] = None,
    model: Annotated[str | None, Flag("--model", help="Served name in the file; without one a folder or a name of the catalogue.")] = None,
    gpu: Annotated[str | None, Flag("--gpu", help="Device whose roofline gives the steps' times.")] = None,
    steps: Annotated[Path | None, Flag("--steps", help="Steps' times measured by `headrace bench steps`, instead of --gpu.")] = None,
    tp: Annotated[int | None, Flag("--tp", min=1, help="Devices of one replica, also more than this version runs; default: 1.")] = None,
    replicas: Annotated[int | None, Flag("--replicas", min=1, max=MAX_REPLICAS, help="Default: the file's.")] = None,
    load: Annotated[str | None, Flag("--load", help="Requests per second; several with commas are simulated one by one.")] = None,
    trace: Annotated[
        Path | None, Flag("--trace", help="JSON lines: timestamp (ms), input_length, output_length, hash_ids, block_size.")
    ] = None,
    duration: Annotated[float, Flag("--duration", help="Seconds in which requests arrive.")] = 60.0,
    input_len: Annotated[int, Flag("--random-input-len", "--input-len", help="Prompt tokens, prefix included.")] = 512,
    output_len: Annotated[int, Flag("--random-output-len", "--output-len")] = 128,
    range_ratio: Annotated[float, Flag("--random-range-ratio", help="Lengths vary by this share, 0..1.")] = 0.5,
    prefix_len: Annotated[int, Flag("--random-prefix-len", "--prefix-len", help="Tokens at the prompts' beginning that are shared.")] = 0,
    spike: Annotated[str | None, Flag("--spike", help="BEGIN:SECONDS:FACTOR, as 30:20:3: three times the load for 20 s.")] = None,
    kill: Annotated[
        list[str] | None,
        Flag("--kill", help="SECOND:REPLICA:BACK, as 30:0:90: replica 0 dies, and is back 90 s later; without :BACK after --load-time."),
    ] = None,
    load_time: Annotated[float | None, Flag("--load-time", help="Seconds until a replica serves; default: by its weights.")] = None,
    standby: Annotated[
        int, Flag("--standby", min=0, max=MAX_REPLICAS, help="Further replicas, loaded and idle, that take a dead one's place.")
    ] = 0,
    autoscale: Annotated[
        str | None, Flag("--autoscale", help="MIN:MAX replicas, decided by the load, for the TTFT of --goodput (else 1 s).")
    ] = None,
    goodput: Annotated[list[str] | None, Flag("--goodput", help="ttft:MS, tpot:MS or e2el:MS; again for more.")] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
    plot: Annotated[
        Path | None, Flag("--plot", help="Write an SVG: one load over the time; several as TTFT, TPOT and cost over the load.")
    ] = None,
) -> None:
    """Simulate a deployment under load: what users would see, without hardware and much faster than time passes."""
    from headrace.lab.metrics import parse_slo

    if trace is not None:
        refuse_beside_trace(context, REPLACED_BY_TRACE, "give --load instead of --trace")
    try:
        slo = parse_slo(goodput) if goodput else None
        shape = make_shape("random", input_len, output_len, range_ratio, prefix_len, 1, 2000)
    except ValueError as error:
        raise UsageRefused(str(error)) from error
    if not 0 < duration < math.inf:
        raise UsageRefused(f"--duration: expected a number of seconds above 0, got {duration:g}.")
    until = duration if trace is None else math.inf
    risen = _spike(spike, until)
    site = _site(_Asked(config, model, gpu, steps, tp, replicas, standby), None if trace else shape)
    rules = None if autoscale is None else _scaling_rules(autoscale, site, slo, load_time, is_alone=not (kill or standby))
    deaths = _deaths(kill or (), site, until, None if rules else load_time)
    loads = _arrivals(load, trace, duration, shape, seed, risen)
    runs = [_run(site, rate, arrivals, risen, deaths, slo, seed, rules) for rate, arrivals in loads]
    if plot is not None:
        _plot(plot, site, runs)
    _print(site, runs, as_json)
    if not any(run.report.finished for run in runs):
        raise typer.Exit(CommandExitCode.FAILED)


@dataclass(frozen=True, slots=True)
class _Run:
    """load: requests per second; None for a trace"""

    load: float | None
    report: LoadReport
    events: Sequence[EventReport]
    timeline: Timeline
    scaled: ScalingReport | None


def _run(
    site: _Site,
    load: float | None,
    arrivals: Iterator[Arrival],
    spike: Spike | None,
    deaths: Sequence[Death],
    slo: Slo | None,
    seed: int,
    rules: ScalingRules | None,
) -> _Run:
    """rules: None: the number of replicas stays"""
    from headrace.lab.metrics import summarize
    from headrace.lab.simulate.chart import timeline
    from headrace.lab.simulate.events import event_reports
    from headrace.lab.simulate.scaling import Scaling, ScalingReport
    from headrace.lab.simulate.site import SimulatedSite
    from headrace.policy.scaling.autoscaler import Autoscaler

    failover_s = site.gateway.timeouts.failover_s
    models = [site.model] * site.replicas
    simulated = SimulatedSite(
        models,
        rules=site.gateway.admission,
        gateway_s=GATEWAY_S,
        failover_s=failover_s,
        routing=site.gateway.routing,
        num_gateways=site.gateway.workers,
        scaling=None
        if rules is None
        else Scaling(policy=Autoscaler(rules, site.replicas), load_s=rules.load_s, hold_s=HOLD_S + rules.load_s),
        seed=seed,
    )
    records = simulated.run(arrivals, deaths)
    if not records:
        raise UsageRefused("No request arrives: give more seconds (--duration) or a higher --load, or a trace that has one.")
    last = max(record.end_s for record in records)
    for death in deaths:
        if death.at > last:
            raise UsageRefused(f"--kill: replica {death.replica} would die at {death.at:g} s, after the last answer ({last:.1f} s).")
    scaled = None if rules is None else ScalingReport(simulated.replica_s() / 3600, simulated.changes)
    return _Run(load, summarize(records, slo), event_reports(records, spike, deaths), timeline(records), scaled)


def _plot(file: Path, site: _Site, runs: Sequence[_Run]) -> None:
    from headrace.lab.simulate.chart import write_chart, write_timeline

    if len(runs) > 1:
        write_chart(file, [(run.load, run.report) for run in runs if run.load is not None], site.price_per_hour, site.title)
        return
    [run] = runs
    write_timeline(file, run.timeline, run.events, site.title if run.load is None else f"{site.title}, {run.load:g} requests/s")


def _print(site: _Site, runs: Sequence[_Run], as_json: bool) -> None:
    from headrace.lab.report import failures, lines, to_plain
    from headrace.lab.simulate.events import event_lines
    from headrace.lab.simulate.scaling import scaling_lines

    if as_json:
        shown = [{"load": run.load, "report": run.report, "events": run.events, "scaling": run.scaled} for run in runs]
        shown_site = {"site": site.described, "price_per_hour": site.price_per_hour, "runs": shown}
        print(json.dumps(to_plain(shown_site), indent=1, allow_nan=False))
        return
    print(f"Simulated: {site.described}")
    for run in runs:
        if run.load is not None and len(runs) > 1:
            print(f"Load {run.load:g} requests/s")
        print("\n".join([*(lines(run.report) if run.report.finished else failures(run.report)), ""]))
        for event in run.events:
            print("\n".join([*event_lines(event), ""]))
        if run.scaled is not None:
            print("\n".join([*scaling_lines(run.scaled), ""]))


@dataclass(frozen=True, slots=True)
class _Site:
    """standby: replicas beside `replicas`; load_s: seconds in which a replica starts; None: its weights are not known; price_per_hour: of
    all replicas, standby ones too; None: no device with a price is named"""

    model: SimulatedModel
    replicas: int
    standby: int
    load_s: float | None
    gateway: GatewayConfig
    title: str
    details: str
    price_per_hour: float | None

    @property
    def described(self) -> str:
        config = self.model.config
        limits = f"steps of up to {config.max_num_seqs:,} sequences and {config.max_num_batched_tokens:,} tokens"
        standby = [counted(self.standby, "standby replica")] if self.standby else []
        return ", ".join([self.title, *standby, self.details, limits])


@dataclass(frozen=True, slots=True)
class _Asked:
    file: Path | None
    model: str | None
    gpu: str | None
    steps: Path | None
    tp: int | None
    replicas: int | None
    standby: int


@dataclass(frozen=True, slots=True)
class _Section:
    """A model in a file of `headrace serve`. named: engine options that the file sets"""

    engine: EngineConfig
    named: Collection[str]
    replicas: int
    gateway: GatewayConfig


def _site(asked: _Asked, lengths: WorkloadShape | None) -> _Site:
    """lengths: of the requests; None for a trace"""
    if (asked.gpu is None) == (asked.steps is None):
        raise UsageRefused("Give --gpu, whose roofline is used, or --steps, a file of measured times: exactly one of them.")
    section = _section(asked.file, asked.model)
    if section is not None and section.replicas > MAX_REPLICAS:
        raise UsageRefused(f"{asked.file}: {section.replicas:,} replicas; one simulation has at most {MAX_REPLICAS}.")
    site = _planned_site(asked, section, lengths) if asked.steps is None else _measured_site(asked, asked.steps, section)
    if lengths is not None:
        _check_lengths(lengths, site.model.max_model_len)
    return site


def _planned_site(asked: _Asked, section: _Section | None, lengths: WorkloadShape | None) -> _Site:
    from headrace.engine.layout import make_need
    from headrace.gateway.config import GatewayConfig
    from headrace.lab.plan.catalogue import read_catalogue
    from headrace.lab.simulate.build import on_device, planned_model
    from headrace.policy.placement.layout import why_not_run
    from headrace.policy.placement.roofline import load_seconds

    known = read_catalogue()
    device = known.device(asked.gpu or "")
    section = section or _Section(EngineConfig(model=asked.model or DEFAULT_MODEL), (), 1, GatewayConfig())
    engine = on_device(section.engine, section.named, device.name)
    shape, dtype = _shape(engine, known.models)
    longest = engine.max_model_len or shape.max_positions
    if lengths is not None:
        _check_lengths(lengths, longest)
    need = make_need(engine, shape, dtype, device, _traffic(lengths, longest))
    simulated, best = planned_model(engine, need, asked.tp)
    count = asked.replicas or section.replicas
    price = None if device.price_per_hour is None else device.price_per_hour * (count + asked.standby) * best.layout.num_devices
    cache = f"{need.dtype}, {simulated.num_blocks * engine.block_size:,} tokens of KV ({need.kv_dtype}) each"
    unrun = why_not_run(device, best.layout)
    where = f"{best.layout} {device.name}" + (f" ({unrun})" if unrun else "")
    load_s = load_seconds(need.model.weights_bytes(need.dtype))
    return _Site(simulated, count, asked.standby, load_s, section.gateway, f"{count} x {shape.name} on {where}", cache, price)


def _measured_site(asked: _Asked, steps: Path, section: _Section | None) -> _Site:
    from headrace.gateway.config import GatewayConfig
    from headrace.lab.plan.catalogue import read_catalogue
    from headrace.lab.simulate.build import check_measured, measured_model
    from headrace.lab.simulate.step_times import read_steps

    if asked.tp is not None:
        raise UsageRefused("--tp: the steps of --steps are those of the engine that was measured; only --gpu has layouts.")
    measured = read_steps(steps)
    section = section or _Section(replace(measured.engine, model=asked.model or measured.engine.model), (), 1, GatewayConfig())
    engine = section.engine.checked()
    known = read_catalogue().models
    shape, _ = _shape(engine, known)
    if engine.model != measured.engine.model and shape != replace(_shape(measured.engine, known)[0], name=shape.name):
        raise UsageRefused(f"--model: {shape.name} has other steps than {measured.engine.model}, of which {steps} was measured.")
    check_measured(engine, measured.engine)
    if measured.warning:
        print(f"Warning: {steps}: {measured.warning}", file=sys.stderr)
    count = asked.replicas or section.replicas
    model = measured_model(engine, measured.latency, shape, measured.num_blocks)
    fitted = f"times of {steps}, whose fit is off by {measured.error:.1%} in the mean"
    return _Site(model, count, asked.standby, None, section.gateway, f"{count} x {shape.name}", fitted, None)


def _shape(engine: EngineConfig, models: Mapping[str, Mapping[str, object]]) -> tuple[ModelShape, str]:
    from headrace.cli.planner.model import find_model

    planned = find_model(engine.model, models)
    if planned.shape.is_encoder:
        raise UsageRefused(f"--model: {planned.shape.name} generates nothing; `headrace plan` says how many inputs it reads.")
    return planned.shape, planned.dtype


def _check_lengths(lengths: WorkloadShape, max_model_len: int) -> None:
    """Refuse lengths that no engine would accept, before any request is drawn."""
    from headrace.lab.simulate.load import MAX_TOKENS

    most = min(max_model_len, MAX_TOKENS)
    prompt = lengths.prefix_tokens + int((lengths.input_tokens - lengths.prefix_tokens) * (1 + lengths.spread))
    answer = int(lengths.output_tokens * (1 + lengths.spread))
    if prompt + answer > most:
        raise UsageRefused(
            f"--input-len, --output-len: prompts of up to {prompt:,} and answers of up to {answer:,} tokens are more than the longest "
            f"context ({most:,})."
        )


def _traffic(lengths: WorkloadShape | None, longest: int) -> Traffic:
    """A trace's lengths are not known before it is read."""
    from headrace.policy.placement.need import Traffic, usual_traffic

    if lengths is None:
        return usual_traffic(longest)
    return Traffic(prompt_tokens=lengths.input_tokens, output_tokens=lengths.output_tokens, counts_prompts=True)


def _section(file: Path | None, model: str | None) -> _Section | None:
    """Folders need not exist: a name in the catalogue is enough."""
    from headrace.cli.config.load import decoded
    from headrace.cli.config.yaml_files import read_yaml

    if file is None:
        return None
    raw = read_yaml(file)
    config = decoded(raw)
    there = [section for section in config.models if section.engine is not None]
    names = ", ".join(section.served_name for section in there) or "none"
    sections = [section for section in there if model in (None, section.served_name, *section.aliases)]
    if not sections:
        raise UsageRefused(f"{file}: no model with engines is named {model}; there are: {names}.")
    if len(sections) > 1:
        raise UsageRefused(f"--model: {file} has several models, and one is simulated at a time; give one of them: {names}.")
    (section,) = sections
    assert section.engine is not None
    return _Section(section.engine, _named(raw, config.models.index(section)), section.replicas, config.gateway)


def _named(raw: Mapping[str, object], index: int) -> Collection[str]:
    models = raw.get("models")
    section = models[index] if isinstance(models, list) else None
    engine = section.get("engine") if isinstance(section, dict) else None
    return frozenset(engine) if isinstance(engine, dict) else ()


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


def _spike(text: str | None, until: float) -> Spike | None:
    from headrace.lab.simulate.load import Spike

    if text is None:
        return None
    begin, seconds, factor = _three(text, "--spike", "BEGIN:SECONDS:FACTOR")
    if not factor > 0 or not seconds > 0:
        raise UsageRefused(f"--spike: {text!r} has no seconds or no factor above 0.")
    if begin >= until:
        raise UsageRefused(f"--spike: {text!r} begins after the last arrival: requests arrive for {until:g} s (--duration).")
    return Spike(begin, seconds, factor)


def _deaths(texts: Sequence[str], site: _Site, until: float, load_s: float | None) -> list[Death]:
    """texts: values of --kill; load_s: of --load-time"""
    from headrace.lab.simulate.events import with_standby

    if site.standby and not texts:
        raise UsageRefused("--standby: it has an effect where a replica dies; give --kill.")
    if site.standby > len(texts):
        deaths = counted(len(texts), "death")
        raise UsageRefused(
            f"--standby: {site.standby} are more than the {deaths} of --kill, and some have no effect; give at most {len(texts)}."
        )
    if load_s is not None and all(text.count(":") > 1 for text in texts):
        raise UsageRefused("--load-time: it is for replicas whose --kill has no :BACK; there is none.")
    return with_standby([_death(text, site.replicas, until, site.load_s if load_s is None else load_s) for text in texts], site.standby)


def _death(text: str, replicas: int, until: float, load_s: float | None) -> Death:
    """text: a value of --kill; load_s: seconds until the replica is back where the value has none"""
    from headrace.lab.simulate.site import Death

    if load_s is not None and not 0 <= load_s < math.inf:
        raise UsageRefused(f"--load-time: {load_s:g} is not a number of seconds, 0 or more.")
    if text.count(":") == 1:
        if load_s is None:
            raise UsageRefused(f"--kill: {text!r} does not say when the replica is back: give SECOND:REPLICA:BACK, or --load-time.")
        text = f"{text}:{load_s!r}"
    at, replica, back_s = _three(text, "--kill", "SECOND:REPLICA:BACK")
    if not replica.is_integer() or replica >= replicas:
        raise UsageRefused(f"--kill: {text!r} names replica {replica:g}; there are replicas 0 to {replicas - 1}.")
    if at >= until:
        raise UsageRefused(f"--kill: {text!r} comes after the last arrival: requests arrive for {until:g} s (--duration).")
    return Death(at, int(replica), back_s)


def _scaling_rules(text: str, site: _Site, slo: Slo | None, load_s: float | None, *, is_alone: bool) -> ScalingRules:
    from headrace.policy.scaling.autoscaler import ScalingRules

    if not is_alone:
        raise UsageRefused("--autoscale: it is simulated without --kill and --standby.")
    numbers = re.fullmatch(r"(\d{1,3}):(\d{1,3})", text)
    if numbers is None or not int(numbers[1]) <= int(numbers[2]) <= MAX_REPLICAS or not int(numbers[2]):
        raise UsageRefused(f"--autoscale: {text!r} is not MIN:MAX, two numbers of replicas up to {MAX_REPLICAS}.")
    load_s = site.load_s if load_s is None else load_s
    if load_s is None or not 0 <= load_s < math.inf:
        raise UsageRefused("--autoscale: how long a replica takes to load is not known; give --load-time SECONDS.")
    rules = ScalingRules(min_replicas=int(numbers[1]), max_replicas=int(numbers[2]), load_s=load_s)
    return rules if slo is None or slo.ttft_s is None else replace(rules, ttft_s=slo.ttft_s)


def _three(text: str, flag: str, form: str) -> tuple[float, float, float]:
    parts = re.fullmatch(r"(\d{1,9}(?:\.\d+)?):(\d{1,9}(?:\.\d+)?):(\d{1,9}(?:\.\d+)?)", text)
    if parts is None:
        raise UsageRefused(f"{flag}: {text!r} is not {form}, three numbers.")
    return float(parts[1]), float(parts[2]), float(parts[3])
