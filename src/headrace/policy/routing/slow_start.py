"""Gives a replica that has just become ready a part of its share of requests, which grows until SLOW_START_S have passed.

The prefix cache of such a replica is empty, its speed is unknown, and if it fails its requests, few have to move. Shares are relative: when
all replicas have just started, none waits for another, and a replica alone gets everything at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.policy.routing.choice import RESOLUTION, Choice, Random

SLOW_START_S = 10.0
"""Seconds in which the share of a newly connected replica grows to its full size, while others serve."""

FIRST_SHARE = 0.1
"""Part of its share that a replica gets in its first moment: enough to find out its speed."""


def started_share(ready_s: float, slow_start_s: float) -> float:
    """Part of its share that a replica gets `ready_s` seconds after it became ready. slow_start_s: 0 = always all of it"""
    if ready_s >= slow_start_s:
        return 1.0
    return max(FIRST_SHARE, ready_s / slow_start_s)


def started(choices: Sequence[Choice], shares: Sequence[float], random: Random) -> list[Choice]:
    """The replicas that take part in this decision, each with the probability share / largest share; one with the largest always does."""
    largest = max(shares, default=1.0)
    return [
        choice
        for choice, share in zip(choices, shares, strict=True)
        if share >= largest or random.randrange(RESOLUTION) < share / largest * RESOLUTION
    ]
