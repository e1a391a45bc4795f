"""One replica: whether it is ready, how long it has stalled, whether it fails what it is sent; and the watch over all of a model.

The first two are pure functions of what the wire reports about it. A replica that stops answering, or whose idle loop stalls, must count as
not ready within one second; thresholds leave room for one heartbeat.

The last is what its circuit hears of the requests sent there: each submission reports one outcome. A failure is a request that the replica
lost before its first token, once per connection (a process that dies with a hundred requests has failed once), and a sequence that ended by
a fault of the engine's. What follows from open circuits: `policy.routing.ejection`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.core.clock import Clock
from headrace.core.finish import FinishReason
from headrace.core.grammar import CANNOT_CONTINUE
from headrace.core.numerics import Numerics, may_resume, numerics_digest
from headrace.core.update import SequenceUpdate
from headrace.policy.routing.choice import ReplicaId
from headrace.policy.routing.circuit_breaker import CircuitBreaker, Ticket
from headrace.policy.routing.ejection import REPLICA_LIMITS
from headrace.wire.client import ConnectionState, ReplicaClient, SeenLoad
from headrace.wire.leash import DRAINING
from headrace.wire.service import SILENT_AFTER_S

if TYPE_CHECKING:
    from headrace.gateway.upstream.replicas import ReplicaPool

log = logging.getLogger(__name__)

IDLE_STALL_S = 0.8
"""Seconds without a wake-up after which an idle loop counts as stuck. A healthy one wakes several times in this time."""

STEP_GRACE_S = 1.0
STEP_GRACE_FACTOR = 4.0
"""A replica is ready while its step takes at most max(STEP_GRACE_S, STEP_GRACE_FACTOR x the predicted duration)."""


def verdict(state: ConnectionState, seen: SeenLoad | None, now: float) -> str:
    """Why a replica is not ready, in a form that may be shown to clients; empty = ready."""
    if state is ConnectionState.DOWN:
        return "not connected"
    if state is ConnectionState.SILENT:
        return "does not answer"
    if state is ConnectionState.DRAINING:
        return DRAINING
    if state is ConnectionState.NOT_READING:
        return "does not read what is sent"
    if seen is None:
        return "has not reported yet"
    age = now - seen.received_s
    if seen.load.step_age_s is not None:
        allowed = max(STEP_GRACE_S, STEP_GRACE_FACTOR * seen.load.step_predicted_s)
        took = seen.load.step_age_s + age
        return f"a step has taken {took:.1f} s, expected at most {allowed:.1f} s" if took > allowed else ""
    idle = seen.load.loop_age_s + age
    return f"its loop has not turned for {idle:.1f} s" if idle > IDLE_STALL_S else ""


def stalled_s(state: ConnectionState, seen: SeenLoad | None, silent_s: float, now: float) -> float:
    """Seconds without progress beyond the predicted step of a connected replica; 0 for one without a connection or a report.

    silent_s  seconds without a frame, delays of this process left out. The age of the last report counts only as far as a replica may be
              silent: beyond that it may be this process that was stopped
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


ReplicaInstance = tuple[ReplicaId, str]


@dataclass(frozen=True, slots=True, eq=False)
class Replica:
    """One replica: its name, its connection, and its circuit. Compared by identity."""

    name: ReplicaId
    connection: ReplicaClient
    circuit: ReplicaCircuit = field(default_factory=ReplicaCircuit)

    @property
    def instance(self) -> ReplicaInstance:
        """Name and process id of the wire: a replica that was restarted counts as another instance and may be tried again."""
        info = self.connection.info
        return self.name, info.instance_id if info is not None else ""

    @property
    def max_model_len(self) -> int:
        """0 before the replica has said Hello."""
        info = self.connection.info
        return info.model.max_model_len if info is not None else 0

    def verdict(self, now: float) -> str:
        """Why it is not ready; empty: it is."""
        return verdict(self.connection.state, self.connection.snapshot, now)

    @property
    def numerics(self) -> Numerics:
        """What its results depend on (`core.numerics`); empty before the replica has said Hello."""
        info = self.connection.info
        return info.model.numerics if info is not None else {}


TICK_S = 0.1
"""Seconds between two looks at the replicas."""

MOVE_AFTER_S = 2.0
"""Seconds without progress, beyond the predicted step, after which streams leave a replica for another one."""

RETRY_S = 0.5
"""Calls that wait for a replica try again after this many seconds where one is ready and nothing has changed: it was full, perhaps."""


class ReplicaWatch:
    """Watches the replicas of one model for its running calls: moves them off a replica that hangs, and wakes the calls that wait for one.

    A replica hangs when it makes no progress for `MOVE_AFTER_S` beyond its predicted step. Its streams are given up only if another ready
    replica may continue them, or begin them where nothing of them has come; otherwise they stay until the wire's lease ends, since it may
    recover. A retired replica is watched as well: its streams move off it when it hangs, and none moves to it. Without a `failover_s` of
    the pool nothing moves, and only the calls that wait already are woken. See docs/failover.md.
    """

    def __init__(self, pool: ReplicaPool, clock: Clock) -> None:
        self._pool = pool
        self._clock = clock
        self._change: asyncio.Future[None] | None = None
        self._last_ready: frozenset[tuple[str, str, str]] = frozenset()
        self._woken_at = clock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="replica watch")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def wait_for_change(self) -> None:
        """Until a replica has become ready, or one still is after `RETRY_S`."""
        if self._change is None:
            self._change = asyncio.get_running_loop().create_future()
            self._woken_at = self._clock()
            self._last_ready = self._ready()
        await asyncio.shield(self._change)

    def look(self) -> None:
        """One look at all replicas."""
        for replica in (*self._pool.replicas, *self._pool.retired) if self._pool.failover_s else ():
            self._look_at(replica)
        if self._change is not None:
            self._wake()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.look()
            except Exception:  # the outermost loop: without it a bug of ours would leave every later stall unnoticed
                log.exception("looking at the replicas failed")

    def _look_at(self, replica: Replica) -> None:
        """Give up its requests where another replica can go on: all where it hangs, those it has not counted where it does not read.

        Without another one of equal numerics, those of which nothing has come.
        """
        connection, name = replica.connection, replica.instance[0]
        is_hanging = self._is_hanging(replica)
        if not connection.num_open or not (is_hanging or connection.unread_s >= MOVE_AFTER_S):
            return
        reason = f"replica {name} {'hangs' if is_hanging else 'does not read what is sent'}"
        others = self._other_ready(replica)
        if not any(may_resume(numerics_digest(replica.numerics), numerics_digest(other.numerics)) for other in others):
            num_moved = connection.abandon_unbegun(reason) if others else 0
        elif is_hanging:
            num_moved = connection.num_open
            connection.abandon(reason)
        else:
            num_moved = connection.abandon_unseen(reason)
        if num_moved:
            log.warning("%s: %d of its requests move to another one", reason, num_moved)

    def _wake(self) -> None:
        assert self._change is not None
        ready, now = self._ready(), self._clock()
        if ready - self._last_ready or (ready and now - self._woken_at >= RETRY_S):
            self._change.set_result(None)
            self._change = None
        self._last_ready = ready

    def _ready(self) -> frozenset[tuple[str, str, str]]:
        """Name, process and numerics digest of each ready replica. The digest may become known later."""
        now = self._clock()
        return frozenset(
            (*replica.instance, numerics_digest(replica.numerics)) for replica in self._pool.replicas if not replica.verdict(now)
        )

    def _is_hanging(self, replica: Replica) -> bool:
        connection = replica.connection
        return stalled_s(connection.state, connection.snapshot, connection.silent_s, self._clock()) >= MOVE_AFTER_S

    def _other_ready(self, left: Replica) -> list[Replica]:
        """The ready replicas beside `left`."""
        now = self._clock()
        return [replica for replica in self._pool.replicas if replica is not left and not replica.verdict(now)]
