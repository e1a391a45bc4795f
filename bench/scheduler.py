"""Measures what the policy floor costs per step, alone: plan and commit of the real scheduler and KV manager, with no model behind them.

    python -m bench.scheduler [--only decode] [--steps 3000] [--rounds 5] -> bench/results/MACHINE/scheduler.json

The result of a step is made up (random ids, outside the timed part). Python's collector runs as it does in the engine, whose libraries are
imported. Times are those of the thread: the time in which other programs have its core is not counted, but they slow it through shared
caches and units of the core. Nothing here waits, so on a quiet machine it is the time by the clock. To compare two versions, run them in
turn (PYTHONPATH=OTHER/src, --no-file).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from bench.harness import write_portable
from bench.machine import results_file
from headrace.core.ids import RequestId
from headrace.core.model_info import KvGroup
from headrace.core.plan import Plan, Result
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams
from headrace.lab.environment import environment
from headrace.policy.config import SchedulerConfig
from headrace.policy.kvcache.manager import KvManager
from headrace.policy.schedule.scheduler import Scheduler

BLOCK_SIZE = 16
VOCAB = 32_000
WARM_UP_STEPS = 200
GROUP = KvGroup(layers=(0,), kv_heads=4, head_dim=64, dtype_bytes=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The sequences that run and that wait.

    num_running, num_waiting  sequences; running ones have slots, waiting ones have none unless `spare_slots`
    prompt_tokens, output_tokens  ranges. The first `num_running` outputs never end when `is_endless`
    chunk_tokens   > 0: one more slot, through which prompts of this length pass one after the other, a chunk per step
    in_step        all running sequences have prompts of one length, computed in one step: they need each next block in the same step
    spare_slots    the queue's head would have a slot, but its blocks are short: it is looked at in every step
    caching        whether full blocks are registered and looked for; no two prompts here begin alike
    """

    num_running: int = 64
    num_waiting: int = 256
    prompt_tokens: tuple[int, int] = (32, 96)
    output_tokens: tuple[int, int] = (128, 384)
    is_endless: bool = True
    chunk_tokens: int = 0
    in_step: bool = False
    spare_slots: int = 0
    queue_policy: str = "priority"
    depth: int = 2
    caching: bool = True


WORKLOADS: dict[str, Workload] = {
    "decode": Workload(),
    "decode-in-step": Workload(in_step=True),
    "decode-fair": Workload(queue_policy="fair"),
    "turnover": Workload(is_endless=False),
    "turnover-uncached": Workload(is_endless=False, caching=False),
    "chunks": Workload(num_running=63, chunk_tokens=4096),
    "blocks-short": Workload(spare_slots=8),
    "decode-256": Workload(num_running=256),
}


class Bench:
    """One scheduler under a workload, stepped by hand as the loop does."""

    def __init__(self, workload: Workload, steps: int, seed: int) -> None:
        self.workload, self.random = workload, random.Random(seed)
        self.length = workload.prompt_tokens[1] + steps + 4 * WARM_UP_STEPS
        self.num_requests = 0
        slots = workload.num_running + (workload.chunk_tokens > 0)
        config = SchedulerConfig(
            max_num_seqs=slots + workload.spare_slots,
            max_num_batched_tokens=slots * workload.prompt_tokens[1] if workload.in_step else max(512, 2 * slots),
            max_model_len=1 << 20,
            max_waiting=slots + workload.num_waiting + 1,
            queue_policy=workload.queue_policy,
            depth=workload.depth,
        )
        blocks = 2 + slots * (self.length // BLOCK_SIZE + 2) + workload.chunk_tokens // BLOCK_SIZE * 4
        self.kv = KvManager((GROUP,), (blocks,), BLOCK_SIZE, key=self.random.randbytes(32), caching=workload.caching)
        self.scheduler = Scheduler(config, self.kv)
        self.ids = array("i", [self.random.randrange(VOCAB) for _ in range(1 << 16)])
        self.in_flight: list[Plan] = []
        self._fill()

    def _fill(self) -> None:
        workload = self.workload
        low, high = workload.prompt_tokens
        for _ in range(workload.num_running):
            prompt = high if workload.in_step else self.random.randint(low, high)
            outputs = self.length - prompt if workload.is_endless else self.random.randint(*workload.output_tokens)
            self.add(prompt, outputs)
            if not workload.in_step:
                self.step()
        while len(self.scheduler.sequences.slots) < workload.num_running:
            self.step()
        if workload.spare_slots:  # nothing is freed any more: a prompt as large as what is left does not fit
            self.add(self.kv.pools[0].num_available * BLOCK_SIZE - BLOCK_SIZE, BLOCK_SIZE)
        while self.scheduler.sequences.num_waiting < workload.num_waiting:
            self.add_waiting()

    def add_waiting(self) -> None:
        if self.workload.chunk_tokens:
            self.add(self.workload.chunk_tokens, 1)
        else:
            self.add(self.random.randint(*self.workload.prompt_tokens), self.random.randint(*self.workload.output_tokens))

    def add(self, prompt_tokens: int, output_tokens: int) -> None:
        self.num_requests += 1
        request = EngineRequest(
            request_id=RequestId(f"request-{self.num_requests}"),
            prompt_ids=tuple(self.random.choices(self.ids, k=prompt_tokens)),
            params=SamplingParams(seed=self.num_requests, max_tokens=output_tokens, ignore_eos=True),
            tenant=f"tenant-{self.num_requests % 32}",
        )
        self.scheduler.sequences.add(request, float(self.num_requests))

    def step(self) -> tuple[float, float]:
        """Seconds of one plan and one commit. With `depth` 2 the step that is committed is the one before."""
        clock = time.thread_time
        began = clock()
        plan = self.scheduler.plan(1e6)
        planned = clock() - began
        if plan is not None:
            self.in_flight.append(plan)
        if plan is not None and len(self.in_flight) < self.workload.depth:
            return planned, 0.0
        oldest = self.in_flight.pop(0)
        result = self._result(oldest)
        began = clock()
        self.scheduler.commit(oldest, result, 1e6)
        return planned, clock() - began

    def _result(self, plan: Plan) -> Result:
        first = self.random.randrange(len(self.ids) // 2)
        count = sum(plan.samples)
        return Result(step_id=plan.step_id, token_counts=plan.samples[:], token_ids=self.ids[first : first + count])

    def run(self, steps: int) -> list[tuple[float, float]]:
        """Seconds of plan and commit, per step. Finished sequences are replaced between steps, so that as many wait as before."""
        for _ in range(WARM_UP_STEPS):
            self.step()
        taken = []
        for _ in range(steps):
            while self.scheduler.sequences.num_waiting < self.workload.num_waiting:
                self.add_waiting()
            taken.append(self.step())
        self.scheduler.check()
        return taken


def summary(taken: list[tuple[float, float]]) -> dict[str, float]:
    """p50, p99 and mean in microseconds."""
    columns = {"plan": [a for a, _ in taken], "commit": [b for _, b in taken], "both": [a + b for a, b in taken]}
    found: dict[str, float] = {}
    for name, column in columns.items():
        cuts = statistics.quantiles(column, n=100)
        found |= {f"{name}_p50_us": round(1e6 * cuts[49], 1), f"{name}_p99_us": round(1e6 * cuts[98], 1)}
        found[f"{name}_mean_us"] = round(1e6 * statistics.fmean(column), 1)
    return found


def measure(names: list[str], steps: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Every round of every workload, the workloads taking turns."""
    kept: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names:
            found = summary(Bench(WORKLOADS[name], steps, seed=number).run(steps))
            kept[name].append(found)
            print(f"{name} {number}: {_shown(found)}", flush=True)
    return kept


def _shown(found: Mapping[str, float]) -> str:
    return ", ".join(f"{key.removesuffix('_us')} {value:.0f}" for key, value in found.items()) + " us"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=WORKLOADS, action="append", help="again for more; default: all")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-file", action="store_true", help="leave bench/results/MACHINE/scheduler.json as it is")
    given = parser.parse_args()
    names = given.only or list(WORKLOADS)
    before = environment()
    kept = measure(names, given.steps, given.rounds)
    for name, found in kept.items():
        print(f"{name}, best round: {_shown({key: min(one[key] for one in found) for key in found[0]})}")
    if not given.no_file:
        settings = {"steps": given.steps, "block_size": BLOCK_SIZE, "workloads": {name: asdict(WORKLOADS[name]) for name in names}}
        write_portable(results_file("scheduler"), {"settings": settings, "environment": before, "rounds": kept})


if __name__ == "__main__":
    main()
