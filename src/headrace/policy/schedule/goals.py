"""Goals for the first token and for further ones: slack of a prompt, tokens that a step may have (docs/fairness.md)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from headrace.core.plan import StepCosts
from headrace.policy.schedule.sequence import Sequence

LEAST_PREFILL_DIVISOR = 16
"""Prompts get at least 1/N of a step's tokens, whatever goals the decoding sequences have: else they would never end."""


def slack_s(seq: Sequence, now: float, costs: StepCosts) -> float:
    """Seconds that may pass before the rest of its prompt has to be computed for its first token to come in time. Infinite without a goal,
    and when it is too late."""
    goal_ms = seq.request.tier.ttft_ms
    if goal_ms is None or seq.first_token_emitted:
        return math.inf
    slack = seq.arrival + goal_ms / 1000 - now - max(seq.num_uncomputed, 1) * costs.token_s
    return slack if slack >= 0 else math.inf


def tightest_tpot_s(sequences: Iterable[Sequence]) -> float:
    """The shortest goal for further tokens, in seconds; infinite where none of the sequences has one."""
    goals = [goal for seq in sequences if (goal := seq.request.tier.tpot_ms) is not None]
    return min(goals) / 1000 if goals else math.inf


def tokens_within(goal_s: float, costs: StepCosts) -> float:
    """Most tokens of a step that is predicted to take no longer than the goal; infinite where there is no goal, or costs are not known."""
    return (goal_s - costs.fixed_s) / costs.token_s if costs.token_s else math.inf
