"""Compares paged KV memory with one preallocated region per sequence.

The same pool of tokens is used once in blocks of 16, once in blocks as long as the longest sequence. The variants differ by `block_size`
only; everything else, the kernels included, is the same code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bench.harness import Machine, Measure, Table, finished, requests_for
from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.lab.datasets import WorkloadShape
from headrace.lab.metrics import summarize
from headrace.lab.offline import run_offline

NUM_REQUESTS = 48
MAX_MODEL_LEN = 512
BLOCK_SIZE = 16
PLACES = 4
"""Sequences that the preallocated pool holds: the pool is PLACES * MAX_MODEL_LEN tokens in both variants."""
SHAPE = WorkloadShape(input_tokens=48, output_tokens=48, spread=0.5)


def table(base: EngineConfig) -> Table:
    """base: model, dtype, kernels and threads to measure with."""
    if MAX_MODEL_LEN % BLOCK_SIZE:
        raise ConfigError("block_size", "must divide the longest sequence for equal pools")
    common = replace(base, max_model_len=MAX_MODEL_LEN, max_num_seqs=NUM_REQUESTS, enable_prefix_caching=False)
    return Table(
        name="paged-memory",
        question="How many sequences run at once in the same KV memory when it is handed out by the block instead of by the sequence?",
        workload=(
            f"{NUM_REQUESTS} requests at once, prompts and outputs of 24 to 72 tokens; a pool of {PLACES * MAX_MODEL_LEN} tokens, "
            f"longest sequence {MAX_MODEL_LEN}."
        ),
        variants={
            "preallocated": replace(common, block_size=MAX_MODEL_LEN, num_kv_blocks=PLACES + 1),
            "paged": replace(common, block_size=BLOCK_SIZE, num_kv_blocks=PLACES * MAX_MODEL_LEN // BLOCK_SIZE + 1),
        },
        measures=(
            Measure("most at once", "sequences", "higher"),
            Measure("output", "tok/s", "higher"),
            Measure("TTFT p99", "ms", "lower"),
            Measure("E2EL p50", "ms", "lower"),
            Measure("preemptions", ""),
        ),
        run=run,
        settings={"requests": NUM_REQUESTS, "shape": SHAPE},
    )


def run(machine: Machine, number: int) -> Mapping[str, float]:
    done = finished(run_offline(machine.engine, machine.collector, requests_for(machine, NUM_REQUESTS, SHAPE, seed=number)))
    report = summarize(done.records)
    return {
        "most at once": done.peak_running,
        "output": done.output_tokens / done.duration_s,
        "TTFT p99": report.ttft_s.quantiles["p99"] * 1000,
        "E2EL p50": report.e2el_s.quantiles["p50"] * 1000,
        "preemptions": done.preemptions,
    }
