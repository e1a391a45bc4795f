"""Configures how long a request may wait for a busy model. `policy.admission.decision` uses the value."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.option import option

GOAL_SHARE = 0.5
"""Part of a tier's `ttft_ms` that a request may be predicted to wait. The rest is for the request's own prompt and for errors of the
prediction. With all of the goal, overload would keep waits at the goal, and most served requests would miss it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRules:
    """The options below `gateway.admission`."""

    max_wait_s: float = option(
        60.0,
        "Longest predicted wait in seconds that a request joins; with a longer one it is refused with 429. "
        "Half of a tier's `ttft_ms` counts instead where that is shorter.",
        above=0.0,
    )

    def wait_bound_s(self, ttft_goal_s: float | None) -> float:
        """Longest predicted wait in seconds that a request of any class may join. ttft_goal_s: the tier's TTFT goal, None: it has none"""
        return self.max_wait_s if ttft_goal_s is None else min(self.max_wait_s, GOAL_SHARE * ttft_goal_s)
