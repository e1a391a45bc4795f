"""Measures what a device reads and computes at most, so that a step's share of it is known (MBU, MFU).

The best of a few short rounds: a fifth of a second on a CPU. Another process that uses the machine meanwhile lowers the figures, and raises
the shares. It reads in one way; `bench/bandwidth.py` compiles and tries four for several seconds, which no engine's start should take, so
that its figure is higher and shares of it lower.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

ROUNDS = 3
READ_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
"""More than the caches hold."""
SIDE = {"cpu": 512, "cuda": 8192}
"""Rows and columns of the matrices that are multiplied."""


class Peaks(NamedTuple):
    read_bytes_per_s: float
    flops_per_s: float


@cache
def measure_peaks(device: str, dtype: torch.dtype) -> Peaks:
    """Once per process. dtype: what the model computes with"""
    kind = torch.device(device).type
    num_bytes, side = READ_BYTES[kind], SIDE[kind]
    values = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    read_s = _best(values.sum, kind)
    matrix = torch.ones(side, side, dtype=dtype, device=device)
    multiply_s = _best(lambda: torch.mm(matrix, matrix), kind)
    return Peaks(num_bytes / read_s, 2 * side**3 / multiply_s)


def _best(work: Callable[[], object], kind: str) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        if kind == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best
