"""When waiting must end: a heap of (time, sequence), lazily rid of sequences that ended in time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from enum import IntEnum

from headrace.policy.schedule.sequence import SeqState, Sequence

MIN_SWEEP = 64
"""Fewer entries than this are not worth sweeping."""


class Limit(IntEnum):
    """What is limited. An answer's deadline ends the sequence; a prerequisite's only while it is missing."""

    ANSWER = 0
    PREREQUISITE = 1


class Deadlines:
    """Entries of sequences that are done are skipped, and swept out once they are the most."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Limit, str, Sequence]] = []
        self._sweep_at = MIN_SWEEP

    def add(self, at: float, seq: Sequence, kind: Limit, what: str = "") -> None:
        """what: the prerequisite. The same thing is limited once per sequence: entries never compare sequences."""
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if entry[4].state is not SeqState.DONE]
            heapq.heapify(self._heap)
            self._sweep_at = max(MIN_SWEEP, 2 * len(self._heap))
        heapq.heappush(self._heap, (at, seq.seq_id, kind, what, seq))

    def take_due(self, now: float) -> Iterator[tuple[Sequence, Limit, str]]:
        """Live sequences whose time has come, each entry once."""
        while self._heap and self._heap[0][0] <= now:
            _, _, kind, what, seq = heapq.heappop(self._heap)
            if seq.state is not SeqState.DONE:
                yield seq, kind, what

    def next(self) -> float | None:
        """The earliest entry's time; it may be of a sequence that is done."""
        return self._heap[0][0] if self._heap else None
