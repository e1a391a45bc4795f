"""Measures what ranks of one machine pay for exchanging: two processes of one thread, each bound to one CPU.

    python -m bench.ranks all-reduce -> bench/results/MACHINE/all-reduce.json

Per size: seconds of one sum of float32 over both ranks, beside what memory allows: every rank reads its summand and writes the sum, at
the read bandwidth of all threads together. Small tensors stay in caches: their time is what calling and waiting cost.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from mmap import mmap

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: see headrace.tensor.host.openmp

import torch

from bench.harness import ROOT, write_portable
from bench.machine import results_file
from headrace.core.parallelism import Parallelism
from headrace.lab.environment import bandwidth_facts, bandwidth_script, environment, measure_bandwidth
from headrace.machine.resources import allowed_cpus
from headrace.tensor.kernels.cpu.jit.launch import set_thread_limit
from headrace.tensor.kernels.cpu.peers import SharedMemoryPeers, shared_bytes

PARALLELISM = Parallelism(tp=2)
SIZES = tuple(1 << power for power in range(10, 25))
"""Bytes: from 1 KiB, half a row of a small model, to 16 MiB, 1,024 rows of a large one."""
CALLS, WARM_UP = 200, 20


def seconds_by_size(rank: int, memory: int) -> list[list[float]]:
    """This process's seconds of each call, for every size."""
    os.sched_setaffinity(0, [(allowed_cpus() or [])[rank]])
    torch.set_num_threads(1)
    set_thread_limit(1)
    peers = SharedMemoryPeers(mmap(memory, shared_bytes(PARALLELISM)), PARALLELISM.place(rank))
    found = []
    for size in SIZES:
        x = torch.zeros(size // 4)  # sums of zeros stay as they are
        seconds = []
        for _ in range(WARM_UP + CALLS):
            began = time.perf_counter()
            peers.reduce(x)
            seconds.append(time.perf_counter() - began)
        found.append(seconds[WARM_UP:])
    return found


def run_ranks() -> list[list[float]]:
    """The first rank's; both wait for each other in every call."""
    memory = os.memfd_create("ranks")
    try:
        os.truncate(memory, shared_bytes(PARALLELISM))
        command = [sys.executable, "-m", "bench.ranks", "all-reduce", "--memory", str(memory), "--rank"]
        ranks = [
            subprocess.Popen([*command, str(rank)], pass_fds=[memory], stdout=subprocess.PIPE, cwd=ROOT)
            for rank in range(PARALLELISM.world)
        ]
        printed = [rank.communicate()[0] for rank in ranks]
    finally:
        os.close(memory)
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed")
    first: list[list[float]] = json.loads(printed[0])
    return first


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["all-reduce"])
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.rank is not None:
        print(json.dumps(seconds_by_size(given.rank, given.memory)))
        return
    if len(allowed_cpus() or []) < PARALLELISM.world:
        raise SystemExit(f"needs {PARALLELISM.world} CPUs that this process may be bound to")
    bandwidth = measure_bandwidth(bandwidth_script())
    entries: list[dict[str, object]] = []
    for size, seconds in zip(SIZES, run_ranks(), strict=True):
        moved = PARALLELISM.world * 2 * size
        bound = moved / bandwidth.bytes_per_s if bandwidth else None
        entries.append({"bytes": size, "bytes_moved": moved, "bound_seconds": bound, "seconds": seconds})
        shown = f"{1e6 * bound:,.1f} us" if bound else "unknown"
        print(f"{size / 1024:,.0f} KiB: {1e6 * statistics.median(seconds):,.1f} us, bound {shown}")
    ranks = {"world": PARALLELISM.world, "threads_per_rank": 1, **bandwidth_facts(bandwidth)}
    write_portable(results_file("all-reduce"), {"environment": asdict(environment()), **ranks, "entries": entries})


if __name__ == "__main__":
    main()
