"""Measures what the machinery of ranks costs a replica that has one: the same engine through a group without members, and without a group.

    python -m bench.one_rank [MODEL] [--rounds 20] [--tokens 64] -> bench/results/MACHINE/one-rank-MODEL.json

Both stand in one process and answer the same prompts in turns. The group has no links and its shared memory one rank, so that no frame is
encoded and nothing exchanged: this is the path through the group, with its counters and its watch, which looks four times a second.
Frames and waits come on top where there are other ranks. The ratio of median decode steps, group / plain, is per number of sequences,
with its 95 % interval. MODEL: a folder; without weights in it, as `bench.tinyllama` makes one, they are drawn. Default: the bundled
model, whose steps are short, so that the share is large.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: see headrace.tensor.host.openmp

from bench.harness import Machine, finished, requests_for, write_portable
from bench.machine import results_file
from bench.pairs import paired_ratio
from headrace.bundled import DEFAULT_MODEL, bundled_path
from headrace.core.parallelism import Place
from headrace.engine.build import assemble
from headrace.engine.config import EngineConfig
from headrace.engine.ranks.leader import make_group
from headrace.engine.runner import build as runner
from headrace.lab.datasets import WorkloadShape
from headrace.lab.environment import environment
from headrace.lab.offline import Collector, run_offline

SEQUENCES = (1, 16)
PROMPT_TOKENS = 16
GOAL = 1.03


def machine(config: EngineConfig, *, has_group: bool) -> Machine:
    built = runner.build(config, lead=(lambda facts: make_group({}, Place())) if has_group else None)
    collector = Collector()
    return Machine(assemble(config, built.runner, built.info, collector, preparer=built.preparer), collector)


def step_seconds(measured: Machine, num_sequences: int, num_tokens: int, seed: int) -> float:
    """The median step while the sequences are answered: nearly all of them decode."""
    requests = requests_for(measured, num_sequences, WorkloadShape(input_tokens=PROMPT_TOKENS, output_tokens=num_tokens), seed=seed)
    return statistics.median(finished(run_offline(measured.engine, measured.collector, requests)).step_s)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=bundled_path(DEFAULT_MODEL))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args(arguments)
    load_format = "auto" if any(given.model.glob("*.safetensors")) else "dummy"
    config = EngineConfig(
        model=str(given.model), device="cpu", load_format=load_format, num_kv_blocks=256, max_num_seqs=max(SEQUENCES)
    ).checked()
    machines = {name: machine(config, has_group=name == "group") for name in ("plain", "group")}
    rounds: list[dict[str, dict[int, float]]] = []
    for number in range(-1, given.rounds):  # the first one is not kept
        names = sorted(machines, reverse=number % 2 == 1)
        rounds.append({name: {count: step_seconds(machines[name], count, given.tokens, number) for count in SEQUENCES} for name in names})
    ratios = {count: paired_ratio(*([each[name][count] for each in rounds[1:]] for name in machines)) for count in SEQUENCES}
    for count, ratio in ratios.items():
        verdict = "kept" if ratio.high <= GOAL else "missed" if ratio.low > GOAL else "not decided"
        print(f"{count} sequences: group / plain {ratio.mean:.3f} ({ratio.low:.3f} to {ratio.high:.3f}), goal {GOAL}: {verdict}")
    facts = {"environment": asdict(environment()), "goal": GOAL, "decided": machines["group"].engine.info.decided}
    write_portable(
        results_file(f"one-rank-{given.model.name}"),
        {**facts, "ratios": {count: asdict(ratio) for count, ratio in ratios.items()}, "rounds": rounds[1:]},
    )
    for each in machines.values():
        each.engine.stop()
        each.engine.run()


if __name__ == "__main__":
    main()
