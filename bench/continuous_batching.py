"""Compares continuous with static batching. Kernels and batch size are the same; the variants differ by `static` of the table only.

One table has evenly spread lengths, one has skewed ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from bench.harness import Machine, Measure, Table, finished, requests_for
from headrace.engine.config import EngineConfig
from headrace.lab.datasets import LoadRequest, WorkloadShape
from headrace.lab.metrics import summarize
from headrace.lab.offline import run_offline

NUM_REQUESTS = 64
BATCH = 16
SHAPE = WorkloadShape(input_tokens=64, output_tokens=64, spread=0.9)
MOST_SKEWED = 8 * SHAPE.output_tokens


def table(base: EngineConfig) -> Table:
    """base: model, dtype, kernels and threads to measure with."""
    return _table(base, "", "prompts and outputs of 6 to 121 tokens each, evenly spread", run)


def skewed_table(base: EngineConfig) -> Table:
    """base: as for `table`."""
    spread = f"prompts of 6 to 121 tokens; outputs of {SHAPE.output_tokens} tokens in the mean, exponentially distributed"
    return _table(base, "-skewed", f"{spread}, {MOST_SKEWED} at most", run_skewed)


def _table(base: EngineConfig, suffix: str, lengths: str, measure: Callable[[Machine, int], Mapping[str, float]]) -> Table:
    common = replace(base, max_num_seqs=BATCH, enable_prefix_caching=False)
    return Table(
        name=f"continuous-batching{suffix}",
        question="What is gained when a finished sequence's place is filled at once instead of when its whole batch is done?",
        workload=f"{NUM_REQUESTS} requests at once, {BATCH} in a batch; {lengths}.",
        variants={"static": common, "continuous": common},
        static="static",
        measures=(
            Measure("output", "tok/s", "higher"),
            Measure("TTFT p50", "ms", "lower"),
            Measure("E2EL p50", "ms", "lower"),
            Measure("E2EL p99", "ms", "lower"),
            Measure("steps", ""),
        ),
        run=measure,
        settings={"requests": NUM_REQUESTS, "shape": SHAPE},
    )


def skewed(requests: Sequence[LoadRequest], *, seed: int) -> list[LoadRequest]:
    """The requests with exponentially distributed outputs: most are short, a few are several times as long as the mean."""
    draw = random.Random(seed)
    return [replace(each, output_tokens=min(MOST_SKEWED, 1 + int(draw.expovariate(1 / SHAPE.output_tokens)))) for each in requests]


def run(machine: Machine, number: int) -> Mapping[str, float]:
    return _measured(machine, requests_for(machine, NUM_REQUESTS, SHAPE, seed=number))


def run_skewed(machine: Machine, number: int) -> Mapping[str, float]:
    return _measured(machine, skewed(requests_for(machine, NUM_REQUESTS, SHAPE, seed=number), seed=number))


def _measured(machine: Machine, requests: Sequence[LoadRequest]) -> Mapping[str, float]:
    done = finished(run_offline(machine.engine, machine.collector, requests))
    report = summarize(done.records)
    return {
        "output": done.output_tokens / done.duration_s,
        "TTFT p50": report.ttft_s.quantiles["p50"] * 1000,
        "E2EL p50": report.e2el_s.quantiles["p50"] * 1000,
        "E2EL p99": report.e2el_s.quantiles["p99"] * 1000,
        "steps": len(done.step_s),
    }
