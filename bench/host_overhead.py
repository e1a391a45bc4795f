"""Measures what everything around the model costs: streaming to many clients, prefix look-ups that find nothing, and the threads that take
the cores.

    python -m bench.host_overhead [--rounds 10] [--clients 200] [--only streaming] [--model FOLDER --quantization int8]
        -> bench/results/MACHINE/host-overhead*.json; what was not asked for stays there as it was

streaming  seconds for the same requests offline (this process, no HTTP) and as event streams from `headrace serve`, in turns
prefixes   seconds offline with the prefix cache on and off, prompts with nothing in common, in turns
overlap    seconds offline with the next step planned while one is computed (depth 2) and after it (depth 1), in turns
threads    CPU seconds of every thread of supervisor, gateway and engine while they stream, per second of the clock

How threads wait between two parallel regions is inherited and written down: GOMP_SPINCOUNT=30000 python -m bench.host_overhead.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: see headrace.tensor.host.openmp

import psutil

from bench.engine_options import add_engine_options, engine_config
from bench.harness import ROOT, Machine, build, finished, write_portable
from bench.machine import results_file
from bench.pairs import paired_ratio
from bench.smoke.children import SERVED, Server, server
from bench.smoke.trees import Side
from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.lab.datasets import WorkloadShape, make_requests
from headrace.lab.environment import bandwidth_facts, bandwidth_script, environment, measure_bandwidth
from headrace.lab.offline import run_offline
from headrace.machine.cache_folder import cache_root

STREAM = WorkloadShape(input_tokens=32, output_tokens=64)
UNIQUE, NUM_UNIQUE = WorkloadShape(input_tokens=480, output_tokens=8), 32
FEW_STREAM = WorkloadShape(input_tokens=8, output_tokens=16)
FEW_UNIQUE, NUM_FEW_UNIQUE = WorkloadShape(input_tokens=128, output_tokens=8), 8
"""For a model given by its folder, which takes a thousand times longer per token than the bundled one."""
PARTS = ("streaming", "prefixes", "overlap")
WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")


def offline_seconds(machine: Machine, count: int, shape: WorkloadShape, seed: int) -> float:
    return finished(run_offline(machine.engine, machine.collector, make_requests(count, shape, seed=seed))).duration_s


def thread_seconds(pid: int) -> dict[str, float]:
    """CPU seconds so far, by "role thread" for the process and all its descendants; a thread's name is the kernel's."""
    found: dict[str, float] = {}
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        role = next((word for word in ("gateway", "engine") if word in process.cmdline()), "supervisor")
        for thread in process.threads():
            name = Path(f"/proc/{process.pid}/task/{thread.id}/comm").read_text(encoding="ascii", errors="replace").strip()
            key = f"{role} {name}"
            found[key] = found.get(key, 0.0) + thread.user_time + thread.system_time
    return found


def streamed(target: Server, clients: int, shape: WorkloadShape, seed: int) -> tuple[float, dict[str, float]]:
    """(seconds, CPU seconds per thread and second); threads that ended meanwhile are left out."""
    before, began = thread_seconds(target.pid), time.monotonic()
    seconds = target.stream_seconds(seed, count=clients, shape=shape)
    spent = time.monotonic() - began
    after = thread_seconds(target.pid)
    return seconds, {name: (after[name] - before.get(name, 0.0)) / spent for name in after}


def streaming(base: EngineConfig, clients: int, shape: WorkloadShape, rounds: int) -> dict[str, object]:
    """Round 0 warms up and is not kept. Each round the two change places."""
    pairs: list[tuple[float, float]] = []
    threads: list[dict[str, float]] = []
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        machine = build(base)
        side = Side("server", ROOT / "src", cache_root(os.environ))
        flags = ["--quantization", base.quantization]
        target = stack.enter_context(server(side, logs / "server.log", model=base.model, flags=flags))
        for number in range(rounds + 1):
            if number % 2:
                offline = offline_seconds(machine, clients, shape, number)
            online, usage = streamed(target, clients, shape, number)
            if not number % 2:
                offline = offline_seconds(machine, clients, shape, number)
            pairs.append((offline, online))
            threads.append(usage)
    return {"clients": clients, **_summary("offline", "streamed", pairs[1:]), "cpu_per_second": threads[1:]}


def prefixes(base: EngineConfig, count: int, shape: WorkloadShape, rounds: int) -> dict[str, object]:
    machines = {name: build(replace(base, enable_prefix_caching=on, max_num_seqs=8)) for name, on in (("off", False), ("on", True))}
    return in_turns(machines, count, shape, rounds)


def overlap(base: EngineConfig, count: int, shape: WorkloadShape, rounds: int) -> dict[str, object]:
    machines = {f"depth {depth}": build(replace(base, depth=depth)) for depth in (1, 2)}
    return {"streams": count, **in_turns(machines, count, shape, rounds)}


def in_turns(machines: Mapping[str, Machine], count: int, shape: WorkloadShape, rounds: int) -> dict[str, object]:
    """Two machines with the same requests, offline. Round 0 warms up; each round the two change places."""
    pairs = []
    for number in range(rounds + 1):
        order = list(machines) if number % 2 == 0 else list(machines)[::-1]
        seconds = {name: offline_seconds(machines[name], count, shape, number) for name in order}
        pairs.append(tuple(seconds[name] for name in machines))
    first, second = machines
    return _summary(first, second, pairs[1:])


def _summary(first: str, second: str, pairs: Sequence[tuple[float, ...]]) -> dict[str, object]:
    ratio = paired_ratio([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    print(f"{second} / {first}: {ratio.mean:.3f} [{ratio.low:.3f}, {ratio.high:.3f}], {ratio.rounds} rounds", flush=True)
    return {"seconds": [{first: pair[0], second: pair[1]} for pair in pairs], "ratio": asdict(ratio)}


def busiest(rounds: Sequence[Mapping[str, float]], most: int = 8) -> list[tuple[str, float]]:
    """Mean shares of a core by thread, the largest first."""
    names = {name for usage in rounds for name in usage}
    means = {name: sum(usage.get(name, 0.0) for usage in rounds) / len(rounds) for name in names}
    return sorted(means.items(), key=lambda item: -item[1])[:most]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--clients", type=int, default=200, help="of the server")
    parser.add_argument("--streams", type=int, default=64, help="at once where steps are planned ahead (default: 64)")
    parser.add_argument("--only", choices=PARTS, action="append", help="again for more; default: all")
    parser.add_argument("--model", help="folder; default: the bundled model")
    add_engine_options(parser, "quantization")
    given = parser.parse_args(arguments)
    if min(given.rounds, given.clients, given.streams) < 1:
        raise ConfigError("rounds", f"{given.rounds} rounds, {given.clients} clients, {given.streams} streams: each must be at least 1")
    waiting = {name: os.environ[name] for name in WAITING if name in os.environ}
    base = engine_config(given.model or SERVED, given)
    stream, (count, unique) = (FEW_STREAM, (NUM_FEW_UNIQUE, FEW_UNIQUE)) if given.model else (STREAM, (NUM_UNIQUE, UNIQUE))
    name = "host-overhead"
    if given.model or given.quantization != "none":
        name += f"-{Path(base.model).name}-{given.quantization}"
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "streaming": lambda: streaming(base, given.clients, stream, given.rounds),
        "prefixes": lambda: prefixes(base, count, unique, given.rounds),
        "overlap": lambda: overlap(base, given.streams, stream, given.rounds),
    }
    file = results_file(name)
    for part in given.only or PARTS:
        facts = {"environment": environment(), "threads_wait": waiting, **bandwidth_facts(measure_bandwidth(bandwidth_script()))}
        found = measures[part]()
        key = f"overlap-{given.streams}" if part == "overlap" else part
        kept = json.loads(file.read_bytes()) if file.is_file() else {}
        write_portable(file, {**kept, key: {**facts, **found}})
        for thread, share in busiest(found.get("cpu_per_second", ())):
            print(f"{share:6.1%} of a core: {thread}")


if __name__ == "__main__":
    main()
