"""Holds the planner's times to the simulator's, which runs the scheduler itself: no plan promises what users would not get."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

import pytest

from headrace.lab.plan.catalogue import Catalogue, read_catalogue
from headrace.policy.placement.layout import judge
from headrace.policy.placement.load import Load, at_rate
from headrace.policy.placement.need import Goals, Need, Traffic
from headrace.policy.placement.roofline import Layout, Roofline
from tools.plan_sizings import shape
from tools.plan_tables import simulate

pytestmark = pytest.mark.pure

MODELS = ("llama-2-7b", "llama-3-8b", "mistral-7b", "qwen2.5-32b", "mixtral-8x7b")
DEVICES = ("rtx4090", "l40s", "a100", "h100", "h200")

NUM_REQUESTS = 150
MANY_REQUESTS = 600
"""Of a simulation: where few requests run together and prompts are long, chance moves the times of 150 by a half."""

MOST_RUNNING = 40
"""A load of NUM_REQUESTS is steady only where far fewer run together."""


@dataclass(frozen=True, slots=True)
class Compared:
    planned: Load
    ttft_s: list[float]
    tpot_s: float


def compared(catalogue: Catalogue, seed: int, num_requests: int = NUM_REQUESTS) -> Compared:
    """A load drawn by `seed`, planned and simulated."""
    drawn_by = random.Random(seed)
    while True:
        need, layout = _need(catalogue, drawn_by)
        judged = judge(need, layout)
        if judged.reason or need.traffic.context > need.model.max_positions:
            continue
        rate = drawn_by.uniform(0.02, 0.95) * judged.full_tokens_per_s
        latency = Roofline(need.model, need.device, layout, need.dtype, need.kv_dtype)
        planned = at_rate(need, latency, rate, max(judged.batch, judged.load.running))
        if planned.running <= MOST_RUNNING:
            break
    records = [record for record in simulate(need, judged, rate, num_requests=num_requests, seed=seed) if record.chunk_s]
    output = need.traffic.output_tokens
    return Compared(
        planned,
        [record.chunk_s[0] - record.intended_s for record in records],
        fmean((record.chunk_s[-1] - record.chunk_s[0]) / (output - 1) for record in records),
    )


def _need(catalogue: Catalogue, drawn_by: random.Random) -> tuple[Need, Layout]:
    """A model on a device, and the lengths and goals of its load."""
    need = Need(
        model=shape(catalogue, drawn_by.choice(MODELS)),
        device=catalogue.device(drawn_by.choice(DEVICES)),
        dtype=drawn_by.choice(["bf16", "fp8", "int4"]),
        kv_dtype="bf16",
        traffic=Traffic(
            prompt_tokens=drawn_by.choice([32, 100, 256, 512, 1000, 3000, 9000]),
            output_tokens=drawn_by.choice([8, 16, 32, 64, 128]),
            counts_prompts=True,
        ),
        goals=Goals(tpot_s=drawn_by.choice([None, 0.05, 0.1]), ttft_s=drawn_by.choice([None, 0.5, 1.0])),
        memory_fraction=0.9,
        compares_all=True,
    )
    return need, Layout(drawn_by.choice([1, 1, 2, 4]))


def check(found: Compared) -> None:
    simulated_s, chance_s = fmean(found.ttft_s), 3 * stdev(found.ttft_s) / sqrt(len(found.ttft_s))
    assert found.planned.ttft_s >= simulated_s - chance_s, "a plan promises an earlier first token than users get"
    assert found.planned.ttft_s <= 2.5 * simulated_s
    late_s = sorted(found.ttft_s)[int(0.95 * len(found.ttft_s))]
    assert 0.75 * late_s <= found.planned.ttft_p95_s <= 3 * late_s
    assert 0.75 * found.tpot_s <= found.planned.tpot_s <= 2.7 * found.tpot_s


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_is_never_better_than_a_simulation(seed: int) -> None:
    check(compared(read_catalogue(), seed))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 10))
def test_two_hundred_plans_are_never_better_than_simulations(first: int) -> None:
    """Ten at a time, each within a test's time limit."""
    catalogue = read_catalogue()
    for seed in range(first, first + 10):
        check(compared(catalogue, seed, MANY_REQUESTS))
