"""Takes the replica that a session's id belongs to, so that its prefix cache has the session's earlier turns."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from headrace.policy.routing.choice import Candidate, Decision, Ranked, figures_of, home_of, seed_of
from headrace.policy.routing.replicas.least_loaded import least_loaded


def by_session(candidates: Sequence[Candidate], decision: Decision) -> Ranked:
    if not decision.session:
        return least_loaded(candidates, decision)
    key = int.from_bytes(blake2b(decision.session.encode(), digest_size=7).digest())
    home = home_of(key, [seed_of(candidate.replica_id) for candidate in candidates])
    return figures_of([candidates[home]], decision), "the one that its session belongs to"
