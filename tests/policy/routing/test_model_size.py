"""Tests the rule that gives a request to a small or a large model."""

from __future__ import annotations

import pytest

from headrace.core.request import PriorityClass
from headrace.policy.routing.model_size import LONG_PROMPT_TOKENS, size_for

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("question", "num_tokens", "priority", "is_large"),
    [
        (0.8, 10, PriorityClass.PREMIUM, False),
        (0.79, 10, PriorityClass.PREMIUM, True),
        (0.6, 10, PriorityClass.STANDARD, False),
        (0.59, 10, PriorityClass.STANDARD, True),
        (0.4, 10, PriorityClass.BATCH, False),
        (0.39, 10, PriorityClass.BATCH, True),
        (1.0, LONG_PROMPT_TOKENS, PriorityClass.PREMIUM, False),
        (1.0, LONG_PROMPT_TOKENS + 1, PriorityClass.BATCH, True),
    ],
)
def test_the_size_follows_from_probability_length_and_priority(
    question: float, num_tokens: int, priority: PriorityClass, is_large: bool
) -> None:
    choice = size_for("question", question, num_tokens=num_tokens, priority=priority)
    assert choice.is_large is is_large
    assert (str(num_tokens) if num_tokens > LONG_PROMPT_TOKENS else f"{question:.2f}") in choice.reason
