"""What a replica's circuit hears of the requests sent there: each submission reports one outcome.

A failure is a request that the replica lost before its first token, once per connection (a process that dies with a hundred requests has
failed once), and a sequence that ended by a fault of the engine's. What follows from open circuits: `policy.routing.ejection`.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.clock import Clock
from headrace.core.finish import FinishReason
from headrace.core.grammar import CANNOT_CONTINUE
from headrace.core.update import SequenceUpdate
from headrace.policy.routing.circuit_breaker import CircuitBreaker, Ticket
from headrace.policy.routing.ejection import REPLICA_LIMITS

NO_TICKET = Ticket(-1)
"""Ticket of a request sent although the circuit is open, since no other replica could take it. Its outcome changes nothing."""

ConnectionKey = tuple[str, float]
"""Id of the engine's process, and when the connection to it was made."""

EJECTED = "failed several requests in a row"
"""Why a replica whose circuit is open is not ready."""


class ReplicaCircuit:
    """The circuit of one replica, over all its connections and restarts."""

    def __init__(self) -> None:
        self.breaker = CircuitBreaker(REPLICA_LIMITS)
        self._failed_connection: ConnectionKey | None = None

    def send(self, connection: ConnectionKey | None, clock: Clock) -> ReplicaAttempt:
        """Note that a request is sent over a connection; None: it is gone already."""
        now = clock()
        ticket = self.breaker.send(now) if self.breaker.can_send(now) else NO_TICKET
        return ReplicaAttempt(self, connection, ticket, clock)

    def lose(self, connection: ConnectionKey | None, ticket: Ticket, now: float) -> None:
        """A request was lost before its first token."""
        if connection is not None and connection == self._failed_connection:
            self.breaker.abandon(ticket, now)
            return
        self._failed_connection = connection
        self.breaker.fail(ticket, now)


class ReplicaAttempt:
    """One submission. The first outcome that is reported counts; later ones change nothing.

    connection  over which it was sent
    """

    __slots__ = ("_circuit", "_clock", "_has_begun", "_is_over", "_ticket", "connection")

    def __init__(self, circuit: ReplicaCircuit, connection: ConnectionKey | None, ticket: Ticket, clock: Clock) -> None:
        self._circuit, self.connection, self._ticket, self._clock = circuit, connection, ticket, clock
        self._has_begun = self._is_over = False

    def read(self, updates: Sequence[SequenceUpdate]) -> None:
        """Its updates came: the answer has begun, or ended."""
        if self._is_over:
            return
        if not self._has_begun and any(update.token_ids for update in updates):
            self._has_begun = True
            self._circuit.breaker.begin(self._ticket)
        for update in updates:
            if update.finish is FinishReason.ERROR and not (update.error or "").startswith(CANNOT_CONTINUE):
                self._is_over = True
                self._circuit.breaker.fail(self._ticket, self._clock())
                return
            if update.finish is not None and update.finish.is_answer:
                self.succeed()
                return

    def succeed(self) -> None:
        """Answered, or refused for what the request asks."""
        if not self._is_over:
            self._is_over = True
            self._circuit.breaker.succeed(self._ticket)

    def lose(self) -> None:
        """The replica is gone, or was given up. After the first token that says nothing about requests that would be sent now."""
        if not self._is_over:
            self._is_over = True
            if self._has_begun:
                self._circuit.breaker.abandon(self._ticket, self._clock())
            else:
                self._circuit.lose(self.connection, self._ticket, self._clock())

    def end(self) -> None:
        """No more of it is read: the client left, the replica was full, or a stop string ended the last sequence. If it had begun, it was
        answered."""
        if self._has_begun:
            self.succeed()
        elif not self._is_over:
            self._is_over = True
            self._circuit.breaker.abandon(self._ticket, self._clock())
