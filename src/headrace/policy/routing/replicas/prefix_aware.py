"""Takes the best of two replicas that are drawn at random, those that hold most of the prompt, whose rest alone is computed, and its home.

A replica with a long queue loses to one that has to compute the prompt, and that one then holds it too.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.policy.routing.choice import Candidate, Decision, Ranked, best_first, figures_of


def prefix_aware(candidates: Sequence[Candidate], decision: Decision) -> Ranked:
    """candidates: the prompt's home first"""
    ranked = best_first(figures_of(candidates, decision))
    soonest = "the least busy" if ranked[0].predicted_s is None else "expected to be done first"
    size = f"of the prompt's {decision.size.prompt_tokens} tokens"
    if cached := ranked[0].cached_tokens:
        return ranked, f"{soonest}, with {cached} {size} in its prefix cache"
    if most := max([each.cached_tokens for each in ranked]):
        return ranked, f"{soonest}, although a busier one has {most} {size} in its prefix cache"
    return ranked, f"{soonest} or about as soon, where none has the prompt's beginning"
