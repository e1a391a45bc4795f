"""Assigns the slots of one engine to its running sequences."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.core.ids import SeqId
from headrace.core.request import PriorityClass
from headrace.policy.sequence import NO_SLOT, Sequence


class Slots:
    """The slots of one engine, and the sequences that hold them.

    generation    raised whenever a sequence starts to run or stops
    """

    def __init__(self, num_slots: int) -> None:
        self._running: dict[SeqId, Sequence] = {}
        self.num_of_class = [0] * len(PriorityClass)
        self.num_goals = 0
        self.generation = 0
        self._num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._ended: list[int] = []

    def __len__(self) -> int:
        return len(self._running)

    @property
    def running(self) -> list[Sequence]:
        """The running sequences, in the order in which they started; the list is the caller's own."""
        return list(self._running.values())

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def has_ended(self) -> bool:
        return bool(self._ended)

    def start(self, seq: Sequence, now: float) -> None:
        """The caller asked `has_free` first."""
        self.num_of_class[seq.request.priority] += 1
        self.num_goals += seq.request.tier.tpot_ms is not None
        seq.start(self._free.pop(), now)
        self._running[seq.seq_id] = seq
        self.generation += 1

    def leave(self, seq: Sequence) -> None:
        if seq.slot == NO_SLOT:
            return
        del self._running[seq.seq_id]
        self.num_of_class[seq.request.priority] -= 1
        self.num_goals -= seq.request.tier.tpot_ms is not None
        self.generation += 1
        self._ended.append(seq.slot)
        self._free.append(seq.slot)
        seq.slot = NO_SLOT

    def discard_rows(self, seq: Sequence) -> None:
        seq.discard_rows()
        self.generation += 1  # `RunningColumns` hold its plan_epoch

    def take_ended(self) -> list[int]:
        ended, self._ended = self._ended, []
        return ended

    def check(self, running: Iterable[Sequence]) -> None:
        among = list(running)
        slots = [seq.slot for seq in self._running.values()]
        assert len(set(slots)) == len(slots), "two sequences in one slot"
        assert sorted([*slots, *self._free]) == list(range(self._num_slots)), "a slot was lost"
        assert len(among) == len(self) == sum(self.num_of_class)
        assert all(self.num_of_class[seq.request.priority] > 0 for seq in among), "running sequences are miscounted by class"
        assert self.num_goals == sum(seq.request.tier.tpot_ms is not None for seq in among), "goals are miscounted"
