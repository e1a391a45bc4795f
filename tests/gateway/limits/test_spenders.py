"""Spenders race for one budget through two gateway processes that are killed: a small storm of `bench/storms/spenders.py`."""

from __future__ import annotations

import pytest
from redis_kit import MISSING, NO_PACKAGE, PROGRAM

from bench.storms.spenders import SpendingPlan, storm


def test_no_more_is_spent_than_the_budget_however_gateways_die() -> None:
    pytest.importorskip("redis", reason=NO_PACKAGE)
    if PROGRAM is None:
        pytest.skip(MISSING)
    plan = SpendingPlan(spenders=16, operations=1500, kills=3)
    counts = storm(plan)
    counts.check(plan)
    assert counts.spent > 0.9 * plan.budget, "the budget was in reach"
    assert counts.operations > counts.admitted, "and was exhausted"
