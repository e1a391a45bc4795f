"""Learns how long steps of few tokens take.

A step reads all weights, however few tokens it computes: a line through all steps, prompts' too, does not show how little one token
more costs. Here each number of tokens has an estimate of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable

MAX_CURVE_TOKENS = 256
"""Longer steps are not observed: beyond, a token costs what it costs in a prompt."""

SIZE_BITS = 4
"""Below 2 ** SIZE_BITS each number of tokens is a size of its own; above, an octave has half as many sizes."""

NUM_RECENT = 7
LEAST_WEIGHT = 0.1
MAX_RATIO = 1.25

STALE_STEPS = 128

MAX_AGE_STEPS = 1024
"""A size that was not seen for this number of steps is forgotten: meanwhile contexts may have grown or shrunk."""


def size_of(num_tokens: int) -> int:
    """The least number of tokens of the size that `num_tokens` belongs to."""
    shift = max(0, num_tokens.bit_length() - SIZE_BITS)
    return num_tokens >> shift << shift


class _Size:
    """A fading mean of seconds that stays near the median of the last steps: a step in which the machine stood still counts little."""

    __slots__ = ("last_step", "num_seen", "recent", "seconds", "tokens")

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=NUM_RECENT)
        self.tokens = self.seconds = 0.0
        self.num_seen = self.last_step = 0

    def observe(self, num_tokens: int, seconds: float, step: int) -> None:
        if step - self.last_step > STALE_STEPS:  # what was seen then counts less
            self.recent = deque(list(self.recent)[-2:], maxlen=NUM_RECENT)
            self.num_seen = min(self.num_seen, 2)
        self.recent.append(seconds)
        self.num_seen += 1
        self.last_step = step
        weight = max(LEAST_WEIGHT, 1 / self.num_seen)
        self.tokens += weight * (num_tokens - self.tokens)
        median = sorted(self.recent)[(len(self.recent) - 1) // 2]
        mean = self.seconds + weight * (seconds - self.seconds)
        self.seconds = min(max(mean, median / MAX_RATIO), median * MAX_RATIO)


class CostCurve:
    """Seconds of a step by its tokens: never less for more tokens, in lines between the sizes that were seen, and beyond them with the
    slope that is given.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._num_steps = 0
        self._points: list[tuple[float, float]] | None = []

    def observe(self, num_tokens: int, seconds: float) -> None:
        self._num_steps += 1
        if self._num_steps % MAX_AGE_STEPS == 0:
            oldest = self._num_steps - MAX_AGE_STEPS
            self._sizes = {size: seen for size, seen in self._sizes.items() if seen.last_step > oldest}
            self._points = None
        if not 0 < num_tokens <= MAX_CURVE_TOKENS:
            return
        self._sizes.setdefault(size_of(num_tokens), _Size()).observe(num_tokens, seconds, self._num_steps)
        self._points = None

    def num_steps_since(self, num_tokens: int) -> int | None:
        """Steps since the size of `num_tokens` was seen; None: it was not."""
        seen = self._sizes.get(size_of(num_tokens))
        return None if seen is None else self._num_steps - seen.last_step

    def seconds(self, num_tokens: int, token_s: float) -> float:
        """0 where nothing was seen. token_s: of one token more, beyond what was seen"""
        if self._points is None:
            self._points = _rising((seen.tokens, seen.seconds, min(seen.num_seen, 1 / LEAST_WEIGHT)) for seen in self._in_order())
        points = self._points
        if not points:
            return 0.0
        place = bisect_left(points, (num_tokens, 0.0))
        if place == 0:
            return max(0.0, points[0][1] - token_s * (points[0][0] - num_tokens))
        left, left_s = points[place - 1]
        if place == len(points):
            return left_s + token_s * (num_tokens - left)
        right, right_s = points[place]
        return left_s + (right_s - left_s) * (num_tokens - left) / (right - left)

    def _in_order(self) -> list[_Size]:
        return [self._sizes[size] for size in sorted(self._sizes)]


def _rising(seen: Iterable[tuple[float, float, float]]) -> list[tuple[float, float]]:
    """The nearest curve that never falls: neighbours that do are replaced by their mean. seen: tokens, seconds, weight"""
    groups: list[tuple[float, float, list[float]]] = []
    for tokens, seconds, weight in seen:
        group = (seconds, weight, [tokens])
        while groups and groups[-1][0] > group[0]:
            before_s, before, places = groups.pop()
            total = before + group[1]
            group = ((before_s * before + group[0] * group[1]) / total, total, [*places, *group[2]])
        groups.append(group)
    return [(tokens, seconds) for seconds, _, places in groups for tokens in places]
