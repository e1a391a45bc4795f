"""Fair shares: tenants take turns by weighted service. A push or a pop costs O(log n) in the tenants that wait."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable

from headrace.policy.queues.shares import StepShares
from headrace.policy.schedule.sequence import Sequence

MAX_REMEMBERED_TENANTS = 10_000

_Standing = tuple[float, float, int, str]
"""A tenant that waits: its service, the key of its first sequence, when it began to wait (to break ties), its name."""


class FairShareQueue:
    """Virtual token counter per tenant (Sheng et al. 2024): the tenant with the least weighted service goes first.

    A tenant that had nothing waiting is lifted to the least counter among those that have or, when nobody waits, to that of the last one
    that did: idling earns no credit.
    """

    charges = True
    shares = StepShares()

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._queues: dict[str, deque[Sequence]] = {}
        self._last_to_wait = ""
        self._size = 0
        self._heap: list[_Standing] = []
        self._standing: dict[str, _Standing] = {}
        """The one entry of `_heap` that counts, per tenant that waits. It may be older than a charge, never than a refund."""
        self._num_arrivals = 0

    def push(self, seq: Sequence, cost_tokens: int) -> None:
        tenant = seq.request.tenant
        self._activate(tenant)
        queue = self._queues.setdefault(tenant, deque())
        if seq.incarnation:
            queue.appendleft(seq)
        else:
            seq.key = seq.arrival
            queue.append(seq)
        self._size += 1
        if queue[0] is seq:
            self._stand(tenant)

    def head(self) -> Sequence | None:
        tenant = self._least_served()
        return None if tenant is None else self._queues[tenant][0]

    def remove(self, seq: Sequence) -> None:
        tenant = seq.request.tenant
        queue = self._queues.get(tenant)
        if queue is None or seq not in queue:
            return
        was_first = queue[0] is seq
        queue.remove(seq)
        self._size -= 1
        if not queue:
            del self._queues[tenant], self._standing[tenant]
            self._last_to_wait = tenant
        elif was_first:
            self._stand(tenant)

    def _stand(self, tenant: str) -> None:
        """Who is first of a tenant that waits, or its service, is new."""
        known = self._standing.get(tenant)
        if known is None:
            self._num_arrivals += 1
        place = self._num_arrivals if known is None else known[2]
        standing = (self._served[tenant], self._queues[tenant][0].key, place, tenant)
        self._standing[tenant] = standing
        heapq.heappush(self._heap, standing)
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._standing):
            self._heap = list(self._standing.values())
            heapq.heapify(self._heap)

    def _least_served(self) -> str | None:
        """The tenant that goes first. Charges only add, so an entry may stand too early, never too late: first, it is put right."""
        while self._heap:
            standing = self._heap[0]
            tenant = standing[3]
            if self._standing.get(tenant) is standing and standing[0] == self._served[tenant]:
                return tenant
            heapq.heappop(self._heap)
            if self._standing.get(tenant) is standing:
                self._stand(tenant)
        return None

    def victim(self, candidates: Iterable[Sequence]) -> Sequence:
        return max(candidates, key=lambda seq: (self._served.get(seq.request.tenant, 0.0), seq.key, seq.seq_id))

    def prefill_order(self, sequences: list[Sequence]) -> list[Sequence]:
        return sorted(sequences, key=lambda seq: (self._served.get(seq.request.tenant, 0.0), seq.key, seq.seq_id))

    def charge(self, seqs: Iterable[Sequence], counts: Iterable[int]) -> None:
        served = self._served
        for seq, num_tokens in zip(seqs, counts, strict=True):
            tenant = seq.request.tenant
            served[tenant] = served.get(tenant, 0.0) + num_tokens / seq.request.weight
            if num_tokens < 0 and tenant in self._queues:
                self._stand(tenant)

    def _activate(self, tenant: str) -> None:
        if tenant in self._queues:
            return
        least = self._least_served()
        floor = self._served.get(self._last_to_wait if least is None else least, 0.0)
        self._served[tenant] = max(self._served.get(tenant, 0.0), floor)
        if len(self._served) > MAX_REMEMBERED_TENANTS:
            self._forget_idle(but=tenant)

    def _forget_idle(self, *, but: str) -> None:
        """Keep the map bounded: tenants without waiting work and least service go first; they re-enter at the floor."""
        kept = {*self._queues, self._last_to_wait, but}
        idle = sorted((name for name in self._served if name not in kept), key=lambda name: self._served[name])
        for name in idle[: len(self._served) // 2]:
            del self._served[name]

    def __len__(self) -> int:
        return self._size
