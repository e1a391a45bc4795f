"""Predicts a step's duration from the steps before it, so that readiness can tell a hanging step from a large one."""

from __future__ import annotations

UNKNOWN_STEP_S = 5.0
"""Seconds predicted for a step before any was observed."""


class StepTimer:
    """A fixed cost plus a cost per token, fitted by least squares; each step observed weighs 2 % less than the next.

    While all steps had about the same size, the two costs cannot be separated. A larger step is then predicted in proportion to its tokens,
    but never beyond UNKNOWN_STEP_S: readiness judges by four times the prediction, so a high guess would hide a hanging step.
    """

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        fading = (self._weight, self._x, self._y, self._xx, self._xy)
        self._weight, self._x, self._y, self._xx, self._xy = (0.98 * value for value in fading)
        self._weight += 1.0
        self._x += num_tokens
        self._y += seconds
        self._xx += num_tokens * num_tokens
        self._xy += num_tokens * seconds

    def predict(self, num_tokens: int) -> float:
        if not self._weight:
            return UNKNOWN_STEP_S
        mean_tokens, mean_seconds = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_tokens**2
        if spread < 1.0:
            in_proportion = mean_seconds * num_tokens / mean_tokens
            return min(max(mean_seconds, in_proportion), max(mean_seconds, UNKNOWN_STEP_S))
        per_token = max(0.0, (self._xy / self._weight - mean_tokens * mean_seconds) / spread)
        return mean_seconds + per_token * (num_tokens - mean_tokens) if num_tokens > mean_tokens else mean_seconds
