"""Tests the retry budget: a share of the requests, and a bounded burst."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.policy.routing.retry_budget import RetryBudget

pytestmark = pytest.mark.pure


@given(is_request=st.lists(st.booleans(), max_size=300))
def test_retries_are_a_share_of_the_requests_and_a_burst(is_request: list[bool]) -> None:
    budget, num_requests, num_retries = RetryBudget(share=0.25, burst=4.0), 0, 0
    for each in is_request:
        if each:
            budget.deposit()
            num_requests += 1
        else:
            num_retries += budget.withdraw()
        budget.check()
    assert num_retries <= 4.0 + 0.25 * num_requests


def test_a_budget_used_up_refills_with_requests() -> None:
    budget = RetryBudget(share=0.25, burst=2.0)
    assert [budget.withdraw() for _ in range(3)] == [True, True, False]
    for _ in range(4):
        budget.deposit()
    assert [budget.withdraw() for _ in range(2)] == [True, False]
