"""Admitted requests that no replica was sent yet, counted per model: their prompts are being read, or their tenants' limits asked.

Loads of replicas and what was sent to them know nothing of these. Without this count all requests that arrive while the event loop is busy
would be admitted by the same short queue.
"""

from __future__ import annotations

from headrace.core.request import PriorityClass


class Joining:
    """One admitted request, until it leaves: a replica was sent it, or it ended before that."""

    __slots__ = ("_counts", "_has_left", "_priority")

    def __init__(self, counts: list[int], priority: PriorityClass) -> None:
        self._counts, self._priority, self._has_left = counts, priority, False
        counts[priority] += 1

    def leave(self) -> None:
        """Leaving twice changes nothing."""
        if not self._has_left:
            self._has_left = True
            self._counts[self._priority] -= 1


class JoiningRequests:
    """The admitted requests of one model that no replica was sent yet. Lives on one event loop."""

    def __init__(self) -> None:
        self._counts = [0] * len(PriorityClass)

    def join(self, priority: PriorityClass) -> Joining:
        return Joining(self._counts, priority)

    def num_requests(self, lowest: PriorityClass) -> int:
        """How many of them are of class `lowest` or a higher one."""
        return sum(self._counts[: lowest + 1])
