"""Decides when a server that failed is sent requests again: a circuit breaker.

    CLOSED --max_failures in a row--> OPEN --cooldown passed--> HALF_OPEN --probe answered--> CLOSED
                                       ^                            |
                                       `------- probe failed -------'  the cooldown doubles, up to max_cooldown_s

A pure state machine: `now` is given, in seconds of one monotonic clock. Each request sent takes a `Ticket` and reports exactly one outcome.
Outcomes of requests that were sent before the last change of state are ignored: a hundred requests that were under way when a server died
do not lengthen its cooldown, and a late answer does not close a circuit that a newer failure opened.

Not here: what counts as a failure, rate limits (a server that limits its rate is healthy), the choice among servers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NewType

Ticket = NewType("Ticket", int)
"""Number of the circuit's state when a request was sent. It grows by one with every change of state."""


class CircuitState(Enum):
    CLOSED = "closed"
    """Requests are sent."""
    OPEN = "open"
    """No request is sent before the cooldown has passed."""
    HALF_OPEN = "half_open"
    """One request is under way, the probe; no other is sent before its outcome is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerLimits:
    """max_failures    failures in a row that open the circuit
    cooldown_s      how long it stays open the first time
    max_cooldown_s  upper bound of the doubled cooldowns
    """

    max_failures: int = 5
    cooldown_s: float = 5.0
    max_cooldown_s: float = 60.0


class CircuitBreaker:
    """The circuit of one server. state: after the last call; num_failures: failures in a row while closed"""

    def __init__(self, limits: BreakerLimits | None = None) -> None:
        self._limits = limits or BreakerLimits()
        self._cooldown_s = self._limits.cooldown_s
        self._open_until = 0.0
        self._ticket = Ticket(0)
        self.state = CircuitState.CLOSED
        self.num_failures = 0

    def wait_s(self, now: float) -> float:
        """Seconds until a request may be sent: 0 for now, the rest of the cooldown while the circuit is open. While a probe runs, one first
        cooldown, since the probe's outcome is not known."""
        if self.state is CircuitState.OPEN:
            return max(0.0, self._open_until - now)
        return self._limits.cooldown_s if self.state is CircuitState.HALF_OPEN else 0.0

    def can_send(self, now: float) -> bool:
        return self.wait_s(now) == 0.0

    def send(self, now: float) -> Ticket:
        """Note that a request is sent, which `can_send` allowed. If the circuit was open, this request is the probe."""
        assert self.can_send(now)
        if self.state is CircuitState.OPEN:
            self._change(CircuitState.HALF_OPEN)
        return self._ticket

    def begin(self, ticket: Ticket) -> None:
        """The request's answer has begun. A probe closes the circuit. This is not an outcome yet: the answer may still break off."""
        if ticket == self._ticket and self.state is CircuitState.HALF_OPEN:
            self._change(CircuitState.CLOSED)
            self._cooldown_s = self._limits.cooldown_s

    def succeed(self, ticket: Ticket) -> None:
        """Outcome: the server answered, or refused the request for a fault of the request itself."""
        self.begin(ticket)
        if ticket == self._ticket:
            self.num_failures = 0

    def fail(self, ticket: Ticket, now: float) -> None:
        """Outcome: the server failed."""
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
        """Outcome not known, for example because the client left. A probe leaves the circuit open without a further cooldown."""
        if ticket == self._ticket and self.state is CircuitState.HALF_OPEN:
            self._change(CircuitState.OPEN)
            self._open_until = now

    def check(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
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
