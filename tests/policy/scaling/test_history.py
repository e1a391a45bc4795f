"""Checks what is expected from earlier days and weeks."""

from __future__ import annotations

import pytest

from headrace.policy.scaling.history import DAY_S, SLOT_S, WEEK_S, ArrivalHistory

pytestmark = pytest.mark.pure


def lived(history: ArrivalHistory, begin: float, seconds: float, rate: float) -> None:
    for step in range(int(seconds / 60)):
        history.add(rate * 60, begin + step * 60)


def test_nothing_is_expected_before_a_day_is_known() -> None:
    history = ArrivalHistory()
    lived(history, 0.0, DAY_S / 2, 1.0)
    assert history.expected(0.75 * DAY_S, 0.8 * DAY_S) == 0.0
    assert history.expected(DAY_S + 3600, DAY_S + 3660) == pytest.approx(1.0)


def test_the_same_day_of_the_week_counts_before_the_day_before() -> None:
    history = ArrivalHistory()
    for day in range(7):
        lived(history, day * DAY_S, DAY_S, 5.0 if day == 6 else 1.0)
    assert history.expected(WEEK_S + 6 * DAY_S, WEEK_S + 6 * DAY_S + 60) == pytest.approx(5.0)
    assert history.expected(WEEK_S + DAY_S, WEEK_S + DAY_S + 60) == pytest.approx(1.0)


def test_a_change_counts_more_with_every_day() -> None:
    history, seen = ArrivalHistory(), []
    for week in range(4):
        lived(history, week * WEEK_S, SLOT_S * 2, 1.0 if week == 0 else 3.0)
        seen.append(history.expected((week + 1) * WEEK_S, (week + 1) * WEEK_S + 60))
    assert seen == sorted(seen)
    assert 2.5 < seen[-1] < 3.0


def test_a_part_of_a_slot_says_nothing() -> None:
    history = ArrivalHistory()
    history.add(0.0, 300.0)
    lived(history, 300.0, 300.0, 9.0)
    history.add(0.0, 700.0)
    assert history.expected(DAY_S, DAY_S + 60) == 0.0
