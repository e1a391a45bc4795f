"""`headrace bench serve` loads any OpenAI-compatible server with an open loop, drawn or of a trace, and reports its latencies."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.bench.common import (
    AsJson,
    Bandwidth,
    Flag,
    Output,
    RunConditions,
    Seed,
    ServedModel,
    Url,
    find_target,
    make_shape,
    refuse_beside_trace,
    write_result,
)
from headrace.cli.chat.chat import DEFAULT_URL, ClientKey
from headrace.cli.exits import CommandExitCode, UsageRefused

if TYPE_CHECKING:
    from headrace.lab.datasets import LoadRequest, WorkloadShape
    from headrace.lab.metrics import LoadReport

DRAWN = ("request_rate", "burstiness", "dataset_name", "input_len", "output_len", "range_ratio", "prefix_len", "num_prefixes")
"""Parameters that a trace replaces."""

DEFAULT_PROMPTS = 100
MAX_TRACE_TOKENS = 1 << 26
"""Prompts of a trace are in memory at once, 8 bytes per token."""


def serve(
    context: typer.Context,
    url: Url = DEFAULT_URL,
    model: ServedModel = None,
    num_prompts: Annotated[
        int | None, Flag("--num-prompts", min=1, help=f"Default {DEFAULT_PROMPTS}, and of a trace all; else its first ones.")
    ] = None,
    trace: Annotated[Path | None, Flag("--trace", help="Replay a trace of `headrace simulate` at its own times.")] = None,
    request_rate: Annotated[float, Flag("--request-rate", help="Requests per second; inf sends all at once.")] = math.inf,
    burstiness: Annotated[float, Flag("--burstiness", help="1 is Poisson, less is burstier (0.25: bursts).")] = 1.0,
    max_concurrency: Annotated[
        int | None, Flag("--max-concurrency", min=1, help="Most requests in flight; waiting for a place counts as latency.")
    ] = None,
    dataset_name: Annotated[str, Flag("--dataset-name", help="random, or shared-prefix.")] = "random",
    input_len: Annotated[int, Flag("--random-input-len", "--input-len", help="Prompt tokens, prefix included.")] = 128,
    output_len: Annotated[int, Flag("--random-output-len", "--output-len")] = 64,
    range_ratio: Annotated[float, Flag("--random-range-ratio", help="Lengths vary by this share, 0..1.")] = 0.0,
    prefix_len: Annotated[
        int, Flag("--random-prefix-len", "--prefix-len", help="Tokens at the beginning of the prompts that are shared.")
    ] = 0,
    num_prefixes: Annotated[int, Flag("--num-prefixes", help="Different shared beginnings.")] = 1,
    vocab_size: Annotated[int, Flag("--vocab-size", help="Token ids are drawn below this.")] = 2000,
    goodput: Annotated[list[str] | None, Flag("--goodput", help="ttft:MS, tpot:MS or e2el:MS; again for more.")] = None,
    timeout: Annotated[float, Flag("--timeout", help="Seconds after which a request has failed.")] = 600.0,
    api_key: ClientKey = None,
    seed: Seed = 0,
    bandwidth: Bandwidth = True,
    output_json: Output = None,
    as_json: AsJson = False,
) -> None:
    """Load a running server: open loop, latency from the intended send time."""
    import asyncio

    from headrace.lab.loadgen import run_load
    from headrace.lab.metrics import parse_slo, summarize
    from headrace.lab.report import notes

    try:
        slo = parse_slo(goodput) if goodput else None
        shape = make_shape(dataset_name, input_len, output_len, range_ratio, prefix_len, num_prefixes, vocab_size)
        if trace is None:
            load = _drawn(num_prompts or DEFAULT_PROMPTS, shape, request_rate, burstiness, seed)
        else:
            refuse_beside_trace(context, DRAWN, "leave one of the two out")
            load = _traced(trace, num_prompts, shape, seed)
    except ValueError as error:
        raise UsageRefused(str(error)) from error
    target = replace(find_target(url, model, api_key), timeout_s=timeout, max_concurrency=max_concurrency)
    conditions = RunConditions(bandwidth)
    records = asyncio.run(run_load(target, *load))
    report = summarize(records, slo)
    settings: dict[str, object] = {"url": target.url, "model": target.model, "max_concurrency": max_concurrency, "seed": seed}
    settings |= {"shape": shape, "request_rate": request_rate, "burstiness": burstiness} if trace is None else {"trace": str(trace)}
    notes_of_run = list(notes(report, has_shared_prefix=shape.prefix_tokens > 0 or trace is not None))
    result = conditions.result(settings=settings, client_kept_up=report.is_valid, notes=notes_of_run, report=report)
    write_result(output_json, result, records)
    _print(report, notes_of_run, result if as_json else None)


Load = tuple[list["LoadRequest"], list[float]]
"""Requests, and the seconds after the start at which each is sent."""


def _drawn(count: int, shape: WorkloadShape, rate: float, burstiness: float, seed: int) -> Load:
    from headrace.lab.datasets import make_requests, send_times

    return make_requests(count, shape, seed=seed), send_times(count, rate=rate, burstiness=burstiness, seed=seed)


def _traced(trace: Path, count: int | None, shape: WorkloadShape, seed: int) -> Load:
    """The first request is sent at once."""
    from headrace.lab.datasets import LoadRequest
    from headrace.lab.simulate.load import read_trace

    requests: list[LoadRequest] = []
    moments: list[float] = []
    num_tokens = 0
    for arrival in itertools.islice(read_trace(trace, seed=seed, low_id=shape.low_id, high_id=shape.high_id), count):
        num_tokens += len(arrival.prompt_ids)
        if num_tokens > MAX_TRACE_TOKENS:
            most = f"its prompts have more than {MAX_TRACE_TOKENS:,} tokens"
            raise UsageRefused(f"--trace: {most}; give --num-prompts {len(requests)} or less.")
        requests.append(LoadRequest(arrival.prompt_ids, arrival.output_tokens))
        moments.append(arrival.at)
    if not requests:
        raise UsageRefused(f"--trace: {trace} has no request.")
    return requests, [moment - moments[0] for moment in moments]


def _print(report: LoadReport, notes: Sequence[str], result: Mapping[str, object] | None) -> None:
    from headrace.lab.report import failures, lines, to_plain

    if result is not None:
        print(json.dumps(to_plain(result), indent=1))
    elif report.finished:
        print("\n".join([*lines(report), *(f"NOTE: {note}" for note in notes)]))
    if not report.finished:
        print("\n".join(["headrace: no request was answered", *failures(report)]), file=sys.stderr)
        raise typer.Exit(CommandExitCode.FAILED)
