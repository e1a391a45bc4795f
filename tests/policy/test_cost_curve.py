"""Tests the curve of what steps of few tokens take: never falling, near what was seen, and not led astray by a machine that stood still."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.policy.cost_curve import MAX_AGE_STEPS, MAX_CURVE_TOKENS, STALE_STEPS, CostCurve, size_of

pytestmark = pytest.mark.pure

TOKEN_S = 0.001


def roofline(num_tokens: int) -> float:
    return 0.01 + TOKEN_S * max(0, num_tokens - 16)


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(0.001, 2.0)), max_size=60))
def test_more_tokens_never_take_less(steps: list[tuple[int, float]]) -> None:
    curve = CostCurve()
    for num_tokens, seconds in steps:
        curve.observe(num_tokens, seconds)
    found = [curve.seconds(num_tokens, TOKEN_S) for num_tokens in range(400)]
    assert all(more >= fewer - 1e-12 for fewer, more in pairwise(found))


@given(st.lists(st.integers(1, MAX_CURVE_TOKENS), min_size=1, max_size=60))
def test_the_curve_meets_what_was_seen(sizes: list[int]) -> None:
    curve = CostCurve()
    for num_tokens in sizes:
        curve.observe(num_tokens, roofline(num_tokens))
    for num_tokens in sizes:
        width = MAX_CURVE_TOKENS // 16 if num_tokens >= 16 else 0  # neighbours share a size
        assert curve.seconds(num_tokens, TOKEN_S) == pytest.approx(roofline(num_tokens), abs=width * TOKEN_S)


def test_beyond_what_was_seen_a_token_costs_what_is_given_and_between_it_is_on_a_line() -> None:
    curve = CostCurve()
    assert curve.seconds(5, TOKEN_S) == 0.0
    curve.observe(4, 0.010)
    curve.observe(8, 0.014)
    assert [curve.seconds(n, 0.5) for n in (5, 8, 10)] == pytest.approx([0.011, 0.014, 1.014])
    assert curve.seconds(2, TOKEN_S) == pytest.approx(0.008)


def test_long_steps_are_not_observed() -> None:
    curve = CostCurve()
    curve.observe(MAX_CURVE_TOKENS + 1, 1.0)
    assert curve.seconds(MAX_CURVE_TOKENS, TOKEN_S) == 0.0


@pytest.mark.parametrize("still_at", [0, 1, 5, 40])
def test_a_machine_that_stood_still_moves_the_curve_by_a_quarter_at_most(still_at: int) -> None:
    curve = CostCurve()
    for step in range(60):
        curve.observe(4, 1.0 if step == still_at else 0.01)
        assert step == still_at == 0 or curve.seconds(4, TOKEN_S) <= 0.0125
    assert curve.seconds(4, TOKEN_S) == pytest.approx(0.01, rel=0.05)


def test_steps_that_have_become_slower_are_followed_and_old_sizes_forgotten() -> None:
    curve = CostCurve()
    curve.observe(8, 0.5)
    for _ in range(2 * MAX_AGE_STEPS):
        curve.observe(4, 0.01)
    assert curve.seconds(8, TOKEN_S) == pytest.approx(0.01 + 4 * TOKEN_S)
    for _ in range(30):
        curve.observe(4, 0.03)
    assert curve.seconds(4, TOKEN_S) == pytest.approx(0.03, rel=0.05)


def test_an_octave_has_eight_sizes() -> None:
    assert [size_of(n) for n in range(1, 16)] == list(range(1, 16))
    assert len({size_of(n) for n in range(64, 128)}) == 8
    assert all(size_of(n) <= n < 1.125 * size_of(n) + 1 for n in range(1, 300))


def test_sizes_are_forgotten_in_a_long_step_too() -> None:
    curve = CostCurve()
    curve.observe(8, 0.5)
    for _ in range(2 * MAX_AGE_STEPS):
        curve.observe(MAX_CURVE_TOKENS + 1, 1.0)
    assert curve.num_steps_since(8) is None
    assert curve.seconds(8, TOKEN_S) == 0.0


def test_what_was_seen_long_ago_counts_less() -> None:
    curve = CostCurve()
    for _ in range(60):
        curve.observe(8, 0.07)
    for _ in range(2):
        for _ in range(STALE_STEPS):
            curve.observe(9, 0.1)
        assert curve.num_steps_since(8) == STALE_STEPS
        curve.observe(8, 0.05)
    assert curve.seconds(8, TOKEN_S) < 0.0626
