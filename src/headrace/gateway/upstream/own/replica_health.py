"""Judges the health of one replica as a gateway sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.core.clock import Clock
from headrace.core.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from headrace.core.grammar import CANNOT_CONTINUE
from headrace.core.load import AttemptCounts, LoadSnapshot
from headrace.core.model_info import Numerics, why_not_resume
from headrace.core.request import PriorityClass
from headrace.core.update import FinishReason, SequenceUpdate
from headrace.gateway.upstream.seam import ReplicaHealth
from headrace.policy.routing.choice import Candidate, ReplicaId
from headrace.policy.routing.failures import REPLICA_LIMITS, CircuitBreaker, Ticket
from headrace.policy.routing.predicted_time import SentSince
from headrace.wire.client import ConnectionState, ReplicaClient, SeenLoad
from headrace.wire.leash import ASLEEP, DRAINING
from headrace.wire.service import SILENT_AFTER_S
from headrace.wire.stream import ReplicaStream

IDLE_STALL_S = 0.8
"""Seconds without a wake-up after which an idle loop counts as stuck."""

STEP_GRACE_S = 1.0
STEP_GRACE_FACTOR = 4.0


VERDICTS = {
    ConnectionState.DOWN: "not connected",
    ConnectionState.SILENT: "does not answer",
    ConnectionState.DRAINING: DRAINING,
    ConnectionState.NOT_READING: "does not read what is sent",
}


def verdict(state: ConnectionState, seen: SeenLoad | None, now: float) -> str:
    if state is not ConnectionState.CONNECTED:
        return VERDICTS[state]
    if seen is None:
        return "has not reported yet"
    if seen.load.is_asleep:
        return ASLEEP
    age = now - seen.received_s
    if seen.load.step_age_s is not None:
        allowed = max(STEP_GRACE_S, STEP_GRACE_FACTOR * seen.load.step_predicted_s)
        took = seen.load.step_age_s + age
        return f"a step has taken {took:.1f} s, expected at most {allowed:.1f} s" if took > allowed else ""
    idle = seen.load.loop_age_s + age
    return f"its loop has not turned for {idle:.1f} s" if idle > IDLE_STALL_S else ""


def stalled_s(state: ConnectionState, seen: SeenLoad | None, silent_s: float, now: float) -> float:
    """Seconds without progress beyond the predicted step.

    silent_s  seconds without a frame, less the delays of this process

    The age of the last report counts for at most SILENT_AFTER_S: an older report may mean that this process was stopped.
    """
    if state is ConnectionState.DOWN or seen is None:
        return 0.0
    if state is ConnectionState.SILENT:
        return silent_s
    age = min(now - seen.received_s, SILENT_AFTER_S)
    if seen.load.step_age_s is not None:
        return max(0.0, seen.load.step_age_s + age - seen.load.step_predicted_s)
    return seen.load.loop_age_s + age


NO_TICKET = Ticket(-1)
"""Ticket of a request sent although the circuit is open, since no other replica could take it."""

ConnectionKey = tuple[str, float]
"""Instance id of the engine."""

EJECTED = "failed several requests in a row"


class ReplicaCircuit:
    def __init__(self) -> None:
        self.breaker = CircuitBreaker(REPLICA_LIMITS)
        self.attempts = AttemptCounts()
        self._failed_connection: ConnectionKey | None = None

    def send(self, connection: ConnectionKey | None, clock: Clock) -> ReplicaAttempt:
        now = clock()
        self.attempts.num_sent += 1
        ticket = self.breaker.send(now) if self.breaker.can_send(now) else NO_TICKET
        return ReplicaAttempt(self, connection, ticket, clock, now)

    def lose(self, connection: ConnectionKey | None, ticket: Ticket, now: float) -> None:
        if connection is not None and connection == self._failed_connection:
            self.breaker.abandon(ticket, now)
            return
        self._failed_connection = connection
        self.breaker.fail(ticket, now)


class ReplicaAttempt:
    """Reports the outcome of one attempt to its replica's circuit, and counts it. Only its first reported outcome counts."""

    __slots__ = ("_circuit", "_clock", "_has_begun", "_is_over", "_is_refused", "_ticket", "connection", "sent_at")

    def __init__(self, circuit: ReplicaCircuit, connection: ConnectionKey | None, ticket: Ticket, clock: Clock, sent_at: float) -> None:
        self._circuit, self.connection, self._ticket, self._clock = circuit, connection, ticket, clock
        self.sent_at = sent_at
        self._has_begun = self._is_over = self._is_refused = False

    def read(self, updates: Sequence[SequenceUpdate]) -> None:
        if self._is_over:
            return
        if not self._has_begun and any(update.token_ids for update in updates):
            self._has_begun = True
            self._circuit.breaker.begin(self._ticket)
            ttft_s = self._clock() - self.sent_at
            self._circuit.attempts.num_begun += 1
            self._circuit.attempts.ttft_s += ttft_s
            self._circuit.attempts.ttft_s_squared += ttft_s**2
        for update in updates:
            if update.finish is FinishReason.ERROR:
                if (update.error or "").startswith(CANNOT_CONTINUE):
                    self._circuit.attempts.num_refused += not self._is_refused
                    self._is_refused = True  # once, whatever the number of its sequences
                    continue
                self._is_over = True
                self._circuit.attempts.num_failed += 1
                self._circuit.breaker.fail(self._ticket, self._clock())
                return
            if update.finish is not None and update.finish.is_answer:
                self.succeed()
                return

    def succeed(self) -> None:
        """The request was answered, or refused for its own content."""
        if not self._is_over:
            self._is_over = True
            self._circuit.breaker.succeed(self._ticket)

    def lose(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._circuit.attempts.num_lost += 1
            if self._has_begun:
                self._circuit.breaker.abandon(self._ticket, self._clock())
            else:
                self._circuit.lose(self.connection, self._ticket, self._clock())

    def reject(self, error: Exception | None) -> None:
        """The engine has taken nothing of it."""
        attempts = self._circuit.attempts
        if isinstance(error, InvalidRequest):
            attempts.num_refused += 1
        elif isinstance(error, Overloaded | Unavailable | DeadlineExceeded):
            attempts.num_rejected += 1
        else:
            attempts.num_failed += 1
        self.end()

    def end(self) -> None:
        """The client left, the replica was full, or a stop string ended the last sequence."""
        if self._has_begun:
            self.succeed()
        elif not self._is_over:
            self._is_over = True
            self._circuit.breaker.abandon(self._ticket, self._clock())


ReplicaInstance = tuple[ReplicaId, str]


@dataclass(frozen=True, slots=True, eq=False)
class Replica:
    """Compared by identity."""

    name: ReplicaId
    connection: ReplicaClient
    circuit: ReplicaCircuit = field(default_factory=ReplicaCircuit)

    @property
    def instance(self) -> ReplicaInstance:
        info = self.connection.info
        return self.name, info.instance_id if info is not None else ""

    @property
    def max_model_len(self) -> int:
        info = self.connection.info
        return info.model.max_model_len if info is not None else 0

    @property
    def is_asleep(self) -> bool:
        seen = self.connection.snapshot
        return seen is not None and seen.load.is_asleep

    def verdict(self, now: float) -> str:
        return verdict(self.connection.state, self.connection.snapshot, now)

    @property
    def numerics(self) -> Numerics:
        info = self.connection.info
        return info.model.numerics if info is not None else {}

    @property
    def adapters(self) -> Mapping[str, str]:
        info = self.connection.info
        return info.model.adapters if info is not None else {}

    def has_adapter(self, name: str | None, digest: str) -> bool:
        return name is None or self.adapters.get(name) == digest

    def waiting(self) -> list[ReplicaStream]:
        """The requests of this gateway that wait there, as far as its load says: the last ones of which nothing has come."""
        load, sent, *_ = self.candidate()[1:]
        unbegun = [stream for stream in self.connection.open_streams if stream.is_unbegun]
        num_waiting = sent.num_requests + (load.num_waiting if load is not None else 0)
        return unbegun[-num_waiting:] if num_waiting else []

    def can_take(self, stream: ReplicaStream) -> bool:
        """As far as its size, its adapter, and the model of what its client has go."""
        required = stream.required_numerics
        if required is not None and why_not_resume(required, self.numerics):
            return False
        return self.max_model_len >= stream.num_tokens and self.has_adapter(stream.adapter, stream.adapter_digest)

    def health(self, reason: str, now: float) -> ReplicaHealth:
        connection = self.connection
        seen = connection.snapshot
        return ReplicaHealth(
            self.name,
            connection.state is not ConnectionState.DOWN,
            reason,
            seen.load if seen else None,
            load_age_s=now - seen.received_s if seen else 0.0,
            is_asleep=reason == ASLEEP,
            num_open=connection.num_open,
            has_tried=connection.has_tried,
            is_failing=not self.circuit.breaker.can_send(now),
            attempts=self.circuit.attempts,
            block_size=connection.info.model.block_size if connection.info is not None else 0,
        )

    def candidate(self, lowest: PriorityClass = PriorityClass.BATCH, *, cached_tokens: int = 0, adapter: str | None = None) -> Candidate:
        """lowest: of the requests that were sent since the load snapshot"""
        seen, sent = self.connection.snapshot, self.connection.sent_since_snapshot(lowest)
        load = seen.load if seen else None
        adapter_s = 0.0 if load is None or adapter is None else _adapter_s(load, adapter)
        return Candidate(self.name, load, SentSince(len(sent), sum(sent)), cached_tokens, adapter_s)


def _adapter_s(load: LoadSnapshot, adapter: str) -> float:
    """The mean time of a read there, unless unfinished requests use the adapter. One that none uses may still be in its memory: a load
    does not say so.
    """
    num_reads = load.counters.adapter_reads
    return load.counters.adapter_read_microseconds / 1e6 / num_reads if num_reads and adapter not in load.running_adapters else 0.0
