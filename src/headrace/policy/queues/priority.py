"""Serves premium before standard before batch, with aging; inside a class, shares between tiers and tenants (docs/fairness.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headrace.core.plan import StepCosts
from headrace.core.request import PriorityClass
from headrace.policy.queues.fair import FairShareQueue
from headrace.policy.queues.queue import QueueTraits, StepShares
from headrace.policy.sequence import STALLED, Sequence

PRIORITY_AGING_S = 10.0
"""Seconds without a started sequence after which a waiting class has aged, for each class between it and the highest waiting class."""

CLASS_WEIGHTS = {PriorityClass.PREMIUM: 64.0, PriorityClass.STANDARD: 8.0, PriorityClass.BATCH: 1.0}
"""Ratio of the tokens that the classes get in the long run while all of them wait."""


class _ClassOrder(FairShareQueue):
    """since: seconds when the class began to wait, or last started a sequence while it had its share"""

    def __init__(self, priority: PriorityClass) -> None:
        super().__init__()
        self.priority = priority
        self.served = 0.0
        self.since = 0.0


class PriorityQueue:
    traits = QueueTraits(has_classes=True, has_tenants=True)
    shares = StepShares(premium_headroom=1 / 16)

    def __init__(self) -> None:
        self._classes = {priority: _ClassOrder(priority) for priority in PriorityClass}
        self._last_to_wait = self._classes[PriorityClass.STANDARD]
        self._size = 0

    def push(self, seq: Sequence, cost_tokens: int) -> None:
        order = self._classes[seq.request.priority]
        if not len(order):
            floor = min((other.served for other in self._waiting()), default=self._last_to_wait.served)
            order.served = max(order.served, floor)
            order.since = seq.stage_since
        order.push(seq, cost_tokens)
        self._size += 1

    def head(self, now: float, costs: StepCosts) -> Sequence | None:
        waiting = self._waiting()
        if len(waiting) > 1:
            waiting = [min(_served_now(waiting, now), key=lambda order: (order.served, order.since + order.priority * PRIORITY_AGING_S))]
        return waiting[0].head(now, costs) if waiting else None

    def heads(self, now: float, costs: StepCosts) -> Iterator[Sequence]:
        for order in self._waiting():
            yield from order.heads(now, costs)

    def num_of_tenant(self, seq: Sequence) -> int:
        return self._classes[seq.request.priority].num_of_tenant(seq)

    def start(self, seq: Sequence, now: float) -> None:
        order = self._classes[seq.request.priority]
        higher = [other for other in self._waiting() if other.priority < order.priority]
        seq.has_aged = bool(higher)
        if all(order.served >= other.served for other in higher):
            order.since = now
        self.remove(seq)

    def remove(self, seq: Sequence) -> None:
        order = self._classes[seq.request.priority]
        before = len(order)
        order.remove(seq)
        self._size += len(order) - before
        if before and not len(order):
            self._last_to_wait = order

    def outranks(self, seq: Sequence, other: Sequence) -> bool:
        return seq.request.priority < other.request.priority and not other.has_aged

    def precedes(self, seq: Sequence, running: Sequence) -> bool:
        if seq.request.priority != running.request.priority:
            return seq.request.priority < running.request.priority
        return self._classes[seq.request.priority].precedes(seq, running)

    def victim(self, candidates: Iterable[Sequence]) -> Sequence:
        among = list(candidates)
        lowest = max(seq.request.priority for seq in among)
        return self._classes[lowest].victim(seq for seq in among if seq.request.priority == lowest)

    def prefill_order(self, sequences: list[Sequence], now: float, costs: StepCosts) -> list[Sequence]:
        present = sorted({seq.request.priority for seq in sequences})
        if len(present) == 1:
            return self._classes[present[0]].prefill_order(sequences, now, costs)
        aged = {seq.seq_id: seq for seq in sequences if _has_aged(seq, present[0], now)}
        ordered = sorted(aged.values(), key=lambda seq: (seq.stage_since, seq.seq_id))
        for priority in present:
            same = [seq for seq in sequences if seq.request.priority == priority and seq.seq_id not in aged]
            ordered += self._classes[priority].prefill_order(same, now, costs) if same else []
        return ordered

    def charge(self, sequences: Iterable[Sequence]) -> None:
        for seq in sequences:
            if count := seq.take_uncharged():
                order = self._classes[seq.request.priority]
                order.served += count / CLASS_WEIGHTS[order.priority]
                order.count(seq.request, count)

    def _waiting(self) -> list[_ClassOrder]:
        return [order for order in self._classes.values() if len(order)]

    def __len__(self) -> int:
        return self._size


def _served_now(waiting: list[_ClassOrder], now: float) -> Iterator[_ClassOrder]:
    for order in waiting:
        if order is waiting[0] or now - order.since >= (order.priority - waiting[0].priority) * PRIORITY_AGING_S:
            yield order


def _has_aged(seq: Sequence, highest: PriorityClass, now: float) -> bool:
    distance = seq.request.priority - highest
    return distance > 0 and seq.stage is STALLED and now - seq.stage_since >= distance * PRIORITY_AGING_S
