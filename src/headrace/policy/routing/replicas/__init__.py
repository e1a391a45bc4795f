"""Chooses among the replicas of a model. A new policy is one file here and one row of `POLICIES`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from headrace.policy.routing.choice import (
    ONLY,
    Candidate,
    Decision,
    Random,
    Ranked,
    ReplicaChoice,
    ReplicaId,
    WeightedDraw,
    draw_weights,
    home_of,
    seed_of,
    two_of,
)
from headrace.policy.routing.replicas.least_loaded import least_loaded
from headrace.policy.routing.replicas.power_of_two import power_of_two
from headrace.policy.routing.replicas.prefix_aware import prefix_aware
from headrace.policy.routing.replicas.round_robin import round_robin
from headrace.policy.routing.replicas.session import by_session

Item = TypeVar("Item")

MAX_FIGURES = 8
"""Kept of one choice."""

MAX_HOLDERS = 2


@dataclass(frozen=True, slots=True)
class ReplicaPolicy:
    """
    rank       the chosen one first; of at least one candidate
    draws      compares two that are drawn at random, not all
    has_index  and at most MAX_HOLDERS of those that were sent the longest known beginning of the prompt, and its home
    """

    rank: Callable[[Sequence[Candidate], Decision], Ranked]
    draws: bool = False
    has_index: bool = False


POLICIES = {
    "prefix-aware": ReplicaPolicy(prefix_aware, draws=True, has_index=True),
    "power-of-two": ReplicaPolicy(power_of_two, draws=True),
    "least-loaded": ReplicaPolicy(least_loaded),
    "session": ReplicaPolicy(by_session),
    "round-robin": ReplicaPolicy(round_robin),
}
DEFAULT_POLICY = "prefix-aware"


def choose(
    name: str,
    candidates: Sequence[Candidate],
    decision: Decision,
    *,
    longest: Collection[ReplicaId] = (),
    first_new: int | None = None,
) -> ReplicaChoice | None:
    """candidates: all; longest, first_new: what the prefix index says of the prompt. None: there is no candidate"""
    if len(candidates) < 2:
        return ReplicaChoice(candidates[0].replica_id, ONLY) if candidates else None
    if not POLICIES[name].draws:
        return compare(name, candidates, decision)
    if decision.is_blind:
        drawn = two_of(candidates, decision.random)
    else:
        weights = draw_weights([candidate.snapshot for candidate in candidates], decision.size)
        drawn = WeightedDraw(candidates, weights).two(decision.random)
    holders = [each for each in candidates if each.replica_id in longest]
    homes = () if first_new is None else [candidates[home_of(first_new, [seed_of(each.replica_id) for each in candidates])]]
    some = {each.replica_id: each for each in (*homes, *drawn, *some_holders(holders, decision.random))}
    return compare(name, list(some.values()), decision)


def some_holders(holders: Sequence[Item], random: Random) -> Sequence[Item]:
    return holders if len(holders) <= MAX_HOLDERS else two_of(holders, random)


def compare(name: str, candidates: Sequence[Candidate], decision: Decision) -> ReplicaChoice:
    """candidates: all, or drawn ones where the policy draws"""
    ranked, reason = POLICIES[name].rank(candidates, decision)
    return ReplicaChoice(ranked[0].replica_id, reason, name, tuple(ranked[:MAX_FIGURES]))
