"""Measures the read bandwidth of this machine's memory: the best of several ways to read an array too large for any cache.

    python bench/bandwidth.py [--json] [--gib 1] [--rounds 5] [--threads N]

It is the denominator of MBU (model bandwidth utilisation). One way alone is too small a denominator: kernels that read weights from several
places at once pass the rate of a plain sum, and MBU came out above 1. So every pattern is timed, and the fastest counts. On a shared
machine the bandwidth changes from minute to minute: measure it right before what it is compared with.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: see headrace.tensor.host.openmp

import numba
import numpy as np
import torch

MIN_GIB = 1.0
DEFAULT_ROUNDS = 5
MATRIX_COLUMNS = 65_536
"""Columns of the matrix-vector pattern: the vector (256 KiB) stays in the second-level cache, the matrix does not."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """read_bytes_per_s: the fastest round of the fastest pattern. pattern: its name. seconds: every round of every pattern, in order."""

    read_bytes_per_s: float
    median_bytes_per_s: float
    num_bytes: int
    threads: int
    pattern: str
    seconds: Mapping[str, tuple[float, ...]]


def sum_of_four_places(values: np.ndarray, num_threads: int) -> float:
    """Every thread sums its share of `values` from four places at once, as a strip kernel reads weights."""
    total = 0.0
    quarter = values.size // (4 * num_threads)
    for thread in numba.prange(num_threads):
        start = 4 * quarter * thread
        first, second = values[start : start + quarter], values[start + quarter : start + 2 * quarter]
        third, fourth = values[start + 2 * quarter : start + 3 * quarter], values[start + 3 * quarter : start + 4 * quarter]
        part = values.dtype.type(0)
        for i in range(quarter):
            part += (first[i] + second[i]) + (third[i] + fourth[i])
        total += part
    return total


compiled_sum = numba.njit(parallel=True, fastmath=True)(sum_of_four_places)


def patterns(values: torch.Tensor) -> Mapping[str, Callable[[], object]]:
    """Name -> one pass over `values` (float32, a multiple of MATRIX_COLUMNS long)."""
    threads = torch.get_num_threads()
    matrix, vector = values.view(-1, MATRIX_COLUMNS), torch.ones(MATRIX_COLUMNS)
    array = values.numpy()
    return {
        "sum": values.sum,
        "sum of eight parts": lambda: values.view(8, -1).sum(1),
        "matrix by vector": lambda: torch.mv(matrix, vector),
        "four places per thread": lambda: compiled_sum(array, threads),
    }


def measure_read_bandwidth(*, gib: float = MIN_GIB, rounds: int = DEFAULT_ROUNDS) -> Bandwidth:
    """Read `gib` GiB `rounds` times in each pattern, taking turns, after one untimed pass that maps the pages and compiles.

    Raises: ValueError for less than 1 GiB (caches would answer) or less than one round.
    """
    if gib < MIN_GIB or rounds < 1:
        raise ValueError(f"gib must be at least {MIN_GIB:g} and rounds at least 1, got {gib:g} and {rounds}")
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
    values = torch.ones(int(gib * 2**30) // 4 // MATRIX_COLUMNS * MATRIX_COLUMNS, dtype=torch.float32)
    ways = patterns(values)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for read in ways.values():
        read()
    for _ in range(rounds):
        for name, read in ways.items():
            began = time.perf_counter()
            read()
            seconds[name].append(time.perf_counter() - began)
    best = min(seconds, key=lambda name: min(seconds[name]))
    num_bytes = values.numel() * 4
    median = sorted(seconds[best])[rounds // 2]
    every = {name: tuple(times) for name, times in seconds.items()}
    return Bandwidth(num_bytes / min(seconds[best]), num_bytes / median, num_bytes, torch.get_num_threads(), best, every)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--gib", type=float, default=MIN_GIB)
    parser.add_argument("--rounds", type=int, default=DEFAULT_ROUNDS)
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    given = parser.parse_args(arguments)
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    try:
        found = measure_read_bandwidth(gib=given.gib, rounds=given.rounds)
    except ValueError as error:
        parser.error(str(error))
    if given.json:
        print(json.dumps(asdict(found)))
    else:
        median = found.median_bytes_per_s / 1e9
        print(f"{found.read_bytes_per_s / 1e9:.1f} GB/s (median {median:.1f}), {found.threads} threads, {found.pattern}")
        for name, times in found.seconds.items():
            print(f"  {name}: {found.num_bytes / min(times) / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
