"""Tests paired ratios: right on paper, unmoved by drift, honest about few rounds."""

from __future__ import annotations

import math
import random

import pytest

from bench.pairs import paired_ratio

pytestmark = pytest.mark.pure


def test_ratio_of_a_steady_machine_is_exact() -> None:
    found = paired_ratio([2.0, 2.0, 2.0], [3.0, 3.0, 3.0])
    assert (found.rounds, found.mean, found.low, found.high) == pytest.approx((3, 1.5, 1.5, 1.5))
    assert found.excludes_one


def test_drift_common_to_both_does_not_widen_the_interval() -> None:
    drift = [1.0, 1.7, 0.6, 2.4, 1.1]
    found = paired_ratio([4.0 * d for d in drift], [5.0 * d for d in drift])
    assert (found.low, found.high) == pytest.approx((1.25, 1.25))


def test_interval_by_hand() -> None:
    # logs 0 and ln 4: mean ln 2, standard error ln 4 / 2, t of one degree of freedom 12.706
    found = paired_ratio([1.0, 1.0], [1.0, 4.0])
    assert found.mean == pytest.approx(2.0)
    assert math.log(found.high / found.mean) == pytest.approx(12.706 * math.log(4) / math.sqrt(2) / math.sqrt(2))
    assert not found.excludes_one


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    draw = random.Random(7)
    covered = 0
    for _ in range(400):
        a = [draw.lognormvariate(0.0, 0.1) for _ in range(10)]
        found = paired_ratio(a, [1.2 * value * draw.lognormvariate(0.0, 0.1) for value in a])
        covered += found.low <= 1.2 <= found.high
    assert 0.92 <= covered / 400 <= 0.98


def test_one_round_proves_nothing() -> None:
    found = paired_ratio([1.0], [9.0])
    assert found.mean == pytest.approx(9.0)
    assert (found.low, found.high) == (0.0, math.inf)
    assert not found.excludes_one


@pytest.mark.parametrize(("a", "b"), [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([1.0], [math.inf])])
def test_senseless_pairs_are_refused(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError):
        paired_ratio(a, b)
