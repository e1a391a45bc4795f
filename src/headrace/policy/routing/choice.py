"""Chooses the replica of a request: draws two at random, and takes the one that is expected to be done first.

A replica's load is its last snapshot plus what this gateway sent since that snapshot was made. Comparing two alone keeps several
gateways from choosing the same replica at once (Mitzenmacher 2001).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NewType, Protocol, TypeVar

from headrace.core.load import EngineCounters, LoadSnapshot
from headrace.policy.routing.predicted_time import NOTHING_SENT, RequestSize, SentSince, mean_speed, num_blocks, predicted_s, speed_of

Choice = TypeVar("Choice")
ReplicaId = NewType("ReplicaId", str)

SIMILAR = 1.25
"""Predicted times whose ratio is at most this are equal."""

UNMEASURED_DIVISOR = 64
"""One choice in N ignores the measured speeds, so that a replica once measured as slow is measured again."""

AFFINITY = 2.0
"""A preferred replica is taken if its predicted time is at most this many times that of the choice without it."""

AFFINITY_REQUESTS = 2
"""The limit of affinity while no speed is known: the preferred replica may have this many requests more than the other choice."""

RESOLUTION = 1 << 30


EMPTY = LoadSnapshot(
    num_running=0,
    num_waiting=0,
    kv_blocks_free=0,
    kv_blocks_cached=0,
    kv_blocks_used=0,
    kv_blocks_total=0,
    counters=EngineCounters(),
)
"""The load that is assumed before the first snapshot."""


class Random(Protocol):
    def randrange(self, stop: int, /) -> int: ...


@dataclass(frozen=True, slots=True)
class Candidate:
    replica_id: ReplicaId
    snapshot: LoadSnapshot | None = None
    sent: SentSince = NOTHING_SENT


@dataclass(frozen=True, slots=True, order=True)
class Cost:
    """lacks_blocks  the prompt would have to wait for KV blocks (free and evictable ones, less those of requests sent since the report)
    fullness      share of the KV pool in use or needed by those requests: decides between equally busy replicas
    """

    lacks_blocks: bool
    outstanding: int
    fullness: float


def choose(
    candidates: Sequence[Candidate],
    *,
    size: RequestSize,
    block_size: int,
    random: Random,
    preferred: ReplicaId | None = None,
) -> Candidate | None:
    """Draws at most three random numbers, whatever the number of replicas, and the same with and without `preferred`. A replica of unknown
    speed counts as one of mean speed.

    preferred  has the beginning of the prompt in its prefix cache: taken unless it is much slower than the choice without it
    """
    if len(candidates) < 2:
        return candidates[0] if candidates else None

    def cost_of(candidate: Candidate) -> Cost:
        return cost(candidate, prompt_tokens=size.prompt_tokens, block_size=block_size)

    favourite = next((candidate for candidate in candidates if candidate.replica_id == preferred), None)
    speeds = [speed_of(candidate.snapshot) for candidate in candidates]
    assumed = mean_speed(speeds)
    if assumed is None or random.randrange(UNMEASURED_DIVISOR) == 0:
        chosen = cheaper_of_two(candidates, cost_of, random)
        return chosen if favourite is None or not _is_about_as_cheap(cost_of(favourite), cost_of(chosen)) else favourite
    known = {candidate.replica_id: speed or assumed for candidate, speed in zip(candidates, speeds, strict=True)}

    def time_of(candidate: Candidate) -> float:
        return predicted_s(candidate.snapshot or EMPTY, candidate.sent, size, known[candidate.replica_id], block_size=block_size)

    first, second = draw_two(candidates, [1.0 / known[candidate.replica_id].idle_s(size) for candidate in candidates], random)
    chosen = second if time_of(second) * SIMILAR < time_of(first) else first
    return chosen if favourite is None or time_of(favourite) > AFFINITY * time_of(chosen) else favourite


def _is_about_as_cheap(favourite: Cost, chosen: Cost) -> bool:
    return favourite.lacks_blocks <= chosen.lacks_blocks and favourite.outstanding <= chosen.outstanding + AFFINITY_REQUESTS


def cheaper_of_two(choices: Sequence[Choice], cost_of: Callable[[Choice], Any], random: Random) -> Choice:
    count = len(choices)
    first = random.randrange(count)
    if count == 1:
        return choices[first]
    second = random.randrange(count - 1)
    pair = (choices[first], choices[second + (second >= first)])
    # `first` is uniform and min() keeps it on equal costs, so idle replicas share evenly.
    return min(pair, key=cost_of)


def draw_two(choices: Sequence[Choice], weights: Sequence[float], random: Random) -> tuple[Choice, Choice]:
    """Each by its weight (> 0) among those left. choices: at least two"""
    first = _draw(weights, random)
    rest = [*range(first), *range(first + 1, len(choices))]
    second = rest[_draw([weights[index] for index in rest], random)] if len(rest) > 1 else rest[0]
    return choices[first], choices[second]


def _draw(weights: Sequence[float], random: Random) -> int:
    point = random.randrange(RESOLUTION) / RESOLUTION * sum(weights)
    for index, weight in enumerate(weights):
        point -= weight
        if point < 0.0:
            return index
    return len(weights) - 1  # rounding


def cost(candidate: Candidate, *, prompt_tokens: int, block_size: int) -> Cost:
    snapshot, sent = candidate.snapshot, candidate.sent
    if snapshot is None:
        return Cost(False, sent.num_requests, 0.0)
    free = snapshot.kv_blocks_free + snapshot.kv_blocks_cached - num_blocks(sent.num_tokens, block_size)
    outstanding = snapshot.num_running + snapshot.num_waiting + sent.num_requests
    fullness = 1.0 - free / snapshot.kv_blocks_total if snapshot.kv_blocks_total else 0.0
    return Cost(free < num_blocks(prompt_tokens, block_size), outstanding, fullness)


SLOW_START_S = 10.0

FIRST_SHARE = 0.1


def started_share(ready_s: float, slow_start_s: float) -> float:
    if ready_s >= slow_start_s:
        return 1.0
    return max(FIRST_SHARE, ready_s / slow_start_s)


def started(choices: Sequence[Choice], shares: Sequence[float], random: Random) -> list[Choice]:
    """A replica that has just become ready gets a part: its prefix cache is empty and its speed unknown."""
    largest = max(shares, default=1.0)
    return [
        choice
        for choice, share in zip(choices, shares, strict=True)
        if share >= largest or random.randrange(RESOLUTION) < share / largest * RESOLUTION
    ]
