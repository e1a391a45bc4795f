"""Tests the price of chunks: a granted chunk fits its budget, the next larger one does not, and no step gets longer than one at
the start.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.policy.schedule.step_budget import ChunkPrice

pytestmark = pytest.mark.pure

positions, budgets, lengths = st.integers(0, 200_000), st.integers(1, 8192), st.integers(1, 10_000)


@given(positions, budgets, lengths)
def test_a_chunk_is_as_long_as_the_budget_pays_for(start: int, budget: int, length: int) -> None:
    price = ChunkPrice(length)
    count = price.most(start, budget)
    assert count == 1 or count + price.surcharge(start, count) <= budget
    assert count == budget or (count + 1) + price.surcharge(start, count + 1) >= budget


@given(positions, budgets, lengths)
def test_no_chunk_takes_longer_than_one_at_a_prompts_beginning(start: int, budget: int, length: int) -> None:
    """Time, in products of one token: each token's own and its attention to all before it, also to those of its chunk."""

    def seconds(first: int, count: int) -> float:
        return sum(1 + position / length for position in range(first, first + count))

    count = ChunkPrice(length).most(start, min(budget, 300))
    assert count == 1 or seconds(start, count) <= seconds(0, min(budget, 300)) + 1e-6


@given(positions, budgets)
def test_without_a_costly_context_every_token_costs_one(start: int, budget: int) -> None:
    assert ChunkPrice().most(start, budget) == budget
    assert ChunkPrice().surcharge(start, budget) == 0


@given(positions, lengths)
def test_a_spent_budget_buys_nothing_and_one_token_is_never_surcharged(start: int, length: int) -> None:
    assert ChunkPrice(length).most(start, 0) == ChunkPrice(length).most(start, -3) == 0
    assert ChunkPrice(length).surcharge(start, 1) == 0
