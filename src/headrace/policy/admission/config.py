"""How long a request may wait for a busy model. What follows from it: `policy.admission.ladder`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.core.request import PriorityClass

WAIT_FACTORS: Mapping[PriorityClass, float] = {PriorityClass.PREMIUM: 2.0, PriorityClass.STANDARD: 1.0, PriorityClass.BATCH: 0.5}
"""Priority class -> multiple of the longest wait that its requests join. The predicted wait is of the whole queue, whatever its classes:
standard requests stop joining at 1, so that beyond it at least half of the queue is premium work, which a premium request does wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRules:
    """
    queue_depth  a model with more waiting sequences than this at every replica is busy: requests below premium go to its smaller model
    max_wait_s   longest predicted wait in seconds that a standard request joins; one more is refused. WAIT_FACTORS has the other classes
    """

    queue_depth: int = 10
    max_wait_s: float = 60.0

    def wait_bound_s(self, priority: PriorityClass, ttft_goal_s: float | None) -> float:
        """ttft_goal_s: of the tier: waiting longer than it misses it"""
        return WAIT_FACTORS[priority] * min(self.max_wait_s, ttft_goal_s or self.max_wait_s)
