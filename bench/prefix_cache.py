"""Measures what the prefix cache saves when prompts begin alike, and what it costs when none do.

The variants differ by `enable_prefix_caching` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bench.harness import Machine, Measure, Table, finished, requests_for
from headrace.engine.config import EngineConfig
from headrace.lab.datasets import WorkloadShape
from headrace.lab.metrics import summarize
from headrace.lab.offline import OfflineRun, run_offline

NUM_REQUESTS = 32
SHARED = WorkloadShape(input_tokens=480, output_tokens=8, prefix_tokens=448, num_prefixes=2)
UNIQUE = WorkloadShape(input_tokens=480, output_tokens=8)


def table(base: EngineConfig) -> Table:
    """base: model, dtype, kernels and threads to measure with."""
    common = replace(base, max_num_seqs=8)
    return Table(
        name="prefix-cache",
        question="What does reuse of equal beginnings save, and what does looking for them cost when there are none?",
        workload=(
            f"{NUM_REQUESTS} prompts of {SHARED.input_tokens} tokens, one after another begun as places come free; once with "
            f"{SHARED.num_prefixes} shared beginnings of {SHARED.prefix_tokens} tokens, once with nothing in common."
        ),
        variants={"off": replace(common, enable_prefix_caching=False), "on": replace(common, enable_prefix_caching=True)},
        measures=(
            Measure("TTFT p50, shared", "ms", "lower"),
            Measure("output, shared", "tok/s", "higher"),
            Measure("prompt tokens found", "share"),
            Measure("time, nothing shared", "ms", "lower"),
            Measure("steps p50, nothing shared", "ms", "lower"),
        ),
        run=run,
        settings={"requests": NUM_REQUESTS, "shared": SHARED, "unique": UNIQUE},
    )


def run(machine: Machine, number: int) -> Mapping[str, float]:
    """Seeds differ by round, so that no round finds the prompts of another."""
    unique = _run(machine, UNIQUE, 2 * number)
    shared = _run(machine, SHARED, 2 * number + 1)
    report = summarize(shared.records)
    steps = sorted(unique.step_s)
    return {
        "TTFT p50, shared": report.ttft_s.quantiles["p50"] * 1000,
        "output, shared": shared.output_tokens / shared.duration_s,
        "prompt tokens found": report.cached_tokens / report.prompt_tokens,
        "time, nothing shared": unique.duration_s * 1000,
        "steps p50, nothing shared": steps[len(steps) // 2] * 1000,
    }


def _run(machine: Machine, shape: WorkloadShape, seed: int) -> OfflineRun:
    return finished(run_offline(machine.engine, machine.collector, requests_for(machine, NUM_REQUESTS, shape, seed=seed)))
