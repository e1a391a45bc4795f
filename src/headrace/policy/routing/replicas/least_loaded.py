"""Takes the replica that is done first, of all: several gateways at once choose the same one."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.policy.routing.choice import Candidate, Decision, Ranked, figures_of


def least_loaded(candidates: Sequence[Candidate], decision: Decision) -> Ranked:
    """Equal ones share evenly."""
    begin = decision.random.randrange(len(candidates))
    figures = figures_of((*candidates[begin:], *candidates[:begin]), decision)
    if any(each.predicted_s is None for each in figures):
        return sorted(figures, key=lambda each: each.cost), "the least busy of all"
    return sorted(figures, key=lambda each: (each.predicted_s, each.cost)), "of all, the one expected to be done first"
