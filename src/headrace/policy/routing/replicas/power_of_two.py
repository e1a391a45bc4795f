"""Takes the better of two replicas that are drawn at random, a faster one more often.

Comparing two alone keeps several gateways from choosing the same replica at once (Mitzenmacher 2001).
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.policy.routing.choice import LEAST_BUSY, Candidate, Decision, Ranked, best_first, figures_of

FASTEST = "of two drawn at random, the one expected to be done first, or the first one where they are close"


def power_of_two(candidates: Sequence[Candidate], decision: Decision) -> Ranked:
    """candidates: the two"""
    ranked = best_first(figures_of(candidates, decision))
    return ranked, LEAST_BUSY if ranked[0].predicted_s is None else FASTEST
