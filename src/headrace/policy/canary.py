"""Judges a canary, the first replica of another version of a model, by what the replicas before it did over the same time. Pure."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

MIN_REQUESTS = 50
MAX_WAIT_S = 120.0
"""The canary is judged after this many requests, at the latest after this time."""

EARLY_RISK = 0.001
LAST_RISK = 0.01
"""That a canary which is as good as the others is found worse, by one look before the end and by the last one."""

DOUBT = 0.1
"""One that would be found worse at this risk does not pass before its time is over."""

MIN_FAILED = 3
MORE_FAILED = 0.01
"""A smaller difference of the shares of failed requests is none."""

MIN_COMPARED = 20
"""Replicas of which fewer requests have ended count as if the rest of these had been answered."""

TIMES_SLOWER = 2.0
SLOWER_S = 0.1
"""Mean seconds to the first token may be this much more: a canary begins with an empty prefix cache."""


@dataclass(frozen=True, slots=True)
class ServedCounts:
    """num_ended   answered and failed requests
    num_failed  times that a replica failed one; it may be open still, to be moved
    num_first   answers that have begun, with the sum of their seconds to the first token, and of the squares
    """

    num_ended: int = 0
    num_failed: int = 0
    num_first: int = 0
    first_s: float = 0.0
    first_s_squared: float = 0.0

    def plus(self, other: ServedCounts) -> ServedCounts:
        return ServedCounts(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))

    def since(self, earlier: ServedCounts) -> ServedCounts:
        """Nothing where a count is lower than before: a gateway that had counted is gone."""
        grown = [mine - its for mine, its in zip(astuple(self), astuple(earlier), strict=True)]
        return ServedCounts() if min(grown) < 0 else ServedCounts(*grown)

    @property
    def failed_share(self) -> float:
        return self.num_failed / max(1, self.num_tried)

    @property
    def num_tried(self) -> int:
        return max(self.num_ended, self.num_failed)

    @property
    def mean_first_s(self) -> float:
        return self.first_s / max(1, self.num_first)

    @property
    def variance_of_mean(self) -> float:
        """`mean_first_s` varies by this, in square seconds."""
        spread = self.first_s_squared / max(1, self.num_first) - self.mean_first_s**2
        return max(0.0, spread) / max(1, self.num_first - 1)

    def shown(self) -> str:
        first = f", first token after {self.mean_first_s:.3f} s on average" if self.num_first else ""
        return f"{self.num_failed} of {self.num_tried} requests failed{first}"


@dataclass(frozen=True, slots=True)
class Judgement:
    is_worse: bool
    reason: str


def judge(canary: ServedCounts, before: ServedCounts, waited_s: float) -> Judgement | None:
    """before: of the replicas before it, over the same time; None: it has to serve more requests"""
    is_last = waited_s >= MAX_WAIT_S
    found = f"{canary.shown()}; before, {before.shown()}"
    if _is_worse(canary, before, LAST_RISK if is_last else EARLY_RISK):
        return Judgement(True, found)
    if is_last and not canary.num_tried:
        return Judgement(False, f"nothing was compared: no request came to it within {MAX_WAIT_S:g} s")
    if is_last or (canary.num_ended >= MIN_REQUESTS and not _is_worse(canary, before, DOUBT)):
        return Judgement(False, found)
    return None


def _is_worse(canary: ServedCounts, before: ServedCounts, risk: float) -> bool:
    return _fails_more(canary, before, risk) or _is_slower(canary, before, risk)


def _fails_more(canary: ServedCounts, before: ServedCounts, risk: float) -> bool:
    """If all failed alike, each failure would be the canary's with the probability of its part of the requests: a binomial tail."""
    if canary.num_failed < MIN_FAILED or canary.failed_share < before.failed_share + MORE_FAILED:
        return False
    share = canary.num_tried / (canary.num_tried + max(before.num_tried, MIN_COMPARED))
    return _binomial_tail(canary.num_failed + before.num_failed, share, canary.num_failed) < risk


def _binomial_tail(count: int, probability: float, at_least: int) -> float:
    """The probability of `at_least` or more successes in `count` tries. 0 < probability < 1"""
    logs = math.log(probability), math.log1p(-probability)
    terms = (
        math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) + k * logs[0] + (count - k) * logs[1]
        for k in range(at_least, count + 1)
    )
    return math.fsum(map(math.exp, terms))


def _is_slower(canary: ServedCounts, before: ServedCounts, risk: float) -> bool:
    """A z test of means; fewer than MIN_COMPARED answers are not compared."""
    if min(canary.num_first, before.num_first) < MIN_COMPARED:
        return False
    excess = canary.mean_first_s - TIMES_SLOWER * before.mean_first_s - SLOWER_S
    deviation = math.sqrt(canary.variance_of_mean + TIMES_SLOWER**2 * before.variance_of_mean)
    return excess > 0 and (deviation == 0 or math.erfc(excess / deviation / math.sqrt(2)) / 2 < risk)
