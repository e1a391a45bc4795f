"""Compares continuous with static batching. Kernels and batch size are the same; the variants differ by `static` of the table only.

One table has evenly spread lengths, one has skewed ones, and one has the highest request rates at which skewed answers come in the same
time. A last table compares a request that is alone in an engine with and without batching.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from bench.harness import Machine, Measure, Table, finished, requests_for
from headrace.engine.config import EngineConfig
from headrace.lab.datasets import LoadRequest, WorkloadShape, send_times
from headrace.lab.metrics import LoadRecord, LoadReport, summarize
from headrace.lab.offline import run_offline

NUM_REQUESTS = 64
BATCH = 16
SHAPE = WorkloadShape(input_tokens=64, output_tokens=64, spread=0.9)
MOST_SKEWED = 8 * SHAPE.output_tokens
EQUAL = replace(SHAPE, spread=0.0)
NUM_RATED = 200
"""Requests of a run at one rate."""
NUM_ALONE = 32


def table(base: EngineConfig) -> Table:
    """base: model, dtype, kernels and threads to measure with."""
    return _table(base, "", "prompts and outputs of 6 to 121 tokens each, evenly spread", run)


def skewed_table(base: EngineConfig) -> Table:
    """base: as for `table`."""
    spread = f"prompts of 6 to 121 tokens; outputs of {SHAPE.output_tokens} tokens in the mean, exponentially distributed"
    return _table(base, "-skewed", f"{spread}, {MOST_SKEWED} at most", run_skewed)


def equal_latency_table(base: EngineConfig) -> Table:
    """base: as for `table`."""
    common = replace(base, max_num_seqs=BATCH, enable_prefix_caching=False)
    return Table(
        name="continuous-batching-equal-latency",
        question="How many more requests per second does continuous batching answer in the same time?",
        workload=(
            f"{NUM_RATED} requests at random moments, {BATCH} in a batch; prompts of 6 to 121 tokens, outputs of {SHAPE.output_tokens} in "
            "the mean, exponentially distributed. The highest rate at which the median answer takes no longer than twice an answer of "
            "that mean in a full batch, sought by halving."
        ),
        variants={"static": common, "continuous": common},
        static="static",
        measures=(Measure("highest rate", "requests/s", "higher"), Measure("goal", "ms"), Measure("E2EL p50 at that rate", "ms")),
        run=run_at_equal_latency,
        settings={"requests": NUM_RATED, "shape": SHAPE},
    )


def alone_table(base: EngineConfig) -> Table:
    """base: as for `table`."""
    common = replace(base, enable_prefix_caching=False)
    return Table(
        name="continuous-batching-alone",
        question="What does batching add to the time of a request that is alone?",
        workload=f"{NUM_ALONE} requests one after the other, each of {EQUAL.input_tokens} tokens in and {EQUAL.output_tokens} out.",
        variants={"one at a time": replace(common, max_num_seqs=1), "batching": replace(common, max_num_seqs=BATCH)},
        measures=(Measure("TTFT p50", "ms", "lower"), Measure("TPOT p50", "ms", "lower"), Measure("E2EL p50", "ms", "lower")),
        run=run_alone,
        settings={"requests": NUM_ALONE, "shape": EQUAL},
    )


def _table(base: EngineConfig, suffix: str, lengths: str, measure: Callable[[Machine, int], Mapping[str, float]]) -> Table:
    common = replace(base, max_num_seqs=BATCH, enable_prefix_caching=False)
    return Table(
        name=f"continuous-batching{suffix}",
        question="What is gained when a finished sequence's place is filled at once instead of when its whole batch is done?",
        workload=f"{NUM_REQUESTS} requests at once, {BATCH} in a batch; {lengths}.",
        variants={"static": common, "continuous": common},
        static="static",
        measures=(
            Measure("output", "tok/s", "higher"),
            Measure("TTFT p50", "ms", "lower"),
            Measure("E2EL p50", "ms", "lower"),
            Measure("E2EL p99", "ms", "lower"),
            Measure("steps", ""),
        ),
        run=measure,
        settings={"requests": NUM_REQUESTS, "shape": SHAPE},
    )


def skewed(requests: Sequence[LoadRequest], *, seed: int) -> list[LoadRequest]:
    """The requests with exponentially distributed outputs: most are short, a few are several times as long as the mean."""
    draw = random.Random(seed)
    return [replace(each, output_tokens=min(MOST_SKEWED, 1 + int(draw.expovariate(1 / SHAPE.output_tokens)))) for each in requests]


def run(machine: Machine, number: int) -> Mapping[str, float]:
    return _measured(machine, requests_for(machine, NUM_REQUESTS, SHAPE, seed=number))


def run_skewed(machine: Machine, number: int) -> Mapping[str, float]:
    return _measured(machine, skewed(requests_for(machine, NUM_REQUESTS, SHAPE, seed=number), seed=number))


def run_at_equal_latency(machine: Machine, number: int) -> Mapping[str, float]:
    answer_s = _answers_s.get(number) or _full_batch_s(machine, number)
    _answers_s[number] = answer_s
    requests = skewed(requests_for(machine, NUM_RATED, SHAPE, seed=number), seed=number)

    def run_at(rate: float) -> LoadReport:
        times = send_times(NUM_RATED, rate=rate, seed=number)
        return summarize(finished(run_offline(machine.engine, machine.collector, requests, times)).records)

    rate, report = highest_rate(run_at, goal_s=2 * answer_s, at_most=1.5 * BATCH / answer_s, halvings=6)
    median_s = report.e2el_s.quantiles["p50"] if report is not None else 0.0
    return {"highest rate": rate, "goal": 2000 * answer_s, "E2EL p50 at that rate": 1000 * median_s}


_answers_s: dict[int, float] = {}
"""Round -> seconds of a mean answer in a full batch, measured once: the goal is one for all variants of a round."""


def _full_batch_s(machine: Machine, number: int) -> float:
    full = finished(run_offline(machine.engine, machine.collector, requests_for(machine, BATCH, EQUAL, seed=number)))
    return summarize(full.records).e2el_s.quantiles["p50"]


def highest_rate(run_at: Callable[[float], LoadReport], *, goal_s: float, at_most: float, halvings: int) -> tuple[float, LoadReport | None]:
    """The highest of the rates tried at which the median answer takes no longer than goal_s, and the run at it; 0 and None where none
    was."""
    low, high, found = 0.0, at_most, None
    for _ in range(halvings):
        rate = (low + high) / 2
        report = run_at(rate)
        if report.e2el_s.quantiles["p50"] <= goal_s:
            low, found = rate, report
        else:
            high = rate
    return low, found


def run_alone(machine: Machine, number: int) -> Mapping[str, float]:
    records: list[LoadRecord] = []
    for request in requests_for(machine, NUM_ALONE, EQUAL, seed=number):
        records += finished(run_offline(machine.engine, machine.collector, [request])).records
    report = summarize(records)
    found = {"TTFT p50": report.ttft_s, "TPOT p50": report.tpot_s, "E2EL p50": report.e2el_s}
    return {name: spread.quantiles["p50"] * 1000 for name, spread in found.items()}


def _measured(machine: Machine, requests: Sequence[LoadRequest]) -> Mapping[str, float]:
    done = finished(run_offline(machine.engine, machine.collector, requests))
    report = summarize(done.records)
    return {
        "output": done.output_tokens / done.duration_s,
        "TTFT p50": report.ttft_s.quantiles["p50"] * 1000,
        "E2EL p50": report.e2el_s.quantiles["p50"] * 1000,
        "E2EL p99": report.e2el_s.quantiles["p99"] * 1000,
        "steps": len(done.step_s),
    }
