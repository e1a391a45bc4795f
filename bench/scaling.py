"""Compares the autoscaler with two rules of KEDA and Ray Serve's policy on the same loads, on virtual time.

    python -m bench.scaling -> bench/results/scaling.json, docs/autoscaling.md     virtual time: the same on every machine

A replica runs 16 sequences, takes 90 s until it serves, and ends about 0.6 requests a second of 256 + 20 tokens; its steps are long, so
that days are simulated in minutes. The goal is a first token within 3 s. KEDA has a threshold of 3 waiting requests a replica, or the rule
of our chart with 12 that run or wait (three quarters of the sequences); Ray Serve has a target of 11 ongoing ones. A request waits up to
600 s, and is never refused for its wait. Of two days the second is counted.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise

from bench.harness import RESULTS, ROOT, replace_block, write_portable
from bench.scaling_rules import KedaChartRule, KedaWaitingRule, RayServeRule
from headrace.engine.config import EngineConfig
from headrace.lab.environment import environment
from headrace.lab.metrics import LoadRecord, percentile
from headrace.lab.simulate.build import SimulatedModel
from headrace.lab.simulate.load import Arrival
from headrace.lab.simulate.scaling import Scaling, ScalingPolicy
from headrace.lab.simulate.site import SimulatedSite
from headrace.lab.simulate.step_times import FittedLatency
from headrace.policy.scaling.autoscaler import Autoscaler, ScalingRules

LATENCY = FittedLatency(step_s=0.6, row_s=0.03, context_s=0.0, prompt_s=0.001, attention_s=0.0)
SLOTS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 256, 20
GOAL_S, LOAD_S, HOLD_S, MAX_REPLICAS = 3.0, 90.0, 600.0, 16
HOUR_S, DAY_S = 3600.0, 86_400.0
PEAK = 3.0
"""Requests a second at the busiest time of a day."""

PAGE, BLOCK_NAME = ROOT / "docs" / "autoscaling.md", "scaling"

Rate = Callable[[float], float]


@dataclass(frozen=True)
class Load:
    """rate: requests a second at a time; blind: spans without reports; measured_from: what comes before teaches only"""

    name: str
    seconds: float
    most: float
    rate: Rate
    replicas: int = 1
    min_replicas: int = 1
    blind: Sequence[tuple[float, float]] = field(default_factory=tuple)
    measured_from: float = 0.0


def spike(at: float) -> float:
    return 3.0 if 600 <= at < 1500 else 0.4


def day(at: float) -> float:
    hour = at % DAY_S / HOUR_S
    return 0.1 + (PEAK - 0.1) * max(0.0, math.sin(math.pi * (hour - 7) / 14)) if 7 <= hour <= 21 else 0.1


def lunch(at: float) -> float:
    """Quiet, and eight times as much from one minute to the next, for two hours of each day."""
    return 3.0 if 12 <= at % DAY_S / HOUR_S < 14 else 0.4


LOADS = (
    Load("spike", 3000, 3.0, spike),
    Load("day", 2 * DAY_S, PEAK, day, measured_from=DAY_S),
    Load("lunch", 2 * DAY_S, 3.0, lunch, measured_from=DAY_S),
    Load("drift", 2 * HOUR_S, 4.0, lambda at: 0.3 + 3.7 * at / (2 * HOUR_S)),
    Load("no reports from the spike on", 3000, 3.0, spike, blind=((590, 3000),)),
    Load("no reports within the spike", 3000, 3.0, spike, blind=((1000, 1500),)),
    Load("late reports", 3000, 3.0, spike, blind=tuple((at, at + 45) for at in range(0, 3000, 90))),
    Load("flapping", HOUR_S, 3.0, lambda at: 3.0 if at % 240 < 120 else 0.3),
    Load("from none", HOUR_S, 1.0, lambda at: 1.0 if 600 <= at < 700 or 2700 <= at < 2800 else 0.0, replicas=1, min_replicas=0),
)


def arrivals(load: Load, seed: int) -> Iterator[Arrival]:
    """Poisson, by thinning."""
    draw, at, number = random.Random(seed), 0.0, 0
    while (at := at + draw.expovariate(load.most)) < load.seconds:
        if draw.random() * load.most < load.rate(at):
            number += 1
            yield Arrival(at, tuple(range(number * PROMPT_TOKENS, (number + 1) * PROMPT_TOKENS)), draw.randint(1, 2 * OUTPUT_TOKENS))


def policies(load: Load) -> dict[str, Callable[[], ScalingPolicy]]:
    rules = ScalingRules(min_replicas=load.min_replicas, max_replicas=MAX_REPLICAS, ttft_s=GOAL_S, load_s=LOAD_S)
    return {
        "Headrace": lambda: Autoscaler(rules, load.replicas),
        "KEDA, waiting requests": lambda: KedaWaitingRule(3, load.min_replicas, MAX_REPLICAS),
        "KEDA, this chart": lambda: KedaChartRule(0.75 * SLOTS, load.min_replicas, MAX_REPLICAS),
        "Ray Serve": lambda: RayServeRule(11, load.min_replicas, MAX_REPLICAS),
    }


def run(load: Load, policy: ScalingPolicy, seed: int) -> dict[str, object]:
    config = EngineConfig(
        model="simulated", max_num_seqs=SLOTS, max_num_batched_tokens=512, num_kv_blocks=1025, depth=1, enable_prefix_caching=False
    )
    model = SimulatedModel(config, LATENCY, 1025, 16_384)
    scaling = Scaling(policy=policy, load_s=LOAD_S, hold_s=HOLD_S, blind=load.blind)
    site = SimulatedSite([model] * load.replicas, scaling=scaling, seed=seed)
    records = site.run(arrivals(load, seed))
    measured = [record for record in records if record.intended_s >= load.measured_from]
    ttft_p95_s = percentile(sorted(_ttft(record) for record in measured), 0.95)
    targets = [(change.at_s, change.num_replicas) for change in site.changes]
    return {
        "requests": len(measured),
        "lost": sum(not record.is_finished for record in measured),
        "within_goal": sum(_ttft(record) <= GOAL_S for record in measured) / len(measured),
        "ttft_p95_s": ttft_p95_s if math.isfinite(ttft_p95_s) else None,
        "replica_hours": site.replica_s(load.measured_from) / HOUR_S,
        "reversals": reversals(targets),
        "most_reversals_in_5_min": most_within(turns(targets), 300.0),
        "most_replicas": max((count for _, count in targets), default=0),
    }


def _ttft(record: LoadRecord) -> float:
    return math.inf if record.ttft_s is None else record.ttft_s


def turns(targets: Sequence[tuple[float, int]]) -> list[float]:
    """When the number of replicas began to move the other way."""
    found, direction = [], 0
    for (_, before), (at, after) in pairwise(targets):
        now = (after > before) - (after < before)
        if direction and now and now != direction:
            found.append(at)
        direction = now or direction
    return found


def reversals(targets: Sequence[tuple[float, int]]) -> int:
    return len(turns(targets))


def most_within(times: Sequence[float], seconds: float) -> int:
    return max((sum(begin <= at < begin + seconds for at in times) for begin in times), default=0)


def markdown(rows: Sequence[Mapping[str, object]]) -> str:
    lines = [
        "| load | policy | requests within the goal (%) | TTFT p95 (s) | replica-hours | turns | most turns in 5 minutes | lost |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ttft_p95 = "-" if row["ttft_p95_s"] is None else f"{row['ttft_p95_s']:.1f}"
        lines.append(
            f"| {row['load']} | {row['policy']} | {100 * float(str(row['within_goal'])):.1f} | {ttft_p95} "
            f"| {row['replica_hours']:.2f} | {row['reversals']} | {row['most_reversals_in_5_min']} | {row['lost']} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="One load's name: nothing is written.")
    parser.add_argument("--no-days", action="store_true", help="Without the loads of two days, which take most of the time.")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    found: list[dict[str, object]] = []
    for load in LOADS:
        if given.only not in (None, load.name) or (given.no_days and load.seconds > DAY_S):
            continue
        for name, make in policies(load).items():
            began = time.perf_counter()
            row = {"load": load.name, "policy": name, **run(load, make(), given.seed)}
            found.append(row)
            print(row, f"{time.perf_counter() - began:.0f} s", flush=True)
    if given.only is None:
        write_portable(RESULTS / "scaling.json", {"environment": asdict(environment()), "runs": found})
        replace_block(PAGE, BLOCK_NAME, markdown(found))


if __name__ == "__main__":
    main()
