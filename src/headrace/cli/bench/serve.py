"""`headrace bench serve` loads any OpenAI-compatible server with an open loop and reports its latencies."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
    write_result,
)
from headrace.cli.chat.chat import DEFAULT_URL, ClientKey
from headrace.cli.exits import CommandExitCode, UsageRefused

if TYPE_CHECKING:
    from headrace.lab.metrics import LoadReport


def serve(
    url: Url = DEFAULT_URL,
    model: ServedModel = None,
    num_prompts: Annotated[int, Flag("--num-prompts", min=1)] = 100,
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

    from headrace.lab.datasets import make_requests, send_times
    from headrace.lab.loadgen import run_load
    from headrace.lab.metrics import parse_slo, summarize
    from headrace.lab.report import notes

    try:
        slo = parse_slo(goodput) if goodput else None
        shape = make_shape(dataset_name, input_len, output_len, range_ratio, prefix_len, num_prefixes, vocab_size)
        times = send_times(num_prompts, rate=request_rate, burstiness=burstiness, seed=seed)
    except ValueError as error:
        raise UsageRefused(str(error)) from error
    target = replace(find_target(url, model, api_key), timeout_s=timeout, max_concurrency=max_concurrency)
    conditions = RunConditions(bandwidth)
    records = asyncio.run(run_load(target, make_requests(num_prompts, shape, seed=seed), times))
    report = summarize(records, slo)
    settings: dict[str, object] = {
        "url": target.url,
        "model": target.model,
        "max_concurrency": max_concurrency,
        "seed": seed,
        "shape": shape,
    }
    settings |= {"request_rate": request_rate, "burstiness": burstiness}
    notes_of_run = list(notes(report, has_shared_prefix=shape.prefix_tokens > 0))
    result = conditions.result(settings=settings, client_kept_up=report.is_valid, notes=notes_of_run, report=report)
    write_result(output_json, result, records)
    _print(report, notes_of_run, result if as_json else None)


def _print(report: LoadReport, notes: Sequence[str], result: Mapping[str, object] | None) -> None:
    from headrace.lab.report import failures, lines, to_plain

    if result is not None:
        print(json.dumps(to_plain(result), indent=1))
    elif report.finished:
        print("\n".join([*lines(report), *(f"NOTE: {note}" for note in notes)]))
    if not report.finished:
        print("\n".join(["headrace: no request was answered", *failures(report)]), file=sys.stderr)
        raise typer.Exit(CommandExitCode.FAILED)
