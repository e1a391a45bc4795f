"""Measures how long streams stand still while a prompt as long as the model allows is computed, and what the prompt takes.

    python -m bench.long_prompt --model FOLDER [--quantization int8] [--kv-cache-dtype int8] -> bench/results/MACHINE/long-prompt-*.json

The streams run alone first, then the long prompt arrives; they last until it has been answered. A stream gets one token per step. A step
computes up to `--max-num-batched-tokens` tokens of the prompt, each of which sees all tokens before it, so the last steps are the longest.
New requests with short prompts arrive while the long one is computed, and wait for their first token.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: see headrace.tensor.host.openmp

from bench.engine_options import add_engine_options, engine_config
from bench.harness import Machine, build, finished, requests_for, write_portable
from bench.machine import results_file
from bench.peers.engines import peak_of
from headrace.core.errors import ConfigError
from headrace.lab.datasets import LoadRequest, WorkloadShape
from headrace.lab.environment import bandwidth_facts, bandwidth_script, environment, measure_bandwidth
from headrace.lab.metrics import percentile
from headrace.lab.offline import run_offline

STREAM_PROMPT = 16
ALONE_TOKENS = 16
"""What each stream has said before the long prompt comes."""
ANSWER_TOKENS = 8
NEWCOMER = WorkloadShape(input_tokens=64, output_tokens=2)
NEWCOMER_EVERY_S = 4.0


def gaps_of(times: Sequence[float]) -> list[float]:
    return sorted(later - earlier for earlier, later in pairwise(times))


def measure(
    machine: Machine, streams: int, newcomers: int, tokens: int, step_tokens: int, every_s: float = NEWCOMER_EVERY_S
) -> dict[str, object]:
    """Times in seconds, memory in bytes; memory is this process's peak before and after the long prompt."""
    costly = machine.engine.info.costly_context
    dearer = 1.0 + tokens / (2 * costly) if costly else 1.0  # on average, see `policy.schedule.step_budget`
    asked = tokens * dearer + newcomers * (NEWCOMER.input_tokens + NEWCOMER.output_tokens)
    num_steps = math.ceil(1.1 * asked / (step_tokens - streams))
    shape = WorkloadShape(input_tokens=STREAM_PROMPT, output_tokens=ALONE_TOKENS)
    alone = [requests_for(machine, streams, shape, seed=seed) for seed in (0, 4)]  # another prompt each: the second finds no prefix
    seconds = min(finished(run_offline(machine.engine, machine.collector, requests)).duration_s for requests in alone)
    before = peak_of(os.getpid())
    shape = WorkloadShape(input_tokens=STREAM_PROMPT, output_tokens=4 * ALONE_TOKENS + num_steps + ANSWER_TOKENS)
    flowing = requests_for(machine, streams, shape, seed=1)
    long = requests_for(machine, 1, WorkloadShape(input_tokens=tokens, output_tokens=1), seed=2)[0]
    short = requests_for(machine, newcomers, NEWCOMER, seed=3)
    arrivals = [0.0] * streams + [seconds] + [seconds + every_s * (i + 0.5) for i in range(newcomers)]
    requests = [*flowing, LoadRequest(long.prompt_ids, ANSWER_TOKENS), *short]
    run = finished(run_offline(machine.engine, machine.collector, requests, arrivals))
    machine.engine.scheduler.check()
    prompt = run.records[streams]
    if min(record.end_s for record in run.records[:streams]) < prompt.chunk_s[0]:
        raise RuntimeError("a stream ended before the long prompt was answered: its gaps would not count")
    meanwhile = [[at for at in record.chunk_s if prompt.intended_s <= at <= prompt.chunk_s[0]] for record in run.records[:streams]]
    gaps = sorted(gap for times in meanwhile for gap in gaps_of(times))
    return {
        "prompt_tokens": tokens,
        "streams": streams,
        "step_tokens": step_tokens,
        "ttft_s": prompt.ttft_s,
        "streams_tokens_meanwhile": [len(times) for times in meanwhile],
        "newcomers_ttft_s": [came.ttft_s for came in run.records[streams + 1 :] if came.intended_s < prompt.chunk_s[0]],
        "worst_gap_s": gaps[-1],
        "gap_p50_s": percentile(gaps, 0.5),
        "gap_alone_p50_s": percentile(gaps_of([at for at in run.records[0].chunk_s if at <= prompt.intended_s]), 0.5),
        "step_s": run.step_s,
        "peak_memory_before_bytes": before,
        "peak_memory_after_bytes": peak_of(os.getpid()),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder")
    add_engine_options(parser, "kv_cache_dtype", "max_num_batched_tokens", quantization="int8")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--newcomers", type=int, default=8)
    parser.add_argument("--tokens", type=int, help="default: the model's own limit, less the answer")
    given = parser.parse_args(arguments)
    if not 1 <= given.streams < given.max_num_batched_tokens:
        raise ConfigError("streams", f"{given.streams} is outside 1..{given.max_num_batched_tokens - 1}")
    config = engine_config(given.model, given)
    facts = {"environment": environment(), **bandwidth_facts(measure_bandwidth(bandwidth_script()))}
    machine = build(config)
    tokens = given.tokens or machine.engine.info.max_model_len - ANSWER_TOKENS
    found = measure(machine, given.streams, given.newcomers, tokens, given.max_num_batched_tokens)
    for name, value in found.items():
        if name != "step_s":
            print(f"{name}: {value}")
    kind = "" if given.kv_cache_dtype == "auto" else f"-kv-{given.kv_cache_dtype}"
    name = f"long-prompt-{Path(config.model).name}-{given.quantization}{kind}-{given.max_num_batched_tokens}"
    write_portable(results_file(name), {**facts, "decided": machine.engine.info.decided, **found})


if __name__ == "__main__":
    main()
