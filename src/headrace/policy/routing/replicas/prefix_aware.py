"""Takes the best of two replicas that are drawn at random and of those that hold most of the prompt: only the rest need be computed there.

A replica with a long queue loses to one that has to compute the prompt, and that one then holds it too.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.policy.routing.choice import Candidate, Decision, Ranked, best_first, figures_of
from headrace.policy.routing.replicas.power_of_two import power_of_two


def prefix_aware(candidates: Sequence[Candidate], decision: Decision) -> Ranked:
    """candidates: the drawn ones first"""
    most = max(candidate.cached_tokens for candidate in candidates)
    if not most:
        return power_of_two(candidates, decision)
    ranked = best_first(figures_of(candidates, decision))
    soonest = "the least busy" if ranked[0].predicted_s is None else "expected to be done first"
    if cached := ranked[0].cached_tokens:
        return ranked, f"{soonest}, with {cached} of the prompt's {decision.size.prompt_tokens} tokens in its prefix cache"
    return ranked, f"{soonest}, although a busier one has {most} of the prompt's {decision.size.prompt_tokens} tokens in its prefix cache"
