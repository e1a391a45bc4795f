"""`headrace bench throughput|latency|steps` runs the engine in this process, without HTTP, and measures it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.bundled import DEFAULT_MODEL
from headrace.cli.bench.common import AsJson, Bandwidth, Flag, Output, RunConditions, Seed, make_shape, warm_up, write_result
from headrace.cli.exits import UsageRefused
from headrace.cli.flags.flag import GivenFlags, with_flags
from headrace.cli.flags.rows import engine_flags
from headrace.core.strict_decode import decode
from headrace.engine.config import EngineConfig, find_gpus_to_start

if TYPE_CHECKING:
    from headrace.core.model_info import ModelInfo
    from headrace.engine.loop import Engine, Outbox
    from headrace.lab.datasets import WorkloadShape
    from headrace.lab.metrics import Distribution, LoadRecord
    from headrace.lab.offline import Collector

ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help="Folder, .gguf file or bundled model; default: headrace-tiny.")]
Price = Annotated[float | None, Flag("--dollars-per-hour", help="Price of this machine: adds the price of a million tokens.")]

NOT_HERE = ("seed",)
"""Engine options without a flag here: `--seed` is also the prompts'."""


@with_flags(*engine_flags(without=NOT_HERE))
def throughput(
    model: ModelArgument = None,
    num_prompts: Annotated[int, Flag("--num-prompts", min=1)] = 64,
    input_len: Annotated[int, Flag("--input-len", "--random-input-len")] = 128,
    output_len: Annotated[int, Flag("--output-len", "--random-output-len")] = 64,
    range_ratio: Annotated[float, Flag("--random-range-ratio")] = 0.0,
    prefix_len: Annotated[int, Flag("--random-prefix-len", "--prefix-len")] = 0,
    dollars_per_hour: Price = None,
    seed: Seed = 0,
    bandwidth: Bandwidth = True,
    output_json: Output = None,
    as_json: AsJson = False,
    *,
    flags: GivenFlags,
) -> None:
    """Run all requests at once, in this process: tokens per second, price, share of bandwidth."""
    from headrace.lab.datasets import make_requests
    from headrace.lab.offline import decode_bytes, dollars_per_million_tokens, run_offline

    config = _config(model, {**flags.values, "seed": seed})
    loop, collector = _engine(config)
    shape = _offline_shape(loop.info, input_len, output_len, range_ratio, prefix_len)
    run_offline(loop, collector, warm_up(shape))
    facts = RunConditions(bandwidth, config.device)
    run = run_offline(loop, collector, make_requests(num_prompts, shape, seed=seed))
    tokens = run.output_tokens
    values: dict[str, object] = {
        "requests": len(run.records),
        "batch size, most sequences at once": run.peak_running,
        "total time (s)": run.duration_s,
        "steps": len(run.step_s),
        "ms per request": run.duration_s / len(run.records) * 1000,
        "requests/s": len(run.records) / run.duration_s,
        "output tokens/s": tokens / run.duration_s,
        "total tokens/s": (tokens + run.prompt_tokens) / run.duration_s,
    }
    values |= _bandwidth_rows(facts)
    least = decode_bytes(loop.info, run, steps=len(run.step_s))
    mbu = least / run.duration_s / facts.bandwidth if facts.bandwidth else _unknown(facts.no_bandwidth)
    values["MBU, at least (weights + KV read by decoding / time / read bandwidth)"] = mbu
    if dollars_per_hour is not None:
        values["$ per 1M output tokens"] = dollars_per_million_tokens(tokens, run.duration_s, dollars_per_hour)
    _finish(facts.result(settings={"model": model, "engine": config, "shape": shape}, values=values), run.records, output_json, as_json)


@with_flags(*engine_flags(without={*NOT_HERE, "max_num_seqs"}))
def latency(
    model: ModelArgument = None,
    batch_size: Annotated[int, Flag("--batch-size", min=1)] = 8,
    input_len: Annotated[int, Flag("--input-len")] = 32,
    output_len: Annotated[int, Flag("--output-len")] = 128,
    num_iters: Annotated[int, Flag("--num-iters", min=1)] = 10,
    num_iters_warmup: Annotated[int, Flag("--num-iters-warmup", min=0)] = 2,
    dollars_per_hour: Price = None,
    seed: Seed = 0,
    bandwidth: Bandwidth = True,
    output_json: Output = None,
    as_json: AsJson = False,
    *,
    flags: GivenFlags,
) -> None:
    """Run one batch from start to end, several times: its latency, its decode step, share of bandwidth."""
    from headrace.lab.datasets import make_requests
    from headrace.lab.metrics import distribution
    from headrace.lab.offline import decode_speed, dollars_per_million_tokens, run_offline

    config = _config(model, {**flags.values, "max_num_seqs": batch_size, "seed": seed})
    loop, collector = _engine(config)
    shape = _offline_shape(loop.info, input_len, output_len, 0.0, 0)
    # Fresh prompts each time: a repeated one would be found in the prefix cache.
    batches = [make_requests(batch_size, shape, seed=seed + 1 + number) for number in range(num_iters_warmup + num_iters)]
    for batch in batches[:num_iters_warmup]:
        run_offline(loop, collector, batch)
    facts = RunConditions(bandwidth, config.device)
    runs = [run_offline(loop, collector, batch) for batch in batches[num_iters_warmup:]]
    speeds = [speed for run in runs if (speed := decode_speed(loop.info, run, facts.bandwidth)) is not None]
    whole = distribution(run.duration_s * 1000 for run in runs)
    values: dict[str, object] = {
        "batch size": batch_size,
        "latency of a batch (ms), mean": whole.mean,
        **{f"latency of a batch (ms), {name}": _shown(whole, name) for name in whole.quantiles},
        "output tokens/s": batch_size * output_len / (whole.mean / 1000),
        "ms per request": whole.mean / batch_size,
    }
    if speeds:
        step = distribution(speed.step_s * 1000 for speed in speeds)
        values |= {"decode step (ms), p50": step.quantiles["p50"], "bytes read per decode step": speeds[0].bytes_read}
    values |= _bandwidth_rows(facts)
    mbus = [speed.mbu for speed in speeds if speed.mbu is not None]
    why = facts.no_bandwidth or "the sequences never decoded together"
    values["MBU ((weights + KV) / decode step / read bandwidth), p50"] = distribution(mbus).quantiles["p50"] if mbus else _unknown(why)
    if dollars_per_hour is not None:
        tokens = batch_size * output_len * len(runs)
        values["$ per 1M output tokens"] = dollars_per_million_tokens(tokens, sum(run.duration_s for run in runs), dollars_per_hour)
    records = [record for run in runs for record in run.records]
    _finish(facts.result(settings={"model": model, "engine": config, "shape": shape}, values=values), records, output_json, as_json)


@with_flags(*engine_flags(without={*NOT_HERE, "depth"}))
def steps(
    model: ModelArgument = None,
    output: Annotated[Path, Flag("--output", help="File that `headrace simulate --steps` reads.")] = Path("steps.json"),
    limit: Annotated[float, Flag("--seconds", min=1.0, help="Measure for at most about this long.")] = 60.0,
    seed: Seed = 0,
    *,
    flags: GivenFlags,
) -> None:
    """Measure what steps of all sizes take, and fit them: the times of this machine for `headrace simulate`."""
    from headrace.lab.simulate.step_times import StepFile, fit, mean_error, measure_steps, write_steps

    config = _config(model, {**flags.values, "depth": 1, "seed": seed})
    loop = _built(config, lambda updates: None)
    samples = measure_steps(loop, limit_s=limit, seed=seed)
    latency = fit(samples)
    error = mean_error(latency, samples)
    kept = StepFile(engine=config, latency=latency, num_blocks=loop.info.num_blocks[0], num_steps=len(samples), error=error)
    write_steps(output, kept)
    print(f"{len(samples)} steps measured; the fit is off by {error:.1%} in the mean. Written: {output}")
    if kept.warning:
        print(f"Warning: {kept.warning}", file=sys.stderr)


def _shown(samples: Distribution, quantile: str) -> object:
    from headrace.lab.metrics import NEEDED_SAMPLES

    value = samples.known(quantile)
    return value if value is not None else _unknown(f"{NEEDED_SAMPLES[quantile]} iterations needed")


def _bandwidth_rows(facts: RunConditions) -> dict[str, object]:
    return {"read bandwidth (GB/s)": facts.bandwidth / 1e9} if facts.bandwidth else {}


def _unknown(why: str) -> str:
    return f"not known: {why}"


def _offline_shape(info: ModelInfo, inputs: int, outputs: int, spread: float, prefix: int) -> WorkloadShape:
    try:
        shape = make_shape("random", inputs, outputs, spread, prefix, 1, info.vocab_size)
    except ValueError as error:
        raise UsageRefused(str(error)) from error
    longest = int(inputs * (1 + spread)) + int(outputs * (1 + spread))
    if longest > info.max_model_len:
        raise UsageRefused(f"prompts and outputs of up to {longest} tokens do not fit max_model_len ({info.max_model_len})")
    return shape


def _config(model: str | None, engine: Mapping[str, object]) -> EngineConfig:
    from headrace.fleet.weights import resolve_model
    from headrace.lab.plan.here import decide_layout

    config = decode(EngineConfig, {**engine, "model": model or DEFAULT_MODEL}).checked(find_gpus_to_start)
    return decide_layout(config, resolve_model(config.model))


def _engine(config: EngineConfig) -> tuple[Engine, Collector]:
    from headrace.lab.offline import Collector

    collector = Collector()
    return _built(config, collector), collector


def _built(config: EngineConfig, outbox: Outbox) -> Engine:
    from headrace.fleet.weights import resolve_model
    from headrace.llm.members import build_ranks

    return build_ranks(config.with_folders(resolve_model), outbox)


def _finish(result: dict[str, object], records: Sequence[LoadRecord], output_json: Path | None, as_json: bool) -> None:
    from headrace.lab.report import to_plain

    write_result(output_json, result, records)
    if as_json:
        print(json.dumps(to_plain(result), indent=1))
        return
    values = result["values"]
    assert isinstance(values, dict)
    for name, value in values.items():
        print(f"{name + ':':<50} {value:,.2f}" if isinstance(value, float) else f"{name + ':':<50} {value}")
