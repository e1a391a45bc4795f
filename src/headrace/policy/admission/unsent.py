"""Counts, for each model, the admitted requests that no replica was sent yet. Such a request's prompt is being read, or its tenant's limits
are being asked.

Load reports know nothing of these requests, nor do the counts of what replicas were sent. Without this count the same short queue would
admit every request that arrives while the event loop is busy.
"""

from __future__ import annotations

from headrace.core.request import PriorityClass


class UnsentRequest:
    """One admitted request. It is counted until it is sent to a replica, or until it ends unsent."""

    __slots__ = ("_counts", "_is_counted", "_priority")

    def __init__(self, counts: list[int], priority: PriorityClass) -> None:
        self._counts, self._priority, self._is_counted = counts, priority, True
        counts[priority] += 1

    def uncount(self) -> None:
        """Count the request no longer. A second call changes nothing."""
        if self._is_counted:
            self._is_counted = False
            self._counts[self._priority] -= 1


class UnsentRequests:
    """The admitted requests of one model that no replica was sent yet. Used on one event loop."""

    def __init__(self) -> None:
        self._counts = [0] * len(PriorityClass)

    def add(self, priority: PriorityClass) -> UnsentRequest:
        return UnsentRequest(self._counts, priority)

    def num_requests(self, lowest: PriorityClass) -> int:
        """How many of the requests are of class `lowest` or a higher one."""
        return sum(self._counts[: lowest + 1])
