"""Finds the answers and prerequisites whose time is over: a heap of (time, sequence). Entries of sequences that ended in time are removed
lazily.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from enum import IntEnum

from headrace.policy.sequence import SeqState, Sequence

MIN_SWEEP = 64
"""Entries of ended sequences are not swept out of a heap smaller than this."""


class Limit(IntEnum):
    """The kind of a deadline. An answer's ends the sequence; a prerequisite's ends it only while the prerequisite is missing."""

    ANSWER = 0
    PREREQUISITE = 1


class Deadlines:
    """Entries of ended sequences are skipped, and swept out when the heap has doubled since the last sweep."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Limit, str, Sequence]] = []
        self._sweep_at = MIN_SWEEP

    def add(self, at: float, seq: Sequence, kind: Limit, what: str = "") -> None:
        """what: the prerequisite's name. A sequence has one entry per kind and name, so the heap never compares sequences."""
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if entry[4].state is not SeqState.DONE]
            heapq.heapify(self._heap)
            self._sweep_at = max(MIN_SWEEP, 2 * len(self._heap))
        heapq.heappush(self._heap, (at, seq.seq_id, kind, what, seq))

    def take_due(self, now: float) -> Iterator[tuple[Sequence, Limit, str]]:
        """Take the entries whose time has come; yield those of live sequences."""
        while self._heap and self._heap[0][0] <= now:
            _, _, kind, what, seq = heapq.heappop(self._heap)
            if seq.state is not SeqState.DONE:
                yield seq, kind, what

    def next(self) -> float | None:
        """The earliest entry's time, None without entries. Its sequence may have ended."""
        return self._heap[0][0] if self._heap else None
