"""Orders the waiting sequences of one tier, fairly between its tenants. A push or a pop costs O(log n) in the number of waiting tenants."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

from headrace.policy.sequence import Sequence

MAX_REMEMBERED_TENANTS = 10_000
"""Service counters kept. Beyond this number half of them are dropped: those of tenants without waiting sequences, the least served
first."""

IDLE_CREDIT_TOKENS = 1024.0
"""Tokens (for a tier: divided by its weight) by which a tenant or tier that begins to wait may lag behind the least served waiting one. A
short burst after a pause is then served at once. However often a tenant pauses, it gets no more than this beyond its share."""

_Entry = tuple[float, float, int, str]
"""A waiting tenant in the heap: its service, the key of its first sequence, the order in which it began to wait (for ties), its name."""


class TenantOrder:
    """A virtual token counter per tenant (Sheng et al. 2024): the tenant with the least service is served first.

    When a tenant begins to wait, its counter is raised to IDLE_CREDIT_TOKENS below the least counter among the waiting tenants, or, when
    none waits, below that of the tenant that waited last: idling earns no more credit.

    served  weighted service of the tier itself, which the caller counts
    """

    def __init__(self) -> None:
        self.served = 0.0
        self._served: dict[str, float] = {}
        self._queues: dict[str, deque[Sequence]] = {}
        self._last_to_wait = ""
        self._size = 0
        self._heap: list[_Entry] = []
        self._current: dict[str, _Entry] = {}
        """Tenant -> the one entry of `_heap` that counts. Its service may lack a charge, never a refund."""
        self._num_arrivals = 0

    def push(self, seq: Sequence) -> None:
        tenant = seq.request.tenant
        self._activate(tenant)
        queue = self._queues.setdefault(tenant, deque())
        seq.key = seq.arrival
        _insert(queue, seq)
        self._size += 1
        if queue[0] is seq:
            self._enter(tenant)

    def head(self) -> Sequence | None:
        tenant = self._least_served()
        return None if tenant is None else self._queues[tenant][0]

    def heads(self) -> Iterator[Sequence]:
        """Each waiting tenant's first sequence, the least served tenant's first."""
        for tenant in sorted(self._queues, key=lambda name: (self._served[name], self._queues[name][0].key)):
            yield self._queues[tenant][0]

    def num_waiting(self, tenant: str) -> int:
        return len(self._queues.get(tenant, ()))

    def remove(self, seq: Sequence) -> bool:
        """Remove a waiting sequence. False: it did not wait here."""
        tenant = seq.request.tenant
        queue = self._queues.get(tenant)
        if queue is None or seq not in queue:
            return False
        was_first = queue[0] is seq
        queue.remove(seq)
        self._size -= 1
        if not queue:
            del self._queues[tenant], self._current[tenant]
            self._last_to_wait = tenant
        elif was_first:
            self._enter(tenant)
        return True

    def service_of(self, tenant: str) -> float:
        """A tenant's service: tokens computed for it, plus the amount by which it was raised when it began to wait."""
        return self._served.get(tenant, 0.0)

    def charge(self, tenant: str, service: float) -> None:
        self._served[tenant] = self._served.get(tenant, 0.0) + service
        if service < 0 and tenant in self._queues:
            self._enter(tenant)  # the entry in the heap would come too late

    def _enter(self, tenant: str) -> None:
        """Push a new entry of a waiting tenant whose first sequence or service has changed."""
        known = self._current.get(tenant)
        if known is None:
            self._num_arrivals += 1
        order = self._num_arrivals if known is None else known[2]
        entry = (self._served[tenant], self._queues[tenant][0].key, order, tenant)
        self._current[tenant] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._current):
            self._heap = list(self._current.values())
            heapq.heapify(self._heap)

    def _least_served(self) -> str | None:
        """The tenant to serve next. A charge leaves a tenant's entry too early in the heap; it is replaced when it reaches the top."""
        while self._heap:
            entry = self._heap[0]
            tenant = entry[3]
            if self._current.get(tenant) is entry and entry[0] == self._served[tenant]:
                return tenant
            heapq.heappop(self._heap)
            if self._current.get(tenant) is entry:
                self._enter(tenant)
        return None

    def _activate(self, tenant: str) -> None:
        if tenant in self._queues:
            return
        least = self._least_served()
        floor = self._served.get(self._last_to_wait if least is None else least, 0.0) - IDLE_CREDIT_TOKENS
        self._served[tenant] = max(self._served.get(tenant, 0.0), floor)
        if len(self._served) > MAX_REMEMBERED_TENANTS:
            self._forget_idle(but=tenant)

    def _forget_idle(self, *, but: str) -> None:
        """Drop half of the counters: of tenants with nothing waiting, those with the least service first."""
        kept = {*self._queues, self._last_to_wait, but}
        idle = sorted((name for name in self._served if name not in kept), key=lambda name: self._served[name])
        for name in idle[: len(self._served) // 2]:
            del self._served[name]

    def __len__(self) -> int:
        return self._size


def _insert(queue: deque[Sequence], seq: Sequence) -> None:
    """Insert a sequence by its key. Most are the newest; a preempted one is among the oldest."""
    if not queue or _place(queue[-1]) < _place(seq):
        queue.append(seq)
        return
    place = next(index for index, other in enumerate(queue) if _place(other) > _place(seq))
    queue.insert(place, seq)


def _place(seq: Sequence) -> tuple[float, int]:
    return seq.key, seq.seq_id
