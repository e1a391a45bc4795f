"""Read bandwidth of this machine's memory, now: all threads sum one float32 array too large for any cache.

The ceiling that decode speed is compared with (MBU, model bandwidth utilisation). It changes from minute to minute on a shared machine:
measure it in the same minute as what it is compared with.

    python bench/bandwidth.py [--json] [--gib 1] [--rounds 5] [--threads N]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: see headrace.tensor.host.openmp

import torch

MIN_GIB = 1.0
DEFAULT_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """read_bytes_per_s: of the fastest round; seconds: every round, in order."""

    read_bytes_per_s: float
    median_bytes_per_s: float
    num_bytes: int
    threads: int
    seconds: tuple[float, ...]


def measure_read_bandwidth(*, gib: float = MIN_GIB, rounds: int = DEFAULT_ROUNDS) -> Bandwidth:
    """Sum `gib` GiB `rounds` times with torch's threads, after one untimed pass that maps the pages.

    Raises: ValueError for less than 1 GiB (caches would answer) or less than one round.
    """
    if gib < MIN_GIB or rounds < 1:
        raise ValueError(f"gib must be at least {MIN_GIB:g} and rounds at least 1, got {gib:g} and {rounds}")
    values = torch.ones(int(gib * 2**30) // 4, dtype=torch.float32)
    values.sum()
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        values.sum()
        seconds.append(time.perf_counter() - began)
    num_bytes = values.numel() * 4
    median = sorted(seconds)[len(seconds) // 2]
    return Bandwidth(num_bytes / min(seconds), num_bytes / median, num_bytes, torch.get_num_threads(), tuple(seconds))


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
        print(f"{found.read_bytes_per_s / 1e9:.1f} GB/s (median {found.median_bytes_per_s / 1e9:.1f}), {found.threads} threads")


if __name__ == "__main__":
    main()
