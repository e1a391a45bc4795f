"""Counts what a canary, and the replicas before it, have served since it serves. `policy.canary` judges by that."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.policy.canary import MAX_WAIT_S, Judgement, ServedCounts, judge


class CanaryWatch:
    """num_starts: of its process, when it began to serve"""

    def __init__(self, name: str, num_starts: int, now: float) -> None:
        self.name = name
        self._num_starts = num_starts
        self._began = now
        self._last: dict[str, ServedCounts] = {}
        self._canary = self._before = ServedCounts()

    def look(
        self, counts: Mapping[str, ServedCounts], num_starts: int, why_not_ready: str, now: float, *, is_one_lost: bool
    ) -> Judgement | None:
        """Returns None where it has to be looked at again.

        counts       of it and the replicas before it
        is_one_lost  one before it has to come back: streams of its version may wait for that
        """
        for name, seen in counts.items():
            grown = seen.since(self._last.get(name, seen))
            self._last[name] = seen
            if name == self.name:
                self._canary = self._canary.plus(grown)
            else:
                self._before = self._before.plus(grown)
        waited_s = now - self._began
        if num_starts > self._num_starts:
            return Judgement(True, "its process has ended, and was started again")
        judged = judge(self._canary, self._before, waited_s)
        if why_not_ready and not (judged is not None and judged.is_worse):
            return Judgement(True, f"it is not ready: {why_not_ready}") if waited_s >= MAX_WAIT_S else None
        if is_one_lost and waited_s < MAX_WAIT_S and judged is not None and not judged.is_worse:
            return None
        return judged
