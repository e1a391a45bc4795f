"""Moves requests that wait at replicas with queues to one that has become ready since they were sent (`policy.routing.moves`)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from functools import partial

from headrace.core.errors import Unavailable, counted
from headrace.gateway.upstream.own.replica_health import Replica, ReplicaInstance
from headrace.policy.routing.moves import MOVES_EVERY_S, moving
from headrace.policy.routing.predicted_time import RequestSize
from headrace.wire.client import SeenLoad
from headrace.wire.service import Handle
from headrace.wire.stream import ReplicaStream

log = logging.getLogger(__name__)


class Moved(Unavailable):
    """Raised by a stream of which nothing was read: its request goes to `replica`."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        super().__init__(f"moved to replica {replica.name}")


class QueueMoves:
    """
    _waited  by replica, the requests that waited elsewhere when it became ready, higher classes first and then by their places
    _loads   by the replica that requests left, its load then: it is asked for more once it has reported anew
    """

    def __init__(self) -> None:
        self._known: frozenset[ReplicaInstance] = frozenset()
        self._waited: dict[Replica, list[tuple[Replica, Handle]]] = {}
        self._loads: dict[Replica, SeenLoad | None] = {}
        self._next_at = 0.0

    def look(self, ready: Sequence[Replica], replicas: Iterable[Replica], size: RequestSize, block_size: int, now: float) -> None:
        """replicas: all, retired ones too; size: of a mean request"""
        replicas = list(replicas)
        new = [replica for replica in ready if replica.instance not in self._known]
        awake = [each.instance for each in replicas if not each.is_asleep]
        self._known = self._known.intersection(awake).union([each.instance for each in new])
        for replica in new:
            found = [(other, enumerate(other.waiting())) for other in replicas if other is not replica]
            ranked = [(stream.priority, place, other, stream.handle) for other, streams in found for place, stream in streams]
            self._waited[replica] = [each[2:] for each in sorted(ranked, key=lambda each: each[:2])]
        self._waited = {new: waited for new, waited in self._waited.items() if waited and new in ready}
        if not self._waited:
            self._loads.clear()
        elif now >= self._next_at:
            self._next_at = now + MOVES_EVERY_S
            for replica in self._waited:
                self._look_at(replica, size, block_size)

    def _look_at(self, new: Replica, size: RequestSize, block_size: int) -> None:
        others = {other for other, _ in self._waited[new]}
        left = {(other, stream.handle) for other in others for stream in other.waiting() if new.can_take(stream)}
        self._waited[new] = [each for each in self._waited[new] if each in left]
        waiting = [each for each in self._waited[new] if each[0].connection.snapshot is not self._loads.get(each[0])]
        queues = {other.name: other.candidate() for other, _ in waiting}
        chosen = moving([other.name for other, _ in waiting], queues, new.candidate(), size, block_size=block_size)
        for other in {waiting[place][0] for place in chosen}:
            handles = {handle for owner, handle in (waiting[place] for place in chosen) if owner is other}
            num_moved = other.connection.abandon(partial(Moved, new), partial(_is_one_of, handles))
            self._loads[other] = other.connection.snapshot
            log.info("%s that waited at replica %s: to %s", counted(num_moved, "request"), other.name, new.name)


def _is_one_of(handles: Collection[Handle], stream: ReplicaStream) -> bool:
    return stream.handle in handles
