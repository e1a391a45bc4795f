"""Measures what ranks of one machine pay for exchanging, and what a pipeline of two gains: two processes of one thread, each bound to one
CPU.

    python -m bench.ranks all-reduce -> bench/results/MACHINE/all-reduce.json
    python -m bench.ranks pipeline   -> bench/results/MACHINE/pipeline.json

all-reduce, per size: seconds of one sum of float32 over both ranks, beside what memory allows: every rank reads its summand and writes
the sum, at the read bandwidth of all threads together. Small tensors stay in caches: their time is what calling and waiting cost.

pipeline, per number of sequences that decode, and for prompts: tokens per second of two stages of one thread each, of the same stages with
one step at a time, and of one process of two threads; beside them the part of the time in which each stage had nothing to compute, and
(p - 1) / (m + p - 1), which it is where m steps pass p stages and the last one ends before the next m begin.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from mmap import mmap
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: see headrace.tensor.host.openmp

import torch

from bench.harness import ROOT, write_portable
from bench.machine import results_file
from bench.tinyllama import write_tinyllama
from headrace.core.parallelism import Parallelism
from headrace.engine.build import build_engine, build_member
from headrace.engine.config import EngineConfig
from headrace.engine.loop import Engine
from headrace.lab.datasets import WorkloadShape, make_requests
from headrace.lab.environment import bandwidth_facts, bandwidth_script, environment, measure_bandwidth
from headrace.lab.metrics import LoadRecord
from headrace.lab.offline import Collector, run_offline
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


VARIANTS: dict[str, dict[str, Any]] = {
    "pipeline": {"pipeline_parallel_size": 2, "num_threads": 1},
    "one step at a time": {"pipeline_parallel_size": 2, "num_threads": 1},
    "one process": {"num_threads": 2},
}
DECODING, PROMPTS = (1, 4, 16), 4
DECODE, PROMPT = WorkloadShape(input_tokens=8, output_tokens=48), WorkloadShape(input_tokens=512, output_tokens=1)
LAYERS = 4
"""Of TinyLlama's 22: what is measured does not depend on it, and a start is shorter."""


def engine_config(variant: str, model: str) -> EngineConfig:
    common: dict[str, Any] = {"load_format": "dummy", "kv_cache_bytes": 128 << 20, "enable_prefix_caching": False, "max_num_seqs": 16}
    return EngineConfig(model=model, device="cpu", max_num_batched_tokens=128, **common, **VARIANTS[variant])


@contextmanager
def one_step_at_a_time(variant: str) -> Iterator[None]:
    """As a pipeline was before it had as many steps in flight as stages."""
    in_flight = EngineConfig.max_steps_in_flight
    if variant == "one step at a time":
        EngineConfig.max_steps_in_flight = property(lambda _: 1)  # type: ignore[method-assign,assignment]
    yield
    EngineConfig.max_steps_in_flight = in_flight  # type: ignore[method-assign]


def bind(config: EngineConfig, rank: int) -> None:
    if config.parallelism.world > 1:
        os.sched_setaffinity(0, [(allowed_cpus() or [])[rank]])


def run_member(variant: str, model: str, rendezvous: Path) -> None:
    config = engine_config(variant, model)
    bind(config, 1)
    with one_step_at_a_time(variant):
        build_member(config, 1, rendezvous).run()


def run_variant(variant: str, model: str) -> list[dict[str, Any]]:
    """An entry for each load. Another process runs the other stage."""
    config = engine_config(variant, model)
    with tempfile.TemporaryDirectory() as folder, one_step_at_a_time(variant):
        rendezvous, collector = Path(folder) / "ranks", Collector()
        command = [sys.executable, "-m", "bench.ranks", "pipeline", "--variant", variant, "--model", model, "--rendezvous", str(rendezvous)]
        member = subprocess.Popen([*command, "--rank", "1"], cwd=ROOT) if config.parallelism.world > 1 else None
        bind(config, 0)
        engine = build_engine(config, collector, rendezvous)
        loads = [(count, DECODE) for count in DECODING] + [(PROMPTS, PROMPT)]
        entries = [measured(engine, collector, count, shape) for count, shape in loads]
        engine.stop()
        engine.run()
        if member is not None and member.wait():
            raise SystemExit("a rank failed")
    return [{"variant": variant, **entry} for entry in entries]


def measured(engine: Engine, collector: Collector, count: int, shape: WorkloadShape) -> dict[str, Any]:
    before = engine.snapshot().counters
    done = run_offline(engine, collector, make_requests(count, shape))
    after = engine.snapshot().counters
    steps_s = after.step_seconds - before.step_seconds
    idle = {
        stage: (us - before.stage_idle_microseconds.get(stage, 0)) / 1e6 / steps_s for stage, us in after.stage_idle_microseconds.items()
    }
    is_prompt = shape.output_tokens == 1
    rate = done.prompt_tokens / done.duration_s if is_prompt else decoded_per_second(done.records)
    return {"load": "prompts" if is_prompt else "decoding", "sequences": count, "tokens_per_second": rate, "idle_share": idle}


def decoded_per_second(records: tuple[LoadRecord, ...]) -> float:
    """While all sequences decode."""
    begin_s, end_s = max(record.chunk_s[0] for record in records), min(record.chunk_s[-1] for record in records)
    return sum(begin_s < moment <= end_s for record in records for moment in record.chunk_s) / (end_s - begin_s)


def bubble(num_steps: int, num_stages: int = 2) -> float:
    return (num_stages - 1) / (num_steps + num_stages - 1)


def measure_pipeline() -> None:
    entries: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_tinyllama(Path(folder))
        path = Path(folder) / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": LAYERS}))
        for variant in (*VARIANTS, *reversed(VARIANTS)):
            command = [sys.executable, "-m", "bench.ranks", "pipeline", "--model", folder, "--variant", variant]
            entries += json.loads(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)
    for load, count in dict.fromkeys((entry["load"], entry["sequences"]) for entry in entries):
        for variant in VARIANTS:
            rounds = [entry for entry in entries if (entry["variant"], entry["load"], entry["sequences"]) == (variant, load, count)]
            rates = statistics.median(entry["tokens_per_second"] for entry in rounds)
            shares = zip(*[entry["idle_share"].values() for entry in rounds], strict=True)
            idle = ", ".join(f"{statistics.mean(stage):.0%}" for stage in shares)
            expected = f"; idle {idle}, formula {bubble(min(count, 2) if variant == 'pipeline' else 1):.0%}" if idle else ""
            print(f"{load} {count}, {variant}: {rates:,.1f} tokens/s{expected}")
    facts = {"layers": LAYERS, "decode": asdict(DECODE), "prompt": asdict(PROMPT), "bubble": {str(m): bubble(m) for m in (1, 2)}}
    write_portable(results_file("pipeline"), {"environment": asdict(environment()), **facts, "entries": entries})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["all-reduce", "pipeline"])
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if len(allowed_cpus() or []) < PARALLELISM.world:
        raise SystemExit(f"needs {PARALLELISM.world} CPUs that this process may be bound to")
    if given.rendezvous is not None:
        run_member(given.variant, given.model, given.rendezvous)
    elif given.variant is not None:
        print(json.dumps(run_variant(given.variant, given.model)))
    elif given.rank is not None:
        print(json.dumps(seconds_by_size(given.rank, given.memory)))
    elif given.what == "pipeline":
        measure_pipeline()
    else:
        measure_all_reduce()


def measure_all_reduce() -> None:
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
