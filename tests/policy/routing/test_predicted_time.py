"""Tests predicted times: each part of the sum, and which replicas are drawn by them."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.load import EngineCounters, LoadSnapshot
from headrace.policy.routing.choice import UNMEASURED_DIVISOR, Candidate, Decision, ReplicaId, WeightedDraw
from headrace.policy.routing.predicted_time import (
    NOTHING_SENT,
    OUTPUT_SHARE,
    RequestSize,
    SentSince,
    StepSpeed,
    mean_speed,
    predicted_s,
    speed_of,
)
from headrace.policy.routing.replicas import choose

pytestmark = pytest.mark.pure

SPEED = StepSpeed(0.010, 0.001)
SLOW = StepSpeed(0.040, 0.004)
SIZE = RequestSize(prompt_tokens=100, output_tokens=50)
IDLE = LoadSnapshot(
    num_running=0,
    num_waiting=0,
    kv_blocks_free=100,
    kv_blocks_cached=0,
    kv_blocks_used=0,
    kv_blocks_total=100,
    counters=EngineCounters(),
    max_num_seqs=4,
    step_fixed_s=0.010,
    step_token_s=0.001,
)
ALONE_S = 0.110 + OUTPUT_SHARE * 50 * 0.011
"""SIZE at IDLE: one step with its prompt, then its output."""


def time_of(sent: SentSince = NOTHING_SENT, size: RequestSize = SIZE, **changes: Any) -> float:
    return predicted_s(replace(IDLE, **changes), sent, size, SPEED, block_size=16)


@pytest.mark.parametrize(
    ("changes", "more_s"),
    [
        ({}, 0.0),
        ({"num_queued_tokens": 30}, 0.030),
        ({"num_queued_tokens": 30, "step_prompt_tokens": 10}, 0.030 + 3 * 0.010),
        ({"num_queued_tokens": 30, "step_prompt_tokens": 10, "num_running": 2}, 0.030 + 3 * 0.012 + OUTPUT_SHARE * 50 * 0.002),
        ({"num_queued_tokens": 30, "step_prompt_tokens": 100, "num_running": 4}, 0.030 + 50 * 0.014 / 4 + OUTPUT_SHARE * 50 * 0.003),
        ({"step_age_s": 0.2, "step_predicted_s": 0.5}, 0.3),
        ({"step_age_s": 0.9, "step_predicted_s": 0.5}, 0.0),
        ({"num_running": 1}, OUTPUT_SHARE * 50 * 0.001),
        ({"num_running": 3}, OUTPUT_SHARE * 50 * 0.003),
        ({"num_running": 4}, 50 * 0.014 / 4 + OUTPUT_SHARE * 50 * 0.003),
        ({"num_running": 4, "num_waiting": 2}, 3 * 50 * 0.014 / 4 + OUTPUT_SHARE * 50 * 0.003),
        ({"num_running": 4, "max_num_seqs": 0}, OUTPUT_SHARE * 50 * 0.004),
        ({"kv_blocks_free": 5, "kv_blocks_used": 95}, 0.05 * 50 * 0.011),
        ({"kv_blocks_free": 3, "kv_blocks_cached": 7, "kv_blocks_used": 90}, 0.0),
        ({"kv_blocks_total": 6, "kv_blocks_free": 6}, math.inf),
        ({"kv_blocks_total": 0, "kv_blocks_free": 0}, 0.0),
    ],
)
def test_each_part_of_the_load_adds_its_time(changes: dict[str, Any], more_s: float) -> None:
    assert time_of(**changes) == pytest.approx(ALONE_S + more_s)


def test_cached_tokens_of_the_prompt_are_not_computed() -> None:
    assert time_of(size=RequestSize(100, 50, cached_tokens=60)) == pytest.approx(ALONE_S - 0.060)


def test_what_was_sent_since_counts_as_queued() -> None:
    assert time_of(SentSince(2, 60)) == pytest.approx(time_of(num_waiting=2, num_queued_tokens=60))


def test_a_speed_is_known_once_a_step_was_computed() -> None:
    assert speed_of(None) is None
    assert speed_of(replace(IDLE, step_fixed_s=0.0, step_token_s=0.0)) is None
    assert speed_of(IDLE) == SPEED
    assert mean_speed([None, None]) is None
    assert mean_speed([SPEED, None, StepSpeed(0.03, 0.003)]) == StepSpeed(0.02, 0.002)


@given(
    st.integers(0, 64),
    st.integers(0, 64),
    st.integers(0, 10_000),
    st.integers(0, 100),
    st.integers(1, 64),
    st.integers(0, 8),
    st.integers(1, 4),
)
def test_more_work_is_never_predicted_to_take_less(
    running: int, waiting: int, queued: int, free: int, slots: int, sent: int, factor: int
) -> None:
    load: dict[str, Any] = {"num_running": min(running, slots), "num_waiting": waiting, "num_queued_tokens": queued, "kv_blocks_free": free}
    before = time_of(SentSince(sent, 16 * sent), max_num_seqs=slots, **load)
    assert before >= ALONE_S - 1e-9
    assert time_of(SentSince(sent + 1, 16 * sent + 16), max_num_seqs=slots, **load) >= before
    assert time_of(SentSince(sent, 16 * sent), max_num_seqs=slots, **load | {"num_queued_tokens": queued + 1}) >= before
    assert time_of(SentSince(sent, 16 * sent), max_num_seqs=slots, **load | {"kv_blocks_free": max(0, free - 1)}) >= before
    slower = StepSpeed(SPEED.fixed_s * factor, SPEED.token_s * factor)
    assert predicted_s(replace(IDLE, **load, max_num_seqs=slots), SentSince(sent, 16 * sent), SIZE, slower, block_size=16) >= before - 1e-9


# ------------------------------------------------------------------------------------------------------------------- the choice by it


def candidate(name: str, **changes: Any) -> Candidate:
    return Candidate(ReplicaId(name), replace(IDLE, **changes))


def chosen(*candidates: Candidate, seed: int) -> str:
    draw = random.Random(seed)
    found = choose("power-of-two", candidates, Decision(SIZE, 16, draw, is_blind=draw.randrange(UNMEASURED_DIVISOR) == 0))
    assert found is not None
    return found.replica_id


def share(name: str, *candidates: Candidate, draws: int = 1000) -> float:
    return sum(chosen(*candidates, seed=seed) == name for seed in range(draws)) / draws


def test_the_faster_of_two_idle_replicas_is_taken() -> None:
    slow = candidate("slow", step_fixed_s=SLOW.fixed_s, step_token_s=SLOW.token_s)
    assert share("fast", candidate("fast"), slow) > 0.98


def test_a_slow_replica_is_taken_once_the_fast_one_is_further_behind() -> None:
    slow = candidate("slow", step_fixed_s=SLOW.fixed_s, step_token_s=SLOW.token_s)
    assert share("slow", candidate("fast", num_queued_tokens=1000), slow) > 0.98


def test_replicas_whose_speeds_differ_by_noise_share_evenly() -> None:
    assert 0.45 < share("a", candidate("a"), candidate("b", step_fixed_s=0.012, step_token_s=0.00095)) < 0.55


def test_a_replica_that_was_measured_as_slow_is_measured_again_now_and_then() -> None:
    """It would get nothing at a low load, and so would count as slow for ever."""
    slow = candidate("slow", step_fixed_s=SLOW.fixed_s, step_token_s=SLOW.token_s)
    assert 0.0 < share("slow", candidate("fast"), slow, draws=5000) < 0.015


def test_a_replica_of_unknown_speed_counts_as_one_of_the_mean_speed() -> None:
    unknown = candidate("unknown", step_fixed_s=0.0, step_token_s=0.0)
    assert 0.4 < share("unknown", candidate("a"), candidate("b"), unknown) * 3 / 2 < 0.6
    assert share("unknown", candidate("a", num_queued_tokens=500), unknown) > 0.98
    assert share("unknown", candidate("a"), Candidate(ReplicaId("unknown"), None, SentSince(3, 300))) < 0.02


def test_while_no_speed_is_known_the_number_of_requests_decides() -> None:
    unknown = {"step_fixed_s": 0.0, "step_token_s": 0.0, "max_num_seqs": 0}
    busy = candidate("busy", num_running=3, **unknown)
    assert share("idle", busy, candidate("idle", num_running=2, num_queued_tokens=10**6, **unknown)) == 1.0


def test_of_many_replicas_faster_ones_are_drawn_more_often() -> None:
    """Uniform draws would give one slow replica of five at least a tenth of the requests, more than its share of the capacity, 1/17."""
    fast = [candidate(f"fast{number}") for number in range(4)]
    slow = candidate("slow", step_fixed_s=SLOW.fixed_s, step_token_s=SLOW.token_s)
    draw = WeightedDraw([*fast, slow], [4.0, 4.0, 4.0, 4.0, 1.0])
    drawn = [draw.two(random.Random(seed)) for seed in range(4000)]
    assert all(first is not second for first, second in drawn)
    assert 0.05 < sum(first is slow for first, _ in drawn) / 4000 < 0.07
    assert 0.055 < sum(second is slow for _, second in drawn) / 4000 < 0.09, "16/17 of 1/13"
    assert share("slow", *fast, slow) < 0.02
