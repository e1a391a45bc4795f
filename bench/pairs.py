"""Computes the ratio of two variants measured in turn, with an interval that slow drift of the machine does not widen.

Each round runs both variants, so a drift from round to round cancels out in a round's ratio. The summary is the geometric mean of the
ratios and its 95 % interval by Student's t on their logarithms; no round is left out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Two-sided 95 % quantiles of Student's t for 1..30 degrees of freedom; the normal's beyond.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Geometric mean of b / a over the rounds, and its 95 % confidence interval, which is infinitely wide for a single round."""

    rounds: int
    mean: float
    low: float
    high: float

    @property
    def excludes_one(self) -> bool:
        """Whether the interval excludes 1: the two variants differ by more than chance."""
        return self.low > 1.0 or self.high < 1.0


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """The ratio b / a, round by round. Raises ValueError without a round, or for a value that is not positive and finite."""
    if not a or len(a) != len(b):
        raise ValueError(f"pairs need equally many rounds, got {len(a)} and {len(b)}")
    if not all(value > 0 and math.isfinite(value) for value in (*a, *b)):
        raise ValueError("a ratio needs positive, finite values")
    logs = [math.log(second / first) for first, second in zip(a, b, strict=True)]
    mean = statistics.fmean(logs)
    if len(logs) == 1:
        return Ratio(1, math.exp(mean), 0.0, math.inf)
    quantile = _T95[len(logs) - 2] if len(logs) - 2 < len(_T95) else 1.96
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(len(logs), math.exp(mean), math.exp(mean - half), math.exp(mean + half))
