"""Measures chunked prefill's effect on running streams: four streams decode, and long prompts arrive in the middle.

The variants differ by `enable_chunked_prefill` only. Without it a long prompt is one step, and every stream waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from bench.harness import Machine, Measure, Table, finished, requests_for
from headrace.engine.config import EngineConfig
from headrace.lab.datasets import LoadRequest, WorkloadShape
from headrace.lab.metrics import percentile
from headrace.lab.offline import run_offline

NUM_STREAMS = 4
STREAM = WorkloadShape(input_tokens=16, output_tokens=160)
NUM_LONG = 3
LONG_TOKENS = 900
STEP_TOKENS = 64


def table(base: EngineConfig) -> Table:
    """base: model, dtype, kernels and threads to measure with."""
    common = replace(base, max_num_seqs=16, max_num_batched_tokens=STEP_TOKENS, enable_prefix_caching=False)
    return Table(
        name="chunked-prefill",
        question="How long do running streams stand still when long prompts arrive?",
        workload=(
            f"{NUM_STREAMS} streams of {STREAM.output_tokens} tokens; {NUM_LONG} prompts of {LONG_TOKENS} tokens arrive while they run; "
            f"steps of {STEP_TOKENS} tokens."
        ),
        variants={
            "whole prompts": replace(common, enable_chunked_prefill=False),
            "chunked": replace(common, enable_chunked_prefill=True),
        },
        measures=(
            Measure("worst gap of a stream", "ms", "lower"),
            Measure("gaps p99", "ms", "lower"),
            Measure("gaps p50", "ms", "lower"),
            Measure("TTFT of long prompts, mean", "ms", "lower"),
        ),
        run=run,
        settings={"streams": STREAM, "long_tokens": LONG_TOKENS},
    )


def run(machine: Machine, number: int) -> Mapping[str, float]:
    """The long prompts arrive after a quarter, a half and three quarters of what the streams take alone."""
    streams = requests_for(machine, NUM_STREAMS, STREAM, seed=number)
    alone = finished(run_offline(machine.engine, machine.collector, streams)).duration_s
    longs = [
        LoadRequest(request.prompt_ids, 1)
        for request in requests_for(machine, NUM_LONG, WorkloadShape(input_tokens=LONG_TOKENS, output_tokens=1), seed=number)
    ]
    arrivals = [0.0] * NUM_STREAMS + [alone * (index + 1) / (NUM_LONG + 1) for index in range(NUM_LONG)]
    done = finished(run_offline(machine.engine, machine.collector, [*streams, *longs], arrivals))
    gaps = sorted(later - earlier for record in done.records[:NUM_STREAMS] for earlier, later in pairwise(record.chunk_s))
    waits = [record.ttft_s for record in done.records[NUM_STREAMS:]]
    return {
        "worst gap of a stream": gaps[-1] * 1000,
        "gaps p99": percentile(gaps, 0.99) * 1000,
        "gaps p50": percentile(gaps, 0.5) * 1000,
        "TTFT of long prompts, mean": sum(waits) / len(waits) * 1000,
    }
