"""Fair queueing between tiers, and inside each tier between its tenants, by tokens computed (docs/fairness.md).

Tiers that have received about the same service are ordered by how soon their TTFT goals are missed (SLACK_LEAD_TOKENS).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from headrace.core.plan import StepCosts
from headrace.core.request import EngineRequest
from headrace.policy.queues.queue import QueueTraits
from headrace.policy.queues.shares import StepShares
from headrace.policy.queues.tenants import IDLE_CREDIT_TOKENS, TenantOrder
from headrace.policy.sequence import Sequence

MAX_REMEMBERED_TIERS = 1000
"""Most tiers whose counters are kept. When one more arrives, the idle tiers with the least service are forgotten, up to half of all."""

SLACK_LEAD_TOKENS = 1024
"""Tiers at most this many weighted tokens ahead of the least served tier are ordered by slack, the time left until a TTFT goal is missed.
With a larger number a tier with short goals would take the share of the others for longer than a step or two."""


class FairShareQueue:
    """Serves the tier with the least weighted service first, and inside that tier the tenant with the least service.

    Weighted service is the number of tokens computed, divided by the tier's weight. A tier that was idle may not catch up at once: when
    the tier begins to wait, its service is raised to IDLE_CREDIT_TOKENS below the least service of the waiting tiers. When no tier waits,
    the service of the tier that waited last takes the place of that minimum. `TenantOrder` has the same rule for tenants.
    """

    traits = QueueTraits(has_tenants=True)
    shares = StepShares()

    def __init__(self) -> None:
        self._tiers: dict[str, TenantOrder] = {}
        self._waiting: dict[str, TenantOrder] = {}
        """Tiers with waiting sequences, in the order in which the tiers began to wait."""
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
        """Add computed tokens to the service of a request's tier and tenant."""
        tier = self._tier(request.tier.name)
        tier.served += num_tokens / request.tier.weight
        tier.charge(request.tenant, num_tokens)

    def _service(self, seq: Sequence) -> tuple[float, float, float, int]:
        """Sort key of a sequence: weighted service of its tier, service of its tenant, then the order among the tenant's sequences."""
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
        """Forget the least served idle tiers, up to half of all tiers. A tier without waiting sequences is idle."""
        idle = sorted((name for name in self._tiers if name not in self._waiting), key=lambda name: self._tiers[name].served)
        for name in idle[: len(self._tiers) // 2]:
            del self._tiers[name]

    def __len__(self) -> int:
        return self._size


def _rank(served: float, least: float, slack: float) -> tuple[bool, float, float]:
    """Sort key of a tier; the smallest is served first. Without TTFT goals all slacks are infinite, and the least served tier is first."""
    return served - least > SLACK_LEAD_TOKENS, slack, served


def _slack_s(seq: Sequence, now: float, costs: StepCosts) -> float:
    """Seconds that the prefill of a sequence may wait so that its first token still meets the tier's TTFT goal.

    Infinite for a tier without a TTFT goal, after the first token, and when the goal is already missed.
    """
    goal_ms = seq.request.tier.ttft_ms
    if goal_ms is None or seq.first_token_emitted:
        return math.inf
    slack = seq.arrival + goal_ms / 1000 - now - max(seq.num_uncomputed, 1) * costs.token_s
    return slack if slack >= 0 else math.inf
