"""Watches the replicas of one model for its running calls: moves them off a replica that hangs, and wakes the calls that wait for one.

A replica hangs when it makes no progress for `MOVE_AFTER_S` beyond its predicted step. Its streams are given up only if another ready
replica may continue them, or begin them where nothing of them has come; otherwise they stay until the wire's lease ends, since it may
recover. See docs/failover.md.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from headrace.core.clock import Clock
from headrace.core.numerics import Numerics, may_resume, numerics_digest
from headrace.gateway.upstream.replica_health import stalled_s, verdict
from headrace.wire.client import ConnectionState, SeenLoad

log = logging.getLogger(__name__)

TICK_S = 0.1
"""Seconds between two looks at the replicas."""

MOVE_AFTER_S = 2.0
"""Seconds without progress, beyond the predicted step, after which streams leave a replica for another one."""

RETRY_S = 0.5
"""Calls that wait for a replica try again after this many seconds where one is ready and nothing has changed: it was full, perhaps."""


class WatchedConnection(Protocol):
    """The part of a replica's connection that is used here."""

    @property
    def state(self) -> ConnectionState: ...
    @property
    def snapshot(self) -> SeenLoad | None: ...
    @property
    def silent_s(self) -> float: ...
    @property
    def unread_s(self) -> float: ...
    @property
    def num_open(self) -> int: ...
    def abandon(self, reason: str) -> None: ...
    def abandon_unseen(self, reason: str) -> int: ...
    def abandon_unbegun(self, reason: str) -> int: ...


class WatchedReplica(Protocol):
    @property
    def connection(self) -> WatchedConnection: ...
    @property
    def numerics(self) -> Numerics: ...
    @property
    def instance(self) -> tuple[str, str]: ...


class WatchedPool(Protocol):
    """The replicas of a model now. A retired one is watched as well: its streams move off it when it hangs, and none moves to it.

    failover_s  0: nothing moves, and only the calls that wait already are woken
    """

    @property
    def failover_s(self) -> float: ...
    @property
    def replicas(self) -> Sequence[WatchedReplica]: ...
    @property
    def retired(self) -> Sequence[WatchedReplica]: ...


class ReplicaWatch:
    def __init__(self, pool: WatchedPool, clock: Clock) -> None:
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

    def _look_at(self, replica: WatchedReplica) -> None:
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
            (*replica.instance, numerics_digest(replica.numerics))
            for replica in self._pool.replicas
            if not verdict(replica.connection.state, replica.connection.snapshot, now)
        )

    def _is_hanging(self, replica: WatchedReplica) -> bool:
        connection = replica.connection
        return stalled_s(connection.state, connection.snapshot, connection.silent_s, self._clock()) >= MOVE_AFTER_S

    def _other_ready(self, left: WatchedReplica) -> list[WatchedReplica]:
        """The ready replicas beside `left`."""
        now = self._clock()
        return [
            replica
            for replica in self._pool.replicas
            if replica is not left and not verdict(replica.connection.state, replica.connection.snapshot, now)
        ]
