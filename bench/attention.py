"""Measures paged attention alone: time per layer by cache type, for decode and prefill batches, beside read bandwidth and the peak of the
FMA units.

    python -m bench.attention [--case decode-8] [--shape llama-1.1b] -> bench/results/MACHINE/attention.json

Several layers' caches are walked in turn, so that none is found in the processor's caches. Each case is a list of rows (tokens, context).
Bytes are keys and values seen, scales included, once each; operations are two per multiply-add of the pairs (query, key) that are seen.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import asdict, dataclass

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: see headrace.tensor.host.openmp

import torch
from torch import Tensor

from bench.harness import write_portable
from bench.machine import results_file
from headrace.core.model_info import KvGroup
from headrace.lab.environment import bandwidth_facts, bandwidth_script, environment, measure_bandwidth
from headrace.tensor.batch import KvCache, allocate_kv, stored_as
from headrace.tensor.device import CPU
from headrace.tensor.kernels.cpu.backend import EXECUTOR, KERNELS
from headrace.tensor.kernels.cpu.jit.launch import thread_limit

BLOCK_SIZE, LAYERS, CALLS = 16, 4, 5
SHAPES = {"llama-1.1b": (32, 4, 64), "head-128": (16, 4, 128)}
"""Query heads, key/value heads, head size."""
CASES: dict[str, list[tuple[int, int]]] = {
    "decode-1 at 512": [(1, 512)],
    "decode-1 at 32768": [(1, 32768)],
    "decode-8 at 1024": [(1, 1024)] * 8,
    "decode-64 at 192": [(1, 192)] * 64,
    "prefill 512": [(512, 512)],
    "prefill 512 behind 1536": [(512, 2048)],
    "prefill 512 behind 7680": [(512, 8192)],
    "prefill 448 with decode-64 at 192": [(448, 448), *[(1, 192)] * 64],
}
KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True, slots=True)
class Step:
    query: Tensor
    table: Tensor
    starts: Tensor
    contexts: Tensor


def make_step(rows: list[tuple[int, int]], heads: int, dim: int) -> Step:
    widths = [-(-context // BLOCK_SIZE) for _, context in rows]
    table = torch.zeros(len(rows), max(widths), dtype=torch.int32)
    ids = torch.randperm(sum(widths), generator=torch.Generator().manual_seed(0)).int() + 1
    for row, (width, own) in enumerate(zip(widths, torch.split(ids, widths), strict=True)):
        table[row, :width] = own
    starts = torch.tensor([0, *(count for count, _ in rows)]).cumsum(0).int()
    contexts = torch.tensor([context for _, context in rows], dtype=torch.int32)
    query = torch.randn(int(starts[-1]), heads, dim, generator=torch.Generator().manual_seed(1))
    return Step(query, table, starts, contexts)


def filled_cache(dtype: torch.dtype, blocks: int, kv_heads: int, dim: int) -> KvCache:
    """Every slot written through the kernel that writes slots."""
    kv = allocate_kv([(kv_heads, dim)] * LAYERS, (0,) * LAYERS, (blocks,), BLOCK_SIZE, dtype, CPU)
    part = torch.randn(blocks * BLOCK_SIZE, kv_heads, dim, generator=torch.Generator().manual_seed(2))
    for layer in kv.layers:
        KERNELS.scatter_kv(part, part.flip(0), layer.values, torch.arange(len(part)), kv_scales=layer.scales)
    return kv


def one_pass(step: Step, kv: KvCache) -> float:
    """Seconds per layer."""
    began = time.perf_counter()
    with EXECUTOR.deferred(len(step.query)):
        for layer in kv.layers:
            KERNELS.attention(
                step.query, layer.values, step.table, step.starts, step.contexts, scale=0.1, kv_scales=layer.scales
            )  # fmt: skip
    return (time.perf_counter() - began) / LAYERS


def measure(shape: str, case: str) -> list[dict[str, object]]:
    """One entry per cache type: seconds per layer of every pass, the types taking turns, and what the median one means."""
    heads, kv_heads, dim = SHAPES[shape]
    rows = CASES[case]
    step = make_step(rows, heads, dim)
    blocks = int(step.table.max()) + 1
    caches = {kind: filled_cache(dtype, blocks, kv_heads, dim) for kind, dtype in KINDS.items()}
    bandwidth = measure_bandwidth(bandwidth_script())
    turns = [[one_pass(step, kv) for kv in caches.values()] for _ in range(CALLS + 1)][1:]  # the first compiles and maps memory
    pairs = sum(count * context - count * (count - 1) // 2 for count, context in rows)
    entries: list[dict[str, object]] = []
    for kind, seconds in zip(KINDS, zip(*turns, strict=True), strict=True):
        typical = statistics.median(seconds)
        num_bytes = sum(context for _, context in rows) * stored_as(KvGroup((0,), kv_heads, dim, 4), KINDS[kind]).block_bytes(1)
        figures = {"gb_per_s": num_bytes / typical / 1e9, "gflop_per_s": 4 * heads * dim * pairs / typical / 1e9}
        entry = {"shape": shape, "case": case, "kind": kind, "seconds": seconds, **figures, **bandwidth_facts(bandwidth)}
        entries.append(entry)
        print(
            f"{shape}, {case}, {kind}: {typical * 1e3:.3f} ms, {figures['gb_per_s']:.1f} GB/s, {figures['gflop_per_s']:.0f} GFLOP/s",
            flush=True,
        )
    return entries


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="again for more; default: all")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="again for more; default: all")
    given = parser.parse_args(arguments)
    torch.set_num_threads(thread_limit())
    entries = [entry for shape in given.shape or SHAPES for case in given.case or CASES for entry in measure(shape, case)]
    write_portable(results_file("attention"), {"environment": asdict(environment()), "entries": entries})


if __name__ == "__main__":
    main()
