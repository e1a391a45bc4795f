"""Tests when a canary is found worse: by how much evidence, how often wrongly, and that a real difference is found."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.policy.canary import MAX_WAIT_S, MIN_REQUESTS, ServedCounts, judge

pytestmark = pytest.mark.pure


def counts(ended: int, failed: int = 0, *first_s: float) -> ServedCounts:
    return ServedCounts(ended, failed, len(first_s), sum(first_s), sum(seconds**2 for seconds in first_s))


NONE = counts(0)


@pytest.mark.parametrize(
    ("canary", "before", "is_worse"),
    [
        (counts(3, 1), counts(10**6), False),
        (counts(50, 2), counts(10**6), False),
        (counts(1000, 5), counts(10**6), False),
        (counts(50, 5), counts(1000), True),
        (counts(5, 5), NONE, True),
        (counts(3, 1), NONE, False),
        (counts(0, 3), counts(40), True),
        (counts(2, 4), counts(0, 3), False),
        (counts(50, 10), counts(50, 10), False),
        (counts(50, 45), counts(50, 10), True),
        (counts(50, 0, *[0.5] * 50), counts(100, 0, *[0.1, 0.3] * 50), False),
        (counts(50, 0, *[0.9, 1.1] * 25), counts(100, 0, *[0.1, 0.3] * 50), True),
        (counts(3, 0, *[9.0] * 3), counts(100, 0, *[0.1] * 100), False),
    ],
)
def test_one_failure_or_a_small_difference_is_no_evidence(canary: ServedCounts, before: ServedCounts, is_worse: bool) -> None:
    judged = judge(canary, before, MAX_WAIT_S)
    assert judged is not None
    assert judged.is_worse is is_worse, judged.reason


def test_it_passes_after_enough_requests_or_when_its_time_is_over() -> None:
    assert judge(counts(MIN_REQUESTS - 1), counts(500), 1.0) is None
    passed = judge(counts(MIN_REQUESTS), counts(500), 1.0)
    assert passed is not None
    assert (passed.is_worse, passed.reason) == (False, "0 of 50 requests failed; before, 0 of 500 requests failed")
    late = judge(counts(1), counts(500), MAX_WAIT_S)
    assert late is not None
    assert not late.is_worse
    idle = judge(NONE, counts(500), MAX_WAIT_S)
    assert idle is not None
    assert (idle.is_worse, idle.reason) == (False, "nothing was compared: no request came to it within 120 s")


def test_what_looks_worse_and_is_not_certain_is_looked_at_longer() -> None:
    unclear = counts(50, 8), counts(60, 1)
    assert judge(*unclear, 1.0) is None
    late = judge(*unclear, MAX_WAIT_S)
    assert late is not None
    assert late.is_worse


@pytest.mark.parametrize(
    ("rate", "canary_rate", "seconds", "canary_seconds", "low", "high"),
    [
        (0.0, 0.0, 1.0, 1.0, 0.0, 0.04),
        (0.02, 0.02, 1.0, 1.0, 0.0, 0.04),
        (0.3, 0.3, 1.0, 1.0, 0.0, 0.04),
        (0.0, 0.0, 1.0, 1.5, 0.0, 0.04),
        (0.01, 0.25, 1.0, 1.0, 0.96, 1.0),
        (0.0, 1.0, 1.0, 1.0, 1.0, 1.0),
        (0.0, 0.0, 1.0, 5.0, 0.96, 1.0),
    ],
)
@pytest.mark.parametrize("num_before", [1, 8])
def test_an_equal_canary_passes_and_a_worse_one_does_not(
    rate: float, canary_rate: float, seconds: float, canary_seconds: float, low: float, high: float, num_before: int
) -> None:
    """Looked at after each request. Times to the first token are drawn as wide as real ones are: their deviation is above the mean."""
    draw = random.Random(7)
    found = [_is_found_worse(draw, num_before, (rate, seconds), (canary_rate, canary_seconds)) for _ in range(50)]
    assert low <= sum(found) / len(found) <= high


def _is_found_worse(draw: random.Random, num_before: int, usual: tuple[float, float], new: tuple[float, float]) -> bool:
    canary, before = NONE, NONE
    for number in range(1500):
        is_canary = draw.randrange(num_before + 1) == 0
        rate, seconds = new if is_canary else usual
        has_failed = draw.random() < rate
        made = counts(1, 1) if has_failed else counts(1, 0, seconds * draw.lognormvariate(-0.5, 1.0))
        canary, before = (canary.plus(made), before) if is_canary else (canary, before.plus(made))
        if is_canary and (judged := judge(canary, before, MAX_WAIT_S * number / 1500)) is not None:
            return judged.is_worse
    judged = judge(canary, before, MAX_WAIT_S)
    assert judged is not None
    return judged.is_worse


some_counts = st.builds(
    lambda ended, failed, first: ServedCounts(ended, min(ended, failed), len(first), sum(first), sum(each**2 for each in first)),
    st.integers(0, 2000),
    st.integers(0, 2000),
    st.lists(st.floats(0, 100), max_size=40),
)


@given(some_counts, some_counts, st.floats(0, 2 * MAX_WAIT_S))
def test_whatever_was_counted_gives_an_answer_in_time_and_one_that_did_better_is_never_worse(
    canary: ServedCounts, before: ServedCounts, waited_s: float
) -> None:
    judged = judge(canary, before, waited_s)
    assert judged is not None or waited_s < MAX_WAIT_S
    if canary.failed_share <= before.failed_share and canary.mean_first_s <= before.mean_first_s:
        assert judged is None or not judged.is_worse


@given(some_counts, some_counts)
def test_what_a_gateway_forgot_is_not_counted(one: ServedCounts, other: ServedCounts) -> None:
    assert one.plus(other).since(other).num_ended == one.num_ended
    assert min(one.since(other).num_ended, one.since(other).num_failed) >= 0
