"""Implements the policies whose order is a key fixed at first push: first come first served, and shortest job first.

Aging needs no rescans: with linear aging the order of two waiting sequences never changes, because `length - waited / aging_s` sorts
like `arrival + length * aging_s`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from headrace.core.plan import StepCosts
from headrace.policy.queues.queue import QueueTraits, StepShares
from headrace.policy.sequence import Sequence

SJF_AGING_S_PER_TOKEN = 0.01


class KeyQueue:
    """A removed sequence's entry stays until it is on top, or the heap has four entries per sequence."""

    traits = QueueTraits()
    shares = StepShares()

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Sequence]] = []
        self._waiting: set[int] = set()
        self._pushes = 0

    def key_of(self, seq: Sequence, cost_tokens: int) -> float:
        return seq.arrival

    def push(self, seq: Sequence, cost_tokens: int) -> None:
        if seq.plan_epoch == 0:
            seq.key = self.key_of(seq, cost_tokens)
        self._pushes += 1  # the number decides between two entries of one sequence, so that the heap never compares sequences
        heapq.heappush(self._heap, (seq.key, seq.seq_id, self._pushes, seq))
        self._waiting.add(seq.seq_id)

    def head(self, now: float, costs: StepCosts) -> Sequence | None:
        while self._heap and self._heap[0][1] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][3] if self._heap else None

    def heads(self, now: float, costs: StepCosts) -> Iterator[Sequence]:
        if (head := self.head(now, costs)) is not None:
            yield head

    def num_of_tenant(self, seq: Sequence) -> int:
        return 1

    def start(self, seq: Sequence, now: float) -> None:
        self.remove(seq)

    def remove(self, seq: Sequence) -> None:
        self._waiting.discard(seq.seq_id)
        if self._heap and self._heap[0][1] == seq.seq_id:
            heapq.heappop(self._heap)
        elif len(self._heap) > 64 and len(self._heap) > 4 * len(self._waiting):
            self._compact()

    def _compact(self) -> None:
        self._heap = [entry for entry in self._heap if entry[1] in self._waiting]
        heapq.heapify(self._heap)

    def outranks(self, seq: Sequence, other: Sequence) -> bool:
        return False

    def precedes(self, seq: Sequence, running: Sequence) -> bool:
        return False

    def victim(self, candidates: Iterable[Sequence]) -> Sequence:
        return max(candidates, key=lambda seq: (seq.key, seq.seq_id))

    def prefill_order(self, sequences: list[Sequence], now: float, costs: StepCosts) -> list[Sequence]:
        return sorted(sequences, key=lambda seq: (seq.key, seq.seq_id))

    def charge(self, sequences: Iterable[Sequence]) -> None:
        return None

    def __len__(self) -> int:
        return len(self._waiting)


class FcfsQueue(KeyQueue):
    pass


class SjfQueue(KeyQueue):
    def key_of(self, seq: Sequence, cost_tokens: int) -> float:
        return seq.arrival + cost_tokens * SJF_AGING_S_PER_TOKEN
