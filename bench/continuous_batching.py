"""Continuous against static batching on mixed lengths: the same kernels and batch size, differing by `batching` only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bench.harness import Machine, Measure, Table, finished, requests_for
from headrace.engine.config import EngineConfig
from headrace.lab.datasets import WorkloadShape
from headrace.lab.metrics import summarize
from headrace.lab.offline import run_offline

NUM_REQUESTS = 64
BATCH = 16
SHAPE = WorkloadShape(input_tokens=64, output_tokens=64, spread=0.9)


def table(base: EngineConfig) -> Table:
    """base: model, dtype, kernels and threads to measure with."""
    common = replace(base, max_num_seqs=BATCH, enable_prefix_caching=False)
    return Table(
        name="continuous-batching",
        question="What is gained when a finished sequence's place is filled at once instead of when its whole batch is done?",
        workload=f"{NUM_REQUESTS} requests at once, {BATCH} in a batch; prompts and outputs of 6 to 121 tokens each, evenly spread.",
        variants={"static": replace(common, batching="static"), "continuous": replace(common, batching="continuous")},
        measures=(
            Measure("output", "tok/s", "higher"),
            Measure("TTFT p50", "ms", "lower"),
            Measure("E2EL p50", "ms", "lower"),
            Measure("E2EL p99", "ms", "lower"),
            Measure("steps", ""),
        ),
        run=run,
        settings={"requests": NUM_REQUESTS, "shape": SHAPE},
    )


def run(machine: Machine, number: int) -> Mapping[str, float]:
    done = finished(run_offline(machine.engine, machine.collector, requests_for(machine, NUM_REQUESTS, SHAPE, seed=number)))
    report = summarize(done.records)
    return {
        "output": done.output_tokens / done.duration_s,
        "TTFT p50": report.ttft_s.quantiles["p50"] * 1000,
        "E2EL p50": report.e2el_s.quantiles["p50"] * 1000,
        "E2EL p99": report.e2el_s.quantiles["p99"] * 1000,
        "steps": len(done.step_s),
    }
