"""Bounds the tokens of a step: by goals for further tokens (TPOT, docs/fairness.md), and by the price of a prompt chunk far into its
context.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.core.plan import StepCosts
from headrace.policy.sequence import Sequence

TPOT_SHARE = 0.9
"""Part of a goal for further tokens that a step is predicted to take at most."""

PREFILL_DIVISOR = 16

LEAST_PREFILL_DIVISOR = 64
"""Prompts get at least 1/N of a step's tokens, whatever the goals."""


def tightest_tpot_s(sequences: Iterable[Sequence]) -> float:
    goals = [goal for seq in sequences if (goal := seq.request.tier.tpot_ms) is not None]
    return TPOT_SHARE * min(goals) / 1000 if goals else math.inf


def tokens_within(goal_s: float, costs: StepCosts) -> float:
    return (goal_s - costs.fixed_s) / costs.token_s if costs.token_s else math.inf


def prefill_part(most: float, max_tokens: int) -> int:
    return int(max(min(max_tokens // PREFILL_DIVISOR, most // 2), max_tokens // LEAST_PREFILL_DIVISOR, 1))


def most_running(most: float, max_tokens: int) -> float:
    """Infinite where even one row would miss a goal, which then is no bound."""
    return math.inf if most < 1 else max(1, most - prefill_part(most, max_tokens))


@dataclass(frozen=True, slots=True)
class ChunkPrice:
    """What the tokens of a prompt chunk cost of a step's budget. A token with `costly_context` tokens before it
    (`core.model_info.ModelInfo`) costs two: its attention takes as long as its products.

    Attention inside the chunk is not charged. costly_context 0: every token costs one.
    """

    costly_context: int = 0

    def most(self, start: int, budget: int) -> int:
        if not self.costly_context or budget <= 0:
            return max(budget, 0)
        return max(1, budget * self.costly_context // (self.costly_context + start))

    def surcharge(self, start: int, count: int) -> int:
        """Tokens charged beyond one each; a single token has none."""
        return count * start // self.costly_context if self.costly_context and count > 1 else 0
