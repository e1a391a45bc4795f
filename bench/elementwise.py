"""Measures everything of a step that is neither a product nor attention: time per call and bytes per second, beside read bandwidth.

    python -m bench.elementwise [--rows 1,8,64,512] -> bench/results/MACHINE/elementwise.json

Kernels of a 1.1 B Llama shape (2,048 wide, 32 + 4 heads of 64, 5,632 inside), 24 calls in turn as a step makes them; bytes are what
must be read and written once. Sampling: one call for all rows, by vocabulary and by what is asked for, by the kernel and by its plain
twin in turns; bytes are those of the logits.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: see headrace.tensor.host.openmp

import numpy as np
import torch
from torch import Tensor

from bench.harness import write_portable
from bench.machine import results_file
from headrace.core.ids import SlotId
from headrace.core.plan import Started
from headrace.core.sampling import SamplingParams
from headrace.lab.environment import ReadBandwidth, bandwidth_facts, bandwidth_script, environment, measure_bandwidth
from headrace.tensor.batch import KvCache, allocate_kv
from headrace.tensor.device import CPU
from headrace.tensor.kernels.cpu.backend import EXECUTOR, KERNELS, draw_tokens
from headrace.tensor.kernels.cpu.jit.launch import thread_limit
from headrace.tensor.kernels.filters import Draw, draw
from headrace.tensor.sampling.sampler import Sampler

WIDTH, HEADS, KV_HEADS, DIM, INSIDE = 2048, 32, 4, 64, 5632
LAYERS, CALLS, BLOCK_SIZE = 24, 15, 16
VOCABULARIES = (32_000, 151_936)
ASKED = {
    "greedy": SamplingParams(temperature=0.0, seed=1),
    "temperature": SamplingParams(temperature=0.8, seed=1),
    "top-p": SamplingParams(temperature=0.8, top_p=0.95, seed=1),
    "top-k and top-p": SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=1),
}

DRAWS: dict[str, Draw] = {"numba": draw_tokens, "plain": draw}

Work = tuple[str, Callable[[int], object], int]
"""name, the call of a layer, bytes of a call"""


def kernels(rows: int) -> Iterator[Work]:
    """One set of tensors per layer, so that no layer finds the last one's in the cache unless a step would."""
    wide = [torch.randn(rows, WIDTH) for _ in range(LAYERS)]
    residual, weight = torch.randn(rows, WIDTH), torch.ones(WIDTH)
    yield "norm, residual added", lambda i: KERNELS.rms_norm(wide[i], weight, 1e-5, residual=residual), 4 * rows * WIDTH * 4
    gate_up = [torch.randn(rows, 2 * INSIDE) for _ in range(LAYERS)]
    yield "gated activation", lambda i: KERNELS.gated_activation(gate_up[i], "silu"), 3 * rows * INSIDE * 4
    qkv = [torch.randn(rows, HEADS + 2 * KV_HEADS, DIM) for _ in range(LAYERS)]
    cos_sin, positions = torch.randn(rows, DIM), torch.arange(rows)
    for kind in (torch.float32, torch.bfloat16, torch.int8):
        cache = allocate_kv([(KV_HEADS, DIM)] * LAYERS, (0,) * LAYERS, (rows // BLOCK_SIZE + 2,), BLOCK_SIZE, kind, CPU)

        def turn(i: int, cache: KvCache = cache) -> None:
            query, key, value = torch.split(qkv[i], [HEADS, KV_HEADS, KV_HEADS], dim=1)
            layer = cache.layers[i]
            KERNELS.rotary_scatter(query, key, value, cos_sin, positions, layer.values, positions, kv_scales=layer.scales)

        stored = 2 * KV_HEADS * DIM * kind.itemsize
        yield f"rotary, {kind} cache".replace("torch.", ""), turn, rows * (2 * HEADS * DIM * 4 + 2 * KV_HEADS * DIM * 4 + stored)


def kernel_seconds(work: Callable[[int], object], rows: int) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    with EXECUTOR.deferred(rows):
        for layer in range(LAYERS):
            EXECUTOR.next_layer()
            work(layer)
    return (time.perf_counter() - began) / LAYERS


def sampling_seconds(params: SamplingParams, logits: Tensor, draw: Draw) -> float:
    """Seconds of one call; the logits are copied before the clock starts, since they are consumed."""
    rows, vocabulary = logits.shape
    sampler, slots = Sampler(vocabulary, (), draw), np.arange(rows)
    for slot in range(rows):
        sampler.start(Started(SlotId(slot), array("i", [1]), 1, params, 0))
    consumed = logits.clone()
    began = time.perf_counter()
    sampler.sample(consumed, slots, slots)
    return time.perf_counter() - began


def entry(name: str, rows: int, seconds: list[float], size: int, bandwidth: ReadBandwidth | None) -> dict[str, object]:
    typical = statistics.median(seconds)
    found = {"what": name, "rows": rows, "seconds": seconds, "gb_per_s": size / typical / 1e9, **bandwidth_facts(bandwidth)}
    print(f"{rows} rows, {name}: {1e6 * typical:,.1f} us, {size / typical / 1e9:.1f} GB/s", flush=True)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,64,512")
    given = parser.parse_args(arguments)
    torch.set_num_threads(thread_limit())
    bandwidth = measure_bandwidth(bandwidth_script())
    entries: list[dict[str, object]] = []
    for rows in map(int, given.rows.split(",")):
        for name, work, size in kernels(rows):
            seconds = [kernel_seconds(work, rows) for _ in range(CALLS + 1)][1:]  # the first maps memory, and compiles
            entries.append(entry(name, rows, seconds, size, bandwidth))
    for vocabulary in VOCABULARIES:
        for rows in (1, 64):
            logits = 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(rows))
            for asked, params in ASKED.items():
                turns = [[sampling_seconds(params, logits, draw) for draw in DRAWS.values()] for _ in range(CALLS + 1)][1:]
                for place, name in enumerate(DRAWS):
                    what, seconds = f"sampling of {vocabulary:,}: {asked}, {name}", [turn[place] for turn in turns]
                    entries.append(entry(what, rows, seconds, rows * vocabulary * 4, bandwidth))
    write_portable(results_file("elementwise"), {"environment": asdict(environment()), "entries": entries})


if __name__ == "__main__":
    main()
