"""The rules of KEDA, alone and as our chart sets it, and of Ray Serve, as their documentation has them, for `bench.scaling`."""

from __future__ import annotations

import math
from collections import deque

from headrace.policy.scaling.autoscaler import ScalingDecision, ScalingFacts


class HorizontalPodAutoscaler:
    """What stands behind KEDA while there are pods: an external metric with an AverageValue, asked every 15 s.

    stabilization_s, max_removed  of `scaleDown`: no fewer than the most that was wanted for so long; pods that go in 60 s, None: all
    """

    SYNC_S, REMOVAL_S, TOLERANCE = 15.0, 60.0, 0.1

    def __init__(
        self, threshold: float, min_replicas: int, max_replicas: int, *, stabilization_s: float = 300.0, max_removed: int | None = None
    ) -> None:
        self._threshold, self._min, self._max = threshold, min_replicas, max_replicas
        self._stabilization_s, self._max_removed = stabilization_s, max_removed
        self.current = max(1, min_replicas)
        self._next = 0.0
        self._wanted: deque[tuple[float, int]] = deque()
        self._removed: deque[tuple[float, int]] = deque()

    def is_due(self, now: float) -> bool:
        is_due = now >= self._next
        if is_due:
            self._next = now + self.SYNC_S
        return is_due

    def scale(self, metric: float, now: float) -> None:
        load = metric / self._threshold
        is_near = self.current > 0 and abs(load / self.current - 1.0) <= self.TOLERANCE
        wanted = self.current if is_near else math.ceil(load)
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - self._stabilization_s:
            self._wanted.popleft()
        if wanted > self.current:
            wanted = min(wanted, max(2 * self.current, self.current + 4))
        else:
            wanted = self._fewer(max(count for _, count in self._wanted), now)
        self.current = max(self._min, min(self._max, wanted))

    def _fewer(self, wanted: int, now: float) -> int:
        while self._removed and self._removed[0][0] <= now - self.REMOVAL_S:
            self._removed.popleft()
        num_removed = max(0, self.current - wanted)
        if self._max_removed is not None:
            num_removed = min(num_removed, self._max_removed - sum(count for _, count in self._removed))
        if num_removed:
            self._removed.append((now, num_removed))
        return self.current - num_removed


class KedaWaitingRule:
    """KEDA 2 with the Prometheus trigger on waiting requests. A query without a result is zero (`ignoreNullValues`, on by default)."""

    def __init__(self, threshold: float, min_replicas: int, max_replicas: int) -> None:
        self._hpa = HorizontalPodAutoscaler(threshold, min_replicas, max_replicas)

    def decide(self, facts: ScalingFacts, now: float) -> ScalingDecision:
        waiting = 0 if facts.age_s > 0.0 else facts.num_waiting
        if self._hpa.is_due(now):
            self._hpa.scale(waiting, now)
        return ScalingDecision(self._hpa.current, f"{waiting} wait")


class KedaChartRule:
    """KEDA 2 as deploy/helm/headrace sets it: requests that run or wait, one pod less a minute after 10 minutes, never none.

    A query without a result is an error: the HPA does nothing. From the third on `fallback` gives it the number of replicas there are.
    """

    STABILIZATION_S, MAX_REMOVED, FAILURE_THRESHOLD = 600.0, 1, 3

    def __init__(self, requests_per_pod: float, min_replicas: int, max_replicas: int) -> None:
        self._requests_per_pod, self._num_failures = requests_per_pod, 0
        self._hpa = HorizontalPodAutoscaler(
            requests_per_pod, max(1, min_replicas), max_replicas, stabilization_s=self.STABILIZATION_S, max_removed=self.MAX_REMOVED
        )

    def decide(self, facts: ScalingFacts, now: float) -> ScalingDecision:
        in_engines = facts.num_running + facts.num_waiting
        if self._hpa.is_due(now):
            self._num_failures = self._num_failures + 1 if facts.age_s > 0.0 else 0
            if not self._num_failures:
                self._hpa.scale(in_engines, now)
            elif self._num_failures >= self.FAILURE_THRESHOLD:
                self._hpa.scale(self._hpa.current * self._requests_per_pod, now)
        return ScalingDecision(self._hpa.current, f"{in_engines} run or wait")


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
