"""Tests the pauses between tries: each is twice the last and never above the limit, and the first returns after a time of success."""

from __future__ import annotations

import pytest

from headrace.core.backoff import Backoff

pytestmark = pytest.mark.pure


def test_pauses_double_up_to_the_limit() -> None:
    backoff = Backoff(1.0, 10.0, stable_s=30.0)
    assert [backoff.pause_s(0.0) for _ in range(6)] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_what_worked_for_a_while_begins_again_and_what_ended_early_does_not() -> None:
    backoff = Backoff(1.0, 10.0, stable_s=30.0)
    assert [backoff.pause_s(worked_s) for worked_s in (0.0, 29.9, 30.0, 0.0, 29.9)] == [1.0, 2.0, 1.0, 2.0, 4.0]
