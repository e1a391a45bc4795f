"""Takes the replicas in turn, whatever their load: what the other policies are compared with."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.policy.routing.choice import Candidate, Decision, Ranked, figures_of


def round_robin(candidates: Sequence[Candidate], decision: Decision) -> Ranked:
    return figures_of([candidates[decision.number % len(candidates)]], decision), "the next one in turn"
