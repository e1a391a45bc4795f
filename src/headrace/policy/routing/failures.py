"""Decides what the failures of servers and replicas lead to.

Pure state machines: `now` is given, in seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NewType

from headrace.policy.routing.choice import ReplicaId

Ticket = NewType("Ticket", int)
"""Number of the circuit's state when a request was sent."""


class CircuitState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerLimits:
    max_failures: int = 5
    cooldown_s: float = 5.0
    max_cooldown_s: float = 60.0


class CircuitBreaker:
    """CLOSED --max_failures in a row--> OPEN --cooldown passed--> HALF_OPEN --probe answered--> CLOSED
                                           ^                            |
                                           `------- probe failed -------'  the cooldown doubles, up to max_cooldown_s

    Each request sent takes a `Ticket` and reports exactly one outcome. Outcomes of requests that were sent before the last change of
    state are ignored: a hundred requests under way when a server died do not lengthen its cooldown.
    """

    def __init__(self, limits: BreakerLimits | None = None) -> None:
        self._limits = limits or BreakerLimits()
        self._cooldown_s = self._limits.cooldown_s
        self._open_until = 0.0
        self._ticket = Ticket(0)
        self.state = CircuitState.CLOSED
        self.num_failures = 0

    def wait_s(self, now: float) -> float:
        if self.state is CircuitState.OPEN:
            return max(0.0, self._open_until - now)
        return self._limits.cooldown_s if self.state is CircuitState.HALF_OPEN else 0.0

    def can_send(self, now: float) -> bool:
        return self.wait_s(now) == 0.0

    def send(self, now: float) -> Ticket:
        assert self.can_send(now)
        if self.state is CircuitState.OPEN:
            self._change(CircuitState.HALF_OPEN)
        return self._ticket

    def begin(self, ticket: Ticket) -> None:
        if ticket == self._ticket and self.state is CircuitState.HALF_OPEN:
            self._change(CircuitState.CLOSED)
            self._cooldown_s = self._limits.cooldown_s

    def succeed(self, ticket: Ticket) -> None:
        self.begin(ticket)
        if ticket == self._ticket:
            self.num_failures = 0

    def fail(self, ticket: Ticket, now: float) -> None:
        if ticket != self._ticket:
            return
        if self.state is CircuitState.HALF_OPEN:
            self._cooldown_s = min(2 * self._cooldown_s, self._limits.max_cooldown_s)
            self._open(now)
            return
        self.num_failures += 1
        if self.num_failures >= self._limits.max_failures:
            self._open(now)

    def abandon(self, ticket: Ticket, now: float) -> None:
        """The outcome is not known: a probe leaves the circuit open without a further cooldown."""
        if ticket == self._ticket and self.state is CircuitState.HALF_OPEN:
            self._change(CircuitState.OPEN)
            self._open_until = now

    def check(self) -> None:
        limits = self._limits
        assert limits.cooldown_s <= self._cooldown_s <= limits.max_cooldown_s
        assert 0 <= self.num_failures < limits.max_failures
        assert self.num_failures == 0 or self.state is CircuitState.CLOSED

    def _open(self, now: float) -> None:
        self._change(CircuitState.OPEN)
        self._open_until = now + self._cooldown_s

    def _change(self, state: CircuitState) -> None:
        self.state = state
        self.num_failures = 0
        self._ticket = Ticket(self._ticket + 1)


EJECTED_DIVISOR = 10
"""At most 1/N of a model's ready replicas are left out at a time, and one where there are fewer."""

REPLICA_LIMITS = BreakerLimits(max_failures=3, cooldown_s=5.0, max_cooldown_s=60.0)


def ejected(ready: Mapping[ReplicaId, CircuitBreaker], now: float) -> frozenset[ReplicaId]:
    """ready  the circuit of every ready replica of the model"""
    most = min(max(1, len(ready) // EJECTED_DIVISOR), len(ready) - 1)
    closed_off = [name for name, breaker in ready.items() if not breaker.can_send(now)]
    return frozenset(sorted(closed_off, key=lambda name: -ready[name].wait_s(now))[: max(0, most)])


OTHERS_S = 60.0


class TenantFailures:
    """Tells failures that one tenant's requests cause from the server's own. A request that makes a server fail each time would open its
    circuit for all tenants. A failure is the tenant's while the server answered another tenant within `OTHERS_S` and has not failed for
    another one since. A tenant alone at a server cannot be distinguished from it: each failure is the server's then.
    """

    def __init__(self) -> None:
        self._tenant_to_answered_at: dict[bytes, float] = {}
        self._failing: bytes | None = None
        self._is_failing_several = False

    def answered(self, tenant: bytes, now: float) -> None:
        self._failing, self._is_failing_several = None, False
        kept = [each for each in self._tenant_to_answered_at.items() if each[0] != tenant]
        self._tenant_to_answered_at = dict([*kept[-1:], (tenant, now)])

    def is_tenants(self, tenant: bytes, now: float) -> bool:
        """Notes a failure, and returns whether it is the tenant's."""
        self._is_failing_several = self._is_failing_several or self._failing not in (None, tenant)
        self._failing = tenant
        others = [at for other, at in self._tenant_to_answered_at.items() if other != tenant]
        return not self._is_failing_several and any(now - at < OTHERS_S for at in others)


class RetryBudget:
    """Limits retries, so that failures cause no storm of them.

    A token bucket without a clock: a new request adds `share` of a token, a retry takes a whole one, at most `burst` are kept. Source:
    Finagle's RetryBudget.
    """

    def __init__(self, *, share: float = 0.2, burst: float = 10.0) -> None:
        self._share = share
        self._burst = burst
        self.tokens = burst

    def deposit(self) -> None:
        self.tokens = min(self.tokens + self._share, self._burst)

    def withdraw(self) -> bool:
        if self.tokens < 1.0:
            return False
        self.tokens -= 1.0
        return True

    def check(self) -> None:
        assert 0.0 <= self.tokens <= self._burst
