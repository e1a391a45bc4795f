"""How requests are shared between replicas of different speed, in virtual time: by predicted time, by outstanding requests, by an oracle.

    python -m bench.routing [--requests 2000] [--seeds 5] [--no-file] -> bench/results/routing.json

The replicas are simulated (`lab.routing_simulation`), the choice is the gateway's own. Nothing is measured by a clock: the figures are the
same on every machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from bench.harness import RESULTS, write_portable
from headrace.lab.routing_simulation import (
    Route,
    RoutingResult,
    SimulatedReplica,
    Workload,
    by_oracle,
    by_outstanding,
    by_predicted_time,
    simulate,
)
from headrace.policy.routing.predicted_time import StepSpeed

FAST, SLOW = StepSpeed(0.005, 0.0001), StepSpeed(0.020, 0.0004)
LOADS = (0.5, 0.8, 0.9)
ORACLE_REQUESTS = 600
"""Each request at an oracle runs every replica ahead, so it gets fewer of them."""


@dataclass(frozen=True, slots=True)
class Site:
    """replicas: makes them anew for each run; num_fast: the first ones, whose share is shown; loads: shares of what their steps allow"""

    replicas: Callable[[], list[SimulatedReplica]]
    num_fast: int
    loads: tuple[float, ...] = LOADS
    with_oracle: bool = False


def _of(num_fast: int, num_slow: int = 0, small_blocks: int = 0) -> Callable[[], list[SimulatedReplica]]:
    def made() -> list[SimulatedReplica]:
        small = [SimulatedReplica(FAST, total_blocks=small_blocks)] if small_blocks else []
        return [SimulatedReplica(FAST) for _ in range(num_fast)] + [SimulatedReplica(SLOW) for _ in range(num_slow)] + small

    return made


SITES: Mapping[str, Site] = {
    "one fast, one four times slower": Site(_of(1, 1), 1, with_oracle=True),
    "four fast, four four times slower": Site(_of(4, 4), 4),
    "four alike": Site(_of(4), 2),
    "two alike, one with a KV cache for about five sequences": Site(_of(1, small_blocks=100), 1, (0.4, 0.5, 0.6), with_oracle=True),
}
ROUTES: Mapping[str, Route] = {"predicted time": by_predicted_time, "outstanding": by_outstanding, "oracle": by_oracle}


def mean_of(results: Sequence[RoutingResult], num_fast: int) -> dict[str, float]:
    def mean(read: Callable[[RoutingResult], float]) -> float:
        return sum(read(result) for result in results) / len(results)

    return {
        "share_of_the_first": round(mean(lambda result: sum(result.shares[:num_fast])), 3),
        "mean_ttft_ms": round(1e3 * mean(lambda result: result.mean_ttft_s), 1),
        "p99_ttft_ms": round(1e3 * mean(lambda result: result.p99_ttft_s), 1),
        "mean_e2e_ms": round(1e3 * mean(lambda result: result.mean_e2e_s), 1),
        "p99_e2e_ms": round(1e3 * mean(lambda result: result.p99_e2e_s), 1),
    }


def measure(num_requests: int, num_seeds: int) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """site -> load -> route -> figures."""
    found: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for name, site in SITES.items():
        for load in site.loads:
            for route_name, route in ROUTES.items():
                if route is by_oracle and not site.with_oracle:
                    continue
                requests = min(num_requests, ORACLE_REQUESTS) if route is by_oracle else num_requests
                runs = [
                    simulate(site.replicas(), Workload(num_requests=requests, load=load, seed=seed), route) for seed in range(num_seeds)
                ]
                figures = mean_of(runs, site.num_fast)
                found.setdefault(name, {}).setdefault(str(load), {})[route_name] = figures
                print(f"{name}, load {load}, {route_name}: {', '.join(f'{key} {value:g}' for key, value in figures.items())}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--no-file", action="store_true", help="leave bench/results/routing.json as it is")
    given = parser.parse_args()
    found = measure(given.requests, given.seeds)
    if not given.no_file:
        settings = {
            "requests": given.requests,
            "seeds": given.seeds,
            "fast": asdict(FAST),
            "slow": asdict(SLOW),
            "workload": asdict(Workload()),
        }
        write_portable(RESULTS / "routing.json", {"settings": settings, "sites": found})


if __name__ == "__main__":
    main()
