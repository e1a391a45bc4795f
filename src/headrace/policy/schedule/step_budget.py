"""Bounds the tokens of a step: by goals for further tokens (TPOT, docs/fairness.md), and by the price of a prompt chunk far into its
context.

A goal for the first token decides the order of prompts instead: `policy.queues.fair`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.core.plan import StepCosts
from headrace.policy.sequence import Sequence

TPOT_SHARE = 0.9
"""Part of a goal for further tokens that a step is predicted to take at most. With all of the goal, steps under load last as long as the
goal, and every second request misses it by a few percent."""

PREFILL_DIVISOR = 16
"""Prompts get 1/N of a step's tokens where the decoding sequences' goals allow twice as many."""

LEAST_PREFILL_DIVISOR = 64
"""Prompts get at least 1/N of a step's tokens, whatever the goals: else they would never end."""


def tightest_tpot_s(sequences: Iterable[Sequence]) -> float:
    """Seconds that steps may take; infinite where none of the sequences has a goal."""
    goals = [goal for seq in sequences if (goal := seq.request.tier.tpot_ms) is not None]
    return TPOT_SHARE * min(goals) / 1000 if goals else math.inf


def tokens_within(goal_s: float, costs: StepCosts) -> float:
    """Infinite where there is no goal, or costs are not known."""
    return (goal_s - costs.fixed_s) / costs.token_s if costs.token_s else math.inf


def prefill_part(most: float, max_tokens: int) -> int:
    """Where goals allow steps of `most` tokens, beside any number of decoding rows."""
    return int(max(min(max_tokens // PREFILL_DIVISOR, most // 2), max_tokens // LEAST_PREFILL_DIVISOR, 1))


def most_running(most: float, max_tokens: int) -> float:
    """Prompts get their part of each step. Infinite where even one row would miss a goal, which then is no bound."""
    return math.inf if most < 1 else max(1, most - prefill_part(most, max_tokens))


@dataclass(frozen=True, slots=True)
class ChunkPrice:
    """A token with `costly_context` tokens before it (`core.model_info.ModelInfo`) costs two: its attention takes as long as its products.

    All tokens of a chunk cost as much as its first one. Attention inside the chunk is not charged: a chunk at a prompt's beginning has it
    too, at a cost of one per token, so a step whose budget is spent takes about as long as that chunk at most.
    costly_context 0: every token costs one.
    """

    costly_context: int = 0

    def most(self, start: int, budget: int) -> int:
        """At least one token if the budget is not empty."""
        if not self.costly_context or budget <= 0:
            return max(budget, 0)
        return max(1, budget * self.costly_context // (self.costly_context + start))

    def surcharge(self, start: int, count: int) -> int:
        """Beyond one each. A single token, as in decoding rows, has none."""
        return count * start // self.costly_context if self.costly_context and count > 1 else 0
