"""Fair queueing between tiers, and inside each tier between its tenants, by tokens computed (docs/fairness.md)."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator

from headrace.core.plan import StepCosts
from headrace.core.request import EngineRequest
from headrace.policy.queues.queue import QueueTraits, StepShares
from headrace.policy.sequence import Sequence

MAX_REMEMBERED_TENANTS = 10_000

IDLE_CREDIT_TOKENS = 1024.0
"""Tokens (for a tier: divided by its weight) by which a tenant or tier that begins to wait may lag behind the least served waiting one."""

_Entry = tuple[float, float, int, str]


class TenantOrder:
    """A virtual token counter per tenant (Sheng et al. 2024): the tenant with the least service is served first."""

    def __init__(self) -> None:
        self.served = 0.0
        self._served: dict[str, float] = {}
        self._queues: dict[str, deque[Sequence]] = {}
        self._last_to_wait = ""
        self._size = 0
        self._heap: list[_Entry] = []
        self._current: dict[str, _Entry] = {}
        """The entries of `_heap` that count. Their service may lack a charge, never a refund."""
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
        for tenant in sorted(self._queues, key=lambda name: (self._served[name], self._queues[name][0].key)):
            yield self._queues[tenant][0]

    def num_waiting(self, tenant: str) -> int:
        return len(self._queues.get(tenant, ()))

    def remove(self, seq: Sequence) -> bool:
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
        return self._served.get(tenant, 0.0)

    def charge(self, tenant: str, service: float) -> None:
        self._served[tenant] = self._served.get(tenant, 0.0) + service
        if service < 0 and tenant in self._queues:
            self._enter(tenant)  # the entry in the heap would come too late

    def _enter(self, tenant: str) -> None:
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
        """A charge leaves a tenant's entry too early in the heap; it is replaced when it reaches the top."""
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
        kept = {*self._queues, self._last_to_wait, but}
        idle = sorted((name for name in self._served if name not in kept), key=lambda name: self._served[name])
        for name in idle[: len(self._served) // 2]:
            del self._served[name]

    def __len__(self) -> int:
        return self._size


def _insert(queue: deque[Sequence], seq: Sequence) -> None:
    if not queue or _place(queue[-1]) < _place(seq):
        queue.append(seq)
        return
    place = next(index for index, other in enumerate(queue) if _place(other) > _place(seq))
    queue.insert(place, seq)


def _place(seq: Sequence) -> tuple[float, int]:
    return seq.key, seq.seq_id


MAX_REMEMBERED_TIERS = 1000

SLACK_LEAD_TOKENS = 1024
"""Tiers at most this many weighted tokens ahead of the least served tier are ordered by slack, the time left until a TTFT goal is
missed.
"""


class FairShareQueue:
    """Serves the tier with the least weighted service first, and inside that tier the tenant with the least service."""

    traits = QueueTraits(has_tenants=True)
    shares = StepShares()

    def __init__(self) -> None:
        self._tiers: dict[str, TenantOrder] = {}
        self._waiting: dict[str, TenantOrder] = {}
        self._last_to_wait = TenantOrder()
        self._size = 0

    def push(self, seq: Sequence, cost_tokens: int) -> None:
        name = seq.request.tier.name
        tier = self._tier(name)
        if not len(tier):
            floor = min((other.served for other in self._waiting.values()), default=self._last_to_wait.served)
            tier.served = max(tier.served, floor - IDLE_CREDIT_TOKENS)
            self._waiting[name] = tier
        tier.push(seq)
        self._size += 1

    def head(self, now: float, costs: StepCosts) -> Sequence | None:
        if len(self._waiting) == 1:
            return next(iter(self._waiting.values())).head()
        firsts = [(tier, head) for tier in self._waiting.values() if (head := tier.head()) is not None]
        if not firsts:
            return None
        least = min(tier.served for tier, _ in firsts)
        return min(firsts, key=lambda pair: _rank(pair[0].served, least, _slack_s(pair[1], now, costs)))[1]

    def heads(self, now: float, costs: StepCosts) -> Iterator[Sequence]:
        for tier in sorted(self._waiting.values(), key=lambda tier: tier.served):
            yield from tier.heads()

    def num_of_tenant(self, seq: Sequence) -> int:
        return self._tier(seq.request.tier.name).num_waiting(seq.request.tenant)

    def start(self, seq: Sequence, now: float) -> None:
        self.remove(seq)

    def remove(self, seq: Sequence) -> None:
        name = seq.request.tier.name
        tier = self._waiting.get(name)
        if tier is None or not tier.remove(seq):
            return
        self._size -= 1
        if not len(tier):
            del self._waiting[name]
            self._last_to_wait = tier

    def outranks(self, seq: Sequence, other: Sequence) -> bool:
        return False

    def precedes(self, seq: Sequence, running: Sequence) -> bool:
        return self._service(seq)[:2] < self._service(running)[:2]

    def victim(self, candidates: Iterable[Sequence]) -> Sequence:
        return max(candidates, key=self._service)

    def prefill_order(self, sequences: list[Sequence], now: float, costs: StepCosts) -> list[Sequence]:
        if len({seq.request.tier.name for seq in sequences}) == 1:
            return sorted(sequences, key=self._service)
        least = min(self._tier(seq.request.tier.name).served for seq in sequences)
        slacks: dict[str, float] = {}
        for seq in sequences:
            name = seq.request.tier.name
            slacks[name] = min(slacks.get(name, math.inf), _slack_s(seq, now, costs))
        return sorted(
            sequences,
            key=lambda seq: (_rank(self._tier(name := seq.request.tier.name).served, least, slacks[name]), self._service(seq)),
        )

    def charge(self, sequences: Iterable[Sequence]) -> None:
        for seq in sequences:
            if count := seq.take_uncharged():
                self.count(seq.request, count)

    def count(self, request: EngineRequest, num_tokens: int) -> None:
        tier = self._tier(request.tier.name)
        tier.served += num_tokens / request.tier.weight
        tier.charge(request.tenant, num_tokens)

    def _service(self, seq: Sequence) -> tuple[float, float, float, int]:
        tier = self._tier(seq.request.tier.name)
        return tier.served, tier.service_of(seq.request.tenant), seq.key, seq.seq_id

    def _tier(self, name: str) -> TenantOrder:
        tier = self._tiers.get(name)
        if tier is None:
            if len(self._tiers) >= MAX_REMEMBERED_TIERS:
                self._forget_idle()
            tier = self._tiers[name] = TenantOrder()
        return tier

    def _forget_idle(self) -> None:
        idle = sorted((name for name in self._tiers if name not in self._waiting), key=lambda name: self._tiers[name].served)
        for name in idle[: len(self._tiers) // 2]:
            del self._tiers[name]

    def __len__(self) -> int:
        return self._size


def _rank(served: float, least: float, slack: float) -> tuple[bool, float, float]:
    return served - least > SLACK_LEAD_TOKENS, slack, served


def _slack_s(seq: Sequence, now: float, costs: StepCosts) -> float:
    goal_ms = seq.request.tier.ttft_ms
    if goal_ms is None or seq.first_token_emitted:
        return math.inf
    slack = seq.arrival + goal_ms / 1000 - now - max(seq.num_uncomputed, 1) * costs.token_s
    return slack if slack >= 0 else math.inf
