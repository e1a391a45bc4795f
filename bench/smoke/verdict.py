"""Decides when a difference is an alarm: a row is at least 2 % slower, and not by chance, over all rows together.

Two looks at rows that are quick to time. The first, a few rounds, only says which rows deserve the rest of the time (`suspects`); the
second, rounds of these rows alone, decides (`judge`). No round of the first counts in the second: what it chose by chance is not believed.

A row's samples are logarithms of candidate / base, one per round. Everything here rests on ranks, so that one round in which the machine
did something else counts as one round, however long it took:

ratio     Hodges-Lehmann: the median of all averages of two rounds
interval  95 %, the range of those averages that belongs to the same test
p         Wilcoxon's signed ranks, one-sided: the share of all 2^n ways to flip the rounds' signs that look at least this slow (exact)
adjusted  Holm's, over the rows that are judged: the chance of *any* false alarm stays below the
          level as far as rounds are independent; 1 for a row cleared by the first look. Rounds of one pair of workers share its luck.
          How much is not known: neighbours correlated by -0.12 to 0.18 in five series of 20 and 31 rounds, which is zero as far as
          so few can say
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SLOWER = 1.02
LEVEL = 0.01
SUSPECT_P = 0.33
"""The p below which the first look suspects a row. Some 30 % of the rows without a difference come along. What is slower by a quarter,
half, the whole of a round's standard deviation is dropped in 50, 30, 5 % of cases: a small loss needs a quiet machine, or `--row`,
which leaves more time for each."""
INTERVAL_TAIL = 0.025


@dataclass(frozen=True, slots=True, kw_only=True)
class RowVerdict:
    """candidate / base of a duration: above 1 is slower."""

    row: str
    rounds: int
    ratio: float
    low: float
    high: float
    p: float
    adjusted: float

    @property
    def is_alarm(self) -> bool:
        return self.ratio >= SLOWER and self.adjusted < LEVEL


def suspects(samples: Mapping[str, Sequence[float]]) -> list[str]:
    """Rows of the first look that a second one is to decide."""
    return [row for row, logs in samples.items() if signed_rank_p(logs) < SUSPECT_P]


def cleared(row: str, logs: Sequence[float]) -> RowVerdict:
    """The verdict on a row that was given no second look."""
    return _verdict(row, logs, 1.0)


def judge(samples: Mapping[str, Sequence[float]]) -> list[RowVerdict]:
    """A verdict for each row, in their order. Raises ValueError for a row with too few rounds to alarm at all."""
    needed = rounds_needed(len(samples)) if samples else 0
    for row, logs in samples.items():
        if len(logs) < needed:
            raise ValueError(f"{row}: {len(logs)} rounds, but {len(samples)} rows need {needed} for an alarm to be possible")
    adjusted = holm([signed_rank_p(logs) for logs in samples.values()])
    return [_verdict(row, logs, value) for (row, logs), value in zip(samples.items(), adjusted, strict=True)]


def rounds_needed(num_rows: int) -> int:
    """The fewest rounds whose smallest possible p, 2**-rounds, is still below the level after Holm."""
    return math.floor(math.log2(num_rows / LEVEL)) + 1


def _verdict(row: str, logs: Sequence[float], adjusted: float) -> RowVerdict:
    ratio, low, high = (math.exp(value) for value in hodges_lehmann(logs))
    return RowVerdict(row=row, rounds=len(logs), ratio=ratio, low=low, high=high, p=signed_rank_p(logs), adjusted=adjusted)


def signed_rank_p(logs: Sequence[float]) -> float:
    """P(sum of the ranks of positive values >= the one seen) when every sign is a fair coin. Ties share ranks; 0 counts as not slower."""
    values = np.asarray(logs, dtype=np.float64)
    ranks = _doubled_ranks(np.abs(values))
    seen = int(ranks[values > 0].sum())
    counts = _sum_counts(ranks)
    return float(counts[seen:].sum() / counts.sum())


def _doubled_ranks(sizes: NDArray[np.float64]) -> NDArray[np.int64]:
    """Twice the mean rank, 1 being the smallest: whole numbers where values tie, too."""
    ordered = np.sort(sizes)
    first = np.searchsorted(ordered, sizes, side="left")
    last = np.searchsorted(ordered, sizes, side="right")
    return np.asarray(first + last + 1, dtype=np.int64)


def _sum_counts(ranks: NDArray[np.int64]) -> NDArray[np.float64]:
    """[sum of ranks + 1]: how many of the subsets of `ranks` have each sum."""
    counts = np.zeros(int(ranks.sum()) + 1)
    counts[0] = 1.0
    for rank in ranks:
        counts[rank:] = counts[rank:] + counts[: len(counts) - rank]
    return counts


def holm(ps: Sequence[float]) -> list[float]:
    """Adjusted p-values in the order given."""
    adjusted, largest = [0.0] * len(ps), 0.0
    for place, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        largest = max(largest, min(1.0, (len(ps) - place) * ps[index]))
        adjusted[index] = largest
    return adjusted


def hodges_lehmann(logs: Sequence[float]) -> tuple[float, float, float]:
    """(median, low, high) of the averages of two values. Fewer than 6 values have no 95 % interval: it is then all of them."""
    values = np.asarray(logs, dtype=np.float64)
    averages = np.sort((values[:, None] + values[None, :])[np.triu_indices(len(values))] / 2)
    counts = _sum_counts(np.arange(1, len(values) + 1))
    tail = np.cumsum(counts) / counts.sum()
    cut = int(np.searchsorted(tail, INTERVAL_TAIL, side="right"))  # sums of ranks that are rarer than the tail
    return float(np.median(averages)), float(averages[cut]), float(averages[-1 - cut])
