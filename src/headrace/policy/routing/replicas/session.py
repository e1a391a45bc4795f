"""Takes the replica that a session's id belongs to, so that its prefix cache has the session's earlier turns.

Which one follows from the id and the replicas' names alone (rendezvous hashing), in every gateway alike. A replica that is added or lost
moves the sessions of that replica only.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from headrace.policy.routing.choice import Candidate, Decision, Ranked, figures_of
from headrace.policy.routing.replicas.least_loaded import least_loaded


def by_session(candidates: Sequence[Candidate], decision: Decision) -> Ranked:
    if not decision.session:
        return least_loaded(candidates, decision)

    def rank(candidate: Candidate) -> bytes:
        return blake2b(f"{decision.session} {candidate.replica_id}".encode(), digest_size=8).digest()

    return figures_of([max(candidates, key=rank)], decision), "the one that its session belongs to"
