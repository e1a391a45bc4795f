"""The rules of KEDA and of Ray Serve, as their documentation has them, for `bench.scaling`."""

from __future__ import annotations

import math
from collections import deque

from headrace.policy.scaling.autoscaler import ScalingDecision, ScalingFacts


class KedaQueueRule:
    """KEDA 2 with the Prometheus trigger on waiting requests, and the HPA behind it: AverageValue, polled every 30 s.

    threshold  waiting requests per replica. A query without a result counts as zero (`ignoreNullValues`, on by default).
    """

    POLLING_S, STABILIZATION_S, TOLERANCE = 30.0, 300.0, 0.1

    def __init__(self, threshold: float, min_replicas: int, max_replicas: int) -> None:
        self._threshold, self._min, self._max = threshold, min_replicas, max_replicas
        self._current = max(1, min_replicas)
        self._next = 0.0
        self._wanted: deque[tuple[float, int]] = deque()

    def decide(self, facts: ScalingFacts, now: float) -> ScalingDecision:
        if now < self._next:
            return ScalingDecision(self._current, "not polled")
        self._next = now + self.POLLING_S
        waiting = 0 if facts.age_s > 0.0 else facts.num_waiting
        wanted = math.ceil(waiting / self._threshold)
        if self._current and abs(waiting / self._threshold / self._current - 1.0) <= self.TOLERANCE:
            wanted = self._current
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - self.STABILIZATION_S:
            self._wanted.popleft()
        wanted = max(wanted, max(count for _, count in self._wanted)) if wanted < self._current else min(wanted, 2 * self._current + 4)
        self._current = max(self._min, min(self._max, wanted))
        return ScalingDecision(self._current, f"{waiting} wait")


class RayServeRule:
    """Ray Serve's default policy: ongoing requests per replica over the last 30 s, against a target, with delays before both directions."""

    LOOK_BACK_S, UPSCALE_S, DOWNSCALE_S = 30.0, 30.0, 600.0

    def __init__(self, target_ongoing: float, min_replicas: int, max_replicas: int) -> None:
        self._target, self._min, self._max = target_ongoing, min_replicas, max_replicas
        self._current = max(1, min_replicas)
        self._seen: deque[tuple[float, float]] = deque()
        self._since: tuple[int, float] = (0, 0.0)

    def decide(self, facts: ScalingFacts, now: float) -> ScalingDecision:
        if facts.age_s == 0.0:
            self._seen.append((now, facts.num_arrived - facts.num_finished))
        while self._seen and self._seen[0][0] < now - self.LOOK_BACK_S:
            self._seen.popleft()
        ongoing = sum(count for _, count in self._seen) / len(self._seen) if self._seen else 0.0
        wanted = max(self._min, min(self._max, math.ceil(ongoing / self._target)))
        direction = (wanted > self._current) - (wanted < self._current)
        if direction != self._since[0]:
            self._since = (direction, now)
        delay_s = self.UPSCALE_S if direction > 0 else self.DOWNSCALE_S
        if direction and now - self._since[1] >= delay_s:
            self._current, self._since = wanted, (0, now)
        return ScalingDecision(self._current, f"{ongoing:.1f} run or wait")
