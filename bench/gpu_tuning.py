"""Finds the tiles that multiply few rows fastest on this GPU: the measurement behind `tensor/kernels/gpu/h100.json`.

    python -m bench.gpu_tuning [--formats fp8,int4,int8,plain] [--rows 1,32,128] [--seconds 80] [--output FILE]

For each format, number of rows and product of Llama-3-8B, the search begins at the table's variant. It tries the variants that differ from
it in one field, halved or doubled. It goes on from the fastest in the same way, until the seconds are spent. Other processes compile the
variants. A time is that of a launch in a replayed graph. Each launch reads a copy of the weight that the cache does not hold any more. A
table's row is chosen by hand from what is printed: one that is fast for all products of its number of rows.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from multiprocessing.pool import AsyncResult, Pool
from pathlib import Path
from typing import Any, cast

import torch

from headrace.lab.report import write_json
from headrace.tensor.kernels.gpu import product as products
from headrace.tensor.kernels.gpu.linears import StoredLinear, TritonPacking
from headrace.tensor.kernels.gpu.product import fit
from headrace.tensor.kernels.gpu.tuning import ProductVariant, read_tuning
from headrace.tensor.kernels.rounding import Precision

SHAPES = {"gate_up": (28672, 4096), "down": (4096, 14336), "qkv": (6144, 4096), "o": (4096, 4096), "head": (128256, 4096)}
FIRST = (("fp8", 1), ("int4", 1), ("int4", 128), ("plain", 1), ("fp8", 32), ("int4", 32))
"""Formats and rows in which most is at stake."""
UNMEASURED = ProductVariant(rows=128, block_n=64, block_k=128, warps=4, stages=4, programs=512)
"""Where the table has the library's product."""
RANGES = {"block_n": (32, 128), "block_k": (64, 512), "programs": (64, 2112), "warps": (4, 8)}
ROTATED_BYTES, LAUNCHES = 256 << 20, 24
READ_GBPS = 3109.0
"""Of the H100's memory, by `bench.gpu`."""
KERNEL: Any = products._product_kernel


@dataclass(slots=True)
class Cell:
    """One product. times: us by variant, the table's first, None for one that failed; waiting: those still compiled; tried: kernels."""

    name: str
    rows: int
    shape: str
    best: ProductVariant
    times: dict[ProductVariant, float | None] = field(default_factory=dict)
    waiting: dict[ProductVariant, AsyncResult[None]] = field(default_factory=dict)
    tried: set[object] = field(default_factory=set)
    library_us: float | None = None

    def to_json(self) -> dict[str, object]:
        times = [{**asdict(variant), "us": us} for variant, us in self.times.items()]
        return {"format": self.name, "rows": self.rows, "shape": self.shape, "library_us": self.library_us, "variants": times}


class WarmedKernel:
    """Compiles what is launched, and launches nothing."""

    def __getitem__(self, grid: object) -> Callable[..., object]:
        return lambda *arguments, **constants: KERNEL.warmup(*arguments, grid=grid, **constants)


def make_linear(name: str, shape: tuple[int, int], device: str) -> StoredLinear:
    weight, packing = torch.randn(shape, dtype=torch.bfloat16, device=device) / 64, TritonPacking(read_tuning())
    linear = (
        packing.pack_linear(weight, None) if name == "plain" else packing.pack_rounded(packing.round_weight(weight, Precision(name)), None)
    )
    assert isinstance(linear, StoredLinear)
    return linear


def compile_variant(name: str, rows: int, shape: tuple[int, int], variant: ProductVariant) -> None:
    """Compile a product's kernel into Triton's folder, in a process that does nothing else. The compiler's errors pass through."""
    products._product_kernel = WarmedKernel()
    x = torch.empty((rows, shape[1]), dtype=torch.bfloat16, device="meta")
    products.product(x, make_linear(name, shape, "meta").weight, variant, None)


def neighbours(variant: ProductVariant, name: str) -> Iterator[ProductVariant]:
    """The variant itself, then those that differ in one field."""
    yield variant
    if name == "int4":
        yield replace(variant, scales_weights=not variant.scales_weights)
    for key, (least, most) in RANGES.items():
        for value in (getattr(variant, key) // 2, getattr(variant, key) * 2):
            if least <= value <= most:
                yield replace(variant, **{key: value})
    yield from (replace(variant, stages=stages) for stages in (variant.stages - 1, variant.stages + 1) if 2 <= stages <= 5)


def submit(cell: Cell, pool: Pool) -> None:
    """Begin to compile what is near the cell's fastest variant and is another kernel than those before it."""
    weight = make_linear(cell.name, SHAPES[cell.shape], "meta").weight
    for variant in neighbours(cell.best, cell.name):
        fitted = fit(weight, variant, cell.rows)
        splits = fitted.num_splits(weight, 1, variant.programs, products.MAX_SPLITS) if fitted else 0
        kernel = (fitted, splits, variant.warps, variant.stages, variant.scales_weights)
        if fitted and kernel not in cell.tried:
            cell.tried.add(kernel)
            cell.waiting[variant] = pool.apply_async(compile_variant, (cell.name, cell.rows, SHAPES[cell.shape], variant))


def time_us(run: Callable[[int], object], stream: Any) -> float | None:
    """Of a launch, the fastest of several replays; None, and a line of why, where it fails. run: the launch of this number."""
    try:
        graph, make_event = torch.cuda.CUDAGraph(), cast(Any, torch.cuda.Event)
        run(0)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            run(0)
            torch.cuda.synchronize()
            graph.capture_begin()
            for number in range(LAUNCHES):
                run(number)
            graph.capture_end()
            events = [make_event(enable_timing=True) for _ in range(7)]
            for each in events:
                each.record()
                graph.replay()
            torch.cuda.synchronize()
        return float(min(begin.elapsed_time(end) for begin, end in pairwise(events[1:]))) * 1000 / LAUNCHES
    except Exception as failure:
        print(f"  left out: {type(failure).__name__}, {failure!s:.120}", flush=True)
        return None


def measure(cell: Cell, deadline_s: float, stream: Any) -> None:
    """Time the cell's variants as they are compiled, and the library's product, and print the fastest beside the table's."""
    linear = make_linear(cell.name, SHAPES[cell.shape], "cuda:0")
    weights = [replace(linear.weight, values=linear.weight.values.clone()) for _ in range(1 + ROTATED_BYTES // linear.weight_bytes)]
    linears = [StoredLinear(weight, None, linear.tuning) for weight in weights]
    x = torch.randn((cell.rows, linear.in_features), dtype=torch.bfloat16, device="cuda:0")
    cell.library_us = cell.library_us or time_us(lambda number: linears[number % len(linears)]._of_many(x), stream)
    for variant, compiled in cell.waiting.items():
        if time.perf_counter() < deadline_s:

            def run(number: int, variant: ProductVariant = variant, compiled: AsyncResult[None] = compiled) -> object:
                compiled.get(timeout=max(0.1, deadline_s - time.perf_counter()))
                return products.product(x, weights[number % len(weights)], variant, None)

            cell.times[variant] = time_us(run, stream)
    cell.waiting = {}
    ranked = sorted((us, place, variant) for place, (variant, us) in enumerate(cell.times.items()) if us)
    cell.best = ranked[0][2] if ranked else cell.best
    print(f"{cell.name}, {cell.rows} rows, {cell.shape}; the library {cell.library_us or 0:.1f} us")
    for us, place, variant in [*ranked[:3], *(each for each in ranked[3:] if not each[1])]:
        share = linear.weight_bytes / us / READ_GBPS / 1000
        print(f"  {' ' if place else '='} {us:7.1f} us {share:4.0%} {str(variant).partition(', ')[2]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="fp8,int4,int8,plain")
    parser.add_argument("--rows", default="1,32,128")
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    deadline_s = time.perf_counter() + given.seconds
    every = [(name, int(rows)) for rows in given.rows.split(",") for name in given.formats.split(",")]
    wanted = [pair for pair in FIRST if pair in every] + [pair for pair in every if pair not in FIRST]
    tuning = read_tuning()
    cells = [
        Cell(name, rows, shape, tuning.product(name, rows, SHAPES[shape][0], 2) or replace(UNMEASURED, rows=rows))
        for name, rows in wanted
        for shape in SHAPES
    ]
    with multiprocessing.get_context("spawn").Pool(min(14, os.cpu_count() or 1)) as pool:  # what is not compiled at its end is ended
        for cell in cells:
            submit(cell, pool)
        stream = cast(Any, torch.cuda).Stream()
        while time.perf_counter() < deadline_s and any(cell.waiting for cell in cells):
            for cell in cells:
                if cell.waiting and time.perf_counter() < deadline_s:
                    measure(cell, deadline_s, stream)
                    submit(cell, pool)
                    torch.cuda.empty_cache()
        if given.output:
            write_json(given.output, [cell.to_json() for cell in cells if cell.times])


if __name__ == "__main__":
    main()
