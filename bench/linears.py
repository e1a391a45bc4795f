"""Measures the linears of six layers of a 1.1 B Llama shape alone: time per pass by kind and number of rows, beside read bandwidth.

    python -m bench.linears [--rows 1,8,12,32,120,512] [--kind bf16] -> bench/results/MACHINE/linears.json

Kinds: bf16 (bfloat16 weights, float32 arithmetic), bf16-products (rows rounded to bfloat16), int8, int4, onednn and onednn-bf16 (float32
and bfloat16 weights reordered for oneDNN, rows of the same dtype). On a machine that is shared, --cpu-time on one thread
(NUMBA_NUM_THREADS=1) measures what others leave alone: arithmetic and a core's own memory traffic.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: see headrace.tensor.host.openmp

import torch
from torch import Tensor

from bench.harness import write_portable
from bench.machine import results_file
from headrace.lab.environment import bandwidth_facts, bandwidth_script, environment, measure_bandwidth
from headrace.tensor.kernels import Linear
from headrace.tensor.kernels.cpu.backend import EXECUTOR
from headrace.tensor.kernels.cpu.integer.quantized import IntegerLinear
from headrace.tensor.kernels.cpu.jit.launch import thread_limit
from headrace.tensor.kernels.cpu.linear import OneDnnLinear, StripLinear
from headrace.tensor.kernels.rounding import Precision, round_weight

LAYER = ((2560, 2048), (2048, 2048), (11264, 2048), (2048, 5632))
LAYERS, CALLS = 6, 7

KINDS: dict[str, Callable[[Tensor], Linear]] = {
    "bf16": lambda weight: StripLinear.pack(weight, None),
    "bf16-products": lambda weight: StripLinear.pack(weight, None, torch.bfloat16),
    "int8": lambda weight: IntegerLinear.pack(round_weight(weight, Precision.INT8), None),
    "int4": lambda weight: IntegerLinear.pack(round_weight(weight, Precision.INT4), None),
    "onednn": lambda weight: OneDnnLinear(weight.float(), None),
    "onednn-bf16": lambda weight: OneDnnLinear(weight, None),
}


def one_pass(linears: list[Linear], inputs: dict[int, Tensor], clock: Callable[[], float]) -> float:
    """As a step does it: few rows' products in one parallel region."""
    rows, began = len(inputs[linears[0].in_features]), clock()
    with EXECUTOR.deferred(rows):
        for linear in linears:
            linear(inputs[linear.in_features])
    return clock() - began


def measure(kinds: list[str], rows: int, linears: dict[str, list[Linear]], clock: Callable[[], float]) -> list[dict[str, object]]:
    """One entry per kind: seconds of every pass, the kinds taking turns, and what the median one means."""
    wide = {width: torch.randn(rows, width) for _, width in LAYER}
    narrow = {width: x.bfloat16() for width, x in wide.items()}
    bandwidth = measure_bandwidth(bandwidth_script())
    turns = [[one_pass(linears[kind], narrow if kind == "onednn-bf16" else wide, clock) for kind in kinds] for _ in range(CALLS + 1)][
        1:
    ]  # the first maps memory
    work = 2 * rows * LAYERS * sum(out * width for out, width in LAYER)
    entries: list[dict[str, object]] = []
    for kind, seconds in zip(kinds, zip(*turns, strict=True), strict=True):
        typical, weight_bytes = statistics.median(seconds), sum(linear.weight_bytes for linear in linears[kind])
        figures = {"gb_per_s": weight_bytes / typical / 1e9, "gflop_per_s": work / typical / 1e9}
        entries.append({"kind": kind, "rows": rows, "seconds": seconds, **figures, **bandwidth_facts(bandwidth)})
        spread = f"fastest {work / min(seconds) / 1e9:.0f}"
        print(f"{rows} rows, {kind}: {figures['gb_per_s']:.1f} GB/s, {figures['gflop_per_s']:.0f} GFLOP/s ({spread})", flush=True)
    return entries


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,12,32,120,512")
    parser.add_argument("--cpu-time", action="store_true", help="of this thread, not of the clock on the wall")
    parser.add_argument("--kind", choices=KINDS, action="append", help="again for more; default: all")
    given = parser.parse_args(arguments)
    torch.set_num_threads(thread_limit())
    rows = [int(count) for count in given.rows.split(",")]
    kinds = given.kind or list(KINDS)
    linears = {kind: [KINDS[kind]((torch.randn(shape) * 0.02).bfloat16()) for _ in range(LAYERS) for shape in LAYER] for kind in kinds}
    clock = time.thread_time if given.cpu_time else time.perf_counter
    entries = [entry for count in rows for entry in measure(kinds, count, linears, clock)]
    write_portable(results_file("linears"), {"environment": asdict(environment()), "entries": entries})


if __name__ == "__main__":
    main()
