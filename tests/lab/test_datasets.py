"""Tests arrival processes and data sets: right rate, right shape, same for the same seed."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest

from headrace.lab.datasets import WorkloadShape, make_requests, send_times

pytestmark = pytest.mark.pure


def test_offered_load_is_exact_for_every_seed() -> None:
    for seed in range(5):
        times = send_times(101, rate=20.0, burstiness=0.25, seed=seed)
        assert times[0] == 0.0
        assert times[-1] == pytest.approx(5.0)
        assert times == sorted(times)


def test_burstiness_changes_the_spread_of_gaps_and_not_the_rate() -> None:
    def variation(burstiness: float) -> float:
        times = send_times(20_000, rate=100.0, burstiness=burstiness, seed=1)
        gaps = [b - a for a, b in itertools.pairwise(times)]
        return statistics.stdev(gaps) / statistics.fmean(gaps)

    # The coefficient of variation of a gamma with shape k is 1 / sqrt(k).
    assert variation(1.0) == pytest.approx(1.0, rel=0.05)
    assert variation(0.25) == pytest.approx(2.0, rel=0.05)
    assert variation(4.0) == pytest.approx(0.5, rel=0.05)


def test_infinite_rate_sends_everything_at_once() -> None:
    assert send_times(3, rate=math.inf) == [0.0, 0.0, 0.0]
    assert send_times(1, rate=2.0) == [0.0]


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (1.0, math.inf)])
def test_senseless_rates_are_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        send_times(2, rate=rate, burstiness=burstiness)


def test_same_seed_gives_the_same_times_and_prompts() -> None:
    assert send_times(50, rate=9.0, seed=3) == send_times(50, rate=9.0, seed=3) != send_times(50, rate=9.0, seed=4)
    shape = WorkloadShape(input_tokens=20, output_tokens=5, spread=0.5)
    assert make_requests(9, shape, seed=3) == make_requests(9, shape, seed=3) != make_requests(9, shape, seed=4)


def test_prompts_have_the_asked_lengths_and_prefixes() -> None:
    shape = WorkloadShape(input_tokens=40, output_tokens=10, spread=0.5, prefix_tokens=30, num_prefixes=2, low_id=5, high_id=9)
    requests = make_requests(200, shape)
    assert {request.prompt_ids[:30] for request in requests} == {requests[0].prompt_ids[:30]} | {
        next(r.prompt_ids[:30] for r in requests if r.prompt_ids[:30] != requests[0].prompt_ids[:30])
    }
    assert {len(request.prompt_ids) for request in requests} == set(range(35, 46))
    assert {request.output_tokens for request in requests} == set(range(5, 16))
    assert {token for request in requests for token in request.prompt_ids} == {5, 6, 7, 8}


@pytest.mark.parametrize("wrong", [{"spread": 2.0}, {"prefix_tokens": 8}, {"low_id": 10, "high_id": 10}, {"output_tokens": 0}])
def test_senseless_shapes_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        make_requests(1, WorkloadShape(**{"input_tokens": 8, "output_tokens": 8, **wrong}))
