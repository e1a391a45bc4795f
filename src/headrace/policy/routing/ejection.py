"""Leaves out, for a while, ready replicas that failed requests. Few are left out at a time, and never the last one.

A replica that fails its requests looks idle, so it would get more and more of them. Its circuit (`circuit_breaker`) decides when it is left
out. Some causes, such as a request that ends every engine, make all replicas fail. The bounds keep such a cause from leaving out all of
them.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.policy.routing.choice import ReplicaId
from headrace.policy.routing.circuit_breaker import BreakerLimits, CircuitBreaker

EJECTED_DIVISOR = 10
"""At most 1/N of a model's ready replicas are left out at a time, and one where there are fewer."""

REPLICA_LIMITS = BreakerLimits(max_failures=3, cooldown_s=5.0, max_cooldown_s=60.0)
"""Three failures in a row open a replica's circuit: each loss of a replica makes a request move."""


def ejected(ready: Mapping[ReplicaId, CircuitBreaker], now: float) -> frozenset[ReplicaId]:
    """The replicas that get no request now. If too many circuits are open, only the ones that stay open longest are ejected.

    ready  the circuit of every ready replica of the model
    """
    most = min(max(1, len(ready) // EJECTED_DIVISOR), len(ready) - 1)
    closed_off = [name for name, breaker in ready.items() if not breaker.can_send(now)]
    return frozenset(sorted(closed_off, key=lambda name: -ready[name].wait_s(now))[: max(0, most)])
