"""Compares batching with one request at a time, on a model of 1.1 billion weights in int8, whose steps read weights and little else.

The variants differ by `max_num_seqs` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from bench.harness import ROOT, Machine, Measure, Table, finished, requests_for
from headrace.engine.config import EngineConfig
from headrace.lab.datasets import WorkloadShape
from headrace.lab.metrics import summarize
from headrace.lab.offline import run_offline

MODEL = ROOT / "build" / "tinyllama"
"""Written by `bench.tinyllama`."""

SHAPE = WorkloadShape(input_tokens=32, output_tokens=24)


def table(base: EngineConfig, num_requests: int = 32) -> Table:
    """base: dtype, kernels and threads to measure with."""
    common = replace(
        base, model=str(MODEL), load_format="dummy", quantization="int8", kv_cache_bytes=256 << 20, enable_prefix_caching=False
    )
    return Table(
        name=f"one-at-a-time-{num_requests}",
        question="What does a batch give against answering one request after the other?",
        workload=(
            f"{num_requests} requests at once, prompts of {SHAPE.input_tokens} and answers of {SHAPE.output_tokens} tokens, "
            "on a model of TinyLlama's shape (1.1 billion random weights, int8)."
        ),
        variants={"one at a time": replace(common, max_num_seqs=1), "batched": replace(common, max_num_seqs=num_requests)},
        measures=(
            Measure("output", "tok/s", "higher"),
            Measure("TPOT p50", "ms", "lower"),
            Measure("TTFT p50", "ms", "lower"),
            Measure("E2EL p50", "ms", "lower"),
        ),
        run=partial(run, num_requests),
        settings={"requests": num_requests, "shape": SHAPE},
    )


def run(num_requests: int, machine: Machine, number: int) -> Mapping[str, float]:
    done = finished(run_offline(machine.engine, machine.collector, requests_for(machine, num_requests, SHAPE, seed=number)))
    report = summarize(done.records)
    return {
        "output": done.output_tokens / done.duration_s,
        "TPOT p50": report.tpot_s.quantiles["p50"] * 1000,
        "TTFT p50": report.ttft_s.quantiles["p50"] * 1000,
        "E2EL p50": report.e2el_s.quantiles["p50"] * 1000,
    }
