"""Learns the cost of steps from earlier ones. Readiness uses it to tell a hanging step from a large one, and gateways to compare
replicas.
"""

from __future__ import annotations

from headrace.core.plan import StepCosts

UNKNOWN_STEP_S = 5.0
"""Seconds predicted for a step before any was observed."""


MIN_SPREAD = 1.0
"""Least variance of the steps' token counts from which the fixed cost can be separated from the cost per token."""


class StepTimer:
    """A fixed cost plus a cost per token, fitted by least squares; each step observed weighs 2 % less than the next.

    While all steps had about the same size, the two costs cannot be separated. A larger step is then predicted in proportion to its tokens,
    but never beyond UNKNOWN_STEP_S: readiness judges by four times the prediction, so a high guess would hide a hanging step.
    """

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._known_token_s: float | None = None

    def observe(self, num_tokens: int, seconds: float) -> None:
        fading = (self._weight, self._x, self._y, self._xx, self._xy)
        self._weight, self._x, self._y, self._xx, self._xy = (0.98 * value for value in fading)
        self._weight += 1.0
        self._x += num_tokens
        self._y += seconds
        self._xx += num_tokens * num_tokens
        self._xy += num_tokens * seconds
        if self._spread >= MIN_SPREAD:
            self._known_token_s = self._slope()

    def predict(self, num_tokens: int) -> float:
        if not self._weight:
            return UNKNOWN_STEP_S
        mean_tokens, mean_seconds = self._x / self._weight, self._y / self._weight
        if self._spread < MIN_SPREAD:
            in_proportion = mean_seconds * num_tokens / mean_tokens
            return min(max(mean_seconds, in_proportion), max(mean_seconds, UNKNOWN_STEP_S))
        return mean_seconds + self._slope() * (num_tokens - mean_tokens) if num_tokens > mean_tokens else mean_seconds

    @property
    def costs(self) -> StepCosts:
        """The fit. While all steps are about the same size, the cost per token is the last one that could be separated.

        Before any could, all of a step's time counts as that of its tokens: with none, an engine that is flooded from its first step on,
        and so fills every step, would never find that a smaller one keeps a goal.
        """
        if not self._weight:
            return StepCosts()
        mean_tokens, mean_seconds = self._x / self._weight, self._y / self._weight
        if self._known_token_s is None:
            return StepCosts(0.0, mean_seconds / mean_tokens)
        return StepCosts(max(0.0, mean_seconds - self._known_token_s * mean_tokens), self._known_token_s)

    @property
    def _spread(self) -> float:
        """Variance of the steps' token counts."""
        return self._xx / self._weight - (self._x / self._weight) ** 2

    def _slope(self) -> float:
        """Seconds per token. The caller asked `_spread` first."""
        mean_tokens, mean_seconds = self._x / self._weight, self._y / self._weight
        return max(0.0, (self._xy / self._weight - mean_tokens * mean_seconds) / self._spread)
